"""Tests of the producer when servers refuse requests, hang, disappear or have no route for the topic."""

from __future__ import annotations

import asyncio
import pickle
import random
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    BrokerError,
    ClientInstance,
    ClientOptions,
    Message,
    MessageIllegal,
    MessageQueue,
    NoRouteError,
    Producer,
    ProducerOptions,
    RequestTimeout,
    SendStatus,
    select_by_random,
)
from cometmq.errors import ClientStateError, ConfigError, ConnectError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.compression import decompress
from cometmq.protocol.frame import Frame
from cometmq.protocol.properties.values import decode_properties
from cometmq.remoting import Connection, Limits

SEND = RequestCode.SEND_MESSAGE_V2
STORED = {"msgId": "A" * 32, "queueId": "0", "queueOffset": "5"}
Brokers = tuple[FakeBroker, FakeBroker]


@pytest.fixture
async def brokers(broker: FakeBroker, namesrv: FakeNamesrv) -> AsyncIterator[Brokers]:
    """Add two brokers with two queues each of topic T."""
    async with FakeBroker("broker-b") as other:
        namesrv.serve("T", broker, other)
        yield broker, other


def producer(namesrv: FakeNamesrv, **options: object) -> Producer:
    return Producer("p", namesrv=namesrv.addr, options=ProducerOptions(**options))  # type: ignore[arg-type]


@pytest.fixture
async def sender(namesrv: FakeNamesrv) -> AsyncIterator[Producer]:
    async with producer(namesrv) as made:
        yield made


def hang(frame: Frame) -> None:
    return None


# -- routes


async def test_no_route_names_everybody_who_was_asked_and_a_way_out(namesrv: FakeNamesrv) -> None:
    unreachable = "127.0.0.1:1"
    async with Producer("p", namesrv=f"{unreachable};{namesrv.addr}") as sender:
        with pytest.raises(NoRouteError) as caught:
            await sender.send(Message("Nowhere", b"x"))
    answers = dict(caught.value.asked)
    assert set(answers) == {unreachable, namesrv.addr}
    assert "cannot connect" in answers[unreachable]
    assert "TOPIC_NOT_EXIST (17)" in answers[namesrv.addr]
    assert "mqadmin updateTopic" in str(caught.value)
    assert "Nowhere" in str(caught.value)
    assert str(caught.value).count("mqadmin updateTopic") == 1
    assert "for the topic: Nowhere'" in str(caught.value)  # the name server's remark is not truncated


async def test_no_name_server_at_all_says_so() -> None:
    async with Producer("p", namesrv="127.0.0.1:1") as sender:
        with pytest.raises(NoRouteError, match="is one running there"):
            await sender.send(Message("T", b"x"))


@pytest.mark.parametrize("way", ["send", "selector", "oneway"])
async def test_a_hanging_name_server_costs_no_more_than_the_budget(namesrv: FakeNamesrv, way: str) -> None:
    namesrv.hangs = True
    message = Message("T", b"x")
    slow = ClientOptions(api_timeout_s=60.0)
    options = ProducerOptions(send_timeout_s=0.2)
    async with Producer("p", namesrv=namesrv.addr, options=options, client_options=slow) as sender:
        sending = {
            "send": sender.send(message),
            "selector": sender.send(message, selector=select_by_random),
            "oneway": sender.send_oneway(message),
        }
        wanted = sending.pop(way)
        for other in sending.values():
            other.close()
        begun = time.monotonic()
        with pytest.raises(NoRouteError, match="nothing within"):
            await wanted
        assert time.monotonic() - begun < 30.0


@pytest.mark.parametrize("queue", [MessageQueue("U", "broker-a", 0), 0])
async def test_a_queue_of_another_topic_is_refused(sender: Producer, broker: FakeBroker, queue: Any) -> None:
    message = Message("T", b"x")
    for sending in (
        sender.send(message, queue=queue),
        sender.send_oneway(message, queue=queue),
        sender.send_batch([message], queue=queue),
        sender.request(message, queue=queue, timeout_s=1.0),
    ):
        with pytest.raises(MessageIllegal, match="is not a queue of topic T") as caught:
            await sending
        assert caught.value.field == "queue"
    assert broker.sent == []


