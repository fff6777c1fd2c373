"""Leases across restarts: the revive log, and the file of ordered pops."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.broker.pop.conftest import RETRY_TOPIC, PopClient, offset_in
from tests.interop.stores import loads
from tests.kit.brokers import copy_running, running, store_raw
from tests.kit.waiting import until

from cometmq.broker.pop import lease_files, revive, service
from cometmq.broker.pop.lease_files import restore_leases
from cometmq.broker.pop.leases import Leases, Pop
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.protocol.bodies import AckMsg, BatchAckMsg, PopCheckPoint
from cometmq.protocol.codes import REVIVE_GROUP, TIMER_TOPIC
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.timers import timer_tags_code

LOG = "rmq_sys_REVIVE_LOG_DefaultCluster"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(revive, "ACK_GRACE_MS", 0)
    monkeypatch.setattr(revive, "CHECK_S", 0.05)


async def restarted(cluster) -> PopClient:
    await cluster.restart()
    return PopClient(cluster.peer())


async def log_is_done(cluster) -> None:
    log = cluster.broker.parts.pops.revive
    end = cluster.broker.parts.store.max_offset(LOG, 0)
    await until(lambda: not len(log) and offset_in(cluster, 0, LOG, REVIVE_GROUP) == end - 1)


async def test_leases_outlive_a_clean_stop(cluster, peer, consumer):
    await peer.send_numbers(6)
    found = await consumer.pop(4)
    assert await consumer.ack(found.handles[1]) == 0
    consumer = await restarted(cluster)
    assert offset_in(cluster) == 4
    await until(lambda: len(cluster.broker.parts.pops.revive))
    assert (await consumer.pop()).bodies == ["4", "5"]
    for number in (0, 2):
        assert await consumer.ack(found.handles[number]) == 0
    assert await consumer.ack(found.handles[0]) == 208
    assert (await consumer.renew(found.handles[3], 0)).code == 0
    again = await consumer.pop_until(5)
    assert (again.bodies, again.messages[0].reconsume_times) == (["3"], 1)
    await log_is_done(cluster)


async def test_acks_and_renewals_outlive_a_second_stop(cluster, peer, consumer):
    await peer.send_numbers(4)
    first = await consumer.pop(2)
    second = await consumer.pop(2)
    consumer = await restarted(cluster)
    await until(lambda: len(cluster.broker.parts.pops.revive) == 2)
    assert await consumer.ack(first.handles[0]) == 0
    for handle in second.handles:
        assert await consumer.ack(handle) == 0
    consumer = await restarted(cluster)
    await until(lambda: len(cluster.broker.parts.pops.revive) == 1)
    assert (await consumer.renew(first.handles[1], 0)).code == 0
    assert (await consumer.pop_until(5)).bodies == ["1"]
    await log_is_done(cluster)
    assert (await consumer.pop()).code == 210


async def test_the_handles_of_renewed_leases_outlive_a_clean_stop(cluster, peer, consumer):
    """After a change, a remoting client's handle starts at the message. The checkpoint starts at the pop."""
    await peer.send_numbers(3)
    handles = [each._replace(start_offset=each.offset) for each in (await consumer.pop()).handles]
    for handle in handles:
        assert (await consumer.renew(handle, 60_000)).code == 0
    consumer = await restarted(cluster)
    await until(lambda: len(cluster.broker.parts.pops.revive))
    assert await consumer.ack(handles[1]) == 0
    assert await consumer.ack(handles[1]) == 208
    assert (await consumer.renew(handles[2], 60_000)).code == 0
    assert await consumer.ack(handles[2]) == 0
    assert (await consumer.renew(handles[0], 0)).code == 0
    assert (await consumer.pop_until(5)).bodies == ["0"]
    await log_is_done(cluster)


async def test_a_message_of_the_retry_topic_is_handed_over_too(cluster, peer, consumer):
    await peer.send(body=b"1")
    (handle,) = (await consumer.pop()).handles
    await consumer.renew(handle, 0)
    (handle,) = (await consumer.pop_until(5)).handles
    consumer = await restarted(cluster)
    await until(lambda: len(cluster.broker.parts.pops.revive))
    assert await consumer.ack(handle) == 0
    await log_is_done(cluster)
    assert offset_in(cluster, topic=RETRY_TOPIC) == 1


def record(cluster, tag, body):
    properties = encode_properties({"TAGS": tag, "UNIQ_KEY": "k"})
    cluster.broker.parts.tables.topics.ensure(LOG, 8)
    from cometmq.protocol.properties.values import stored_tags_code

    store_raw(cluster, LOG, properties, body, tags_code=stored_tags_code(properties))


