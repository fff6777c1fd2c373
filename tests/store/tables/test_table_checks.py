"""Every bit of each table in `config/` is flipped: a load returns table or backup, or raises an error.

CometMQ's own tables have a CRC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import everything, numbered, open_store, send

from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.errors import StoreCorrupt
from cometmq.protocol.bodies import DelayOffsetTable, SubscriptionGroupTable, TopicConfigTable
from cometmq.store import JsonTable, MessageStore
from cometmq.store.base.disk import write_new_file
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.min_offsets import MinOffsets
from cometmq.store.tables.table_checks import render

Table = dict[str, Any]
CONFIG = "/store/config"


def _topic(name: str, **more: Any) -> Table:
    return {
        "order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG", "topicName": name,
        "topicSysFlag": 0, "writeQueueNums": 4, **more,
    }  # fmt: skip


def _group(name: str) -> Table:
    return {
        "brokerId": 0, "consumeBroadcastEnable": True, "consumeEnable": True, "consumeFromMinEnable": True,
        "groupName": name, "notifyConsumerIdsChangedEnable": True, "retryMaxTimes": 16, "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
    }  # fmt: skip


def _topics(count: int) -> Table:
    topics = {f"Topic{n}": _topic(f"Topic{n}") for n in range(count)}
    topics["Kept"] = _topic("Kept", attributes={"+retention.ms": "60000"})
    return {"dataVersion": {"counter": count, "timestamp": 1700000000000}, "topicConfigTable": topics}


def _groups(count: int) -> Table:
    groups = {f"G{n}": _group(f"G{n}") for n in range(count)}
    return {"dataVersion": {"counter": count, "timestamp": 1700000000000}, "subscriptionGroupTable": groups}


def _offsets(count: int) -> Table:
    return {"offsetTable": {f"Topic{n}@G1": {0: 250 + count, 1: 251} for n in range(count)}}


def _delays(count: int) -> Table:
    return {"offsetTable": {3: 202, 4: 70 * count, 17: 1}, "logPosition": 900 * count}


APACHES: dict[str, tuple[Callable[[int], Table], Callable[[Table], object]]] = {
    "topics.json": (_topics, TopicConfigTable.from_plain),
    "subscriptionGroup.json": (_groups, SubscriptionGroupTable.from_plain),
    "consumerOffset.json": (_offsets, lambda table: ConsumerOffsets().load(table)),
    "delayOffset.json": (_delays, DelayOffsetTable.from_plain),
}
OWN: dict[str, Callable[[int], Table]] = {
    "consumeQueueEnds.json": lambda n: {
        "logEnd": 900 * n,
        "queueEnds": {"T": {"0": 30 * n, "1": 2}},
        "segmentSize": 65536,
        "queueFileSize": 2000,
        "indexFileSize": 8440,
    },
    "queueMinOffsets.json": lambda n: {"minOffsets": {"T": {"0": 30 * n, "1": 2}}},
    "deletedTopics.json": lambda n: {"deletedTopics": {"T": 3000 * n, "U": 17}},
    "timers.json": lambda n: {
        "queueOffset": 30 * n,
        "deliveredMs": 1_700_000_000_000,
        "firstPosition": 400,
        "logPosition": 900 * n,
        "waiting": {"T": n, "U": 17},
    },
}


def texts(values: Any) -> Any:
    """Return the values with all keys as strings, as they are after loading."""
    if isinstance(values, dict):
        return {str(key): texts(value) for key, value in values.items()}
    return values


def saved(name: str, content: Callable[[int], Table]) -> tuple[bytes, bytes]:
    """Return the content of the file and of its backup after two changes."""
    disk = RecordingDisk({"/store": None, CONFIG: None})
    table = JsonTable(f"{CONFIG}/{name}", disk)
    table.save(content(1))
    table.save(content(2))
    image = disk.image()
    new, old = image[table.path], image[table.path + ".bak"]
    assert new is not None
    assert old is not None
    return new, old


def flips(text: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(len(text) * 8):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(changed)


def disk_of(name: str, text: bytes, backup: bytes | None) -> RecordingDisk:
    start = {"/store": None, CONFIG: None, f"{CONFIG}/{name}": text}
    if backup is not None:
        start[f"{CONFIG}/{name}.bak"] = backup
    return RecordingDisk(start)


def table_of(name: str, text: bytes, backup: bytes | None) -> JsonTable:
    return JsonTable(f"{CONFIG}/{name}", disk_of(name, text, backup))


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Return the differences of two tables: numbers, attributes, and names that only one table has."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or len(found) != len(expected):
            return [f"{path}: not the same entries"]
        lost, new = expected.keys() - found.keys(), found.keys() - expected.keys()
        named = "attributes" in path or path.startswith("/offsetTable")
        if (lost or new) and not (len(lost) == 1 and named):
            return [f"{path}: {sorted(lost)} became {sorted(new)}"]
        pairs = [(found[key], expected[key], key) for key in expected.keys() - lost]
        pairs += [(found[b], expected[a], a) for a, b in zip(lost, new, strict=True)]
        return [problem for one, other, key in pairs for problem in differences(one, other, f"{path}/{key}")]
    if found == expected or type(found) is type(expected) is int:
        return []
    return [] if "attributes" in path and isinstance(found, str) else [f"{path}: {found!r}"]


@pytest.mark.parametrize("name", APACHES)
@pytest.mark.parametrize("with_backup", [True, False])
def test_a_flipped_bit_leaves_the_table_its_backup_or_the_typed_error(
    name: str, with_backup: bool, caplog: pytest.LogCaptureFixture
) -> None:
    content, take = APACHES[name]
    new, old = saved(name, content)
    now, before = texts(content(2)), texts(content(1))
    kinds = {"table": 0, "backup": 0, "error": 0}
    for bit, text in flips(new):
        caplog.clear()
        table = table_of(name, text, old if with_backup else None)
        try:
            found = table.load()
        except StoreCorrupt:
            assert not with_backup, bit
            kinds["error"] += 1
            continue
        take(found)
        if found == before:
            assert with_backup, bit
            assert name in caplog.text, bit
            kinds["backup"] += 1
        else:
            assert differences(found, now) == [], (bit, text[max(0, bit // 8 - 20) : bit // 8 + 20])
            kinds["table"] += 1
    assert kinds["table"] < kinds["backup"] + kinds["error"]  # some flips go undetected


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("topics.json", b'{"topicConfigTabld":{}}'),
        ("topics.json", b'{"topicConfigTable":[]}'),
        ("topics.json", b'{"topicConfigTable":{"A":{"topicName":"B"}}}'),
        ("topics.json", b'{"topicConfigTable":{"A":7}}'),
        ("topics.json", b'{"topicConfigTable":{"A":{"perm":"rw"}}}'),
        ("topics.json", b'{"topicConfigTable":{"A":{"perm":[6]}}}'),
        ("subscriptionGroup.json", b'{"subscriptionGroupTable":{"A":{}}}'),
        ("consumerOffset.json", b'{"offsetTable":["T@G"]}'),
        ("consumerOffset.json", b'{"offsetTable":{"T@G":{0:1,0:2}}}'),
        ("consumerOffset.json", b'{"offsetTable":{"T@G":{"x":1}}}'),
        ("consumerOffset.json", b'{"offsetTable":{"T@G":7}}'),
        ("consumerOffset.json", b'{"offsetTable":{"TAG":{0:1}}}'),
        ("consumerOffset.json", b'{"offsetTable":{"T\xc0@G":{0:1}}}'),
        ("delayOffset.json", b'{"offsetTable":{"three":1}}'),
        ("delayOffset.json", b'{"offsetTable":{3:"much"}}'),
        ("delayOffset.json", b"\0" * 512),
        ("delayOffset.json", b""),
    ],
)
def test_what_is_no_such_table_gives_way_to_the_backup(name: str, damage: bytes) -> None:
    content, _ = APACHES[name]
    _, old = saved(name, content)
    disk = disk_of(name, damage, old)
    table = JsonTable(f"{CONFIG}/{name}", disk)
    assert table.load() == texts(content(1))
    table.save(content(3))  # the damaged file must not replace the good backup
    assert JsonTable(table.path, disk).load() == texts(content(3))
    assert table_of(name, disk.image()[table.path + ".bak"], None).load() == texts(content(1))
    if damage:
        with pytest.raises(StoreCorrupt, match=name):
            table_of(name, damage, damage).load()


def test_what_is_damaged_after_it_was_written_never_becomes_the_backup() -> None:
    disk = disk_of("topics.json", b"", None)
    table = JsonTable(f"{CONFIG}/topics.json", disk)
    for count in (1, 2):
        table.save(_topics(count))
    write_new_file(disk, table.path, b'{"topicConfigTabld":{}}')
    table.save(_topics(3))
    assert table_of("topics.json", disk.image()[table.path + ".bak"], None).load() == _topics(1)
    table.save(_topics(4))
    assert table_of("topics.json", disk.image()[table.path + ".bak"], None).load() == _topics(3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("topics.json", b"{}"),
        ("topics.json", b'{"topicConfigTable":{}}'),
        ("subscriptionGroup.json", b'{"forbiddenTable":{},"subscriptionGroupTable":{}}'),
        ("consumerOffset.json", b'{"groupTopicMap":{"G":["T"]},"offsetTable":{"T@G":{0:"4"}}}'),
        (
            "delayOffset.json",
            b'{"dataVersion":{"counter":1,"stateVersion":0,"timestamp":1},"offsetTable":{}}',
        ),
    ],
)
def test_what_other_versions_and_people_write_is_a_table(name: str, text: bytes) -> None:
    APACHES[name][1](table_of(name, text, None).load())


class TestOwnTables:
    @pytest.mark.parametrize("name", OWN)
    def test_every_flipped_bit_shows(self, name: str) -> None:
        new, old = saved(name, OWN[name])
        missed = []
        for bit, text in flips(new):
            found = table_of(name, text, old).load()
            if found not in (OWN[name](2), OWN[name](1)):
                missed.append(bit)
        assert missed == []

    def test_a_damaged_table_of_ends_counts_as_empty_and_its_backup_is_not_asked(self) -> None:
        new, old = saved("consumeQueueEnds.json", OWN["consumeQueueEnds.json"])
        ends = CleanEnds(disk_of("consumeQueueEnds.json", new.replace(b"60", b"70"), old), "/store")
        assert (ends.log_end, ends.ends) == (-1, {})

    @pytest.mark.parametrize("damage", [b"60", b"6000"])
    def test_damaged_floors_and_deletions_are_taken_from_the_backup_or_count_as_empty(
        self, damage: bytes
    ) -> None:
        for name in ("queueMinOffsets.json", "deletedTopics.json"):
            new, old = saved(name, OWN[name])
            disk = disk_of(name, new.replace(damage, b"7" + damage[1:]), old)
            if damage in new:
                assert MinOffsets(disk, "/store").by_topic == (
                    {"T": {0: 30, 1: 2}} if name == "queueMinOffsets.json" else {}
                )
                assert DeletedTopics(disk, "/store").hides("T", 2999) is (name == "deletedTopics.json")
                assert not DeletedTopics(disk, "/store").hides("T", 3000)
            write_new_file(disk, f"{CONFIG}/{name}", b"{")
            write_new_file(disk, f"{CONFIG}/{name}.bak", b"\xff")
            assert MinOffsets(disk, "/store").by_topic == {}
            assert not DeletedTopics(disk, "/store")

    @pytest.mark.parametrize("name", OWN)
    def test_files_without_a_crc_are_read_and_get_one(self, name: str) -> None:
        disk = disk_of(name, render(OWN[name](1)).encode(), None)
        table = JsonTable(f"{CONFIG}/{name}", disk)
        assert table.load() == OWN[name](1)
        table.save(OWN[name](2))
        assert b'"crc":"' in (disk.image()[table.path] or b"")
        assert table.load() == OWN[name](2)

    def test_a_changed_end_does_not_move_the_queue(
        self, tmp_path: Path, store: MessageStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        sent = numbered(30)
        for body in sent:
            send(store, body)
        store.close()
        path = tmp_path / "config" / "consumeQueueEnds.json"
        text = path.read_bytes()
        assert text.count(b'"0":30') == 1
        path.write_bytes(text.replace(b'"0":30', b'"0":70'))
        with caplog.at_level(logging.ERROR):
            store = open_store(tmp_path)
        assert "consumeQueueEnds.json" in caplog.text
        assert send(store, b"next").queue_offset == 30
        assert everything(store) == [*sent, b"next"]
