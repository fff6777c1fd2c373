"""The objects that tiered storage keeps in an object store, and the interface of the object store.

Each uploaded log segment has three objects, named by the store's id, the segment's position, and an ending:

- `.log`: an exact copy of the segment file.
- `.crc`: the CRC-32 of each block of BLOCK bytes of the segment, 4 bytes each, big-endian.
- `.json`: the manifest, which is written last. A segment without a manifest is not complete.

Names contain no text from clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Protocol

import msgspec
import numpy as np

from cometmq.errors import CommandError
from cometmq.protocol.checksum import crc32
from cometmq.protocol.codes import ResponseCode
from cometmq.store.base.disk import Disk, is_numbered, opened
from cometmq.store.tables.table_checks import TieredSegment

BLOCK = 512 << 10
"""The unit of reads from the object store, in bytes. For a record of 1 KiB, a read takes 5 ms longer."""
DATA, CRCS, MANIFEST = ".log", ".crc", ".json"
_DIGITS = 20
_VERSION = 1
_MAX_MANIFEST = 1 << 20  # The names of MAX_ANNOUNCED_DELETIONS topics take a part of that


class ObjectStoreFailed(OSError):
    """An operation on the object store failed. The same operation may succeed later."""


class Damaged(ObjectStoreFailed):
    """The content of an object differs from the uploaded content."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} does not match its CRC")


class ObjectStore(Protocol):
    """The operations of an object store. They block, so threads call them. They raise ObjectStoreFailed."""

    def put(self, name: str, content: bytes | Iterator[bytes]) -> None:
        """Create or replace an object. If the iterator raises an exception, nothing is created."""

    def get(self, name: str, start: int, length: int) -> bytes:
        """Return the bytes [start, start + length) of an object."""

    def size(self, name: str) -> int | None:
        """Return the length of an object, or None if it does not exist."""

    def names(self, prefix: str) -> Iterable[str]:
        """Return the names of all objects that begin with `prefix`, which ends with a slash."""

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""


class Unavailable(CommandError):
    """A read needs a segment that the object store cannot return now. The client may retry."""


def unavailable(reason: str) -> Unavailable:
    return Unavailable(ResponseCode.SYSTEM_BUSY, f"the messages are in the object store, try again: {reason}")


def object_name(store_id: str, base: int, ending: str) -> str:
    return f"{store_id}/{base:0{_DIGITS}d}{ending}"


def base_of(name: str) -> tuple[int, str] | None:
    """Return the segment's position and the ending in an object's name, or None for any other name."""
    stem, dot, ending = name.rpartition("/")[2].rpartition(".")
    if not is_numbered(stem, _DIGITS) or dot + ending not in (DATA, CRCS, MANIFEST):
        return None
    return int(stem), dot + ending


def crcs_length(size: int) -> int:
    """Return the length of the `.crc` object of a segment."""
    return -(-size // BLOCK) * 4


Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Manifest(msgspec.Struct, rename="camel"):
    """The content of a manifest: the facts about a segment, as JSON that people can read."""

    position: Natural
    size: Natural
    crc: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    modified_ms: Natural
    deleted_topics: dict[str, Natural] = {}
    version: int = _VERSION
    block_size: int = BLOCK

    @property
    def segment(self) -> TieredSegment:
        return TieredSegment(self.size, self.crc, self.modified_ms)


def manifest(base: int, segment: TieredSegment, deleted_topics: dict[str, int]) -> bytes:
    """Return the content of a manifest.

    For a restore it also has the topics that were deleted since the log had grown to `base`, each with the
    position before which its records are deleted.
    """
    return msgspec.json.encode(Manifest(base, *segment, deleted_topics))


def manifest_at(objects: ObjectStore, store_id: str, base: int, size: int) -> Manifest | None:
    """Read the manifest of a segment. Return None if it is invalid. Raises ObjectStoreFailed."""
    name = object_name(store_id, base, MANIFEST)
    length = objects.size(name) or 0
    try:
        found = msgspec.json.decode(objects.get(name, 0, min(length, _MAX_MANIFEST)), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_valid = (found.position, found.size, found.version, found.block_size) == (base, size, _VERSION, BLOCK)
    return found if is_valid else None


def checked_crcs(objects: ObjectStore, store_id: str, base: int, segment: TieredSegment) -> bytes:
    """Return the CRCs of a segment's blocks. Raises ObjectStoreFailed, which is Damaged if they differ."""
    crcs = objects.get(object_name(store_id, base, CRCS), 0, crcs_length(segment.size))
    if crc32(crcs) != segment.crc or len(crcs) != crcs_length(segment.size):
        raise Damaged(object_name(store_id, base, CRCS))
    return crcs


def checked_blocks(
    objects: ObjectStore,
    store_id: str,
    base: int,
    segment: TieredSegment,
    crcs: bytes,
    first: int,
    count: int,
) -> bytes:
    """Return consecutive blocks of a segment, up to the first damaged block.

    Raises ObjectStoreFailed. It is Damaged if the first requested block is damaged.
    """
    name, length = object_name(store_id, base, DATA), blocks_length(segment, first, count)
    data = objects.get(name, first * BLOCK, length)
    expected = np.frombuffer(crcs, ">u4", count, 4 * first).tolist()
    found = [crc32(data[at : at + BLOCK]) for at in range(0, length, BLOCK)]
    good = next((n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), count)
    if not good:
        raise Damaged(name)
    return data[: good * BLOCK]


def blocks_length(segment: TieredSegment, first: int, count: int) -> int:
    """Return the length of `count` blocks of a segment, the last of which may be shorter."""
    return min(count * BLOCK, segment.size - first * BLOCK)


class Pieces:
    """Reads the blocks of a local segment, for an upload or a check, and computes their CRCs."""

    def __init__(self, disk: Disk, path: str, size: int, stopped: Callable[[], bool]) -> None:
        self._disk, self._path, self._size = disk, path, size
        self._stopped = stopped
        self._crcs: list[int] = []

    def __iter__(self) -> Iterator[bytes]:
        """Yield the blocks. Raises OSError if a read fails, if the file is too short, or at a stop."""
        with opened(self._disk, self._path, write=False) as fd:
            for at in range(0, self._size, BLOCK):
                length = min(BLOCK, self._size - at)
                block = self._disk.pread(fd, length, at)
                if len(block) != length or self._stopped():
                    raise ObjectStoreFailed(f"{self._path} ends at {at + len(block)}, or the broker stops")
                self._crcs.append(crc32(block))
                yield block

    def crcs(self) -> bytes:
        """Return the content of the `.crc` object. All blocks must have been read."""
        return np.array(self._crcs, ">u4").tobytes()
