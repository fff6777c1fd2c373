"""The files of the log as a start finds them."""

from __future__ import annotations

from cometmq.errors import StoreError
from cometmq.store.base.disk import NO_FILE, Disk, is_numbered, opened
from cometmq.store.log.places import LogPlaces


def list_segments(disk: Disk, places: LogPlaces, segment_size: int) -> tuple[list[int], list[str]]:
    """First positions of the segments, and notes; files of a wrong but possible length are set right.

    Raises StoreError for files that belong to another segment size: going on would tear the log apart.
    """
    bases: list[int] = []
    notes: list[str] = []
    short: list[tuple[str, int]] = []
    for directory, name in places.files():
        path = f"{directory}/{name}"
        if not is_numbered(name, 20):
            if not disk.is_dir(path):
                notes.append(f"{path}: not a segment, left alone")
            continue
        facts = disk.facts(path)
        if facts is None:
            continue
        if not facts.regular:
            raise StoreError(NO_FILE, path)
        base = int(name)
        if base % segment_size or facts.size > segment_size:
            raise StoreError(
                f"{facts.size} bytes from {base} on do not fit mappedFileSizeCommitLog={segment_size}", path
            )
        if facts.size < segment_size:
            short.append((path, facts.size))
        bases.append(base)
    places.check(bases)
    for path, size in short:
        notes.append(f"{path}: {size} bytes instead of {segment_size}, filled up with zeros")
        with opened(disk, path) as fd:
            disk.truncate(fd, segment_size)
    return bases, notes
