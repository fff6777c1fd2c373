"""`verify` reports no false findings for a store that a broker uses or used when it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.verifying import check, kinds, only
from tests.store.kit import drop_first_segment, quick, send, small
from tests.store.planted import build, filler, flip, places

from cometmq.store import ManualClock, MessageStore
from cometmq.store.inspect.verify import verify


class TestUnclean:
    def test_a_killed_store_has_warnings_only(self, tmp_path: Path) -> None:
        store = build(tmp_path, close=False)
        store.queues.write_dirty()
        filler(store, ManualClock(1_700_000_100_000), 400, 50)
        store.crash()
        report = check(tmp_path)
        assert report.sound
        assert not report.clean
        assert report.records == 450
        assert kinds(report, "warning") == {"queue-short", "index-short", "checkpoint"} - (
            {"checkpoint"} if (tmp_path / "checkpoint").exists() else set()
        )

    def test_it_is_sound_again_after_the_next_start(self, tmp_path: Path) -> None:
        build(tmp_path, close=False).crash()
        quick(tmp_path, ManualClock(1_700_000_900_000)).close()
        assert check(tmp_path).findings == []


class TestLive:
    def test_what_is_still_in_memory_is_not_missed(self, tmp_path: Path) -> None:
        build(tmp_path, close=False)
        report = check(tmp_path)
        assert report.live
        assert report.findings == []
        assert report.records == 400

    def test_a_store_that_moves_while_it_is_read(self, tmp_path: Path) -> None:
        """Before every read of a file messages arrive, queues and index are written, or segments expire."""
        store = build(tmp_path, 1200, close=False)
        store.queues.write_dirty()
        store.index.write()
        clock = ManualClock(1_700_001_000_000)
        moves = deletions = 0

        class Moving(FaultyDisk):
            def pread(self, fd: int, length: int, offset: int) -> bytes:
                nonlocal moves, deletions
                moves += 1
                filler(store, clock, 1200 + moves * 3, 3)
                store.queues.write_dirty()
                store.index.write()
                if moves % 20 == 0 and len(store.log.segments) > 5:
                    drop_first_segment(store)
                    deletions += 1
                return super().pread(fd, length, offset)

        report = verify(str(tmp_path), config=small(tmp_path), disk=Moving(), pause=lambda _seconds: None)
        store.close()
        assert moves > 40
        assert deletions > 3
        assert report.live
        assert report.findings == []
        assert report.records > 400
        assert check(tmp_path).findings == []

    def test_a_broker_that_is_about_to_make_its_first_segment(
        self, tmp_path: Path, store: MessageStore
    ) -> None:
        class Late(FaultyDisk):
            looked = False

            def listdir(self, path: str) -> list[str]:
                names = super().listdir(path)
                if path == str(tmp_path / "commitlog") and not self.looked:
                    self.looked = True
                    send(store)
                    return []
                return names

        # No configuration contains the length of segments.
        assert verify(str(tmp_path), disk=Late()).findings == []

    @pytest.mark.parametrize("directory", ["index", "consumequeue/T/1"])
    def test_a_list_of_files_that_grew_while_it_was_read(self, tmp_path: Path, directory: str) -> None:
        """A directory listing is unordered: it may contain the newest file and lack the two before it."""
        store = build(tmp_path, 900, close=False)
        store.queues.write_dirty()
        store.index.write()

        class Growing(FaultyDisk):
            torn = False

            def listdir(self, path: str) -> list[str]:
                names = super().listdir(path)
                if path == str(tmp_path / directory) and not self.torn:
                    self.torn = True
                    assert len(names) > 2
                    del names[-3:-1]
                return names

        disk = Growing()
        report = verify(str(tmp_path), config=small(tmp_path), disk=disk, pause=lambda _seconds: None)
        assert disk.torn
        assert report.findings == []

    def test_the_lock_of_another_process_is_seen_and_left_alone(self, root: Path) -> None:
        code = (
            "import sys, fcntl; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 0, 0); "
            "print('held', flush=True); sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, str(root / "lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            assert check(root).live
            holder.communicate(b"")
        assert not check(root).live

    def test_damage_in_the_middle_is_named_all_the_same(self, tmp_path: Path) -> None:
        store = build(tmp_path, close=False)
        hit = places(tmp_path)[20]
        flip(hit.path, hit.at + 100)
        only(check(tmp_path), "log-damage", hit.path, hit.at)
        store.crash()