async def test_what_apache_has_left_in_the_log_is_paired(cluster, peer, consumer):
    """The records arrive while the broker runs, as its timers deliver them."""
    await peer.send_numbers(5)
    await peer.set_group(b'{"groupName":"G"}')
    fields = {"start_offset": 0, "pop_time": 1, "queue_id": 0, "topic": "Orders", "group": "G"}
    fields["broker_name"] = "broker-a"
    ack = {name: value for name, value in fields.items() if name != "invisible_time"}
    record(
        cluster,
        "ck",
        PopCheckPoint(**fields, num=4, invisible_time=1 << 42, queue_offset_diff=[0, 1, 2, 4]).encode(),
    )
    record(cluster, "ack", AckMsg(**ack, ack_offset=1).encode())
    record(cluster, "bAck", BatchAckMsg(**ack, ack_offset=-1, ack_offset_list=[2, 4]).encode())
    record(cluster, "ck", b"{no json")
    log = cluster.broker.parts.pops.revive
    pop = revive.PopKey("G", "Orders", 0, 1)

    def open_messages():
        return [each for found in log._pending.get(pop, {}).values() for each in found.open]  # noqa: SLF001

    await until(lambda: open_messages() == [0])
    assert log.renew(pop, 0, 0, True)
    cluster.broker.parts.tables.offsets.commit("G", "Orders", 0, 5)
    assert (await consumer.pop_until(5)).bodies == ["0"]
    await log_is_done(cluster)


async def test_records_that_apache_has_left_in_the_timer_topic_come_into_the_log(cluster, peer, consumer):
    cluster.broker.parts.tables.topics.ensure(LOG, 8)
    wanted = {"REAL_TOPIC": LOG, "REAL_QID": "7", "TIMER_OUT_MS": str(1 << 40), "TAGS": "ck", "UNIQ_KEY": "k"}
    properties = encode_properties(wanted)
    store_raw(cluster, TIMER_TOPIC, properties, b"{}", tags_code=timer_tags_code(properties))
    await until(lambda: cluster.broker.parts.store.max_offset(LOG, 7) == 1)


async def test_an_ack_may_come_before_its_checkpoint(cluster, peer, consumer):
    await peer.send_numbers(2)
    before = cluster.broker.parts.pops.leases.born_ms - 1
    popped = (await consumer.pop()).handles
    handle = popped[1]._replace(pop_time_ms=before, start_offset=1)
    cluster.broker.parts.tables.offsets.commit("G", "Orders", 0, 2)
    assert await consumer.ack(handle) == 0
    assert await consumer.ack(handle._replace(pop_time_ms=1 << 60)) == 208
    fields = {"start_offset": 0, "pop_time": before, "queue_id": 0, "topic": "Orders", "group": "G"}
    record(cluster, "ck", PopCheckPoint(**fields, num=1, queue_offset_diff=[1], invisible_time=1).encode())
    await log_is_done(cluster)
    assert (await consumer.pop()).code == 210


async def test_early_acks_are_limited_and_expire(cluster, peer, consumer, monkeypatch):
    await peer.send_numbers(3)
    log, born_ms = cluster.broker.parts.pops.revive, cluster.broker.parts.pops.leases.born_ms
    for group in "GH":
        cluster.broker.parts.tables.offsets.commit(group, "Orders", 0, 3)
    keys = {group: revive.PopKey(group, "Orders", 0, born_ms - 1) for group in "GH"}
    monkeypatch.setattr(revive, "MAX_EARLY_ACKS", 4)
    assert [log.ack(keys["G"], offset) for offset in range(3)] == [True, True, False]
    assert [log.ack(keys["H"], offset) for offset in range(2)] == [True, False]
    log.expire_early()
    assert not log.ack(keys["G"], 2)
    monkeypatch.setattr(revive, "MAX_INVISIBLE_MS", -1_000_000)
    log.expire_early()
    assert not log.ack(keys["G"], 2)
    monkeypatch.undo()
    assert all(log.ack(keys["G"], offset) for offset in range(3))


async def test_a_kill_after_the_start_repeats_what_was_not_done(tmp_path):
    async with running(tmp_path / "store") as (broker, peer):
        await peer.send_numbers(2)
        found = await PopClient(peer).pop()
    async with running(tmp_path / "store") as (broker, peer):
        await until(lambda: len(broker.parts.pops.revive))
        before = broker.parts.tables.offsets.query(REVIVE_GROUP, LOG, 0)
        assert await PopClient(peer).ack(found.handles[0]) == 0
        assert broker.parts.tables.offsets.query(REVIVE_GROUP, LOG, 0) == before == -1


