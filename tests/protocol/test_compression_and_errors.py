"""Compressed bodies in all three forms; errors that carry what they know through pickling."""

from __future__ import annotations

import builtins
import inspect
import pickle
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.cutting import mutations, never_escapes, truncations

from cometmq import errors
from cometmq.errors import BodyError, BodyTooLarge, CometError, ConfigError, MessageIllegal
from cometmq.protocol.codes import (
    LANGUAGES,
    check_group_name,
    check_topic_name,
    language_name,
    response_name,
    version_name,
)
from cometmq.protocol.compression import Compression, compress, decompress

KINDS = list(Compression)


@settings(max_examples=40)
@given(st.binary(max_size=2000), st.sampled_from(KINDS), st.integers(0, 0xFF))
def test_bodies_survive(body: bytes, how: Compression, other_bits: int) -> None:
    assert decompress(how.sys_flag | other_bits, compress(body, how)) == body
    assert decompress(other_bits & ~1, body) == body


def test_type_zero_is_zlib() -> None:
    assert decompress(1, zlib.compress(b"abc")) == b"abc"
    assert Compression.ZLIB.sys_flag == 769


@pytest.mark.parametrize("how", KINDS)
def test_cut_and_changed_bodies_are_refused(how: Compression) -> None:
    data = compress(b"hello" * 200, how)

    assert never_escapes(lambda cut: decompress(how.sys_flag, cut), truncations(data)) == (0, len(data))
    never_escapes(lambda changed: decompress(how.sys_flag, changed), mutations(data))


@pytest.mark.parametrize("how", KINDS)
def test_a_body_that_was_never_compressed(how: Compression) -> None:
    with pytest.raises(BodyError, match="compressed body"):
        decompress(how.sys_flag, b"plain text")


def zstd_of_unknown_size(body: bytes) -> bytes:
    """As Java's streaming encoder writes it."""
    encoder = zstandard.ZstdCompressor().compressobj()
    return bytes(encoder.compress(body) + encoder.flush())


BOMBS = [
    *((how.sys_flag, partial(compress, how=how)) for how in KINDS),
    (Compression.ZSTD.sys_flag, zstd_of_unknown_size),
]


@pytest.mark.parametrize(("sys_flag", "make"), BOMBS)
def test_bombs_stop_at_the_limit(sys_flag: int, make: Callable[[bytes], bytes]) -> None:
    data = make(bytes(5 << 20))

    assert len(decompress(sys_flag, data, limit=5 << 20)) == 5 << 20
    with pytest.raises(BodyTooLarge, match="larger than 5242879") as caught:
        decompress(sys_flag, data, limit=(5 << 20) - 1)
    assert caught.value.limit == (5 << 20) - 1


