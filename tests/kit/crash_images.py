"""Enumerate the disk states that a power failure may leave, by the fault model of `recording_disk`.

A `CrashPoint` is a moment in the history of a `RecordingDisk`: the failure happens directly after a given
number of operations. It lists what was volatile at that moment as choices (content of a sector, length of a
file, change of a name). An image is the disk after one pick for each choice. `every_image` yields all images;
`sampled_image` returns a fixed or seeded one, so that a failing image can be rebuilt from its label.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.kit.recording_disk import (
    Image,
    Operation,
    RecordingDisk,
    apply_length,
    apply_names,
    apply_write,
)

SECTOR = 512


class Choice(NamedTuple):
    """A volatile part of the disk and its possible versions.

    Attributes:
        kind: "sector", "length" or "name".
        inode: File that a sector or length belongs to.
        number: Index of the sector in the file, or of the change of a name.
        versions: Possible values, the durable one first: sector contents, lengths, or 0 and 1 for a change of
            a name that is lost or kept.
        stamps: Index of the operation that produced each version.
    """

    kind: str
    inode: int
    number: int
    versions: tuple[bytes | int, ...]
    stamps: tuple[int, ...]


class FileState:
    """Content of a file at its last sync, and the operations since then."""

    __slots__ = ("durable", "pending")

    def __init__(self, durable: bytes) -> None:
        self.durable = bytearray(durable)
        self.pending: list[tuple[int, Operation]] = []

    def sync(self) -> None:
        for _, operation in self.pending:
            apply(self.durable, operation)
        self.pending.clear()

    def choices(self, inode: int) -> Iterator[Choice]:
        """Yield the volatile sectors and the volatile length of the file."""
        now = bytearray(self.durable)
        lengths: list[tuple[int, int]] = [(len(now), -1)]
        sectors: dict[int, list[tuple[bytes, int]]] = {}
        for stamp, operation in self.pending:
            before = len(now)
            if operation.kind == "pwrite":
                first, stop = operation.offset, operation.offset + len(operation.data)
            else:
                first, stop = min(before, operation.offset), before
            touched = range(first // SECTOR, -(-stop // SECTOR)) if stop > first else range(0)
            for number in touched:
                if number not in sectors:
                    sectors[number] = [(sector_of(now, number), -1)]
            apply(now, operation)
            for number in touched:
                content = sector_of(now, number)
                if content != sectors[number][-1][0]:
                    sectors[number].append((content, stamp))
            if len(now) != lengths[-1][0]:
                lengths.append((len(now), stamp))
        if len(lengths) > 1:
            yield Choice("length", inode, 0, *zip(*lengths, strict=True))
        for number, versions in sorted(sectors.items()):
            if len(versions) > 1:
                yield Choice("sector", inode, number, *zip(*versions, strict=True))


def apply(content: bytearray, operation: Operation) -> None:
    if operation.kind == "pwrite":
        apply_write(content, operation.offset, operation.data)
    else:
        apply_length(content, operation.offset)


def sector_of(content: bytearray, number: int) -> bytes:
    """Return a sector, padded with zeros beyond the end of the file."""
    return bytes(content[number * SECTOR : (number + 1) * SECTOR]).ljust(SECTOR, b"\0")


class CrashPoint:
    """A power failure after the first `at` operations of a history. It can only be moved forward."""

    def __init__(self, disk: RecordingDisk, at: int = 0) -> None:
        self._history = disk.history
        self.at = 0
        self._files: dict[int, FileState | None] = {}
        self._names = dict(disk.start_names)
        for path, content in disk.start.items():
            self._files[self._names[path]] = None if content is None else FileState(content)
        self._pending_names: list[tuple[int, Operation]] = []
        self._choices: list[Choice] | None = None
        self.advance(at)

    def advance(self, at: int) -> None:
        """Move the failure to a later operation."""
        for stamp in range(self.at, at):
            self._take(stamp, self._history[stamp])
        self.at = max(self.at, at)
        self._choices = None

    def _take(self, stamp: int, operation: Operation) -> None:
        kind = operation.kind
        if kind in ("pwrite", "length"):
            self._file(operation.inode).pending.append((stamp, operation))
        elif kind == "fdatasync":
            self._file(operation.inode).sync()
        elif kind == "fsync_dir":
            due = [each for each in self._pending_names if os.path.dirname(each[1].path) == operation.path]
            lasting = {moment for moment, _ in due}
            self._pending_names = [each for each in self._pending_names if each[0] not in lasting]
            for moment, change in due:
                self._rename_in(self._names, change)
                if self._moves_directory(change):  # Changes of names in the directory moved with it.
                    self._pending_names = [
                        each
                        for each in self._pending_names
                        if each[0] > moment or not each[1].path.startswith(change.path + "/")
                    ]
        else:
            if kind in ("create", "mkdir"):
                self._files[operation.inode] = FileState(b"") if kind == "create" else None
            self._pending_names.append((stamp, operation))

    def _moves_directory(self, operation: Operation) -> bool:
        return operation.kind == "rename" and self._files[operation.inode] is None

    def _rename_in(self, names: dict[str, int], operation: Operation) -> None:
        if self._moves_directory(operation):
            for path in [path for path in names if path.startswith(operation.path + "/")]:
                del names[path]
        apply_names(names, operation)

    def _file(self, inode: int) -> FileState:
        state = self._files[inode]
        assert state is not None
        return state

    @property
    def choices(self) -> list[Choice]:
        """Volatile parts of the disk at this moment."""
        if self._choices is None:
            found = [
                Choice("name", -1, number, (0, 1), (-1, stamp))
                for number, (stamp, _) in enumerate(self._pending_names)
            ]
            living = set(self._names.values())
            for _, operation in self._pending_names:
                living.update(inode for _, inode in operation.names if inode is not None)
            for inode in sorted(living):
                state = self._files[inode]
                if state is not None and state.pending:
                    found += state.choices(inode)
            self._choices = found
        return self._choices

    def count(self) -> int:
        """Return the number of different images that `every_image` yields."""
        return math.prod(len(choice.versions) for choice in self.choices)

    def build(self, picks: Sequence[int]) -> Image:
        """Return the image in which choice n has its version picks[n]."""
        names = dict(self._names)
        changed: dict[int, list[tuple[Choice, int]]] = {}
        for choice, pick in zip(self.choices, picks, strict=True):
            if choice.kind == "name":
                if pick:
                    self._rename_in(names, self._pending_names[choice.number][1])
            else:
                changed.setdefault(choice.inode, []).append((choice, pick))
        image: Image = {}
        for path in sorted(names):  # Directories are created before their entries.
            if path != "/" and image.get(os.path.dirname(path), b"") is not None:
                continue
            state = self._files[names[path]]
            image[path] = None if state is None else content_of(state, changed.get(names[path], []))
        return image

    # -- images -----------------------------------------------------------------------------------

    def every_image(self) -> Iterator[tuple[str, Image]]:
        """Yield (label, image) of every possible image."""
        for picks in itertools.product(*(range(len(choice.versions)) for choice in self.choices)):
            yield f"{self.at}:{'.'.join(map(str, picks))}", self.build(picks)

    def sampled_image(self, number: int, seed: str) -> tuple[str, Image]:
        """Return (label, image) of one possible image.

        In image 0 nothing volatile has reached the disk, in 1 everything, in 2 everything but changes of
        names, in 3 only changes of names. Higher numbers are random, in one of the five styles of
        `_by_chance`.
        """
        last = [len(choice.versions) - 1 for choice in self.choices]
        if number == 0:
            picks = [0] * len(last)
        elif number == 1:
            picks = last
        elif number in (2, 3):
            arrived = [(choice.kind == "name") == (number == 3) for choice in self.choices]
            picks = [top * here for top, here in zip(last, arrived, strict=True)]
        else:
            picks = self._by_chance(random.Random(f"{seed}:{self.at}:{number}"))
        return f"{self.at}:s{number}", self.build(picks)

    def _by_chance(self, chance: random.Random) -> list[int]:
        choices = self.choices
        last = [len(choice.versions) - 1 for choice in choices]
        style = chance.randrange(5)
        if not choices or style == 0:  # independent random versions
            return [chance.randint(0, top) for top in last]
        if style == 1:  # nearly all newest, or nearly all durable
            rare = chance.choice((0.05, 0.3))
            common = chance.random() < 0.5
            return [chance.randint(0, top) if chance.random() < rare else top * common for top in last]
        if style == 2:  # all newest but one
            missing = chance.randrange(len(choices))
            return [top if n != missing else chance.randint(0, top - 1) for n, top in enumerate(last)]
        if style == 3:  # newest lengths and names, random sectors
            share = chance.choice((0.2, 0.5, 0.9))
            return [
                chance.randint(0, top) if choice.kind == "sector" and chance.random() > share else top
                for choice, top in zip(choices, last, strict=True)
            ]
        # Everything before a moment has reached the disk, and a part of that moment's operation.
        stamps = sorted({stamp for choice in choices for stamp in choice.stamps})
        moment = chance.choice(stamps)
        picks = []
        for choice in choices:
            arrived = sum(1 for stamp in choice.stamps if stamp <= moment) - 1
            torn = choice.stamps[arrived] == moment and arrived > 0 and chance.random() < 0.5
            picks.append(arrived - torn)
        return picks


def content_of(state: FileState, picked: list[tuple[Choice, int]]) -> bytes:
    """Return the content of a file with these picks."""
    content = bytearray(state.durable)
    length = len(content)
    for choice, pick in picked:
        version = choice.versions[pick]
        if isinstance(version, int):
            length = version
        elif pick:
            apply_write(content, choice.number * SECTOR, version)
    apply_length(content, length)
    return bytes(content)