class TestAKill:
    """The store is closed as a kill leaves it, while the broker's tables are not written any more."""

    @pytest.fixture(autouse=True)
    def often(self, monkeypatch):
        monkeypatch.setattr(service, "SAVE_S", 0.02)

    async def test_acks_and_leases_outlive_a_kill(self, tmp_path):
        root, copy = tmp_path / "store", tmp_path / "copy"
        async with running(root, flushConsumerOffsetInterval="10") as (broker, peer):
            consumer = PopClient(peer)
            await peer.send_numbers(6)
            found = await consumer.pop(5)
            for number in (1, 3):
                assert await consumer.ack(found.handles[number]) == 0
            assert (await consumer.renew(found.handles[4], 0, suspend=True)).code == 0
            await until(lambda: broker.parts.store.max_offset(RETRY_TOPIC, 0) == 1)
            pops = broker.parts.pops
            await until(lambda: not pops.leases.dirty)
            await broker.parts.tables.offsets_file.save_now()
            await pops.lease_file.save_now()
            await asyncio.to_thread(copy_running, root, copy)
        assert (copy / "abort").exists()
        async with running(copy) as (broker, peer):
            consumer = PopClient(peer)
            again = await consumer.pop()
            assert sorted(again.bodies) == ["4", "5"]
            for handle in (found.handles[0], found.handles[2]):
                assert await consumer.ack(handle) == 0
            assert broker.parts.tables.offsets.query("G", "Orders", 0) == 5

    async def test_an_offset_that_was_set_elsewhere_counts(self):
        table = {"floor": 1, "head": 4, "pops": [[1, 0, 1 << 50, True, "1 1 3 1"]]}
        offsets = ConsumerOffsets()
        for queue_id, offset in enumerate((0, 1, 3, 9, 2)):
            offsets.commit("G", "Orders", queue_id, offset)
        leases = Leases(offsets, 5)
        entries = {str(queue_id): table for queue_id in range(5)} | {"7": table, "8": {"floor": "x"}}
        restore_leases({"leaseTable": {"Orders@G": entries}}, leases, offsets, lambda *_: 9, 0, 0)
        heads = {queue.key[2]: (queue.head, list(queue.leases)) for queue in leases}
        assert heads == {1: (4, [1, 3]), 2: (4, [3])}
        assert [offsets.query("G", "Orders", queue_id) for queue_id in range(5)] == [0, 1, 3, 9, 2]

    @pytest.mark.parametrize("queues", [None, [], "x", {"0": None}, {"0": {"pops": [[1, 0, 1, True, 7]]}}])
    def test_a_file_of_another_shape_is_ignored(self, queues, caplog):
        leases = Leases(ConsumerOffsets(), 5)
        for table in (queues, {"Orders@G": queues}):
            restore_leases({"leaseTable": table}, leases, ConsumerOffsets(), lambda *_: 9, 0, 0)
            lease_files.restore_ordered({"table": table}, leases, ConsumerOffsets(), 0, 0)
        assert not list(leases)
        assert "Orders@G in popLeases.json is ignored" in caplog.text

    async def test_an_offset_on_the_disk_has_no_leases_from_before_it_was_set(self, tmp_path):
        root, copy = tmp_path / "store", tmp_path / "copy"
        async with running(root) as (broker, peer):
            consumer = PopClient(peer)
            await peer.send_numbers(6)
            found = await consumer.pop(6)
            for number in (2, 4):
                assert await consumer.ack(found.handles[number]) == 0
            pops, tables = broker.parts.pops, broker.parts.tables
            await until(lambda: not pops.leases.dirty)
            await pops.lease_file.save_now()
            pops._saves.cancel()  # noqa: SLF001
            tables.offsets.commit("G", "Orders", 0, 3)
            await tables.offsets_file.save_now()
            await asyncio.to_thread(copy_running, root, copy)
        async with running(copy) as (_, peer):
            assert (await PopClient(peer).pop()).bodies == ["3", "4", "5"]

    async def test_the_table_is_built_while_other_tasks_run(self, monkeypatch):
        monkeypatch.setattr(lease_files, "PER_TURN", 4)
        offsets = ConsumerOffsets()
        leases = Leases(offsets, 5)
        for queue_id in range(3):
            key = "G", "Orders", queue_id
            offsets.commit(*key, 0)
            popped = [(offset, Pop(1, 0, 0), 100, True) for offset in (*range(9), 11)]
            leases.restore(key, 12, popped)
        building = asyncio.create_task(lease_files.leases_table(leases, 0, 50))
        turns = 0
        while not building.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 6
        entry = {"floor": 0, "head": 12, "pops": [[1, 0, 150, True, "0 9 11 1"]]}
        entries = {"Orders@G": {str(each): entry for each in range(3)}}
        assert building.result() == {"leaseTable": entries, "writtenAt": 50}

    async def test_messages_that_a_crash_has_removed_are_not_done(self):
        offsets = ConsumerOffsets()
        offsets.commit("G", "Orders", 0, 1)
        leases = Leases(offsets, 5)
        table = {"floor": 1, "head": 9, "pops": [[1, 0, 1 << 50, True, "1 1 6 1"]]}
        restore_leases({"leaseTable": {"Orders@G": {"0": table}}}, leases, offsets, lambda *_: 4, 0, 0)
        (queue,) = leases
        assert (queue.head, list(queue.leases)) == (4, [1])


