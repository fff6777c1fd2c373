"""Effects of brokerRole, the limits of single pulls and other settings.

See docs/reference/storage.md, Writing, Reading, Pull answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest
from tests.kit.brokers import COMMIT, held, records, running
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq.broker.base.address import ports_of
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import ConfigError
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import VERSION_5_0_0, RequestCode, ResponseCode
from cometmq.protocol.headers import ConsumerSendMsgBackRequestHeader, QueryMessageRequestHeader
from cometmq.store import Clock, ManualClock


def begin(answer):
    return int(answer.ext["nextBeginOffset"])


@pytest.fixture
async def slave(tmp_path):
    """Start a slave on a store that a master wrote: 40 messages and a delayed one."""
    async with running(tmp_path, messageDelayLevel="1h") as (_, peer):
        await peer.send_numbers(40)
        await peer.send("Later", properties={"DELAY": "1"})
        await peer.pull()
    async with contextlib.AsyncExitStack() as stack:

        async def start(**more):
            more = {"brokerRole": "SLAVE", "brokerId": "1", "messageDelayLevel": "1h", **more}
            return await stack.enter_async_context(running(tmp_path, **more))

        yield start


class TestSlave:
    async def test_no_message_is_taken_and_none_delivered(self, slave):
        broker, peer = await slave()
        one = await peer.send()
        batch = encode_batch([(0, b"x", b"")])
        lot = await peer.send(body=batch, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
        header = ConsumerSendMsgBackRequestHeader(offset=0, group="G", delay_level=0)
        back = await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        assert (one.code, lot.code) == (ResponseCode.SERVICE_NOT_AVAILABLE,) * 2
        assert "slave" in one.remark
        assert back.code == ResponseCode.SYSTEM_ERROR
        assert [m.body for m in records(await peer.pull(offset=39))] == [b"39"]
        assert broker.parts.schedule.positions()[1] == (0, 1)
        assert broker.parts.schedule.cursors[1].timer is None

    async def test_pulls_commit_no_offset(self, slave):
        broker, peer = await slave()
        await peer.pull(flags=COMMIT, hold_ms=10, commit_offset=7)
        assert broker.parts.tables.offsets.queues("G", "Orders") == {}

    @pytest.mark.parametrize("asked", [-1, 100])
    async def test_offsets_stay_what_they_are(self, slave, asked):
        broker, peer = await slave(slaveReadEnable="true")
        broker.parts.tables.groups.table["G"].broker_id = 3
        end = broker.parts.store.log.end
        answer = await peer.pull(offset=asked)
        assert (answer.code, begin(answer)) == (ResponseCode.PULL_RETRY_IMMEDIATELY, asked)
        assert answer.ext["suggestWhichBrokerId"] == "3"
        assert broker.parts.store.log.end == end

    async def test_offsets_are_corrected_where_that_is_asked_for(self, slave):
        _, peer = await slave(offsetCheckInSlave="true")
        answer = await peer.pull(offset=100)
        assert (answer.code, begin(answer)) == (ResponseCode.PULL_OFFSET_MOVED, 40)

    async def test_the_group_says_which_broker_serves_whom(self, slave):
        broker, peer = await slave(slaveReadEnable="true")
        group = broker.parts.tables.groups.find("G")
        group.broker_id, group.which_broker_when_consume_slowly = 5, 6
        assert (await peer.pull()).ext["suggestWhichBrokerId"] == "5"
        broker.parts.store.reader.memory_bytes = 0
        assert (await peer.pull()).ext["suggestWhichBrokerId"] == "6"
        broker.config.slave_read_enable = False
        assert (await peer.pull()).ext["suggestWhichBrokerId"] == "0"


class TestMasterThatReplicates:
    """A master without connected slaves: no slave confirms a message."""

    @pytest.fixture(params=["ASYNC_FLUSH", "SYNC_FLUSH"])
    async def lonely(self, start_cluster, request):
        return await start_cluster(brokerRole="SYNC_MASTER", flushDiskType=request.param)

    async def test_senders_who_wait_hear_that_there_is_no_slave(self, lonely):
        peer = lonely.peer()
        for number in range(2):
            answer = await peer.send(body=b"%d" % number)
            assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
            assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("0", str(number))
            assert len(answer.ext["msgId"]) == 32
        batch = encode_batch([(0, b"2", b"")])
        lot = await peer.send(body=batch, code=RequestCode.SEND_BATCH_MESSAGE, batch=True)
        assert (lot.code, lot.ext["queueOffset"]) == (ResponseCode.SLAVE_NOT_AVAILABLE, "2")
        assert [m.body for m in records(await peer.pull())] == [b"0", b"1", b"2"]

    async def test_those_who_do_not_wait_hear_of_success(self, lonely):
        peer = lonely.peer()
        assert (await peer.send(properties={"WAIT": "false"})).code == 0
        await peer.pull()
        header = ConsumerSendMsgBackRequestHeader(offset=0, group="G", delay_level=1)
        assert (await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)).code == 0


@pytest.mark.parametrize("given", ["FOO", "", "slave"])
def test_a_role_that_there_is_not_is_refused(tmp_path, given):
    with pytest.raises(ConfigError) as error:
        BrokerConfig.from_properties({"brokerRole": given})
    assert (error.value.key, error.value.value) == ("brokerRole", given)


def test_a_slave_needs_an_id_of_its_own(tmp_path):
    with pytest.raises(ConfigError) as error:
        BrokerConfig.from_properties({"brokerRole": "SLAVE"})
    assert error.value.key == "brokerId"
    assert BrokerConfig.from_properties({"brokerRole": "SLAVE", "brokerId": "1"}).store.broker_role == "SLAVE"


@pytest.mark.parametrize("role", ["SYNC_MASTER", "ASYNC_MASTER", None])
def test_a_master_has_the_id_of_a_master(role, caplog):
    given = {"brokerId": "3"} | ({"brokerRole": role} if role else {})
    config = BrokerConfig.from_properties(given)
    assert config.properties()["brokerId"] == "0"
    assert "brokerId=3 is replaced by 0" in caplog.text


@pytest.mark.parametrize("given", ["0", "-1"])
def test_a_slave_with_the_id_of_a_master_is_refused(given):
    with pytest.raises(ConfigError, match="positive number") as error:
        BrokerConfig.from_properties({"brokerRole": "SLAVE", "brokerId": given})
    assert (error.value.key, error.value.value) == ("brokerId", given)


@pytest.mark.parametrize("key", ["listenPort", "haListenPort", "metricsPromExporterPort", "dLegerPeers"])
async def test_a_port_that_is_taken_stops_the_start(tmp_path, key):
    settings = {"brokerRole": "SYNC_MASTER"}
    number = port = str(free_port())  # its neighbouring ports are free
    with socket.create_server(("127.0.0.1", int(port))):
        if key == "metricsPromExporterPort":
            settings["metricsExporterType"] = "PROM"
        elif key == "dLegerPeers":
            settings = {"enableDLegerCommitLog": "true", "dLegerGroup": "broker-a", "dLegerSelfId": "n0"}
            port = f"n0-127.0.0.1:{port}"
        settings[key] = port
        with pytest.raises(ConfigError, match=f"{key} = '{number}': .*Address already in use"):
            async with running(tmp_path, **settings):
                pass
    async with running(tmp_path, **settings) as (broker, _):  # the store and the ports are free again
        assert [found for found, _, _ in ports_of(broker.config) if found == key] == [key]


async def test_the_role_of_a_running_broker_stays(started):
    _, peer = await started()
    answer = await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"brokerRole=SYNC_MASTER")
    assert (answer.code, "brokerRole" in answer.remark) == (16, True)
    assert (await peer.send()).code == 0


class TestOffsetMovedEvents:
    @pytest.mark.parametrize(("asked", "corrected"), [(-1, 0), (9, 2)])
    async def test_whoever_is_sent_elsewhere_stands_in_the_topic(self, cluster, peer, asked, corrected):
        await peer.send()
        await peer.send()
        await peer.pull(group="Lost", offset=asked)
        (event,) = records(await peer.pull("OFFSET_MOVED_EVENT", hold_ms=5000))
        queue = {"topic": "Orders", "brokerName": cluster.broker.config.broker_name, "queueId": 0}
        offsets = {"offsetRequest": asked, "offsetNew": corrected}
        assert json.loads(event.body) == {"consumerGroup": "Lost", "messageQueue": queue, **offsets}
        assert (event.tags, event.keys, event.queue_id) == ("Lost", ("Lost",), 0)
        assert event.born_host == event.store_host == cluster.addr
        (found,) = records(await peer.pull("OFFSET_MOVED_EVENT", expression="Lost"))
        assert found.body == event.body

    async def test_who_is_within_the_queue_or_at_its_end_does_not(self, cluster, peer):
        await peer.send()
        for offset in (0, 1):
            await peer.pull(offset=offset)
        assert cluster.broker.parts.store.max_offset("OFFSET_MOVED_EVENT", 0) == 0

    async def test_a_held_pull_whose_queue_goes_is_told_and_stands_there(self, cluster):
        """The offset event is stored at the end of a tick and is written by the next one."""
        peer, other = cluster.peer(), cluster.peer()
        await peer.send()
        broker = cluster.broker.parts
        pulling = await held(cluster, peer)
        await broker.store.deletion.delete(["Orders"])
        broker.pulls.topic_gone("Orders")
        assert (await pulling).code == ResponseCode.PULL_OFFSET_MOVED
        (event,) = records(await other.pull("OFFSET_MOVED_EVENT", hold_ms=5000))
        assert json.loads(event.body)["offsetRequest"] == 1

    async def test_a_store_that_takes_no_messages_answers_all_the_same(self, cluster, peer):
        await peer.send()
        cluster.broker.parts.store.appender.why_closed = "the test says so"
        answer = await peer.pull(offset=7)
        assert (answer.code, begin(answer)) == (ResponseCode.PULL_OFFSET_MOVED, 1)


class TestMostBytes:
    """The request field maxMsgBytes of 5.x clients."""

    @pytest.mark.parametrize(
        ("version", "asked", "count"),
        [
            (VERSION_5_0_0, 3500, 3),
            (VERSION_5_0_0, 1, 1),  # the first message is returned whatever its size
            (VERSION_5_0_0, 2**31 - 1, 10),
            (VERSION_5_0_0, None, 10),
            (VERSION_5_0_0, -5, 1),
            (407, 3500, 10),
        ],
    )
    async def test_an_answer_keeps_to_what_the_pull_asks_for(self, peer, version, asked, count):
        for _ in range(10):
            await peer.send(body=bytes(1000))
        answer = await peer.pull(version=version, max_msg_bytes=asked)
        assert len(records(answer)) == count

    async def test_less_than_a_hundred_bytes_is_a_hundred(self, peer):
        for _ in range(3):
            await peer.send("T", body=b"", properties={})
        size = records(await peer.pull("T"))[0].store_size
        assert size > 100
        assert len(records(await peer.pull("T", version=VERSION_5_0_0, max_msg_bytes=2 * size))) == 2


class TestLiveSettings:
    async def test_long_polling_can_be_switched_off_and_on(self, cluster):
        peer, admin = cluster.peer(), cluster.peer()
        await peer.send()
        change = b"longPollingEnable=false\nshortPollingTimeMills=50"
        assert (await admin.call(RequestCode.UPDATE_BROKER_CONFIG, None, change)).code == 0
        begun = time.monotonic()
        assert (await peer.pull(offset=1, hold_ms=15_000)).code == 19
        assert 0.05 <= time.monotonic() - begun < 10
        assert (await admin.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"longPollingEnable=true")).code == 0
        pulling = await held(cluster, peer)
        await asyncio.sleep(0.2)  # four times the duration of a short poll
        assert not pulling.done()
        await admin.send(body=b"second")
        assert [m.body for m in records(await pulling)] == [b"second"]

    async def test_a_query_by_unique_key_finds_default_query_max_num(self, peer):
        for _ in range(5):
            await peer.send(properties={"UNIQ_KEY": "U", "KEYS": "k"})
        for most in (2, 3):
            change = b"defaultQueryMaxNum=%d" % most
            assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, change)).code == 0
            for unique, count in ((True, most), (None, 4)):
                query = QueryMessageRequestHeader("Orders", "U", 4, 0, 1 << 60, unique_key_query=unique)
                assert len(records(await peer.call(RequestCode.QUERY_MESSAGE, query))) == count


async def test_deliveries_to_a_store_that_takes_nothing_are_tried_ever_more_rarely(
    cluster, peer, caplog, monkeypatch
):
    await peer.send(body=b"late", properties={"DELAY": "1"})
    broker = cluster.broker.parts
    schedule, cursor = broker.schedule, broker.schedule.cursors[1]
    waits = []
    (await until(lambda: cursor.timer)).cancel()
    monkeypatch.setattr(schedule, "_wake", lambda _cursor, delay_s=0.0: waits.append(delay_s))
    now = Clock()
    clock = ManualClock(now.time_ms() + 5000, now.boottime() + 5)
    monkeypatch.setattr(schedule, "clock", clock)
    shut, broker.store.appender.why_closed = broker.store.appender.why_closed, "the test says so"
    for number in range(12):
        schedule.run(cursor)
        await until(lambda number=number: len(waits) > number)
    assert waits == [pytest.approx(min(0.1 * 2**n, 10)) for n in range(12)]
    assert sum("could not deliver" in record.message for record in caplog.records) == 1
    broker.store.appender.why_closed = shut
    schedule.run(cursor)
    assert [m.body for m in records(await peer.pull(hold_ms=5000))] == [b"late"]
    await until(lambda: cursor.offset == 1)
    assert cursor.refusals.failures == 0
