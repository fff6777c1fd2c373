"""Well-formed frames of valid JSON with values that no honest client would send."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tests.faults.good_requests import Request
from tests.faults.malformed import command

KIB, MIB = 1024, 1024 * 1024
EVIL = "\x1b[31m\x1b]0;owned\x07\x9b2J[red]x\u202e"
"""A text that controls a terminal, reverses its direction, and contains markup of rich."""

NAMES = (
    "", " ", ".", "..", "/abs", "x/../Good", "x/../../../../evil", "x/../../config/topics.json", "a\0b",
    "a\nERROR b", "\x1b[2J", "a.b", "a b", "%", "%RETRY%", "%DLQ%CG", "%RETRY%" + "x" * 120,
    "%RETRY%%RETRY%CG", "TBW102", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "OFFSET_MOVED_EVENT",
    "TRANS_CHECK_MAX_TIME_TOPIC", "CID_RMQ_SYS_x", "rmq_sys_x", "x" * 127, "x" * 128, "x" * 256,
    "x" * 33_000, "订单", "\ud800", "a || b", "CG\x02REAL_TOPIC\x01Victim\x02REAL_QID\x010", "..:1", "a\0:1",
    "1.2.3.4:99999", "[::1", "${jndi:x}", "null", "CG", "TopicA",
)  # fmt: skip
NUMBERS = (
    "0", "-1", "1", "3", "19", "32767", "32768", "65536", "2147483647", "2147483648", "-2147483648",
    "4294967296", "4611686018427387904", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "9" * 400, "1e9", "1.5", "NaN", "0x10", " 5 ", "+5", "", "true",
)  # fmt: skip
TIMES = ("0", "-1", "1795170712333", "253402300800000", "4611686018427387904", "-4611686018427387904")
PROPERTIES = (
    "\x01", "\x02", "\x01\x02", "a\x01b", "a\x01b\x01c\x02", "DELAY\x01-1\x02", "DELAY\x0199\x02",
    "DELAY\x01x\x02", "DELAY\x013\x02bad\x01a\x01b\x02",
    "REAL_TOPIC\x01../../evil\x02REAL_QID\x01-1\x02DELAY\x011\x02", "RETRY_TOPIC\x01a/../b\x02",
    "TAGS\x01" + "t" * 30_000 + "\x02", "KEYS\x01" + "k" * 30_000 + "\x02",
    "KEYS\x01" + "k " * 15_000 + "\x02", "UNIQ_KEY\x01" + "u" * 30_000 + "\x02", "x\x01y\x02" * 8_000,
    "TRAN_MSG\x01true\x02", "WAIT\x01x\x02",
    "INNER_MULTI_DISPATCH\x01a,b\x02INNER_MULTI_QUEUE_OFFSET\x01-1\x02",
)  # fmt: skip
VALUES = (*NAMES, *NUMBERS, *TIMES, *PROPERTIES)
SMALL = tuple(value for value in VALUES if len(value) < KIB)

BODIES = (
    b"", b"\0", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 20_000,
    b"{" + b'"a":1,' * 50_000 + b'"a":1}', b'"' + b"x" * MIB + b'"', b"=" * 100_000, b"\n" * 100_000,
    b"a=b\n" * 20_000, b"storePathRootDir=/nowhere\n", b"brokerIP1=..\nlistenPort=1\n",
    b"flushConsumerOffsetInterval=0\n", b"registerNameServerPeriod=" + b"9" * 400, b"maxMessageSize=-1\n",
    b"messageDelayLevel=1s 2x\n", struct.pack(">i", -1) * 100, struct.pack(">i", 2**31 - 1), bytes(5 * MIB),
)  # fmt: skip


def table(requests: Mapping[int, Request]) -> Iterator[bytes]:
    """Yield every request with each field set to each value, and with every body."""
    for code, request in requests.items():
        for name in request.ext:
            for value in VALUES:
                yield command(code, request.body, ext={**request.ext, name: value})
        for body in BODIES:
            yield command(code, body, ext=request.ext)
        for body in _changed_bodies(request.body):
            yield command(code, body, ext=request.ext)


def mixtures(requests: Mapping[int, Request], seed: int) -> Iterator[bytes]:
    """Yield random small requests with a few hostile values each, without end."""
    chance = random.Random(seed)
    codes = list(requests)
    few = [body for body in BODIES if len(body) < KIB]
    bodies = {
        code: [*few, *(body for body in _changed_bodies(request.body) if len(body) < KIB)]
        for code, request in requests.items()
    }
    while True:
        code = chance.choice(codes)
        request = requests[code]
        ext = dict(request.ext)
        for name in chance.sample(list(ext), min(len(ext), chance.randint(0, 3))):
            ext[name] = chance.choice(SMALL)
        body = request.body if chance.random() < 0.7 else chance.choice(bodies[code])
        yield command(code, body, ext=ext, version=chance.choice((0, 121, 407, 409, 513, 2**31 - 1)))


def _changed_bodies(body: bytes) -> Iterator[bytes]:
    """Yield a JSON body with each of its leaves hostile, and each of its lists and objects long."""
    try:
        good = json.loads(body)
    except ValueError:
        return
    for path in _paths(good):
        for value in SMALL:
            yield json.dumps(_with(good, path, value)).encode()
        for number in NUMBERS[:16]:
            yield json.dumps(_with(good, path, int(number))).encode()
        found = _at(good, path)
        if isinstance(found, list) and found:
            yield json.dumps(_with(good, path, found * 5_000)).encode()
            yield json.dumps(_with(good, path, [_renamed(found[0], n) for n in range(5_000)])).encode()
        if isinstance(found, dict) and found:
            key, value = next(iter(found.items()))
            longer = {f"{key}{n}": value for n in range(5_000)}
            yield json.dumps(_with(good, path, longer)).encode()
            for name in NAMES:
                yield json.dumps(_with(good, path, {name: value})).encode()


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (key,)
        for rest in _paths(child):
            yield (key, *rest)


def _renamed(value: Any, number: int) -> Any:
    """Return a value in which every name is unique."""
    if isinstance(value, str):
        return f"{value}{number}"
    if isinstance(value, dict):
        return {key: _renamed(child, number) for key, child in value.items()}
    return [_renamed(child, number) for child in value] if isinstance(value, list) else value


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    changed = copy.deepcopy(value)
    _at(changed, path[:-1])[path[-1]] = leaf
    return changed
