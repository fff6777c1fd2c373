"""Strategies for malformed property strings, and the keys that a parser of the whole map finds in them."""

from __future__ import annotations

from hypothesis import strategies as st

from cometmq.protocol.properties.values import decode_properties

PROPERTIES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"\x01", b"\x02", b"\x02", b"UNIQ_KEY\x01", b"\x02UNIQ_KEY\x01A", b"UNIQ_KEY\x01B\x02"]
        ),
        st.sampled_from([b"TAGS\x01", b"TAGS\x01t", b"KEYS\x01", b"KEYS\x01k l", b"x", "é".encode()]),
    ),
    max_size=8,
).map(b"".join)


def keys_of_the_map(properties: bytes) -> list[bytes]:
    """Return the keys that a parser of the whole map would index."""
    found = decode_properties(properties)
    keys = [found.get("UNIQ_KEY", ""), *found.get("KEYS", "").split(" ")]
    return [key.encode() for key in keys if key]