@pytest.mark.parametrize(("sys_flag", "make"), BOMBS)
def test_little_more_than_the_limit_is_allocated(sys_flag: int, make: Callable[[bytes], bytes]) -> None:
    data = make(bytes(128 << 20))
    within = make(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            decompress(sys_flag, data, limit=64 << 20)
        assert len(decompress(sys_flag, within, limit=64 << 20)) == 64 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 96 << 20


def test_unknown_types_and_names() -> None:
    with pytest.raises(BodyError, match="type 5"):
        decompress(0x501, b"x")
    assert Compression.of(" zstd ") is Compression.ZSTD
    with pytest.raises(ConfigError, match="ZLIB, LZ4 or ZSTD"):
        Compression.of("snappy")


@pytest.mark.parametrize("how", [Compression.LZ4, Compression.ZSTD])
def test_a_missing_package_names_the_extra(how: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    data = compress(b"x", how)

    def refuse(name: str, *args: object) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(BodyError, match=r"cometmq\[zstd\]"):
        decompress(how.sys_flag, data)


# -- errors

SAMPLES: dict[str, tuple[Any, ...]] = {
    "CommandError": (17, "no topic", {"a": "b"}),
    "FrameError": ("bad",),
    "HeaderError": ("queueId", "x", "not a whole number"),
    "BodyError": ("HeartbeatData", "no object", "$.a"),
    "BodyTooLarge": ("compressed body", 5, "max_body"),
    "RecordError": (7, "size", "too small"),
    "ConfigError": ("listenPort", "x", "a port"),
    "ClientStateError": ("closed",),
    "MessageIllegal": ("too long", "T", "topic"),
    "BrokerError": (17, "", "no topic", "a:1", "T", "k", "create it"),
    "ConnectError": ("a:1", "refused"),
    "SendFailed": ("a:1", 310),
    "RequestTimeout": ("a:1", 310, 3.0),
    "NoRouteError": ("T", [("n:9876", "no route")], "create it"),
    "StoreError": ("full", "/x"),
    "StoreCorrupt": ("bad magic", "/x"),
}
ABSTRACT = ("CometError", "ProtocolError", "RemotingError")
CONCRETE = [
    name
    for name, cls in vars(errors).items()
    if inspect.isclass(cls)
    and issubclass(cls, CometError)
    and name not in ("CometError", "ProtocolError", "RemotingError")
]


@pytest.mark.parametrize("name", CONCRETE)
def test_errors_keep_their_fields_and_words_through_pickling(name: str) -> None:
    error = getattr(errors, name)(*SAMPLES[name])
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error) != ""
    assert vars(copy) == vars(error) != {}
    assert not hasattr(builtins, name)


def test_a_broker_error_says_everything() -> None:
    error = errors.BrokerError(
        17, remark="no topic T", broker_addr="a:1", topic="T", key="K", hint="create it"
    )

    assert (error.code, error.name) == (17, "TOPIC_NOT_EXIST")
    assert str(error) == "TOPIC_NOT_EXIST (17) from a:1 for topic T message K: no topic T (create it)"


def test_no_route_names_who_was_asked() -> None:
    error = errors.NoRouteError("T", [("n1:9876", "code 17"), ("n2:9876", "no connection")])

    assert str(error) == "no route to topic T: n1:9876 answered 'code 17'; n2:9876 answered 'no connection'"


def test_long_values_are_cut_in_words() -> None:
    assert len(str(errors.HeaderError("x", "y" * 100_000, "bad"))) < 300


# -- names of numbers


def test_names_of_codes_and_versions() -> None:
    assert (response_name(22), response_name(9999)) == ("QUERY_NOT_FOUND", "RESPONSE_CODE_9999")
    numbers = [28, 213, 232, 253, 317, 399, 406, 407, 409, 413, 479, 513, 611, 612, 5000]
    assert [version_name(number) for number in numbers] == [
        "V3", "V4_0_0", "V4_1_0_SNAPSHOT", "V4_2_0", "V4_5_2", "V4_9_3", "V4_9_7_SNAPSHOT", "V4_9_7",
        "V4_9_8", "V5_0_0", "V5_3_3", "V5_5_0", "V5_9_9", "HIGHER_VERSION", "HIGHER_VERSION",
    ]  # fmt: skip


def test_names_of_languages() -> None:
    assert (LANGUAGES[3], LANGUAGES[9], language_name(200), language_name(-1)) == (
        "PYTHON",
        "GO",
        "OTHER",
        "OTHER",
    )


@pytest.mark.parametrize("name", ["T", "%RETRY%group", "a|b-c_d", "x" * 127])
def test_good_names(name: str) -> None:
    check_topic_name(name)
    check_group_name(name)


@pytest.mark.parametrize("name", ["", " ", "a b", "é", "a.b", "a\n", "x" * 256])
def test_bad_names(name: str) -> None:
    with pytest.raises(MessageIllegal, match="topic name"):
        check_topic_name(name)
    with pytest.raises(MessageIllegal, match="group name"):
        check_group_name(name)
