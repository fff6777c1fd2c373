"""A master and its slaves in one process, over sockets (docs/reference/storage.md, HA port)."""

from __future__ import annotations

import asyncio
import re
import shutil

import pytest
from tests.kit.brokers import COMMIT, offset_of, records
from tests.kit.waiting import until

from cometmq.broker import register
from cometmq.broker.replication import ha_server
from cometmq.broker.replication.ha_slave import Phase
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.bodies.admin import HaRuntimeInfo
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import UpdateConsumerOffsetRequestHeader
from cometmq.store import truncate_log
from cometmq.store.tiered.layout import unavailable

OK, NO_SLAVE, SLAVE_TIMEOUT = 0, ResponseCode.SLAVE_NOT_AVAILABLE, ResponseCode.FLUSH_SLAVE_TIMEOUT
SMALL = {"mappedFileSizeCommitLog": "16384"}


async def send(group, count=1, body=b"hello", **more):
    """Send `count` messages concurrently and return the response codes."""
    peer = group.peers["master"]
    return [
        answer.code for answer in await asyncio.gather(*(peer.send(body=body, **more) for _ in range(count)))
    ]


def replication(group, name):
    return group.brokers[name].parts.replication


def core(group, name="slave"):
    return replication(group, name).slave.core


async def bodies(group, name, topic="Orders"):
    """Pull the bodies of queue 0 from the named broker."""
    found, offset = [], 0
    while True:
        answer = await group.peers[name].pull(topic, offset=offset)
        if answer.code != 0:
            return found
        found += [message.body for message in records(answer)]
        offset = len(found)


def raises(error):
    def fail(*_args, **_named):
        raise error

    return fail


