"""A slave's copy of its master's tables (docs/reference/storage.md, Slave metadata sync)."""

from __future__ import annotations

import pytest
from tests.broker.pop.conftest import set_mode
from tests.kit.brokers import commit, create
from tests.kit.waiting import until

from cometmq.broker.replication.metadata_sync import merged
from cometmq.errors import CommandError
from cometmq.protocol.codes import RequestCode, ResponseCode


@pytest.mark.parametrize(
    ("own", "before", "master", "expected", "returned"),
    [
        ({}, None, {"T@G": {0: 5}}, {"T@G": {0: 5}}, []),
        ({"T@G": {0: 9}}, None, {"T@G": {0: 5}}, {"T@G": {0: 5}}, []),  # the origin of the 9 is unknown
        ({"T@G": {0: 5}}, {"T@G": {0: 5}}, {"T@G": {0: 7}}, {"T@G": {0: 7}}, []),
        ({"T@G": {0: 5}}, {"T@G": {0: 5}}, {"T@G": {0: 2}}, {"T@G": {0: 2}}, []),  # reset at the master
        ({"T@G": {0: 5}}, {"T@G": {0: 5}}, {}, {}, []),  # deleted at the master
        ({"T@G": {0: 9}}, {"T@G": {0: 5}}, {"T@G": {0: 5}}, {"T@G": {0: 9}}, [("T@G", 0, 9)]),
        ({"T@G": {0: 9}}, {"T@G": {0: 5}}, {"T@G": {0: 11}}, {"T@G": {0: 11}}, []),
        ({"T@G": {0: 3}}, {"T@G": {0: 5}}, {"T@G": {0: 5}}, {"T@G": {0: 5}}, []),
        ({"T@G": {1: 9}}, {}, {"T@G": {0: 1}}, {"T@G": {0: 1, 1: 9}}, [("T@G", 1, 9)]),
    ],
)
def test_offsets_of_both_sides(own, before, master, expected, returned):
    assert merged(own, before, master) == (expected, returned)


@pytest.fixture
async def pair(group):
    await group.master(messageDelayLevel="1s 1h")
    await group.slave(messageDelayLevel="1s 1h")
    await group.known()
    return group


def tables(group, name):
    return group.brokers[name].parts.tables


async def sync(group):
    await group.brokers["slave"].parts.replication.sync.sync()


async def test_topics_groups_and_offsets_are_copied_and_written(pair):
    peer = pair.peers["master"]
    await create(peer, "Orders", read=3, write=3)
    await create(peer, "Gone")
    await peer.set_group(b'{"groupName":"G","retryMaxTimes":3}')
    await commit(peer, 1, 42)
    await sync(pair)
    master, slave = tables(pair, "master"), tables(pair, "slave")
    assert slave.topics.table == master.topics.table
    assert slave.topics.version == master.topics.version
    assert slave.groups.table == master.groups.table
    assert slave.groups.table["G"].retry_max_times == 3
    assert slave.offsets.query("G", "Orders", 1) == 42
    await peer.delete_topic("Gone")
    await sync(pair)
    assert "Gone" not in slave.topics.table
    await pair.stop("slave")
    await pair.stop("master")
    await pair.again("slave")
    written = tables(pair, "slave")
    assert written.topics.table == slave.topics.table
    assert written.groups.table == slave.groups.table
    assert written.offsets.query("G", "Orders", 1) == 42


async def test_consume_modes_are_copied_and_written(pair):
    peer = pair.peers["master"]
    await create(peer, "Orders")
    await peer.set_group(b'{"groupName":"G"}')
    assert (await set_mode(peer, pop_share_queue_num=3)).code == 0
    await sync(pair)
    mode = tables(pair, "slave").modes.modes["Orders", "G"]
    assert (mode.mode, mode.pop_share_queue_num) == ("POP", 3)
    assert (await set_mode(peer, mode="PULL")).code == 0
    await sync(pair)
    await pair.stop("slave")
    await pair.again("slave")
    assert tables(pair, "slave").modes.modes["Orders", "G"].mode == "PULL"


async def test_a_master_of_rocketmq_4_has_no_consume_modes(pair):
    pair.brokers["master"].parts.server.override_handlers([RequestCode.GET_ALL_MESSAGE_REQUEST_MODE], unknown)
    await create(pair.peers["master"], "Orders")
    await pair.peers["master"].set_group(b'{"groupName":"G"}')
    await sync(pair)
    assert "G" in tables(pair, "slave").groups.table
    assert pair.brokers["slave"].parts.replication.sync.failure == ""


