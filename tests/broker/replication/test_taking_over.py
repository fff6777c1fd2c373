"""Promotion of a slave's directory to the master, and tables copied from the master (docs/replication.md)."""

from __future__ import annotations

import shutil

import pytest
from tests.kit.brokers import commit, create
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq.broker.replication import ha_slave
from cometmq.broker.replication.ha_slave import Phase
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import ConsumerSendMsgBackRequestHeader
from cometmq.protocol.headers.admin import PurgeTopicRequestHeader

AS_MASTER = {"brokerRole": "ASYNC_MASTER", "brokerId": "0"}


@pytest.fixture
async def pair(group):
    await group.master(messageDelayLevel="1s 1h")
    await group.slave(messageDelayLevel="1s 1h")
    await group.known()
    return group


def tables(group, name="slave"):
    return group.brokers[name].parts.tables


def store(group, name="slave"):
    return group.brokers[name].parts.store


async def sync(group):
    await group.brokers["slave"].parts.replication.sync.sync()


async def promoted(group, **settings):
    """Start the slave's directory as the master once it has the whole log."""
    await group.equal()
    await group.stop("master")
    await group.stop("slave")
    return await group.again("slave", **AS_MASTER, **settings)


async def test_a_slave_that_becomes_the_master_knows_the_topics_of_its_log(pair, caplog):
    """The topics were created in the last seconds, after the last copy of the master's tables."""
    await sync(pair)
    peer = pair.peers["master"]
    await create(peer, "New", read=4, write=4)
    assert (await peer.send("New", queue_id=2)).code == 0
    assert (await peer.send("Waits", properties={"DELAY": "2"})).code == 0
    back = ConsumerSendMsgBackRequestHeader(offset=0, group="G", delay_level=1, origin_topic="New")
    assert (await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
    await until(lambda: store(pair, "master").max_offset("%RETRY%G", 0) == 1)
    await promoted(pair, messageDelayLevel="1s 1h")
    known = tables(pair).topics.table
    assert known["New"].read_queue_nums == known["New"].write_queue_nums == 3  # the queues its messages name
    assert known["%RETRY%G"].read_queue_nums == 1
    peer = pair.peers["slave"]
    assert (await peer.pull("New", 2)).code == 0
    assert (await peer.send("New", queue_id=1)).code == 0
    adopted = {record.args[0] for record in caplog.records if "no settings" in record.msg}
    assert adopted == {"New", "%RETRY%G"}


async def test_queues_that_were_added_in_the_last_seconds_are_served(pair):
    peer = pair.peers["master"]
    await create(peer, "Wider", read=2, write=2)
    await create(peer, "Narrower", read=4, write=4)
    await peer.send("Narrower", queue_id=3)
    await create(peer, "Narrower", read=2, write=2)
    await pair.equal()
    await sync(pair)
    await create(peer, "Wider", read=6, write=6)
    await peer.send("Wider", queue_id=5)
    await promoted(pair)
    known = tables(pair).topics.table
    assert (known["Wider"].read_queue_nums, known["Narrower"].read_queue_nums) == (6, 2)


async def test_a_slave_serves_the_topics_of_its_log_while_it_knows_no_master(pair):
    await sync(pair)
    assert (await pair.peers["master"].send("New")).code == 0
    await pair.equal()
    await pair.stop("master")
    await pair.stop("slave")
    await pair.again("slave")
    assert (await pair.peers["slave"].pull("New")).code == 0


async def test_a_master_that_comes_back_empty_takes_nothing_from_its_slave(group, monkeypatch, caplog):
    pair = group
    await pair.master(listenPort=str(free_port()), haListenPort=str(free_port()))
    await pair.slave()
    await pair.known()
    await create(pair.peers["master"])
    await pair.peers["master"].send_numbers(3)
    await commit(pair.peers["master"], 0, 2)
    await pair.equal()
    await sync(pair)
    core = pair.brokers["slave"].parts.replication.slave.core
    monkeypatch.setattr(ha_slave, "RETRY_INTERVAL_S", 600)  # no check before the next connection
    await pair.stop("master")
    await until(lambda: core.phase is Phase.PAUSING)
    shutil.rmtree(pair.root / "master")
    await pair.again("master")
    await create(pair.peers["master"], "Other")
    for _ in range(2):
        await sync(pair)
    assert (await pair.peers["slave"].pull()).code == 0
    assert "Orders" in tables(pair).topics.table
    assert "Other" not in tables(pair).topics.table
    assert tables(pair).offsets.query("G", "Orders", 0) == 2
    assert store(pair).max_offset("Orders", 0) == 3
    assert core.phase is Phase.STOPPED
    facts = pair.brokers["slave"].parts.replication.facts()
    end = store(pair).log.end
    assert facts["haProblem"] == f"the slave's log ends at {end}, ahead of the master's, which ends at 0"
    assert caplog.text.count("could not be copied: the slave's log ends at") == 1


async def test_what_is_purged_at_the_master_is_hidden_at_its_slave(pair):
    peer = pair.peers["master"]
    await create(peer)
    await peer.send_numbers(3)
    await pair.equal()
    await sync(pair)
    header = PurgeTopicRequestHeader(topic="Orders", execute=True)
    assert (await peer.call(RequestCode.PURGE_TOPIC, header)).code == 0
    await peer.send(body=b"new")
    await pair.equal()
    await sync(pair)
    assert store(pair).min_offset("Orders", 0) == 3
    await promoted(pair)
    assert (await pair.peers["slave"].pull(offset=0)).code == ResponseCode.PULL_OFFSET_MOVED
    assert store(pair).min_offset("Orders", 0) == 3


@pytest.mark.parametrize("anew", [False, True])
async def test_a_deletion_that_a_slave_was_away_for_is_done_when_it_comes(pair, anew):
    """The same holds if the slave's log ends before the deletion and a topic of that name exists again."""
    peer = pair.peers["master"]
    await create(peer, "Gone", write=3)
    for queue_id in range(3):
        await peer.send("Gone", b"old", queue_id)
    await pair.equal()
    await sync(pair)
    await pair.stop("slave")
    await peer.send("Gone", b"old", properties={"WAIT": "false"})
    await peer.delete_topic("Gone")
    if anew:
        await create(peer, "Gone", write=3)
        await peer.send("Gone", b"new", 1, properties={"WAIT": "false"})
    slave = await pair.again("slave")
    slave.parts.tables.topics.version = tables(pair, "master").topics.version
    await pair.equal()
    await sync(pair)
    assert store(pair).queues.next_offsets("Gone") == ({1: 1} if anew else {})
