"""What dispatch takes from a record's properties: keys for the index, the tags code for the queue unit.

Works on the stored bytes: decoding all properties of every message would cost more than everything else here.
"""

from __future__ import annotations

from cometmq.protocol.properties import java_hash

_UNIQ_KEY = b"UNIQ_KEY\x01"
_KEYS = b"KEYS\x01"
_TAGS = b"TAGS\x01"
_MOST_TAGS = 10_000

_tag_codes: dict[bytes, int] = {}


def property_value(properties: bytes, name: bytes) -> bytes:
    """Value of `name` (given with its 0x01) in a stored properties string; empty when absent."""
    start = 0
    while True:
        at = properties.find(name, start)
        if at < 0:
            return b""
        if at == 0 or properties[at - 1] == 2:
            begin = at + len(name)
            end = properties.find(b"\x02", begin)
            return properties[begin:] if end < 0 else properties[begin:end]
        start = at + 1


def index_keys(properties: bytes) -> list[bytes]:
    """Keys to index, from a record's properties: the unique key, then each of KEYS, as UTF-8."""
    keys = []
    at = properties.find(_UNIQ_KEY)
    if at >= 0 and (at == 0 or properties[at - 1] == 2):
        end = properties.find(b"\x02", at)
        unique = properties[at + 9 :] if end < 0 else properties[at + 9 : end]
    else:
        unique = property_value(properties, _UNIQ_KEY)
    if unique:
        keys.append(unique)
    at = properties.find(_KEYS)
    if at >= 0:
        if at == 0 or properties[at - 1] == 2:
            end = properties.find(b"\x02", at)
            several = properties[at + 5 :] if end < 0 else properties[at + 5 : end]
        else:
            several = property_value(properties, _KEYS)
        if b" " in several:
            keys += [key for key in several.split(b" ") if key]
        elif several:
            keys.append(several)
    return keys


def stored_tags_code(properties: bytes) -> int:
    """Java hash of the TAGS property, 0 without one. Codes of tags seen before are remembered."""
    tags = property_value(properties, _TAGS)
    if not tags:
        return 0
    code = _tag_codes.get(tags)
    if code is None:
        if len(_tag_codes) >= _MOST_TAGS:
            _tag_codes.clear()
        code = _tag_codes[tags] = java_hash(tags.decode("utf-8", "replace"))
    return code