def unknown(_connection, _frame):
    raise CommandError(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type 402 not supported")


async def test_delay_offsets_are_copied(pair):
    await pair.peers["master"].send(properties={"DELAY": "1"})
    delays = tables(pair, "master").delays
    await until(lambda: delays.get(1) == 1)
    await pair.equal()
    await sync(pair)
    assert tables(pair, "slave").delays.get(1) == 1
    assert tables(pair, "slave").delays.to_file()["logPosition"] > 0


async def test_offsets_wait_until_the_log_is_there(pair, monkeypatch):
    peer, slave = pair.peers["master"], pair.brokers["slave"]
    with monkeypatch.context() as patch:
        patch.setattr(slave.parts.replication.slave, "end_tick", lambda: None)
        await peer.send(properties={"WAIT": "false"})
        await commit(peer, 0, 1)
        await sync(pair)
        await commit(peer, 0, 2)
        await sync(pair)
        assert tables(pair, "slave").offsets.query("G", "Orders", 0) == -1
    await pair.equal()
    await sync(pair)
    assert tables(pair, "slave").offsets.query("G", "Orders", 0) == 1
    await sync(pair)
    assert tables(pair, "slave").offsets.query("G", "Orders", 0) == 2


async def test_offsets_that_were_stored_while_the_master_was_away_come_back_to_it(pair):
    await commit(pair.peers["master"], 0, 5)
    await commit(pair.peers["master"], 1, 5)
    await sync(pair)
    await pair.stop("master")
    await commit(pair.peers["slave"], 0, 9)
    await commit(pair.peers["slave"], 1, 3)
    await pair.again("master")
    await sync(pair)
    for name in ("master", "slave"):
        assert tables(pair, name).offsets.queues("G", "Orders") == {0: 9, 1: 5}


async def test_an_offset_that_the_master_refuses_holds_up_no_other(pair, monkeypatch):
    await sync(pair)
    await pair.stop("master")
    for queue_id in range(3):
        await commit(pair.peers["slave"], queue_id, 9)
    await pair.again("master")
    offsets = tables(pair, "master").offsets
    taken = offsets.commit
    monkeypatch.setattr(
        type(offsets), "commit", lambda _, *given: given[2] != 1 and taken.__func__(offsets, *given)
    )
    await sync(pair)
    assert offsets.queues("G", "Orders") == {0: 9, 2: 9}


async def test_a_master_that_does_not_answer_is_asked_again(pair, caplog):
    await pair.stop("master")
    for _ in range(2):
        await sync(pair)
    assert caplog.text.count("could not be copied") == 1
    await pair.again("master")
    await create(pair.peers["master"], "New")
    await sync(pair)
    assert "New" in tables(pair, "slave").topics.table


async def test_the_answer_for_delay_offsets_says_what_they_know_of(pair):
    answer = await pair.peers["master"].call(RequestCode.GET_ALL_DELAY_OFFSET)
    assert b'"logPosition"' in bytes(answer.body)


async def test_the_queues_of_a_topic_that_was_deleted_go_too(pair):
    """Queues of a topic that has only lost its configuration are kept."""
    peer, store = pair.peers["master"], pair.brokers["slave"].parts.store
    for topic in ("Orders", "Gone", "Lost"):
        await create(peer, topic)
        await peer.send(topic=topic)
    await pair.equal()
    await sync(pair)
    await peer.delete_topic("Gone")
    tables(pair, "master").topics.delete("Lost")
    await sync(pair)
    assert store.queues.topics() == ["Lost", "Orders"]
    await create(peer, "Gone")
    await peer.send(topic="Gone")
    await pair.equal()
    await sync(pair)
    assert store.max_offset("Gone", 0) == 1


async def test_a_topic_is_made_anew_before_the_slave_hears_of_its_end(pair):
    peer, store = pair.peers["master"], pair.brokers["slave"].parts.store
    for number in range(3):
        await create(peer, "Gone", write=3)
        for queue_id in range(number + 1):
            await peer.send("Gone", b"%d" % number, queue_id)
        await pair.equal()
        assert store.queues.next_offsets("Gone") == dict.fromkeys(range(number + 1), 1)
        await peer.delete_topic("Gone")


async def test_what_was_said_of_a_topic_does_not_count_for_its_successor(pair, monkeypatch):
    """Offsets and a purge of the old topic wait for the log and arrive after the new topic's messages."""
    peer, slave = pair.peers["master"], pair.brokers["slave"]
    await create(peer, "Again")
    for _ in range(3):
        await peer.send("Again")
    await pair.equal()
    await sync(pair)
    store = pair.brokers["master"].parts.store
    await store.topic_retention.raise_min_offsets("Again", {0: 3})
    tables(pair, "master").offsets.commit("G", "Again", 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(slave.parts.replication.slave, "end_tick", lambda: None)
        await peer.send(properties={"WAIT": "false"})
        await sync(pair)
    await peer.delete_topic("Again")
    await create(peer, "Again")
    for _ in range(2):
        await peer.send("Again")
    await pair.equal()
    await sync(pair)
    (queue,) = slave.parts.store.queues.of_topic("Again")
    assert (queue.min_offset, queue.max_offset) == (0, store.max_offset("Again", 0))
    assert queue.max_offset > 0  # a busy master may have refused one send
    assert tables(pair, "slave").offsets.query("G", "Again", 0) == -1
    assert slave.parts.store.min_offsets.by_topic == {}
