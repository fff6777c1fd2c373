"""Back-pressure of a running broker, tested over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from tests.kit.brokers import Peer, records, refused, running
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq.broker.base.protection import MEASURE_INTERVAL_S
from cometmq.protocol.bodies import KVTable
from cometmq.protocol.codes import RequestCode

BUSY = 2


@contextlib.asynccontextmanager
async def loop_held_up(broker, seconds=0.3):
    """Block the event loop repeatedly, with pauses for arrived requests, until it would refuse a send."""
    going = True

    def hold() -> None:
        if going:
            time.sleep(seconds)
            asyncio.get_running_loop().call_later(MEASURE_INTERVAL_S / 4, hold)

    asyncio.get_running_loop().call_soon(hold)
    await until(lambda: broker.parts.protection.why, 20)
    try:
        yield
    finally:
        going = False


class TestALoopThatLags:
    async def test_sends_are_refused_with_reason_and_figures_until_it_keeps_up(self, tmp_path, caplog):
        async with running(tmp_path, waitTimeMillsInSendQueue="200") as (broker, peer):
            await peer.send()
            async with loop_held_up(broker):
                answer = await peer.send(body=b"refused")
                refused(answer, BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, ")
                refused(answer, BUSY, "limit 200 ms (waitTimeMillsInSendQueue)")
                await peer.send(body=b"refused too, and not answered", oneway=True)
                # The limits for pulls and heartbeats are longer.
                assert len(records(await peer.pull())) == 1
                assert (await peer.heartbeat()).code == 0
                shown = await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)
            await until(lambda: not broker.parts.protection.why)
            assert (await peer.send(body=b"taken")).code == 0
            assert [message.body for message in records(await peer.pull())] == [b"hello", b"taken"]
            table = KVTable.decode(shown.body).table
            assert int(table["sendThreadPoolQueueHeadWaitTimeMills"]) >= 200
            assert "loop lag" in table["flowControl"]
            assert table["flowControlRefused"] == "2"
        assert caplog.text.count("the broker is overloaded and refuses requests: loop lag") == 1

    async def test_one_stall_refuses_nobody(self, tmp_path, caplog):
        # The limit is so long that the machine itself does not cause a second stall.
        async with running(tmp_path, waitTimeMillsInSendQueue="900") as (broker, peer):
            await peer.send()
            asyncio.get_running_loop().call_soon(time.sleep, 1.0)
            assert (await peer.send()).code == 0  # the send waits for all of it
            await asyncio.sleep(5 * MEASURE_INTERVAL_S)
            assert broker.parts.protection.refused == 0
        assert "overloaded" not in caplog.text

    async def test_nothing_is_refused_without_fast_failure(self, tmp_path):
        async with running(tmp_path, waitTimeMillsInSendQueue="200") as (broker, peer), loop_held_up(broker):
            body = b"brokerFastFailureEnable=false\n"
            assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body)).code == 0
            await until(lambda: not broker.parts.protection.why)
            assert (await peer.send()).code == 0

    async def test_the_fast_port_refuses_too(self, tmp_path):
        port = free_port()
        limits = {"waitTimeMillsInSendQueue": "200", "waitTimeMillsInPullQueue": "200"}
        async with running(tmp_path, listenPort=str(port), **limits) as (broker, peer), loop_held_up(broker):
            async with Peer(f"127.0.0.1:{port - 2}") as old:
                refused(await old.send(), BUSY, "loop lag")
                refused(await old.pull(), 3, "not supported")
            refused(await peer.pull(), BUSY, "limit 200 ms (waitTimeMillsInPullQueue)")


class StuckDisk(FaultyDisk):
    """A disk on which syncs of the log wait while it is stuck."""

    def __init__(self) -> None:
        super().__init__()
        self._go_on = threading.Event()
        self._go_on.set()
        self.before = self._wait

    def _wait(self, operation: str, path: str) -> None:
        if operation == "fdatasync" and "commitlog" in path:
            assert self._go_on.wait(30)

    @contextlib.contextmanager
    def stuck(self):
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()


class TestADiskThatSyncsSlowly:
    async def test_sends_that_would_only_wait_are_refused(self, tmp_path):
        disk = StuckDisk()
        settings = {"flushDiskType": "SYNC_FLUSH", "osPageCacheBusyTimeOutMills": "60000"}
        async with running(tmp_path, disk, **settings) as (broker, peer):
            await peer.send()
            with disk.stuck():
                waiting = [asyncio.create_task(peer.send(body=b"waits")) for _ in range(3)]
                await until(lambda: broker.parts.writer.waiting == 3)
                body = b"osPageCacheBusyTimeOutMills=100\n"
                assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body)).code == 0
                await until(lambda: broker.parts.protection.why)
                answer = await peer.send()
            refused(answer, BUSY, "[PCBUSY_CLEAN_QUEUE]broker busy")
            refused(answer, BUSY, "size of queue: 3, reason: flush backlog ")
            refused(answer, BUSY, "limit 100 ms (osPageCacheBusyTimeOutMills)")
            assert [answer.code for answer in await asyncio.gather(*waiting)] == [0, 0, 0]
            await until(lambda: not broker.parts.protection.why)
            assert (await peer.send()).code == 0
            assert len(records(await peer.pull())) == 5

    async def test_senders_that_do_not_wait_for_it_go_on(self, tmp_path):
        disk = StuckDisk()
        often = {"flushIntervalCommitLog": "10", "flushCommitLogLeastPages": "0"}
        async with running(tmp_path, disk, osPageCacheBusyTimeOutMills="10", **often) as (broker, peer):
            with disk.stuck():
                await peer.send()
                await until(lambda: broker.parts.store.flusher.syncing_s > 0.1)
                assert (await peer.send()).code == 0

    async def test_more_bytes_than_may_be_lost_are_not_taken(self, tmp_path):
        disk = StuckDisk()
        settings = {"maxUnflushedBytes": "10000", "flushIntervalCommitLog": "3600000"}
        async with running(tmp_path, disk, **settings) as (broker, peer):
            with disk.stuck():
                for _ in range(10):
                    await peer.send(body=b"x" * 1000)
                await until(lambda: broker.parts.protection.why)
                answer = await peer.send()
            refused(answer, BUSY, "[OVERLOAD]broker busy")
            refused(answer, BUSY, " bytes, limit 10000 bytes (maxUnflushedBytes)")
            await until(lambda: not broker.parts.protection.why)  # does not wait for the flush interval
            assert (await peer.send()).code == 0