async def test_a_name_server_that_is_down_is_passed_over(namesrv: FakeNamesrv) -> None:
    async with Producer("p", namesrv=["127.0.0.1:1", namesrv.addr]) as sender:
        assert (await sender.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        assert sender.client.namesrv.current == namesrv.addr


async def test_a_topic_one_name_server_lacks_is_found_elsewhere(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    async with FakeNamesrv() as other:
        other.serve("T", broker)
        async with Producer("p", namesrv=[namesrv.addr, other.addr]) as sender:
            assert (await sender.send(Message("T", b"x"))).status is SendStatus.SEND_OK


async def test_an_unknown_topic_goes_where_topics_are_created(
    namesrv: FakeNamesrv, broker: FakeBroker, sender: Producer
) -> None:
    namesrv.serve("TBW102", broker, queues=8, perm=7)
    assert len(await sender.queues("New")) == 4
    await sender.send(Message("New", b"x"))
    (header, _), *_ = broker.sent
    assert (header.topic, header.default_topic, header.default_topic_queue_nums) == ("New", "TBW102", 4)


async def test_a_route_without_writable_queues_is_explained(
    namesrv: FakeNamesrv, broker: FakeBroker, sender: Producer
) -> None:
    namesrv.serve("T", broker, perm=4)
    with pytest.raises(NoRouteError, match="without a queue that may be written"):
        await sender.send(Message("T", b"x"))
    del namesrv.routes["T"]  # the route is cached by now
    with pytest.raises(NoRouteError, match="No topic route info"):
        await sender.send(Message("T", b"x"))


async def test_concurrent_sends_share_one_route_request(
    namesrv: FakeNamesrv, broker: FakeBroker, sender: Producer
) -> None:
    await asyncio.gather(*(sender.send(Message("T", b"x")) for _ in range(50)))
    assert namesrv.asked == ["T"]
    assert len(broker.sent) == 50


# -- tries


@pytest.mark.parametrize("code", [ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY])
async def test_a_refusal_that_may_pass_is_tried_on_another_broker(
    brokers: Brokers, code: ResponseCode, sender: Producer
) -> None:
    bad, _ = brokers
    bad.refuse(SEND, code)
    results = [await sender.send(Message("T", b"x")) for _ in range(4)]
    assert {result.queue.broker_name for result in results} == {"broker-b"}
    assert bad.requests.count(SEND) >= 1


async def test_a_refusal_for_good_is_raised_with_all_we_know(brokers: Brokers, sender: Producer) -> None:
    for broker in brokers:
        broker.refuse(SEND, ResponseCode.MESSAGE_ILLEGAL, "too odd")
    with pytest.raises(BrokerError) as caught:
        await sender.send(Message("T", b"x"))
    error = caught.value
    assert (error.code, error.name, error.remark, error.topic) == (13, "MESSAGE_ILLEGAL", "too odd", "T")
    assert error.broker_addr in [broker.addr for broker in brokers]
    assert len(error.key) == 32
    assert sum(broker.requests.count(SEND) for broker in brokers) == 1


async def test_the_last_error_tells_of_all_tries(brokers: Brokers, sender: Producer) -> None:
    for broker in brokers:
        broker.refuse(SEND, ResponseCode.SYSTEM_ERROR, "not today")
    with pytest.raises(BrokerError) as caught:
        await sender.send(Message("T", b"x"))
    (note,) = caught.value.__notes__
    tries = caught.value.tries
    assert note == str(tries)
    assert "sent 3 times to topic T" in note
    assert tries is not None
    assert (tries.topic, tries.took_s < 30, len(tries.outcomes)) == ("T", True, 3)
    assert {broker for broker, _ in tries.outcomes} == {"broker-a", "broker-b"}
    assert all("SYSTEM_ERROR (1)" in outcome for _, outcome in tries.outcomes)
    assert pickle.loads(pickle.dumps(caught.value)).tries == tries


async def test_the_error_of_a_single_try_tells_of_it_too(broker: FakeBroker, sender: Producer) -> None:
    broker.refuse(SEND, ResponseCode.SYSTEM_ERROR, "not today")
    with pytest.raises(BrokerError) as caught:
        await sender.send(Message("T", b"x"), queue=MessageQueue("T", "broker-a", 0))
    assert caught.value.tries is not None
    assert [broker for broker, _ in caught.value.tries.outcomes] == ["broker-a"]
    assert not hasattr(caught.value, "__notes__")
    assert BrokerError(1).tries is None


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_broker_that_failed_is_left_alone_if_that_is_asked_for(
    brokers: Brokers, namesrv: FakeNamesrv, enabled: bool
) -> None:
    brokers[0].refuse(SEND, ResponseCode.SYSTEM_ERROR, "not today")
    async with producer(namesrv, send_latency_fault_enable=enabled) as sender:
        for _ in range(12):
            assert (await sender.send(Message("T", b"x"))).queue.broker_name == "broker-b"
    asked = brokers[0].requests.count(SEND)
    assert asked <= 1 if enabled else asked > 1


async def test_a_broker_that_is_gone_is_passed_over(
    namesrv: FakeNamesrv, broker: FakeBroker, sender: Producer
) -> None:
    gone = FakeBroker("broker-gone")
    gone.addr = "127.0.0.1:1"
    namesrv.serve("T", gone, broker)
    for _ in range(4):
        assert (await sender.send(Message("T", b"x"))).queue.broker_name == "broker-a"


async def without_master(namesrv: FakeNamesrv, broker: FakeBroker, sender: Producer) -> None:
    """Request another topic's route, which shows that the broker's master is gone."""
    namesrv.serve("U", broker)
    namesrv.routes["U"].broker_datas[0].broker_addrs = {1: broker.addr}
    await sender.client.refresh_routes(["U"])
    assert sender.client.routes.master(broker.name) is None


async def test_a_broker_that_lost_its_master_is_passed_over(
    namesrv: FakeNamesrv, brokers: Brokers, sender: Producer
) -> None:
    await sender.send(Message("T", b"before"))
    await without_master(namesrv, brokers[0], sender)
    namesrv.hangs = True  # the old route of T stays cached
    for _ in range(4):
        assert (await sender.send(Message("T", b"x"))).queue.broker_name == "broker-b"


async def test_a_topic_whose_only_master_is_gone_is_tried_as_often_as_any_and_named(
    namesrv: FakeNamesrv, broker: FakeBroker, sender: Producer
) -> None:
    await sender.send(Message("T", b"before"))
    await without_master(namesrv, broker, sender)
    namesrv.hangs = True
    with pytest.raises(NoRouteError, match="a master of broker broker-a") as caught:
        await sender.send(Message("T", b"x"))
    assert "sent 3 times to topic T" in caught.value.__notes__[0]


async def test_a_queue_of_the_callers_choice_whose_master_is_gone_makes_the_route_be_asked_again(
    namesrv: FakeNamesrv, brokers: Brokers, sender: Producer
) -> None:
    chosen = MessageQueue("T", "broker-a", 0)
    await sender.send(Message("T", b"before"))
    await without_master(namesrv, brokers[0], sender)
    for send in (sender.send, sender.send_oneway):
        asked = namesrv.asked.count("T")
        with pytest.raises(NoRouteError, match="broker-a"):
            await send(Message("T", b"x"), queue=chosen)
        await until(lambda asked=asked: namesrv.asked.count("T") != asked)
        await sender.client.refresh_routes(["T"])  # shares the request in flight
        await without_master(namesrv, brokers[0], sender)


async def test_a_route_that_goes_during_a_retry_leaves_the_result(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    def stored(frame: Frame) -> Frame:
        namesrv.routes.clear()
        sender.client.routes.remove("T")
        return frame.response(10, ext=STORED)

    broker.on(SEND, stored)
    async with producer(namesrv, retry_another_broker_when_not_store_ok=True) as sender:
        assert (await sender.send(Message("T", b"x"))).status is SendStatus.FLUSH_DISK_TIMEOUT


async def test_a_hanging_broker_costs_no_more_than_the_budget(namesrv: FakeNamesrv, brokers: Brokers) -> None:
    for broker in brokers:
        broker.on(SEND, hang)
    async with producer(namesrv, send_timeout_s=60.0) as sender:
        begun = time.monotonic()
        with pytest.raises(RequestTimeout):
            await sender.send(Message("T", b"x"), timeout_s=0.3)
        assert 0.25 < time.monotonic() - begun < 30.0


async def test_a_limit_per_try_leaves_time_for_another_broker(namesrv: FakeNamesrv, brokers: Brokers) -> None:
    brokers[0].on(SEND, hang)
    async with producer(namesrv, try_timeout_s=0.1, send_timeout_s=30.0, retry_times=200) as sender:
        for _ in range(4):
            assert (await sender.send(Message("T", b"x"))).queue.broker_name == "broker-b"


async def test_a_given_queue_gets_one_try(brokers: Brokers, sender: Producer) -> None:
    bad, good = brokers
    bad.refuse(SEND, ResponseCode.SYSTEM_ERROR)
    with pytest.raises(BrokerError):
        await sender.send(Message("T", b"x"), queue=MessageQueue("T", "broker-a", 1))
    assert bad.requests.count(SEND) == 1
    assert good.requests.count(SEND) == 0


async def test_a_given_queue_of_an_unknown_broker_is_an_error(sender: Producer) -> None:
    with pytest.raises(NoRouteError, match="broker-x"):
        await sender.send(Message("T", b"x"), queue=MessageQueue("T", "broker-x", 0))


async def test_a_broker_that_moved_is_found_again(namesrv: FakeNamesrv) -> None:
    async with FakeBroker("broker-a") as old, FakeBroker("broker-a") as new:
        namesrv.serve("T", old)
        async with producer(namesrv, send_timeout_s=10.0) as sender:
            await sender.send(Message("T", b"before"))
            await old.__aexit__(None, None, None)
            namesrv.serve("T", new)

            async def sent() -> bool:
                try:
                    await sender.send(Message("T", b"after"))
                except ConnectError:
                    return False
                return True

            await until(lambda: sent())
    assert [body for _, body in new.sent] == [b"after"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_stored_but_not_safe_is_a_result(
    namesrv: FakeNamesrv, brokers: Brokers, code: int, status: SendStatus
) -> None:
    bad, good = brokers
    bad.on(SEND, lambda frame: frame.response(code, ext=STORED))
    namesrv.serve("T", bad)
    async with producer(namesrv) as sender:
        assert (await sender.send(Message("T", b"x"))).status is status
    namesrv.serve("T", bad, good)
    async with producer(namesrv, retry_another_broker_when_not_store_ok=True) as sender:
        for _ in range(4):
            assert (await sender.send(Message("T", b"x"))).status is SendStatus.SEND_OK


# -- messages


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), "topic"),
        (Message("T", b""), "body"),
        (Message("T", bytes(1001)), "body"),
        (Message("T", b"x", delay_level=19), "delay_level"),
        (Message("T", b"x", properties={"": "v"}), ""),
        (Message("T", b"x", properties={"n": ""}), "n"),
        (Message("T", b"x", properties={"CLUSTER": "v"}), "CLUSTER"),
        (Message("T", b"x", properties={"n": "ö" * 20000}), "properties"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_message_no_broker_would_take_is_refused_here(
    namesrv: FakeNamesrv, message: Message, field: str
) -> None:
    async with producer(namesrv, max_message_size=1000) as sender:
        with pytest.raises(MessageIllegal, check=lambda error: error.field == field):
            await sender.send(message)
    assert namesrv.asked == []


async def test_a_message_that_was_changed_is_checked_again(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    message = Message("T", b"x")
    message.tags = "a || b"
    async with producer(namesrv, max_delay_level=40) as sender:
        with pytest.raises(MessageIllegal, match="subscribed"):
            await sender.send(message)
        message.tags, message.keys, message.delay_level = "a", ["k"], 40
        await sender.send(message)
    properties = decode_properties((broker.sent[0][0].properties or "").encode())
    assert (properties["TAGS"], properties["KEYS"], properties["DELAY"]) == ("a", "k", "40")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], ""),
        ([Message("T", b"x"), Message("U", b"x")], "topic"),
        ([Message("%RETRY%g", b"x")], "topic"),
        ([Message("T", b"x", delay_level=1)], "delay_level"),
        ([Message("T", b"x", delay_ms=1)], "delay_level"),
        ([Message("T", b"x", properties={"TIMER_DELIVER_MS": "1"})], "delay_level"),
        ([Message("T", b"x"), Message("T", b"x", wait_store=False)], "wait_store"),
        ([Message("T", bytes(600)), Message("T", bytes(600))], "body"),
    ],
)
async def test_impossible_batches_are_refused(
    namesrv: FakeNamesrv, messages: list[Message], field: str
) -> None:
    async with producer(namesrv, max_message_size=1000) as sender:
        with pytest.raises(MessageIllegal, check=lambda error: error.field == field):
            await sender.send_batch(messages)


