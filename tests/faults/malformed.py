"""Malformed frames by kind. Every case is one byte string that is sent unchanged."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

MIB = 1024 * 1024
HUGE = 2**31 - 1

JSON, BINARY = 0, 1


def frame(header: bytes, body: bytes = b"", *, kind: int = JSON) -> bytes:
    """Build a frame with correct lengths around any header."""
    return struct.pack(">II", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body


def command(code: Any, body: bytes = b"", ext: Any = None, **fields: Any) -> bytes:
    """Build a JSON frame with any fields, valid or not."""
    header: dict[str, Any] = {"code": code, "flag": 0, "language": "JAVA", "opaque": 7, "version": 409}
    if ext is not None:
        header["extFields"] = ext
    header.update(fields)
    return frame(json.dumps(header).encode(), body)


def text_command(text: str) -> bytes:
    """Build a JSON frame whose header is this text."""
    return frame(text.encode("utf-8", "surrogatepass"))


def binary_header(
    code: int = 105, flag: int = 0, remark: bytes = b"", ext: bytes = b"", *,
    remark_length: int | None = None, ext_length: int | None = None,
) -> bytes:  # fmt: skip
    """Build a header of type 1; the lengths may be wrong."""
    return (
        struct.pack(">hbhii", code, 0, 409, 7, flag)
        + struct.pack(">i", len(remark) if remark_length is None else remark_length)
        + remark
        + struct.pack(">i", len(ext) if ext_length is None else ext_length)
        + ext
    )


def binary_entry(
    key: bytes, value: bytes, *, key_length: int | None = None, value_length: int | None = None
) -> bytes:
    """Build an ext entry of a binary header."""
    return (
        struct.pack(">H", (len(key) if key_length is None else key_length) & 0xFFFF)
        + key
        + struct.pack(">i", len(value) if value_length is None else value_length)
        + value
    )


GOOD_HEADER = json.dumps(
    {"code": 105, "extFields": {"topic": "T"}, "flag": 0, "language": "JAVA", "opaque": 3, "version": 409}
).encode()
GOOD_BINARY = binary_header(ext=binary_entry(b"topic", b"T"))


def lengths() -> Iterator[tuple[str, bytes]]:
    """Yield impossible length words and header lengths."""
    for size in (0, 1, 3):
        yield f"frame of {size}", struct.pack(">I", size) + b"x" * size
    for size in (-1, -(2**31), HUGE, 16 * MIB - 3, 16 * MIB + 1):
        yield f"length word {size}", struct.pack(">i", size) + GOOD_HEADER
    yield "no header", struct.pack(">II", 4, 0)
    yield "no header, a body", struct.pack(">II", 8, 0) + b"body"
    yield "header beyond the frame", struct.pack(">II", 4 + 10, 100) + b"{" * 10
    yield "header of 16 MiB", struct.pack(">II", 4 + 10, 0xFFFFFF) + b"{" * 10
    yield "header shorter than its JSON", struct.pack(">II", 4 + len(GOOD_HEADER), 20) + GOOD_HEADER
    yield "frame cut short", frame(GOOD_HEADER)[:-7]
    yield "length word only", struct.pack(">I", 15 * MIB)
    yield "HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield "TLS hello", bytes.fromhex("1603010200010001fc0303") + bytes(600)
    yield "zeros", bytes(5000)
    yield "ones", b"\xff" * 5000


def header_types() -> Iterator[tuple[str, bytes]]:
    """Yield valid and invalid serialization types before bytes that do not match."""
    for kind in (2, 3, 0x16, 0x7F, 0x80, 0xFF):
        yield f"type {kind}", frame(GOOD_HEADER, kind=kind)
    yield "JSON called binary", frame(GOOD_HEADER, kind=BINARY)
    yield "binary called JSON", frame(GOOD_BINARY, kind=JSON)
    for end in range(len(GOOD_BINARY)):
        yield f"binary cut at {end}", frame(GOOD_BINARY[:end], kind=BINARY)
    yield "binary, trailing bytes", frame(GOOD_BINARY + b"more", kind=BINARY)
    for length in (-1, HUGE, 500):
        yield f"remark length {length}", frame(binary_header(remark_length=length), kind=BINARY)
        yield f"ext length {length}", frame(binary_header(ext_length=length), kind=BINARY)
        entry = binary_entry(b"topic", b"T", value_length=length)
        yield f"value length {length}", frame(binary_header(ext=entry), kind=BINARY)
        entry = binary_entry(b"topic", b"T", key_length=length)
        yield f"key length {length}", frame(binary_header(ext=entry), kind=BINARY)
    yield "binary, bad UTF-8 in remark", frame(binary_header(remark=b"\xff\xfe"), kind=BINARY)
    yield (
        "binary, bad UTF-8 in value",
        frame(binary_header(ext=binary_entry(b"topic", b"\xff\xfe")), kind=BINARY),
    )
    many = b"".join(binary_entry(b"k%d" % n, b"v") for n in range(5000))
    yield "binary, 5,000 entries", frame(binary_header(ext=many), kind=BINARY)


HOSTILE_HEADERS = (
    "[]",
    "null",
    "0",
    '"x"',
    "{}",
    "true",
    "NaN",
    "{",
    "}",
    "[" * 50,
    "{]",
    "{,}",
    '{"code"}',
    '{"code":}',
    '{"code":105,}',
    '{"code":105}{"code":105}',
    '{"code":105} x',
    "{code:105,opaque:1}",
    "{'code':105}",
    '{"code":105,"code":106,"opaque":1}',
    '{"code":1e400}',
    '{"code":1e3}',
    '{"code":105.5}',
    '{"code":NaN}',
    '{"code":-Infinity}',
    '{"code":0x69}',
    '{"code":105,"opaque":99999999999999999999}',
    '{"code":99999999999999999999999999}',
    '{"code":' + "9" * 5000 + "}",
    '{"code":"105"}',
    '{"code":null}',
    '{"code":[105]}',
    '{"code":{}}',
    '{"code":true}',
    '{"code":"abc"}',
    '{"opaque":5}',
    '{"code":105,"flag":"zero"}',
    '{"code":105,"flag":{}}',
    '{"code":105,"opaque":"x"}',
    '{"code":105,"opaque":[1]}',
    '{"code":105,"version":"new"}',
    '{"code":105,"version":-99999999999}',
    '{"code":105,"language":{}}',
    '{"code":105,"language":999}',
    '{"code":105,"language":[[]]}',
    '{"code":105,"remark":{}}',
    '{"code":105,"remark":5}',
    '{"code":105,"remark":"\\ud800"}',
    '{"code":105,"extFields":[]}',
    '{"code":105,"extFields":"x"}',
    '{"code":105,"extFields":5}',
    '{"code":105,"extFields":{"topic":{}}}',
    '{"code":105,"extFields":{"topic":[1,2]}}',
    '{"code":105,"extFields":{"topic":null}}',
    '{"code":105,"extFields":{"topic":1e999}}',
    '{"code":105,"extFields":{"topic":"\\ud83d"}}',
    '{"code":105,"extFields":{"topic":"\\u00"}}',
    '{"code":105,"extFields":{"topic":"\x00\x01"}}',
    '{"code":105,"extFields":{1:2,3:4}}',
    '{"code":105,"extFields":{{"a":1}:2}}',
    "{'code':105,'extFields':{'topic':'\\'}}",
    '/* */{"code":105}',
    '\ufeff{"code":105}',
    '{"code":105,"extFields":{"topic":"unterminated',
)


def json_headers() -> Iterator[tuple[str, bytes]]:
    """Yield truncated, hostile and deeply nested header texts."""
    for end in range(len(GOOD_HEADER)):
        yield f"JSON cut at {end}", frame(GOOD_HEADER[:end])
    for text in HOSTILE_HEADERS:
        yield f"JSON {text[:60]!r}", text_command(text)
    yield "lone surrogate bytes", text_command('{"code":105,"remark":"\ud800"}')
    yield "bad UTF-8", frame(b'{"code":105,"remark":"\xff\xfe\xfd"}')
    yield "bad UTF-8 in a key", frame(b'{"code":105,"\xff":1}')
    yield "UTF-16", frame('{"code":105}'.encode("utf-16"))
    for depth in (65, 1000, 200_000):
        yield f"{depth} arrays", text_command('{"code":105,"remark":' + "[" * depth + "]" * depth + "}")
        yield f"{depth} open arrays", text_command("[" * depth)
        yield f"{depth} objects", text_command('{"extFields":' * depth + "1" + "}" * depth)
        yield f"{depth} bare objects", text_command("{a:" * depth)
        yield f"{depth} objects as keys", text_command("{" * depth)
        inside = '{"code":105,"extFields":{"topic":' + "[" * depth + "]" * depth + "}}"
        yield f"{depth} arrays in ext", text_command(inside)
    ext = {f"key{n}": "v" for n in range(100_000)}
    yield "100,000 ext fields", command(105, ext=ext)
    yield "a value of 8 MiB", command(105, ext={"topic": "x" * 8 * MIB})
    yield "a remark of 1 MiB", command(105, remark="x" * MIB)
    yield "a name of 1 MiB", frame(b'{"' + b"n" * MIB + b'":1,"code":105}')


WRONG_VALUES: tuple[Any, ...] = (
    "", "abc", "-1", "99999999999999999999", "1e9", "0x10", "1.5", " 5 ", "NaN", "١٢", "1_0", "null", "true",
    -1, 2**63, -(2**63) - 1, 1.5, True, None, [], {}, [[1]], {"a": 1}, "x" * 70_000, "\ud800", "\0",
)  # fmt: skip


def wrong_fields(code: int, fields: dict[str, Any], body: bytes = b"") -> Iterator[tuple[str, bytes]]:
    """Yield a valid request with each field missing, and with each wrong value in turn."""
    yield f"{code}: no ext", command(code, body)
    yield f"{code}: empty ext", command(code, body, ext={})
    for name in fields:
        rest = {key: value for key, value in fields.items() if key != name}
        yield f"{code}: no {name}", command(code, body, ext=rest)
        for value in WRONG_VALUES:
            yield f"{code}: {name} = {value!r:.30}", command(code, body, ext={**fields, name: value})


HOSTILE_BODIES = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b"5",
    b'"x"',
    b"{",
    b"}",
    b"\xff\xfe",
    b"\0" * 1000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"{a:" * 100_000,
    b'{"table":{"x":' + b"9" * 100_000 + b"}}",
    b'{"a":1e999}',
    b"{[1,2]:3}",
    b'{"topicConfigSerializeWrapper":5}',
    b'{"topicConfigSerializeWrapper":{"dataVersion":[]}}',
    b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":5}}}',
    b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"perm":"x","readQueueNums":1e99}}}}',
    b'{"filterServerList":{"a":1},"topicConfigSerializeWrapper":{"topicConfigTable":[]}}',
    b'{"counter":"x","timestamp":{}}',
    b'{"counter":99999999999999999999999}',
    b'{"clientID":5,"consumerDataSet":{}}',
    b'{"clientID":"c","consumerDataSet":[5],"producerDataSet":"x"}',
    b'{"consumerGroup":[],"clientId":{},"mqSet":5}',
    b'{"mqSet":[{"queueId":"x"}]}',
)


def json_bodies(code: int, fields: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield bodies that are not JSON, or JSON of another shape."""
    for text in HOSTILE_BODIES:
        yield f"{code}: body {text[:40]!r} of {len(text)}", command(code, text, ext=fields)


