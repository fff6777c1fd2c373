"""In every 512-byte sector of a small store one bit is flipped, or the sector is zeroed.

`verify` reports file and position, the store starts and serves all other messages, and `rebuild` repairs
everything that can be derived from the log. `COMETMQ_ROT_MESSAGES=5000` makes the store larger (200 by
default), `COMETMQ_ROT_SEED=n` flips other bits.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import pytest
from tests.kit.recording_disk import Image, RecordingDisk
from tests.long_form import LONG
from tests.store.kit import send

from cometmq.protocol.properties.values import java_hash
from cometmq.protocol.record.one import decode_record, iter_records
from cometmq.store import JsonTable, ManualClock, MessageStore, StoreConfig
from cometmq.store.base.disk import write_new_file
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.verify import VerifyReport, verify

ROOT = "/rot"
SECTOR = 512
FLIPS = 2 if LONG else 1  # flipped bytes per sector in use, one at a time
MESSAGES = int(os.environ.get("COMETMQ_ROT_MESSAGES", "200"))
SEED = os.environ.get("COMETMQ_ROT_SEED", "1")
QUEUES = 2
BLANK = b"\xcb\xd4\x31\x94"
CONFIG = StoreConfig(
    store_path_root_dir=ROOT,
    mapped_file_size_commit_log=8192,
    mapped_file_size_consume_queue=20 * 20,
    max_hash_slot_num=11,
    max_index_num=40,
    check_crc_on_read=True,
)
Damaged = tuple[str, int, int, Image]  # path, first changed byte, number of bytes, image


@lru_cache(maxsize=1)
def sound_store() -> tuple[Image, dict[tuple[str, int, int], bytes]]:
    """Return a cleanly stopped store and its records by (topic, queue, offset)."""
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
        appended = send(
            store, chance.randbytes(chance.choice((9, 100, 400, 1100))), topic, number % QUEUES,
            properties=f"TAGS\x01{tag}\x02KEYS\x01k{number}".encode(), born_timestamp_ms=clock.now_ms,
            tags_code=java_hash(tag),
        )  # fmt: skip
        data = store.lookups.record_at(appended.physical_offset)
        assert data is not None
        records[topic, number % QUEUES, appended.queue_offset] = data
    store.close()
    return disk.image(), records


def sectors(kind: str) -> Iterator[Damaged]:
    """Yield each sector of each file in damaged form.

    A sector with content is zeroed, or one bit is flipped: in nonzero bytes, where damage usually matters,
    and in a zero byte.
    """
    image, _ = sound_store()
    chance = random.Random(f"{SEED}:{kind}")
    for path, content in sorted(image.items()):
        if content is None or path.endswith(("/lock", "/abort")):
            continue
        for at in range(0, len(content), SECTOR):
            sector = content[at : at + SECTOR]
            used = [place for place, byte in enumerate(sector) if byte]
            unused = [place for place, byte in enumerate(sector) if not byte]
            if kind == "zeroed":
                if used:
                    changed = bytearray(content)
                    changed[at : at + SECTOR] = bytes(len(sector))
                    yield path, at, len(sector), {**image, path: bytes(changed)}
                continue
            places = chance.sample(used, min(FLIPS, len(used))) + chance.sample(unused, min(1, len(unused)))
            for place in places:
                changed = bytearray(content)
                changed[at + place] ^= 1 << chance.randrange(8)
                yield path, at + place, 1, {**image, path: bytes(changed)}


def record_around(content: bytes, place: int) -> tuple[int, int]:
    """Return (start, size) of a segment's record that contains this byte; size 0 after the last record."""
    at = 0
    while content[at + 4 : at + 7] == b"\xda\xa3\x20":
        size = int.from_bytes(content[at : at + 4], "big")
        if place < at + size:
            return at, size
        at += size
    return at, 0


ENTRIES = 40 + 4 * CONFIG.max_hash_slot_num


def part_of(path: str, place: int) -> str:
    """Return the part of the store that a byte belongs to."""
    content = sound_store()[0][path]
    assert content is not None
    if "/commitlog/" in path:
        start, size = record_around(content, place)
        if not size:
            blank = content[start + 4 : start + 8] == BLANK
            in_blank = "blank record" if place < start + 8 else "behind the blank"
            return in_blank if blank else "behind the log"
        body_end = start + 88 + int.from_bytes(content[start + 84 : start + 88], "big")
        inside = place - start
        return "head" if inside < 88 else "body" if place < body_end else "topic and properties"
    if "/index/" in path:
        entry, byte = divmod(place - ENTRIES, 20)
        if place < ENTRIES:
            return "index header" if place < 40 else "index slots"
        in_use = 1 <= entry < int.from_bytes(content[36:40], "big")
        return "unused entry" if not in_use else "entry time" if 12 <= byte < 16 else "entry"
    if "/consumequeue/" in path:
        return "queue"
    if path.endswith("/checkpoint"):
        return "checkpoint" if place < 24 else "behind the checkpoint"
    return "table"


