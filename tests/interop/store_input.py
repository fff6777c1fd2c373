"""Identical input for two brokers, and reads of everything that a broker serves.

Requests are built directly, so that no client chooses any value (born time, unique key, order of properties).
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from tests.interop import wire
from tests.interop.stores import Record, records_in

SEND_V2 = 310
SEND_BATCH = 320
PULL = 11
UPDATE_OFFSET = 15
QUERY_MESSAGE = 12
QUERY_OFFSET = 14
MAX_OFFSET = 30
MIN_OFFSET = 31
SEND_BACK = 36
UPDATE_TOPIC = 17
BORN = 1_700_000_000_000
GROUP = "store-readers"
PROBE = "store-probe"

TINY = {
    "mappedFileSizeCommitLog": str(1 << 20),
    "mappedFileSizeConsumeQueue": str(100 * 20),
    "maxHashSlotNum": "500",
    "maxIndexNum": "400",
    "maxMessageSize": str(512 * 1024),
}
"""Settings with files so small that a few hundred messages fill several of each kind."""
TINY_SLOTS = 500


class RefusedError(Exception):
    """A response of the broker with a code other than 0."""


@dataclass
class Feeder:
    """A sender with one connection to a broker, which gets every value of a message."""

    connection: wire.Connection
    sent: int = 0

    def send(
        self,
        topic: str,
        queue: int,
        body: bytes,
        properties: list[tuple[str, str]],
        *,
        flag: int = 0,
        sys_flag: int = 0,
    ) -> dict[str, str]:
        text = "\x02".join(f"{name}\x01{value}" for name, value in properties)
        return self._send(SEND_V2, topic, queue, body, text, flag, sys_flag)

    def batch(
        self, topic: str, queue: int, parts: list[tuple[bytes, list[tuple[str, str]]]]
    ) -> dict[str, str]:
        body = b""
        for content, properties in parts:
            text = "\x02".join(f"{name}\x01{value}" for name, value in properties).encode()
            size = 22 + len(content) + len(text)
            body += struct.pack(">iiiii", size, 0, 0, 0, len(content)) + content
            body += struct.pack(">h", len(text)) + text
        return self._send(SEND_BATCH, topic, queue, body, "WAIT\x01true", 0, 0, batch=True)

    def _send(
        self,
        code: int,
        topic: str,
        queue: int,
        body: bytes,
        properties: str,
        flag: int,
        sys_flag: int,
        *,
        batch: bool = False,
    ) -> dict[str, str]:
        self.sent += 1
        ext = {
            "a": "feeder",
            "b": topic,
            "c": "TBW102",
            "d": "4",
            "e": str(queue),
            "f": str(sys_flag),
            "g": str(BORN + self.sent),
            "h": str(flag),
            "i": properties,
            "j": "0",
            "k": "false",
            "m": str(batch).lower(),
        }
        return self.ask(code, ext, body)

    def update_topic(self, topic: str, queues: int, **more: str) -> None:
        ext = {
            "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(queues),
            "writeQueueNums": str(queues), "perm": "6", "order": "false", "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
        }  # fmt: skip
        self.ask(UPDATE_TOPIC, ext | more)

    def ask(self, code: int, ext: dict[str, str], body: bytes = b"") -> dict[str, str]:
        header, _ = self.connection.call(code, ext, body)
        if header["code"] != 0:
            raise RefusedError(code, header["code"], header.get("remark"))
        fields: dict[str, str] = header.get("extFields") or {}
        return fields


def feed(port: int, *, numbered: int = 500, batches: int = 12, big: bool = True) -> None:
    """Send the whole input: several topics, keys, tags, batches, delayed messages, a retry; 814 records."""
    noise = random.Random(7)
    with wire.Connection(port) as connection:
        feeder = Feeder(connection)
        for topic, queues in (("Alpha", 4), ("Beta", 2), ("Gamma", 1)):
            feeder.update_topic(topic, queues)
        for number in range(numbered):
            _numbered(feeder, number, noise)
        # The large messages fill three log files.
        for size in (0, 1, 4096, *((100_000, 400_000, 400_000, 400_000, 300_000) if big else ())):
            feeder.send("Beta", 1, noise.randbytes(size) or b"-", [("KEYS", f"big{size}")])
        for number in range(batches):
            parts = [
                (b"part %d.%d" % (number, each), [("TAGS", "part"), ("KEYS", f"p{number}.{each}")])
                for each in range(25)
            ]
            feeder.batch("Gamma", 0, parts)
        for level in (3, 4, 5, 18):
            feeder.send(
                "Alpha", 0, b"later %d" % level, [("DELAY", str(level)), ("TAGS", "late"), ("KEYS", "late")]
            )
        feeder.send("Alpha", 1, b"x\x9c squeezed", [("TAGS", "z")], sys_flag=1)
        for queue in range(4):
            offset = {"topic": "Alpha", "queueId": str(queue), "commitOffset": str(10 + queue)}
            feeder.ask(UPDATE_OFFSET, {"consumerGroup": GROUP, **offset})
        sent_back = {
            "group": GROUP, "originTopic": "Alpha", "offset": "0", "delayLevel": "5", "originMsgId": "",
            "unitMode": "false", "maxReconsumeTimes": "16",
        }  # fmt: skip
        feeder.ask(SEND_BACK, sent_back)


def _numbered(feeder: Feeder, number: int, noise: random.Random) -> None:
    properties = [("UNIQ_KEY", f"{number:032X}")]
    if number % 2:
        properties.append(("TAGS", ("TagA", "TagB", "polygenelubricants", "订单")[number % 4]))
    if number % 3:
        properties.append(("KEYS", f"k{number} k{number % 10}" + ("  double" if number % 5 == 0 else "")))
    if number % 7 == 0:
        properties += [("WAIT", "true"), ("clerk", "Łukasz 🚀"), (f"p{number}", "v" * (number % 50))]
    noise.shuffle(properties)
    feeder.send("Alpha", number % 4, noise.randbytes(1 + number % 300), properties, flag=number)


def served(
    port: int, topic: str, queue: int, first: int = 0, *, step_over: tuple[int, ...] = ()
) -> list[Record]:
    """Return every message of a queue from an offset on, as the broker serves it to pulls.

    step_over: Codes, beside that of success, after which the next offset is pulled.
    """
    found: list[Record] = []
    offset = first
    with wire.Connection(port) as connection:
        while True:
            ext = {
                "consumerGroup": PROBE, "topic": topic, "queueId": str(queue), "queueOffset": str(offset),
                "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0",
                "subscription": "*", "subVersion": "0", "expressionType": "TAG",
            }  # fmt: skip
            header, body = connection.call(PULL, ext)
            if header["code"] not in (0, *step_over):
                assert header["code"] in (19, 21), header  # 19: no new message, 21: an empty queue
                return found
            found += records_in(body)
            offset = int(header["extFields"]["nextBeginOffset"])


def min_offset(port: int, topic: str, queue: int) -> int:
    header, _ = wire.call(port, MIN_OFFSET, {"topic": topic, "queueId": str(queue)})
    assert header["code"] == 0, header
    return int(header["extFields"]["offset"])


def max_offset(port: int, topic: str, queue: int) -> int:
    header, _ = wire.call(port, MAX_OFFSET, {"topic": topic, "queueId": str(queue)})
    return int(header["extFields"]["offset"])


def consumer_offset(port: int, group: str, topic: str, queue: int) -> int:
    ext = {"consumerGroup": group, "topic": topic, "queueId": str(queue)}
    header, _ = wire.call(port, QUERY_OFFSET, ext)
    return int(header["extFields"]["offset"])


def by_key(port: int, topic: str, key: str) -> list[Record]:
    """Return the broker's records for a key, without duplicates, which a key named twice causes."""
    ext = {"topic": topic, "key": key, "maxNum": "64", "beginTimestamp": "0", "endTimestamp": str(2**62)}
    header, body = wire.call(port, QUERY_MESSAGE, ext)
    assert header["code"] == 0
    return sorted(set(records_in(body)), key=lambda each: each.position)


def keys(record: Record) -> list[str]:
    """Return the keys by which a record is found."""
    fields = dict(each.split("\x01", 1) for each in record.properties)
    return [*fields.get("KEYS", "").split(" "), fields.get("UNIQ_KEY", "")]
