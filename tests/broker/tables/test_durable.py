"""The tables of a broker on a disk that fails, is slow, or loses power.

A change is written before its response is sent, and tables refer only to synced messages.
"""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest
from tests.kit.brokers import records, refused, running, table_on_disk
from tests.kit.crash_images import CrashPoint
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.recording_disk import RecordingDisk
from tests.kit.waiting import until

from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.tables.durable import save_changes
from cometmq.errors import StoreCorrupt
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import SCHEDULE_TOPIC, RequestCode
from cometmq.protocol.headers import (
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicRequestHeader,
)
from cometmq.protocol.lenient import read_lenient


def new_topic(name: str) -> CreateTopicRequestHeader:
    return CreateTopicRequestHeader(
        topic=name, default_topic="TBW102", read_queue_nums=1, write_queue_nums=1, perm=6,
        topic_filter_type="SINGLE_TAG",
    )  # fmt: skip


# Requests that change a table: (file, name of the entry in the file, code, header, body).
CHANGES = [
    ("topics.json", "New", RequestCode.UPDATE_AND_CREATE_TOPIC, new_topic("New"), b""),
    ("subscriptionGroup.json", "G", RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None,
     SubscriptionGroupConfig(group_name="G").encode()),
]  # fmt: skip


class TestAnswers:
    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
    async def test_a_change_is_answered_when_it_is_written(self, tmp_path, disk, change):
        file, name, code, header, body = change
        let_go, reached = threading.Event(), threading.Event()

        def hold(operation: str, path: str) -> None:
            if operation == "rename" and file in path:
                reached.set()
                assert let_go.wait(20)

        async with running(tmp_path, disk) as (_, peer):
            disk.before = hold
            asked = asyncio.create_task(peer.call(code, header, body))
            assert await asyncio.to_thread(reached.wait, 20)
            answers, _ = await asyncio.wait({asked}, timeout=0.1)
            let_go.set()
            assert not answers
            assert (await asked).code == 0
            assert f'"{name}"' in (tmp_path / "config" / file).read_text()

    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
    async def test_a_refused_write_is_told_and_tried_again_until_it_works(
        self, tmp_path, disk, change, caplog
    ):
        file, name, code, header, body = change
        async with running(tmp_path, disk) as (_, peer):
            fault = disk.fail("pwrite", match=file, error=errno.ENOSPC, times=4)
            answer = await peer.call(code, header, body)
            refused(answer, 1, name)
            assert "No space left" in answer.remark
            path = tmp_path / "config" / file
            await until(lambda: path.exists() and f'"{name}"' in path.read_text())
            assert fault.times == 0
        assert f"{file} could not be written, trying again" in caplog.text
        assert f"{file} can be written again" in caplog.text

    async def test_deletions_are_answered_when_they_are_written(self, tmp_path, disk):
        async with running(tmp_path, disk) as (broker, peer):
            assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, new_topic("T"))).code == 0
            assert (await peer.send("T")).code == 0
            broker.parts.tables.groups.find("G")
            broker.parts.tables.offsets.commit("G", "T", 0, 1)
            await broker.parts.tables.offsets_file.save_now()
            delete = DeleteTopicRequestHeader(topic="T")
            assert (await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, delete)).code == 0
            assert "T" not in table_on_disk(tmp_path, "topics.json")["topicConfigTable"]
            assert table_on_disk(tmp_path, "consumerOffset.json") == {"offsetTable": {}}
            gone = DeleteSubscriptionGroupRequestHeader(group_name="G")
            assert (await peer.call(RequestCode.DELETE_SUBSCRIPTIONGROUP, gone)).code == 0
            assert "G" not in table_on_disk(tmp_path, "subscriptionGroup.json")["subscriptionGroupTable"]