async def test_large_bodies_are_compressed_if_that_helps(broker: FakeBroker, sender: Producer) -> None:
    noise = random.Random(1).randbytes(5000)
    for body in (bytes(4095), bytes(4096), noise, bytes(300_000)):
        await sender.send(Message("T", body))
    small, large, incompressible, huge = broker.sent
    assert (small[0].sys_flag, small[1]) == (0, bytes(4095))
    assert large[0].sys_flag == 0x301
    assert zlib.decompress(large[1]) == bytes(4096)
    assert (incompressible[0].sys_flag, incompressible[1]) == (0, noise)
    assert zlib.decompress(huge[1]) == bytes(300_000)


@pytest.mark.parametrize(
    ("kind", "level", "sys_flag"), [("zlib", 9, 0x301), ("LZ4", 5, 0x101), ("ZSTD", 19, 0x201)]
)
async def test_the_compression_of_ones_choice(
    namesrv: FakeNamesrv, broker: FakeBroker, kind: str, level: int, sys_flag: int
) -> None:
    async with producer(namesrv, compress_type=kind, compress_level=level, compress_over=100) as sender:
        await sender.send(Message("T", bytes(5000)))
    ((header, body),) = broker.sent
    assert (header.sys_flag, decompress(sys_flag, body)) == (sys_flag, bytes(5000))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"compress_type": "gzip"}, "compress_type"),
        ({"compress_level": 10}, "compress_level"),
        ({"compress_type": "ZSTD", "compress_level": 0}, "compress_level"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.key == key):
        ProducerOptions(**options)  # type: ignore[arg-type]


