"""Unreadable sectors under the log: only the messages on them are lost."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import bodies, committed, open_store, pulled, put, send, started
from tests.store.recovery.test_recovery import contents, fill, quick, segment, unclean

from cometmq.store import NotInMemory
from cometmq.store.base.disk import Buffer
from cometmq.store.inspect.verify import verify


class BadSectors(FaultyDisk):
    """A disk on which given positions of the commit log cannot be read."""

    def __init__(self, *places: int) -> None:
        super().__init__(really_sync=False)
        self.places = places

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        path = self._paths[fd]
        if "commitlog" in path and any(
            offset <= place - int(Path(path).name) < offset + length for place in self.places
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().pread(fd, length, offset)


def test_a_place_that_the_device_cannot_read_costs_only_the_messages_on_it(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    unclean(tmp_path)
    log = [path.read_bytes() for path in sorted((tmp_path / "commitlog").iterdir())]
    store = open_store(tmp_path, BadSectors(70_000, 75_000))
    found = contents(store)
    lost = [body for queue_id in sent for body in sent[queue_id] if body not in found[queue_id]]
    assert 1 <= len(lost) <= 13  # the messages on two blocks of 4 KiB
    assert all(damage.start >= 65_536 and damage.stop < 82_000 for damage in store.recovered.damage)
    store.close()
    assert [path.read_bytes() for path in sorted((tmp_path / "commitlog").iterdir())][: len(log)] == log


def test_nothing_is_cut_off_behind_a_place_that_cannot_be_read(tmp_path: Path) -> None:
    sent = fill(tmp_path)
    store = quick(tmp_path)
    end = store.log.end
    store.close()
    unclean(tmp_path)
    last = segment(tmp_path, end // (64 << 10))
    before = last.read_bytes()
    store = open_store(tmp_path, BadSectors(end - 10))
    assert 0 < sum(map(len, sent.values())) - sum(map(len, contents(store).values())) < 10
    appended = send(store, b"goes on in the next segment")
    assert appended.physical_offset == (end // (64 << 10) + 1) * (64 << 10)
    store.close()
    assert last.read_bytes() == before


def test_verify_names_a_place_that_cannot_be_read(tmp_path: Path) -> None:
    fill(tmp_path)
    report = verify(str(tmp_path), disk=BadSectors(70_000))
    (found,) = [each for each in report.findings if each.kind == "log-damage"]
    assert found.path.endswith(f"{64 << 10:020d}")
    assert "cannot be read" in found.problem


class NeverCached(BadSectors):
    """A disk without a page cache, which counts the reads that would block the event loop."""

    def __init__(self, *places: int) -> None:
        super().__init__(*places)
        self.loop_thread = -1
        self.in_the_loop = 0

    def pread_cached(self, fd: int, length: int, offset: int) -> Buffer | None:
        return None

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self.in_the_loop += threading.get_ident() == self.loop_thread
        return super().pread(fd, length, offset)


@pytest.mark.parametrize("segment_size", [64 << 10, 1 << 20])
async def test_pulls_get_everything_but_what_cannot_be_read(tmp_path: Path, segment_size: int) -> None:
    store = open_store(tmp_path, mapped_file_size_commit_log=segment_size)
    sent = [b"%d:" % number + bytes(number * 41 % 1500) for number in range(200)]
    places = [put(store, body).physical_offset for body in sent]
    committed(store.commit())
    store.close()
    disk = NeverCached()
    store = started(tmp_path, disk, mapped_file_size_commit_log=segment_size)
    disk.loop_thread = threading.get_ident()
    disk.places = (places[50] + 20, places[120], places[199] - 1)
    found: list[bytes] = []
    refused: list[tuple[int, int | None]] = []
    offset = 0
    while offset < len(sent):
        with pytest.raises(NotInMemory):
            store.get_messages("T", 0, offset, 32)
        try:
            answer = await pulled(store, "T", 0, offset)
        except OSError as failure:
            refused.append((offset, failure.errno))
            offset += 1
            continue
        found += bodies(answer)
        offset = answer.next_begin_offset
    assert refused == [(number, errno.EIO) for number in (50, 120, 198)]
    assert found == [body for number, body in enumerate(sent) if number not in (50, 120, 198)]
    assert disk.in_the_loop == 0
    disk.loop_thread = -1