def bomb(start: bytes) -> bytes:
    """Return a zlib stream of 2 MiB that inflates to 2 GiB."""
    packer = zlib.compressobj(9)
    head = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    # After a full flush the compressed bytes do not depend on their position, so they can be repeated.
    return head + 128 * (packer.compress(bytes(16 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH))


def compressed_registrations(fields: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield REGISTER_BROKER with compressed bodies that have wrong counts or inflate to huge sizes."""
    version = b'{"counter":1,"timestamp":1}'
    topic = b"TopicA 4 4 6 SINGLE_TAG"
    sized = struct.pack(">i", len(version)) + version
    bodies = {
        "not zlib": b"garbage that is no zlib stream",
        "cut": zlib.compress(sized + bytes(1000))[:-20],
        "empty": zlib.compress(b""),
        "version length -1": zlib.compress(struct.pack(">i", -1)),
        "version length huge": zlib.compress(struct.pack(">i", HUGE) + version),
        "topic count huge": zlib.compress(sized + struct.pack(">i", HUGE)),
        "topic count negative": zlib.compress(sized + struct.pack(">i", -5)),
        "topic length huge": zlib.compress(sized + struct.pack(">ii", 1, HUGE) + topic),
        "topic of one word": zlib.compress(
            sized + struct.pack(">ii", 1, 6) + b"TopicA" + struct.pack(">i", 0)
        ),
        "topic of wrong numbers": zlib.compress(
            sized + struct.pack(">ii", 1, 21) + b"TopicA x y z SINGLE_T" + struct.pack(">i", 0)
        ),
        "filter list huge": zlib.compress(sized + struct.pack(">ii", 0, HUGE)),
        "filter list deep": zlib.compress(sized + struct.pack(">ii", 0, 100_000) + b"[" * 100_000),
        "a bomb": bomb(struct.pack(">i", HUGE)),
    }
    for name, body in bodies.items():
        for crc in (0, zlib.crc32(body) & HUGE):
            ext = {**fields, "compressed": "true", "bodyCrc32": str(crc)}
            yield f"103 compressed: {name}, crc {crc != 0}", command(103, body, ext=ext)
    yield "103: wrong crc", command(103, b"{}", ext={**fields, "bodyCrc32": "12345"})


SPARKS = (b"{", b"}", b"[", b'"', b"\\", b",", b":", b"\0", b"\xff", b"-", b"9")


def mutations(seed: int, count: int, originals: list[bytes]) -> Iterator[bytes]:
    """Yield valid frames with bytes changed, lost, doubled or moved; half of them have corrected lengths."""
    dice = random.Random(seed)
    for _ in range(count):
        data = bytearray(dice.choice(originals))
        for _ in range(dice.choice([1, 1, 2, 5, 20])):
            at = dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    data[at] = dice.randrange(256)
                case 1:
                    del data[at : at + dice.randrange(1, 9)]
                case 2:
                    data[at:at] = data[at : at + dice.randrange(1, 40)]
                case _:
                    data[at:at] = dice.choice(SPARKS)
            if len(data) < 8:
                data += bytes(8)
        if dice.random() < 0.5:
            struct.pack_into(">I", data, 0, len(data) - 4)
        yield bytes(data)