UNCOVERED = ((16, 20), (36, 88))
"""Byte ranges of a record that neither its CRC nor queue and index entries cover.

They are flag, sysFlag, both times, both hosts, reconsumeTimes and preparedTransactionOffset. The size checks
the body length after them.
"""


def format_can_show(path: str, place: int, image: Image) -> bool:
    """Return whether a flip of this byte contradicts other data in the store."""
    content, changed = sound_store()[0][path], image[path]
    assert content is not None
    assert changed is not None
    part = part_of(path, place)
    if part == "head":
        inside = place - record_around(content, place)[0]
        return not any(low <= inside < high for low, high in UNCOVERED)
    if part == "topic and properties":
        # Only values of properties other than UNIQ_KEY, KEYS and TAGS are unchecked, and there are none here.
        return True
    if part == "index header" and 8 <= place < 16:  # the end time, which may differ by a second
        right, wrong = (int.from_bytes(data[8:16], "big", signed=True) for data in (content, changed))
        return abs(right - wrong) > 999
    if part == "entry time":  # the first valid entry of the oldest file is not recorded
        oldest = path == min(name for name in sound_store()[0] if "/index/" in name)
        return not (oldest and place < ENTRIES + 40)
    if part == "checkpoint":
        number = place // 8
        value = int.from_bytes(changed[number * 8 : number * 8 + 8], "big", signed=True)
        last = max(int.from_bytes(data[56:64], "big") for data in sound_store()[1].values())
        return not 0 <= value < 1 << 53 or (number < 2 and value > last)
    return part != "table"  # other tests cover damage in tables


def names(report: VerifyReport, path: str, place: int, reach: int) -> bool:
    """Return whether a finding names the file and a position at most `reach` bytes before `place`.

    If only queue or index contradict a record, the finding names their file and the record's log position.
    """
    unused = part_of(path, place) in ("behind the blank", "unused entry", "behind the checkpoint")
    if "/commitlog/" in path:
        content = sound_store()[0][path]
        assert content is not None
        position = int(os.path.basename(path)) + record_around(content, place)[0]
        if any(re.search(rf"(log position|record at) {position}\b", f.problem) for f in report.findings):
            return True
    return any(
        (finding.severity != "note" or (unused and finding.kind == "unused-bytes"))
        and finding.path == path
        and (finding.offset < 0 or place - reach <= finding.offset <= place + SECTOR)
        for finding in report.findings
    )


def served(store: MessageStore) -> dict[tuple[str, int, int], bytes]:
    """Return every record that consumers can read."""
    found = {}
    for queue in store.queues:
        offset = queue.min_offset
        while offset < queue.max_offset:
            answer = store.reader.get(queue, offset, 32)
            data = b"".join(answer.buffers)  # type: ignore[union-attr]
            at = 0
            for message in iter_records(data, check_crc=True):
                size = message.store_size
                found[queue.topic, queue.queue_id, message.queue_offset] = data[at : at + size]
                at += size
            assert answer.next_begin_offset > offset  # type: ignore[union-attr]
            offset = answer.next_begin_offset  # type: ignore[union-attr]
    return found


def recovered(disk: RecordingDisk) -> dict[tuple[str, int, int], bytes]:
    """Start the store and stop it again; return the records it served."""
    store = MessageStore.open(CONFIG, disk, ManualClock())
    found = served(store)
    store.close()
    return found


def test_the_store_is_sound_before() -> None:
    image, records = sound_store()
    report = verify(ROOT, disk=RecordingDisk(image), config=CONFIG)
    assert (report.sound, report.records, report.units) == (True, MESSAGES, MESSAGES)
    assert recovered(RecordingDisk(image)) == records


PARTS = {
    "head", "body", "topic and properties", "blank record", "behind the log", "queue", "index header",
    "index slots", "entry", "checkpoint", "table",
}  # fmt: skip


@pytest.mark.representative("zeroed")
@pytest.mark.thorough("each kind of damage")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["flipped", "zeroed"])
def test_verify_names_what_is_damaged(kind: str) -> None:
    unnoticed = []
    shown: Counter[str] = Counter()
    for path, place, count, image in sectors(kind):
        report = verify(ROOT, disk=RecordingDisk(image), config=CONFIG)
        if part_of(path, place) == "table" or (kind == "flipped" and not format_can_show(path, place, image)):
            continue  # tables are tested below
        part = part_of(path, place)
        shown[part] += 1
        if not names(report, path, place, reach=8192 if part == "behind the log" else 2048):
            unnoticed.append((path, place, count, [f for f in report.findings if f.severity != "note"][:3]))
    assert not unnoticed, "\n".join(map(str, unnoticed))
    assert set(shown) >= {"head", "body", "queue"}
    assert shown.total() > 150


