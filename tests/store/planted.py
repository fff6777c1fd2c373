"""A store with every kind of file that `verify` checks, and damage at known positions."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.store.kit import committed, put, quick

from cometmq.message import MessageExt
from cometmq.protocol.properties.values import tags_code
from cometmq.protocol.record.one import decode_record
from cometmq.store import JsonTable, ManualClock, MessageStore

QUEUES = 3
GOLDEN = Path(__file__).parent.parent / "data" / "store-4.9.7.tar.gz"
SLOTS = 100  # as in kit.small
ENTRIES_AT = 40 + 4 * SLOTS


@dataclass(frozen=True)
class Place:
    """A stored message: its segment file, byte in that file, log position, size, queue and queue offset."""

    path: Path
    at: int
    position: int
    size: int
    queue_id: int
    queue_offset: int


def filler(store: MessageStore, clock: ManualClock, start: int, count: int) -> None:
    for number in range(start, start + count):
        clock.now_ms += 100
        tag = f"tag{number % 4}"
        properties = f"UNIQ_KEY\x01U{number:05d}\x02KEYS\x01k{number} all\x02TAGS\x01{tag}\x02".encode()
        body = b"%d:" % number + bytes([number % 251]) * (300 + number % 90)
        put(store, body, queue_id=number % QUEUES, properties=properties, tags_code=tags_code(tag))
        if number % 5 == 0:
            committed(store.commit())
    committed(store.commit())


def build(root: Path, count: int = 400, *, close: bool = True) -> MessageStore:
    """Store `count` messages of topic T in three queues, with several segments and at least two index files.

    The topic table has a backup.
    """
    clock = ManualClock()
    table = JsonTable(str(root / "config" / "topics.json"))
    for _ in range(2):
        table.save({"topicConfigTable": {"T": {"topicName": "T", "perm": 6}}})
    store = quick(root, clock)
    filler(store, clock, 0, count)
    if close:
        store.close()
    return store


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a store of 400 messages and stop it cleanly. Tests must not change it."""
    root = tmp_path_factory.mktemp("sound")
    build(root)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """Copy the sound store, so that a test can damage the copy."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


def messages_of(path: Path) -> Iterator[tuple[int, MessageExt]]:
    """Yield (byte, message) of each record of a segment, independently of the scan under test."""
    data, at = path.read_bytes(), 0
    while data[at + 4 : at + 7] == b"\xda\xa3\x20":
        message = decode_record(data, at)
        yield at, message
        at += message.store_size


def places(root: Path) -> list[Place]:
    """Return every message of the log."""
    return [
        Place(path, at, each.physical_offset, each.store_size, each.queue_id, each.queue_offset)
        for path in sorted((root / "commitlog").iterdir())
        for at, each in messages_of(path)
    ]


def alter(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int) -> None:
    alter(path, at, bytes([path.read_bytes()[at] ^ 0x10]))


def unit_place(root: Path, place: Place) -> tuple[Path, int]:
    """Return the queue file of a message's unit and the unit's first byte in it."""
    position = place.queue_offset * 20
    directory = root / "consumequeue" / "T" / str(place.queue_id)
    return directory / f"{position - position % 2000:020d}", position % 2000


def index_files(root: Path) -> list[Path]:
    return sorted((root / "index").iterdir())


def extract_golden(root: Path, recorded: Path = GOLDEN) -> Path:
    """Extract a recorded store of Apache's broker, with every file at its full length."""
    with tarfile.open(recorded) as archive:
        archive.extractall(root, filter="data")
    for name, length in json.loads((root / "lengths.json").read_text()).items():
        with open(root / name, "r+b") as file:
            file.truncate(length)
    (root / "lengths.json").unlink()
    return root


def snapshot(root: Path) -> dict[str, bytes]:
    """Return the content of every file in a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


UNCOVERED_PLACES = {
    "topic": ("topic", b"\x01T", 1, b"U"),
    "queue id": ("queue id", None, 15, b"\x0b"),
    "queue offset": ("queue offset", None, 27, b"\x02"),
    "queue offset behind the end": ("queue offset", None, 25, b"\x20"),
    "queue offset zero": ("queue offset", None, 20, bytes(8)),
    "tags": ("TAGS", b"TAGS\x01tag2", 6, b"\x65"),
    "name of the tags": ("TAGS", b"TAGS\x01tag2", 0, b"U"),
}
"""Fields of a record outside its CRC, for record 222 of `build`.

Each entry has the word that a report must contain, the bytes to search for (None: the record's start), the
position relative to them, and the new bytes.
"""


def damage_field(place: Place, field: str) -> None:
    """Change a field of a record that can only be checked against its queue unit."""
    _, text, behind, data = UNCOVERED_PLACES[field]
    record = place.path.read_bytes()[place.at : place.at + place.size]
    at = (record.index(text, 88) if text else 0) + behind
    assert record[at : at + len(data)] != data
    alter(place.path, place.at + at, data)
