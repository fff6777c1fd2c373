"""A table and its file on a disk that fails or is slow."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.kit.brokers import running
from tests.kit.waiting import until

from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.tables import table_file
from cometmq.broker.tables.durable import save_changes
from cometmq.broker.tables.table_file import TableFile


class TestRetries:
    async def test_a_stop_tries_once_more_and_says_what_is_lost(self, tmp_path, disk, caplog):
        path = tmp_path / "config" / "t.json"
        table = TableFile(disk, str(path), lambda: {"n": 1})
        disk.fail("pwrite", times=1_000_000)
        table.save()
        with pytest.raises(OSError, match="Input/output"):
            await table.saved()
        async with asyncio.timeout(60):
            await table.finish()
        assert "t.json could not be written: " in caplog.text
        assert not path.exists()

    async def test_a_change_wakes_a_write_that_waits(self, tmp_path, disk, monkeypatch):
        monkeypatch.setattr(table_file, "RETRY_S", 1000.0)
        content = {"n": 1}
        table = TableFile(disk, str(tmp_path / "config" / "t.json"), lambda: dict(content))
        disk.fail("pwrite", times=1)
        with pytest.raises(OSError, match="Input/output"):
            await table.save_now()
        content["n"] = 2
        async with asyncio.timeout(60):
            await table.save_now()
        assert table.load() == {"n": 2}

    async def test_changes_during_a_write_are_in_the_next(self, tmp_path, disk):
        content = {"n": 1}
        table = TableFile(disk, str(tmp_path / "config" / "t.json"), lambda: dict(content))
        reached, let_go = threading.Event(), threading.Event()

        def hold(operation: str, _path: str) -> None:
            if operation == "rename":
                reached.set()
                assert let_go.wait(20)

        disk.before = hold
        first = asyncio.create_task(table.save_now())
        assert await asyncio.to_thread(reached.wait, 20)
        content["n"] = 2
        second = asyncio.create_task(table.save_now())
        await asyncio.sleep(0)
        let_go.set()
        await first
        await second
        assert table.load() == {"n": 2}

    async def test_delay_offsets_are_written_only_when_they_have_changed(self, tmp_path, disk, monkeypatch):
        monkeypatch.setattr(DelayLevels, "of", lambda _config: DelayLevels((50, 50)))
        async with running(tmp_path, disk) as (broker, peer):
            parts = broker.parts
            save_changes(parts.tables.delays, parts.tables.delays_file)
            await parts.tables.delays_file.saved()
            assert not (tmp_path / "config" / "delayOffset.json").exists()
            await peer.send("T", properties={"DELAY": "1"})
            await until(lambda: parts.store.max_offset("T", 0) == 1)
            await until(lambda: parts.tables.delays.to_table() == {"offsetTable": {1: 1}})
            save_changes(parts.tables.delays, parts.tables.delays_file)
            await parts.tables.delays_file.saved()
            written = (tmp_path / "config" / "delayOffset.json").stat()
            save_changes(parts.tables.delays, parts.tables.delays_file)
            await parts.tables.delays_file.saved()
            again = (tmp_path / "config" / "delayOffset.json").stat()
            assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
