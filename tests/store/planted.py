"""A store with everything in it that `verify` looks at, and ways to damage it at a known place."""

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
SLOTS = 100  # kit.small's
ENTRIES_AT = 40 + 4 * SLOTS


@dataclass(frozen=True)
class Place:
    """One stored message: its segment file, byte in it, log position, size, queue and offset in that."""

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
    """`count` messages of topic T in three queues, several segments, two index files and more, and a topic
    table with its backup."""
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
    """A store of 400 messages that was stopped in order. Not to be changed."""
    root = tmp_path_factory.mktemp("sound")
    build(root)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


def messages_of(path: Path) -> Iterator[tuple[int, MessageExt]]:
    """(byte, message) of each record of a segment, found without the code under test's walk."""
    data, at = path.read_bytes(), 0
    while data[at + 4 : at + 7] == b"\xda\xa3\x20":
        message = decode_record(data, at)
        yield at, message
        at += message.store_size


def places(root: Path) -> list[Place]:
    """Every message of the log."""
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
    """Queue file and byte in it of a message's unit."""
    position = place.queue_offset * 20
    directory = root / "consumequeue" / "T" / str(place.queue_id)
    return directory / f"{position - position % 2000:020d}", position % 2000


def index_files(root: Path) -> list[Path]:
    return sorted((root / "index").iterdir())


def extract_golden(root: Path, recorded: Path = GOLDEN) -> Path:
    """A recorded store of Apache's broker with every file at its full length."""
    with tarfile.open(recorded) as archive:
        archive.extractall(root, filter="data")
    for name, length in json.loads((root / "lengths.json").read_text()).items():
        with open(root / name, "r+b") as file:
            file.truncate(length)
    (root / "lengths.json").unlink()
    return root


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file of a directory."""
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
"""What a record says outside its CRC: word that names it, text to look for (None: the record's start), byte
behind that, and what to put there. For record 222 of `build`."""


def damage_field(place: Place, field: str) -> None:
    """Change a field of a record that only its queue unit can contradict."""
    _, text, behind, data = UNCOVERED_PLACES[field]
    record = place.path.read_bytes()[place.at : place.at + place.size]
    at = (record.index(text, 88) if text else 0) + behind
    assert record[at : at + len(data)] != data
    alter(place.path, place.at + at, data)