class GatedDisk(RecordingDisk):
    """A disk on which syncs of the commit log wait while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def fdatasync(self, fd: int) -> None:
        if "/commitlog/" in self._paths[fd]:
            assert self.gate.wait(20)
        super().fdatasync(fd)


class TestPowerFailure:
    @pytest.mark.slow("two seconds of delay, and each state of the disk is read")
    @pytest.mark.representative
    @pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
    async def test_the_cursor_of_a_delayed_message_lasts_no_longer_than_its_copy(self, mode, monkeypatch):
        """While the sync of the delivered copy is slow, the new cursor must not reach the device."""
        monkeypatch.setattr(DelayLevels, "of", lambda _config: DelayLevels((2_000, 2_000)))
        disk = GatedDisk()
        async with running("/store", disk, flushDiskType=mode, flushIntervalCommitLog="3600000") as (
            broker,
            peer,
        ):
            parts = broker.parts
            await peer.send("T", b"the delayed one", properties={"DELAY": "1"})
            assert parts.store.max_offset(SCHEDULE_TOPIC, 0) == 1
            disk.gate.clear()
            await until(lambda: parts.tables.delays.to_table() == {"offsetTable": {1: 1}})
            save_changes(parts.tables.delays, parts.tables.delays_file)
            saved = asyncio.create_task(parts.tables.delays_file.saved())
            done, _ = await asyncio.wait({saved}, timeout=0.3)
            assert not done
            disk.gate.set()
            await saved
            found = [cursor_and_copies(disk, at) for at in range(len(disk.history) + 1)]
        assert all(copies >= 2 for cursor, copies in found if cursor == 1)
        assert found[-1] == (1, 2)

    async def test_who_does_not_wait_is_answered_before_the_sync(self):
        disk = GatedDisk()
        async with running("/store", disk, flushDiskType="SYNC_FLUSH") as (broker, peer):
            disk.gate.clear()
            assert (await peer.send("T", b"at once", properties={"WAIT": "false"})).code == 0
            waits = asyncio.create_task(peer.send("T", b"safe", properties={"WAIT": "true"}))
            done, _ = await asyncio.wait({waits}, timeout=0.3)
            assert not done
            assert broker.parts.store.max_offset("T", 0) == 0  # the other message is not visible either
            disk.gate.set()
            assert (await waits).code == 0
            assert broker.parts.store.max_offset("T", 0) == 2

    async def test_consumer_offsets_last_no_longer_than_the_log(self):
        """Once the offset of a message that was sent back has been committed, only its copy remains."""
        disk = GatedDisk()
        async with running("/store", disk, flushIntervalCommitLog="3600000") as (broker, peer):
            parts = broker.parts
            disk.gate.clear()
            await peer.send("T", b"the only one")
            parts.tables.offsets.commit("G", "T", 0, 1)
            saved = asyncio.create_task(parts.tables.offsets_file.save_now())
            done, _ = await asyncio.wait({saved}, timeout=0.3)
            assert not done
            disk.gate.set()
            await saved
            for at in range(len(disk.history) + 1):
                _, image = CrashPoint(disk, at).sampled_image(0, "")
                if b"T@G" in (image.get("/store/config/consumerOffset.json") or b""):
                    assert log_of(image).count(b"the only one") == 1

    async def test_offsets_are_not_written_when_the_log_cannot_be_flushed(self, tmp_path, disk, caplog):
        async with running(tmp_path, disk) as (broker, peer):
            await peer.send("T")
            disk.fail("fdatasync", match="/commitlog/", times=1_000_000)
            broker.parts.tables.offsets.commit("G", "T", 0, 1)
            with pytest.raises(OSError, match="Input/output"):
                await broker.parts.tables.offsets_file.save_now()
        assert not (tmp_path / "config" / "consumerOffset.json").exists()
        assert "consumerOffset.json could not be written" in caplog.text


def log_of(image) -> bytes:
    return b"".join(content for path, content in image.items() if path.startswith("/store/commitlog/"))


def cursor_and_copies(disk: RecordingDisk, at: int) -> tuple[int, int]:
    """Return the cursor of level 1 and the number of the message's copies in the log after a power failure.

    The failure follows `at` disk operations and loses all that was not synced.
    """
    _, image = CrashPoint(disk, at).sampled_image(0, "")
    text = image.get("/store/config/delayOffset.json")
    cursor = read_lenient(text)["offsetTable"].get("1", 0) if text else 0
    return cursor, log_of(image).count(b"the delayed one")


class TestAfterACrash:
    @pytest.mark.parametrize("crashed", [True, False])
    async def test_offsets_beyond_the_end_of_their_queue_come_down_to_it(self, tmp_path, crashed, caplog):
        async with running(tmp_path) as (broker, peer):
            for _ in range(5):
                await peer.send("T")
            offsets = broker.parts.tables.offsets
            for topic, queue_id, offset in (("T", 0, 10), ("T", 1, 3), ("Lost", 0, 7), ("T2", 0, 0)):
                offsets.commit("G", topic, queue_id, offset)
            offsets.commit("H", "T", 0, 5)
        if crashed:
            (tmp_path / "abort").touch()
        async with running(tmp_path) as (broker, peer):
            offsets = broker.parts.tables.offsets
            found = [offsets.query("G", *queue) for queue in (("T", 0), ("T", 1), ("Lost", 0), ("T2", 0))]
            assert found == ([5, 0, 0, 0] if crashed else [10, 3, 7, 0])
            assert offsets.query("H", "T", 0) == 5
            assert offsets.take_changes() is crashed
            assert ("offsets of T@G were beyond the ends" in caplog.text) is crashed
            assert ("queue 0: 10, now 5" in caplog.text) is crashed
            assert "T@H" not in caplog.text
            for n in range(5):
                await peer.send("T", b"%d" % n)
            answer = await peer.pull("T", offset=offsets.query("G", "T", 0))
            assert (answer.code == 0) is crashed
            if crashed:
                assert [message.body for message in records(answer)] == [b"0", b"1", b"2", b"3", b"4"]

    async def test_a_damaged_table_gives_way_to_its_backup_at_a_start(self, tmp_path):
        async with running(tmp_path) as (broker, peer):
            await peer.send("T")
            for offset in (3, 4):
                broker.parts.tables.offsets.commit("G", "T", 0, offset)
                await broker.parts.tables.offsets_file.save_now()
        path = tmp_path / "config" / "consumerOffset.json"
        for damage in (b'{"offsetTabld":{}}', b"\xff{}", b'{"offsetTable":["T@G"]}'):
            path.write_bytes(damage)
            (tmp_path / "config" / "consumerOffset.json.bak").write_text('{"offsetTable":{"T@G":{0:3}}}')
            async with running(tmp_path) as (broker, _):
                assert broker.parts.tables.offsets.query("G", "T", 0) == 3
            path.write_bytes(damage)
            (tmp_path / "config" / "consumerOffset.json.bak").write_bytes(damage)
            with pytest.raises(StoreCorrupt, match=r"consumerOffset\.json"):
                async with running(tmp_path):
                    pass


class TestDeletionOfATopic:
    async def test_refused_anywhere_it_leaves_the_topic_and_done_again_nothing_of_it(self, tmp_path):
        """Each operation of the deletion fails in one of the runs."""
        refused = 0
        for number in range(1, 60):
            root, disk = tmp_path / f"{number}", FaultyDisk(really_sync=False)
            async with running(root, disk) as (broker, peer):
                assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, new_topic("T"))).code == 0
                await peer.send("T", b"old")
                broker.parts.tables.offsets.commit("G", "T", 0, 1)
                # The log is flushed before, so that the failing operation belongs to the deletion.
                await broker.parts.tables.offsets_file.save_now()
                store = broker.parts.store
                store.queues.write_dirty()
                await store.topic_retention.raise_min_offsets("T", {0: 0})
                delete = DeleteTopicRequestHeader(topic="T")
                fault = disk.fail("*", first=number, match=str(root / ""), error=errno.ENOSPC)
                answer = await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, delete)
                if answer.code != 0 and "was not deleted" in answer.remark:
                    refused += 1
                    assert "No space left" in answer.remark
                    assert broker.parts.tables.topics.get("T") is not None
                    assert broker.parts.tables.offsets.query("G", "T", 0) == 1
                untouched = fault.times
                disk.heal()
                assert (await peer.call(RequestCode.DELETE_TOPIC_IN_BROKER, delete)).code == 0
                assert (await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, new_topic("T"))).code == 0
                assert (await peer.send("T", b"new")).ext["queueOffset"] == "0"
                assert [message.body for message in records(await peer.pull("T"))] == [b"new"]
                assert broker.parts.tables.offsets.query("G", "T", 0) == -1
            async with running(root) as (_, peer):
                assert [message.body for message in records(await peer.pull("T"))] == [b"new"]
            if untouched:
                break
        else:
            pytest.fail("the deletion has more operations than were tried")
        assert refused >= 5