def test_a_compression_whose_package_is_missing_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cometmq\[zstd\]"):
        ProducerOptions(compress_type="LZ4")


async def test_what_a_request_carries(broker: FakeBroker, sender: Producer) -> None:
    message = Message(
        "T", b"x", tags="A", keys=("k",), delay_level=3, flag=9, properties={"u": "v"}, wait_store=False
    )
    first = await sender.send(message)
    second = await sender.send(message)
    header, body = broker.sent[0]
    assert body == b"x"
    assert (header.producer_group, header.flag, header.batch, header.bname) == ("p", 9, False, "broker-a")
    properties = decode_properties((header.properties or "").encode())
    assert properties.pop("UNIQ_KEY") == first.msg_id
    assert properties == {"u": "v", "KEYS": "k", "TAGS": "A", "DELAY": "3", "WAIT": "false"}
    assert first.msg_id != second.msg_id
    assert abs(header.born_timestamp - time.time() * 1000) < 60_000


async def test_an_id_that_the_sender_chose_stays(sender: Producer) -> None:
    result = await sender.send(Message("T", b"x", properties={"UNIQ_KEY": "C" * 32}))
    assert result.msg_id == "C" * 32


# -- life


async def test_a_cancelled_send_leaves_the_producer_whole(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    broker.on(SEND, hang)
    async with producer(namesrv, max_in_flight=4) as sender:
        sends = [asyncio.create_task(sender.send(Message("T", b"x"))) for _ in range(12)]
        await broker.wait_for(lambda: broker.requests.count(SEND) == 4)
        for task in sends:
            task.cancel()
        ends = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}
        del broker.scripts[SEND]
        results = await asyncio.gather(*(sender.send(Message("T", b"y")) for _ in range(12)))
    assert len(results) == 12