class TestOrdered:
    async def test_leases_outlive_a_clean_stop(self, cluster, peer, consumer):
        await peer.send_numbers(4)
        found = await consumer.pop(3, order=True, attempt_id="one")
        assert await consumer.ack(found.handles[1]) == 0
        consumer = await restarted(cluster)
        assert (await consumer.pop(order=True)).code == 210
        again = await consumer.pop(3, order=True, attempt_id="one")
        assert again.bodies == ["0", "2"]
        for handle in again.handles:
            assert await consumer.ack(handle) == 0
        assert offset_in(cluster) == 3
        assert (await consumer.pop(order=True)).bodies == ["3"]

    async def test_the_file_has_apaches_format(self, tmp_path):
        async with running(tmp_path / "store") as (_, peer):
            await peer.send_numbers(3)
            found = await PopClient(peer).pop(order=True, attempt_id="one")
            await PopClient(peer).ack(found.handles[1])
        entry = loads((tmp_path / "store/config/consumerOrderInfo.json").read_text())["table"]["Orders@G"][
            "0"
        ]
        assert (entry["o"], entry["cm"], entry["a"], entry["i"]) == ([0, 1, 2], 2, "one", 60_000)
        assert entry["popTime"] == found.handles[0].pop_time_ms
        assert abs(entry["ot"]["2"] - entry["popTime"] - 60_000) < 10_000

    async def test_an_entry_that_does_not_fit_the_offset_is_ignored(self, tmp_path):
        root = tmp_path / "store"
        async with running(root) as (_, peer):
            await peer.send_numbers(3)
            await PopClient(peer).pop(order=True)
        path = root / "config" / "consumerOrderInfo.json"
        table = loads(path.read_text())["table"]
        entry = table["Orders@G"]["0"]
        (root / "config" / "consumerOrderInfo.json.bak").unlink(missing_ok=True)
        table = {"Orders@G": {"0": {**entry, "o": [1, 1]}, "1": {"o": "x"}}, "Orders@H": {"0": {}}}
        path.write_text(json.dumps({"table": table}))
        async with running(root) as (_, peer):
            assert (await PopClient(peer).pop(order=True)).bodies == ["0", "1", "2"]


class TestAClockThatWasSetBack:
    """Leases must not last longer because the wall clock shows an earlier time after the restart."""

    @pytest.fixture
    def leases(self):
        self.offsets = ConsumerOffsets()
        self.offsets.commit("G", "Orders", 0, 4)
        return Leases(self.offsets, 0)

    def test_ordinary_leases(self, leases):
        entry = {"floor": 4, "head": 5, "pops": [[8_000, 4, 10_000, True, "4 1"]]}
        table = {"leaseTable": {"Orders@G": {"0": entry}}, "writtenAt": 9_000}
        restore_leases(table, leases, self.offsets, lambda *_: 5, 50, 1_000)
        assert leases.next_deadline_ms() == 50 + 1_000

    def test_ordered_leases(self, leases):
        entry = {"popTime": 8_000, "i": 2_000, "o": [4], "ot": {4: 10_000}, "l": 9_000, "cm": 0}
        lease_files.restore_ordered({"table": {"Orders@G": {0: entry}}}, leases, self.offsets, 50, 1_000)
        assert leases.next_deadline_ms() == 50 + 1_000