class TestCopies:
    @pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
    async def test_a_slave_has_what_its_master_has_answered(self, group, flush):
        await group.master(flushDiskType=flush)
        await group.slave(flushDiskType=flush)
        await group.known()
        for number in range(10):
            assert await send(group, 3, b"%d" % number) == [OK] * 3
            assert group.end("slave") == group.end("master")
        assert group.log_bytes("slave") == group.log_bytes("master")
        await replication(group, "slave").sync.sync()
        assert await bodies(group, "slave") == await bodies(group, "master")

    async def test_an_empty_slave_gets_the_whole_log_over_many_segments(self, group):
        await group.master(brokerRole="ASYNC_MASTER", **SMALL)
        for _ in range(6):
            assert await send(group, 10, bytes(700)) == [OK] * 10
        await group.slave(**SMALL)
        await group.equal()
        assert len(group.brokers["slave"].parts.store.log.segments) > 2
        assert group.log_bytes("slave") == group.log_bytes("master")

    async def test_segments_roll_under_load(self, group):
        await group.master(**SMALL)
        await group.slave(**SMALL)
        await group.known()
        for _ in range(8):
            assert await send(group, 10, bytes(700)) == [OK] * 10
        await group.equal()
        assert group.log_bytes("slave") == group.log_bytes("master")

    async def test_a_slave_that_was_away_goes_on_where_it_was(self, group):
        await group.master()
        await group.slave()
        await group.known()
        await send(group, 5)
        await group.stop("slave")
        await until(lambda: not replication(group, "master").master.links)
        assert await send(group) == [NO_SLAVE]
        await group.again("slave")
        await group.known()
        assert await send(group) == [OK]
        assert group.log_bytes("slave") == group.log_bytes("master")

    @pytest.mark.slow("master and slave start twice")
    async def test_a_slave_that_was_away_gets_what_is_in_the_object_store_only(self, group, tmp_path):
        tiered = {"tieredStoreUri": f"file://{tmp_path}/objects", "tieredLocalReservedTime": "0"}
        often = {"cleanResourceInterval": "20", "deleteWhen": "99"}
        await group.master(brokerRole="ASYNC_MASTER", **SMALL, **tiered, **often)
        await group.slave(**SMALL)
        await send(group)
        await group.equal()
        await group.stop("slave")
        for _ in range(6):
            assert await send(group, 10, bytes(700)) == [OK] * 10
        await until(lambda: len(group.brokers["master"].parts.store.log.segments) == 1)
        await group.stop("master")  # The next one has nothing in memory
        await group.again("master")
        (tmp_path / "objects").rename(tmp_path / "away")
        await group.again("slave")
        await until(lambda: "the messages are in the object store" in core(group).problem, 20)
        (tmp_path / "away").rename(tmp_path / "objects")
        await group.equal()
        assert len(group.brokers["slave"].parts.store.log.segments) > 2
        assert len(await bodies(group, "slave")) == len(await bodies(group, "master")) == 61

    async def test_a_master_that_comes_back_is_followed_again(self, group):
        await group.master()
        await group.slave()
        await group.known()
        await send(group, 5)
        await replication(group, "slave").sync.sync()
        await group.stop("master")
        await until(lambda: core(group).phase is not Phase.FOLLOWING)
        assert len(await bodies(group, "slave")) == 5
        await group.again("master")
        await group.known()
        assert await send(group) == [OK]
        assert group.log_bytes("slave") == group.log_bytes("master")

    async def test_a_new_message_ends_pulls_that_wait_at_the_slave(self, group):
        await group.master()
        await group.slave()
        await group.known()
        await send(group)
        await replication(group, "slave").sync.sync()
        pulling = asyncio.create_task(group.peers["slave"].pull(offset=1, hold_ms=15_000))
        await until(lambda: len(group.brokers["slave"].parts.pulls.long_poll))
        await send(group, 1, b"new")
        assert [message.body for message in records(await pulling)] == [b"new"]

    async def test_what_is_not_in_memory_is_read_by_a_thread(self, group, monkeypatch):
        await group.master(brokerRole="ASYNC_MASTER", **SMALL)
        for _ in range(3):
            await send(group, 10, bytes(700))
        await group.stop("master")
        master = await group.again("master")
        monkeypatch.setattr(type(master.parts.store.disk), "pread_cached", lambda *_: None)
        await group.slave(**SMALL)
        await group.equal()
        assert group.log_bytes("slave") == group.log_bytes("master")

    async def test_a_log_that_cannot_be_read_ends_the_connection(self, group, monkeypatch, caplog):
        master = await group.master(brokerRole="ASYNC_MASTER", **SMALL)
        await send(group)
        with monkeypatch.context() as patch:
            patch.setattr(type(master.parts.store.log), "read", raises(OSError(5, "rotten")))
            await group.slave(**SMALL)
            await until(lambda: "cannot be read: [Errno 5] rotten" in caplog.text)
            patch.setattr(type(master.parts.store.log), "read", raises(unavailable("an outage")))
            await until(lambda: re.search("cannot be read: .*an outage", caplog.text))
            patch.setattr(type(master.parts.store.log), "read", lambda *_: None)
            await until(lambda: "was deleted meanwhile" in caplog.text)
        await group.equal()

    async def test_a_slave_with_another_size_of_segments_says_so(self, group):
        await group.master(brokerRole="ASYNC_MASTER", **SMALL)
        for _ in range(3):
            await send(group, 10, bytes(700))
        await group.slave(mappedFileSizeCommitLog="8192")
        await until(lambda: core(group).problem)
        assert core(group).problem.startswith("the master's log at ")
        assert "the segment has room for" in core(group).problem

    async def test_a_slave_whose_disk_is_full_tries_again(self, group, monkeypatch):
        await group.master(brokerRole="ASYNC_MASTER")
        slave = await group.slave()
        await group.known()
        disk = slave.parts.store.disk
        reserve = type(disk).reserve

        def full(self, *given):
            return raises(OSError(28, "full"))() if self is disk else reserve(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(type(disk), "reserve", full)
            await send(group)
            await until(lambda: "full" in core(group).problem)
        await group.equal()


class TestWaits:
    async def test_without_a_slave_senders_who_wait_hear_so(self, group):
        await group.master()
        assert await send(group) == [NO_SLAVE]
        assert await send(group, properties={"WAIT": "false"}) == [OK]
        assert len(await bodies(group, "master")) == 2

    async def test_an_async_master_waits_for_nobody(self, group):
        await group.master(brokerRole="ASYNC_MASTER", inSyncReplicas="3")
        assert await send(group) == [OK]

    async def test_a_slave_that_reports_nothing_more_is_waited_for_in_vain(self, group, monkeypatch):
        await group.master(slaveTimeout="200")
        slave = await group.slave()
        await group.known()
        monkeypatch.setattr(slave.parts.replication.slave, "end_tick", lambda: None)
        assert await send(group) == [SLAVE_TIMEOUT]
        assert await send(group, properties={"WAIT": "false"}) == [OK]
        assert len(await bodies(group, "master")) == 2

    async def test_a_slave_that_is_too_far_behind_is_not_waited_for(self, group, monkeypatch):
        await group.master(haSlaveFallbehindMax="2000", slaveTimeout="10000")
        slave = await group.slave()
        await group.known()
        monkeypatch.setattr(slave.parts.replication.slave, "end_tick", lambda: None)
        await send(group, properties={"WAIT": "false"}, body=bytes(3000))
        assert await send(group) == [NO_SLAVE]
        monkeypatch.undo()
        await group.known()
        assert await send(group) == [OK]

    async def test_two_slaves_can_be_waited_for(self, group):
        await group.master(inSyncReplicas="3")
        await group.slave("one")
        await group.known()
        assert await send(group) == [NO_SLAVE]
        await group.slave("two")
        await group.known(2)
        assert await send(group, 5) == [OK] * 5
        assert group.log_bytes("one") == group.log_bytes("two") == group.log_bytes("master")

    async def test_one_of_two_slaves_is_enough(self, group):
        await group.master()
        await group.slave("one")
        await group.slave("two")
        await group.known(2)
        await group.stop("one")
        assert await send(group, 5) == [OK] * 5
        await group.equal("two")

    async def test_the_number_may_follow_the_slaves_that_there_are(self, group):
        await group.master(inSyncReplicas="3", minInSyncReplicas="2", enableAutoInSyncReplicas="true")
        assert await send(group) == [NO_SLAVE]
        await group.slave("one")
        await group.known()
        assert await send(group) == [OK]

    async def test_replies_of_both_waits_come_together(self, group):
        """With SYNC_FLUSH nothing is sent to a slave before it is on the device."""
        master = await group.master(flushDiskType="SYNC_FLUSH")
        await group.slave()
        await group.known()
        assert await send(group, 20) == [OK] * 20
        assert master.parts.store.flusher.flushed == group.end("slave") == group.end("master")


class TestContradictions:
    async def stopped(self, group):
        await until(lambda: core(group).phase is Phase.STOPPED)
        return core(group).problem

    async def test_a_slave_ahead_of_its_master_stops_and_makes_no_wait_pass(self, group, caplog):
        await group.master()
        await group.slave()
        await group.known()
        await send(group, 3)
        before = group.root / "before"
        await group.stop("master")
        shutil.copytree(group.root / "master", before)
        await group.again("master")
        await group.known()
        await send(group, 3)
        end = group.end("slave")
        await group.stop("master")
        shutil.rmtree(group.root / "master")
        before.rename(group.root / "master")
        await group.again("master")
        kept = group.end("master")
        problem = await self.stopped(group)
        assert f"ends at {end}, ahead of the master's, which ends at {kept}" in problem
        await until(lambda: problem in caplog.text)  # the state is logged after it has changed
        assert await send(group) == [NO_SLAVE]
        facts = replication(group, "slave").facts()
        assert (facts["haState"], facts["haProblem"]) == ("stopped", problem)
        topics = group.brokers["slave"].parts.tables.topics
        version = topics.version
        await replication(group, "slave").sync.sync()
        assert topics.version == version
        await group.stop("slave")
        truncate_log(str(group.root / "slave"), kept)
        await group.again("slave")
        await group.known()
        assert await send(group) == [OK]
        assert group.log_bytes("slave") == group.log_bytes("master")

    async def test_a_slave_whose_log_differs_stops_though_it_is_shorter(self, group):
        await group.master(brokerRole="ASYNC_MASTER")
        await send(group, 3)
        await group.slave("slave")
        await group.equal()
        await group.stop("slave")
        await group.stop("master")
        shutil.rmtree(group.root / "master")
        await group.again("master")
        await send(group, 9)
        await group.again("slave")
        assert "is not the master's" in await self.stopped(group) or "has none" in core(group).problem
        end = group.end("slave")
        await group.stop("slave")
        shutil.rmtree(group.root / "slave")
        await group.again("slave")
        await group.equal()
        assert end < group.end("slave")
        assert group.log_bytes("slave") == group.log_bytes("master")


class TestRoles:
    async def test_a_slave_refuses_messages_and_serves_reads_without_its_master(self, group):
        await group.master(slaveReadEnable="true")
        await group.slave(slaveReadEnable="true")
        await group.known()
        await send(group, 3)
        await replication(group, "slave").sync.sync()
        await group.stop("master")
        peer = group.peers["slave"]
        assert (await peer.send()).code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert len(await bodies(group, "slave")) == 3
        header = UpdateConsumerOffsetRequestHeader(
            consumer_group="G", topic="Orders", queue_id=0, commit_offset=2
        )
        assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code == 0

    async def test_both_sides_say_how_far_they_are(self, group):
        master = await group.master()
        await group.slave()
        await group.known()
        await send(group, 3)
        answers = [
            HaRuntimeInfo.decode((await group.peers[name].call(RequestCode.GET_BROKER_HA_STATUS)).body)
            for name in ("master", "slave")
        ]
        end = group.end("master")
        of_master, of_slave = answers
        assert (of_master.master, of_master.in_sync_slave_nums) == (True, 1)
        assert of_master.master_commit_log_max_offset == end
        (link,) = of_master.ha_connection_info
        assert (link.slave_ack_offset, link.diff, link.in_sync) == (end, 0, True)
        client = of_slave.ha_client_runtime_info
        assert (of_slave.master, client.max_offset, client.activated) == (False, end, True)
        assert client.master_addr == f"127.0.0.1:{master.parts.registrar.address.ha_port}"
        assert (
            replication(group, "master").facts() | {"haSlaves": "1", "haLagBytes": "0"}
            == replication(group, "master").facts()
        )

    async def test_a_master_says_where_it_is(self, group):
        master = await group.master()
        answer = await group.peers["master"].call(RequestCode.EXCHANGE_BROKER_HA_INFO)
        assert answer.ext["masterAddress"] == master.addr
        assert answer.ext["masterHaAddress"].endswith(f":{master.parts.registrar.address.ha_port}")
        assert int(answer.ext["masterFlushOffset"]) == master.parts.store.flusher.flushed

    async def test_the_address_of_the_settings_is_followed_without_a_name_server(self, group):
        """The master's main port is taken to be the port before its HA port."""
        master = await group.master()
        ha_port = master.parts.registrar.address.ha_port
        slave = await group.start(
            "slave", {"brokerRole": "SLAVE", "brokerId": "1", "haMasterAddress": f"127.0.0.1:{ha_port}"}
        )
        assert core(group).master == (f"127.0.0.1:{ha_port - 1}", f"127.0.0.1:{ha_port}")
        slave.parts.replication.follow(master.addr, "127.0.0.1:1")
        await group.known()


@pytest.mark.parametrize("first", ["master", "slave"])
async def test_a_name_server_tells_a_slave_of_its_master(group, first, monkeypatch):
    monkeypatch.setattr(register, "NO_MASTER_S", 0.1)
    server = NameServer(NamesrvConfig(listen_port=0, bind_address="127.0.0.1"))
    port = await server.start()
    try:
        roles = {
            "master": {"brokerRole": "SYNC_MASTER"},
            "slave": {"brokerRole": "SLAVE", "brokerId": "1"},
        }
        for name in sorted(roles, key=first.__ne__):
            await group.start(name, {**roles[name], "namesrvAddr": f"127.0.0.1:{port}"})
        await until(lambda: group.brokers["master"].parts.replication.master.core.slaves)
        await group.known()
        assert await send(group) == [OK]
    finally:
        await group.close()
        await server.stop()


async def test_strangers_at_the_ha_port_do_no_harm(group):
    master = await group.master()
    port = master.parts.registrar.address.ha_port
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, (1 << 60).to_bytes(8, "big")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        assert await reader.read() == b""
        writer.close()
    assert await send(group) == [NO_SLAVE]
    assert offset_of(await group.peers["master"].pull(flags=COMMIT), "nextBeginOffset") == 1


async def test_strangers_who_hold_all_places_keep_no_slave_out(group, monkeypatch):
    monkeypatch.setattr(ha_server, "MAX_SLAVES", 3)
    master = await group.master()
    port = master.parts.registrar.address.ha_port
    links = master.parts.replication.master.links
    strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    strangers += [await asyncio.open_connection("127.0.0.1", port)]
    await until(lambda: len(links) == 3)
    strangers[2][1].write(bytes(8))  # reports position 0, like a slave with an empty log
    slave = await group.slave()
    await group.known()
    assert await send(group) == [0]
    await until(lambda: slave.parts.store.log.end == master.parts.store.log.end)
    async with asyncio.timeout(60):
        assert await strangers[0][0].read() == b""
    for _, writer in strangers:
        writer.close()