@pytest.mark.parametrize("way", ["send", "batch", "oneway"])
async def test_sends_beyond_the_connections_limit_of_unsent_bytes_wait(
    namesrv: FakeNamesrv, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """All requests are queued in one iteration of the event loop, unless they wait."""
    limits = Limits(write_high=2**16, write_low=2**14, write_wait=2**20, write_evict=2**20, write_total=2**20)
    monkeypatch.setattr("cometmq.remoting.client.Limits", lambda: limits)
    message, plain_write = Message("T", bytes(60_000)), Connection.write
    was_full: list[bool] = []

    def write(connection: Connection, data: bytes) -> None:
        was_full.append(connection.full)
        plain_write(connection, data)

    monkeypatch.setattr(Connection, "write", write)
    async with producer(namesrv, compress_over=2**20, send_timeout_s=60.0) as sender:
        await sender.send(Message("T", b"x"))
        if way == "send":
            await asyncio.gather(*(sender.send(message) for _ in range(200)))
        elif way == "batch":
            await asyncio.gather(*(sender.send_batch([message, message]) for _ in range(100)))
        else:
            for _ in range(200):
                await sender.send_oneway(message)
        await broker.wait_for(lambda: sum(len(body) for _, body in broker.sent) > 200 * 60_000)
    assert len(broker.connections) == 1
    assert not any(was_full)


async def test_a_stop_waits_for_the_sends_under_way(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    held: list[Frame] = []
    broker.on(SEND, held.append)
    sender = producer(namesrv)
    await sender.start()
    sending = asyncio.create_task(sender.send(Message("T", b"x")))
    await broker.wait_for(lambda: bool(held))
    stopping = asyncio.create_task(sender.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    broker.connections[0].respond(held[0], 0, ext=STORED)
    assert (await sending).queue_offset == 5
    await stopping
    await sender.stop()
    with pytest.raises(ClientStateError):
        await sender.send(Message("T", b"x"))
    with pytest.raises(ClientStateError):
        await sender.start()


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_send_many_never_sends_nothing_in_silence(
    broker: FakeBroker, sender: Producer, concurrency: int
) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        await sender.send_many([Message("T", b"x")], concurrency=concurrency)
    assert broker.sent == []


async def test_send_many_keeps_order_and_stops_at_a_failure(broker: FakeBroker, sender: Producer) -> None:
    results = await sender.send_many((Message("T", b"%d" % n) for n in range(100)), concurrency=7)
    assert [int(broker.sent[r.queue_offset][1]) for r in results] == list(range(100))
    broker.sent.clear()
    mixed = (Message("T", b"" if n == 30 else b"x") for n in range(1000))
    with pytest.raises(MessageIllegal):
        await sender.send_many(mixed, concurrency=8)
    assert len(broker.sent) < 60


async def test_producers_announce_themselves_and_say_goodbye(
    namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    async with ClientInstance(namesrv.addr) as client:
        async with Producer("p1", client=client) as one, Producer("p2", client=client):
            await one.send(Message("T", b"x"))
            await broker.wait_for(lambda: bool(broker.heartbeats))
            assert [p.group_name for p in broker.heartbeats[-1].producer_data_set] == ["p1", "p2"]
            assert len(broker.connections) == 1
            broker.on(SEND, hang)
            sending = asyncio.create_task(one.send(Message("T", b"x")))
            await broker.wait_for(lambda: broker.requests.count(SEND) == 2)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.stop(), 0.01)  # stops draining, but still unregisters
            sending.cancel()
        assert broker.requests.count(RequestCode.UNREGISTER_CLIENT) == 2


async def test_selectors_choose_among_the_queues_of_the_topic(brokers: Brokers, sender: Producer) -> None:
    chosen = {(await sender.send(Message("T", b"x"), selector=select_by_random)).queue for _ in range(60)}
    assert chosen == set(await sender.queues("T"))
    wrong = MessageQueue("Other", "broker-a", 0)
    with pytest.raises(ValueError, match="Other"):
        await sender.send(Message("T", b"x"), selector=lambda queues, message, argument: wrong)
