"""Every 512-byte sector of a small store, flipped in one bit and zeroed in turn: `verify` names file and
place, `rebuild` repairs what the log can repair, and what is served is right. (What the running store serves
without either is the subject of the tests beside the store.)

`COMETMQ_ROT_MESSAGES=5000` makes the store larger (200 by default), `COMETMQ_ROT_SEED=n` flips other bits.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from functools import lru_cache

import pytest

from cometmq.protocol.properties import java_hash
from cometmq.protocol.record import decode_record, record_starts
from cometmq.store import JsonTable, ManualClock, MessageStore, StoreConfig
from cometmq.store.disk import write_new_file
from cometmq.store.rebuild import rebuild
from cometmq.store.verify import VerifyReport, verify
from cometmq.testing.recording_disk import Image, RecordingDisk

ROOT = "/rot"
SECTOR = 512
FLIPS = 4  # bits of a sector that are flipped, one at a time
MESSAGES = int(os.environ.get("COMETMQ_ROT_MESSAGES", "200"))
SEED = os.environ.get("COMETMQ_ROT_SEED", "1")
HOST = b"\x7f\0\0\1\0\0\xc3\x50"
QUEUES = 2
CONFIG = StoreConfig(
    store_path_root_dir=ROOT,
    mapped_file_size_commit_log=8192,
    mapped_file_size_consume_queue=20 * 20,
    max_hash_slot_num=11,
    max_index_num=40,
    check_crc_on_read=True,
)
Damaged = tuple[str, int, int, Image]  # path, changed byte (or first of the sector), bytes changed, image


@lru_cache(maxsize=1)
def sound_store() -> tuple[Image, dict[tuple[str, int, int], bytes]]:
    """A store that was stopped cleanly, and its records by (topic, queue, offset)."""
    clock, chance = ManualClock(), random.Random(SEED)
    disk = RecordingDisk(now_ms=clock.time_ms)
    store = MessageStore.open(CONFIG, disk, clock)
    table = JsonTable(f"{ROOT}/config/topics.json", disk)
    for version in (1, 2):
        table.save({"topicConfigTable": {}, "dataVersion": {"counter": version, "timestamp": 1}})
    records = {}
    for number in range(MESSAGES):
        clock.advance(chance.random() * 9)
        topic, tag = f"T{number % 2}", f"tag{number % 5}"
        appended = store.append(
            topic, number % QUEUES, chance.randbytes(chance.choice((9, 100, 400, 1100))),
            f"TAGS\x01{tag}\x02KEYS\x01k{number}".encode(), born_timestamp_ms=clock.now_ms, born_host=HOST,
            tags_code=java_hash(tag),
        )  # fmt: skip
        assert store.commit().error is None
        data = store.lookup(appended.physical_offset)
        assert data is not None
        records[topic, number % QUEUES, appended.queue_offset] = data
    store.close()
    return disk.image(), records


def sectors(kind: str) -> Iterator[Damaged]:
    """Each sector that holds anything, damaged. A flip hits a byte that is not zero, as most damage that
    matters does."""
    image, _ = sound_store()
    chance = random.Random(f"{SEED}:{kind}")
    for path, content in sorted(image.items()):
        if content is None or path.endswith(("/lock", "/abort")):
            continue
        for at in range(0, len(content), SECTOR):
            sector = content[at : at + SECTOR]
            used = [place for place, byte in enumerate(sector) if byte]
            if not used:
                continue
            if kind == "zeroed":
                changed = bytearray(content)
                changed[at : at + SECTOR] = bytes(len(sector))
                yield path, at, len(sector), {**image, path: bytes(changed)}
                continue
            for place in chance.sample(used, min(FLIPS, len(used))):
                changed = bytearray(content)
                changed[at + place] ^= 1 << chance.randrange(8)
                yield path, at + place, 1, {**image, path: bytes(changed)}


def record_around(content: bytes, place: int) -> tuple[int, int]:
    """(start, size) of the record of a segment that holds this byte; size 0 behind the last one."""
    at = 0
    while content[at + 4 : at + 7] == b"\xda\xa3\x20":
        size = int.from_bytes(content[at : at + 4], "big")
        if place < at + size:
            return at, size
        at += size
    return at, 0


UNCOVERED = ((16, 20), (36, 88))
"""Bytes of a record that neither its CRC nor queue and index entries vouch for: flag; sysFlag, both times,
both hosts, reconsumeTimes, preparedTransactionOffset (the body length behind them is checked by the size)."""


def format_can_show(path: str, place: int) -> bool:
    """Whether a flip of this byte contradicts anything else in the store."""
    content = sound_store()[0][path]
    assert content is not None
    if "/commitlog/" in path:
        start, size = record_around(content, place)
        return not any(low <= place - start < high for low, high in UNCOVERED) or not size
    if "/index/" in path:
        if place < 16:
            return False  # begin and end time are compared with nothing
        entries = 40 + 4 * CONFIG.max_hash_slot_num
        return place < entries or not 12 <= (place - entries) % 20 < 16  # seconds only narrow a search
    return "/consumequeue/" in path


def names(report: VerifyReport, path: str, place: int, reach: int) -> bool:
    """Whether a finding names the file and a place in it not more than `reach` bytes before. Where only queue
    or index contradict a record, the finding is theirs and names the record by its log position."""
    if "/commitlog/" in path:
        content = sound_store()[0][path]
        assert content is not None
        position = int(os.path.basename(path)) + record_around(content, place)[0]
        if any(re.search(rf"(log position|record at) {position}\b", f.problem) for f in report.findings):
            return True
    return any(
        finding.severity != "note"
        and (finding.path == path or (finding.offset < 0 and finding.path == os.path.dirname(path)))
        and (finding.offset < 0 or place - reach <= finding.offset <= place + SECTOR)
        for finding in report.findings
    )


def served(store: MessageStore) -> dict[tuple[str, int, int], bytes]:
    """Every record that consumers get."""
    found = {}
    for queue in store.queues:
        offset = queue.min_offset
        while offset < queue.max_offset:
            answer = store.reader.get(queue, offset, 32, wait=True)
            data = b"".join(answer.buffers)  # type: ignore[union-attr]
            for at, size in record_starts(data):
                message = decode_record(data, at, check_crc=True)
                found[queue.topic, queue.queue_id, message.queue_offset] = data[at : at + size]
            assert answer.next_begin_offset > offset  # type: ignore[union-attr]
            offset = answer.next_begin_offset  # type: ignore[union-attr]
    return found


def test_the_store_is_sound_before() -> None:
    image, records = sound_store()
    report = verify(ROOT, disk=RecordingDisk(image), config=CONFIG)
    assert (report.sound, report.records, report.units) == (True, MESSAGES, MESSAGES)
    store = MessageStore.open(CONFIG, RecordingDisk(image), ManualClock())
    assert served(store) == records
    store.close()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["flipped", "zeroed"])
def test_verify_names_what_is_damaged(kind: str) -> None:
    unnoticed = []
    shown = 0
    for path, place, count, image in sectors(kind):
        report = verify(ROOT, disk=RecordingDisk(image), config=CONFIG)
        if not any(part in path for part in ("/commitlog/", "/consumequeue/", "/index/")):
            continue
        if kind == "flipped" and not format_can_show(path, place):
            continue
        shown += 1
        if not names(report, path, place, reach=2048):
            unnoticed.append((path, place, count, [f for f in report.findings if f.severity != "note"][:3]))
    assert not unnoticed, "\n".join(map(str, unnoticed))
    assert shown > 150


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["flipped", "zeroed"])
def test_rebuild_repairs_everything_but_lost_records(kind: str) -> None:
    _, records = sound_store()
    tried = 0
    for path, place, count, image in sectors(kind):
        disk = RecordingDisk(image)
        rebuild(ROOT, disk=disk, config=CONFIG)
        report = verify(ROOT, disk=RecordingDisk(disk.image()), config=CONFIG)
        where = f"{path} {place}"
        in_log = "/commitlog/" in path
        derived = [f for f in report.findings if f.severity == "error" and f.kind != "table"]
        assert not derived or in_log, (where, derived)
        store = MessageStore.open(CONFIG, disk, ManualClock())
        found = served(store)
        store.close()
        lost = records.keys() - found.keys()
        changed = {at for at in found.keys() & records.keys() if found[at] != records[at]}
        invented = found.keys() - records.keys()
        touched = _touched(path, place, count) if in_log else set()
        moved = kind == "flipped" and in_log and _moves_the_record(path, place)
        assert moved or not invented, (where, invented)
        assert lost | changed <= touched, (where, lost, changed)
        for at in changed:  # only what no checksum covers can be different, never the body
            assert decode_record(found[at]).body == decode_record(records[at]).body, where
        tried += 1
    assert tried > 150


def _touched(path: str, place: int, count: int) -> set[tuple[str, int, int]]:
    """The records that have a byte in the damaged stretch."""
    _, records = sound_store()
    base = int(os.path.basename(path))
    hit = set()
    for at, data in records.items():
        start = int.from_bytes(data[28:36], "big") - base
        if start < place + count and start + len(data) > place:
            hit.add(at)
    return hit


def _moves_the_record(path: str, place: int) -> bool:
    """Whether the byte belongs to queue id, queue offset or topic: a record with another one of those is
    still a record."""
    content = sound_store()[0][path]
    assert content is not None
    start, size = record_around(content, place)
    if not size:
        return False
    body_end = start + 88 + int.from_bytes(content[start + 84 : start + 88], "big")
    return 12 <= place - start < 28 or body_end <= place < body_end + 3


@pytest.mark.parametrize("kind", ["flipped", "zeroed"])
def test_a_damaged_table_is_an_error_or_the_backup_or_a_table(kind: str) -> None:
    image, _ = sound_store()
    tried = 0
    for path, place, _, changed in sectors(kind):
        if not path.endswith("/topics.json"):
            continue
        table = JsonTable(path, RecordingDisk(changed)).load()
        assert table.keys() <= {"topicConfigTable", "dataVersion"} or kind == "flipped"
        tried += 1
        if kind == "zeroed":
            assert table == JsonTable(path + ".bak", RecordingDisk(image)).load(), place
    assert tried


def test_both_copies_of_a_table_damaged_is_an_error() -> None:
    disk = RecordingDisk(sound_store()[0])
    for name in ("topics.json", "topics.json.bak"):
        write_new_file(disk, f"{ROOT}/config/{name}", b"{{{ rot")
    with pytest.raises(Exception, match=r"topics.json"):
        JsonTable(f"{ROOT}/config/topics.json", disk).load()


@pytest.mark.parametrize("offset", [0, 5, 2_000])
def test_a_damaged_queue_offset_costs_its_own_record_only(offset: int) -> None:
    """No CRC covers it: the records around it tell."""
    image, records = sound_store()
    victim = ("T0", 0, 3)
    position = int.from_bytes(records[victim][28:36], "big")
    path = f"{ROOT}/commitlog/{position - position % 8192:020d}"
    changed = bytearray(image[path] or b"")
    at = position % 8192 + 20
    changed[at : at + 8] = offset.to_bytes(8, "big")
    lost = {name for name in image if "/consumequeue/" in name or name.endswith("/checkpoint")}
    damaged = {name: content for name, content in image.items() if name not in lost}
    damaged |= {path: bytes(changed), f"{ROOT}/abort": b""}
    disk = RecordingDisk(damaged)
    store = MessageStore.open(CONFIG, disk, ManualClock())
    found = served(store)
    store.close()
    assert found == {name: data for name, data in records.items() if name != victim}
    rebuild(ROOT, disk=disk, config=CONFIG)
    store = MessageStore.open(CONFIG, disk, ManualClock())
    again = served(store)
    store.close()
    assert again == found