def test_zeroed_sectors_lie_within_records_on_their_borders_and_across_everything_else() -> None:
    inside, borders = 0, 0
    parts: set[str] = set()
    for path, at, count, _ in sectors("zeroed"):
        parts |= {part_of(path, place) for place in range(at, at + count)}
        if "/commitlog/" not in path:
            continue
        content = sound_store()[0][path]
        assert content is not None
        first, last = record_around(content, at), record_around(content, at + count - 1)
        borders += first != last
        inside += first == last and {part_of(path, at), part_of(path, at + count - 1)} == {"body"}
    assert inside >= 5
    assert borders >= 50
    assert parts >= PARTS


@pytest.mark.representative("zeroed-clean")
@pytest.mark.thorough("each kind of damage and stop")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", ["clean", "unclean"])
@pytest.mark.parametrize("kind", ["flipped", "zeroed"])
def test_the_store_starts_and_serves_the_rest(kind: str, start: str) -> None:
    """The store starts without a repair by tools.

    After an unclean stop without checkpoint all derived data is rebuilt from the log. After a clean stop, a
    damaged queue loses the messages of the damaged units.
    """
    _, records = sound_store()
    for path, place, count, image in sectors(kind):
        where = f"{path} {place}"
        disk = RecordingDisk(image)
        if start == "unclean":
            left = {name: content for name, content in image.items() if name != f"{ROOT}/checkpoint"}
            disk = RecordingDisk(left | {f"{ROOT}/abort": b""})
        store = MessageStore.open(CONFIG, disk, ManualClock())
        found = served(store)
        appended = send(store, b"after", "T0")
        assert store.lookups.record_at(appended.physical_offset), where
        store.close()
        hit = _touched(path, place, count) if "/commitlog/" in path else set()
        if start == "clean" and "/consumequeue/" in path:
            hit = _pointed_at(path, place, count)
        wrong = {at for at in records if found.get(at) != records[at]}
        assert wrong <= hit, (where, wrong - hit)
        # Without queue files, a record with a damaged queue or offset is stored as the record says.
        strange = {found[at][28:36] for at in found.keys() - records.keys()}
        assert strange <= {records[at][28:36] for at in hit if start == "unclean"}, where
        for at in wrong & found.keys() & records.keys():
            assert decode_record(found[at]).body == decode_record(records[at]).body, where


def _pointed_at(path: str, place: int, count: int) -> set[tuple[str, int, int]]:
    """Return the messages whose units have a byte in the damaged range."""
    topic, queue, name = path.split("/")[-3:]
    first, last = (int(name) + place) // 20, (int(name) + place + count - 1) // 20
    return {(topic, int(queue), offset) for offset in range(first, last + 1)}


@pytest.mark.slow("rebuilds a store for each damaged sector")
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
        left = {f.kind for f in report.findings if f.severity == "error"} - {"table", "checkpoint"}
        assert left <= ({"log-damage", "torn-tail", "record-field"} if in_log else set()), (where, report)
        found = recovered(disk)
        lost = records.keys() - found.keys()
        changed = {at for at in found.keys() & records.keys() if found[at] != records[at]}
        touched = _touched(path, place, count) if in_log else set()
        assert not found.keys() - records.keys(), where
        assert lost | changed <= touched, (where, lost, changed)
        for at in changed:  # fields without a checksum may differ, but never the body
            assert decode_record(found[at]).body == decode_record(records[at]).body, where
        tried += 1
    assert tried > 150


def _touched(path: str, place: int, count: int) -> set[tuple[str, int, int]]:
    """Return the records with a byte in the damaged range."""
    _, records = sound_store()
    base = int(os.path.basename(path))
    hit = set()
    for at, data in records.items():
        start = int.from_bytes(data[28:36], "big") - base
        if start < place + count and start + len(data) > place:
            hit.add(at)
    return hit


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


def test_verify_names_every_table_that_cannot_be_read() -> None:
    image, _ = sound_store()
    tables = [path for path in image if path.endswith((".json", ".json.bak"))]
    assert len(tables) >= 3
    for path, place, _, changed in sectors("zeroed"):
        if path not in tables:
            continue
        report = verify(ROOT, disk=RecordingDisk(changed), config=CONFIG)
        (found,) = [finding for finding in report.findings if finding.kind == "table"]
        severity = "warning" if path.endswith(".bak") else "error"
        assert (found.severity, found.path) == (severity, path), place
        tables.remove(path)
    assert tables == []


def test_both_copies_of_a_table_damaged_is_an_error() -> None:
    disk = RecordingDisk(sound_store()[0])
    for name in ("topics.json", "topics.json.bak"):
        write_new_file(disk, f"{ROOT}/config/{name}", b"{{{ rot")
    with pytest.raises(Exception, match=r"topics.json"):
        JsonTable(f"{ROOT}/config/topics.json", disk).load()


@pytest.mark.parametrize("offset", [0, 5, 2_000])
def test_a_damaged_queue_offset_costs_its_own_record_only(offset: int) -> None:
    """No CRC covers the queue offset, but neighbouring records reveal the damage."""
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
    found = recovered(disk)
    assert found == {name: data for name, data in records.items() if name != victim}
    rebuild(ROOT, disk=disk, config=CONFIG)
    assert recovered(disk) == found
