"""Records that a client writes to the trace topic; no send or listener waits for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv, Script

from cometmq import (
    ClientInstance,
    ClientOptions,
    ConfigError,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    SyncProducer,
    TraceOptions,
    TransactionProducer,
    TransactionState,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.traces import (
    AnyTrace,
    ConsumeCode,
    EndTransaction,
    MessageType,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceLine,
    decode_trace,
)
from cometmq.testing import LocalBroker

TRACES = "RMQ_SYS_TRACE_TOPIC"
SEND = RequestCode.SEND_MESSAGE_V2
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "traces.json").read_text())
BEFORE = SubBefore(
    timestamp_ms=1, region="R", group="g", request_id="r", msg_id="id", retry_times=0, keys="k"
)  # fmt: skip


@dataclass
class Traced:
    """A broker with topic T and a trace topic, and the messages that were written to the trace topic."""

    namesrv: FakeNamesrv
    broker: FakeBroker

    @property
    def messages(self) -> list[tuple[list[str], list[AnyTrace]]]:
        """Return the keys and the records of each trace message."""
        return [
            (
                decode_properties((header.properties or "").encode())["KEYS"].split(),
                [decode_trace(text) for text in body.decode().split("\x02")[:-1]],
            )
            for header, body in self.broker.sent
            if header.topic == TRACES
        ]

    @property
    def records(self) -> list[AnyTrace]:
        return [trace for _, records in self.messages for trace in records]

    def client(self, sampling: float = 1.0, topic: str = TRACES) -> ClientInstance:
        trace = TraceOptions(topic=topic, sampling=sampling)
        return ClientInstance(self.namesrv.addr, ClientOptions(trace=trace))

    def producer(self, **options: float) -> Producer:
        trace = TraceOptions(**options)  # type: ignore[arg-type]
        return Producer("p", namesrv=self.namesrv.addr, client_options=ClientOptions(trace=trace))


@pytest.fixture
def traced(namesrv: FakeNamesrv, broker: FakeBroker) -> Traced:
    namesrv.serve(TRACES, broker, queues=1)
    return Traced(namesrv, broker)


# -- sends


async def test_a_send_is_traced_with_all_that_java_writes(traced: Traced) -> None:
    before = int(time.time() * 1000)
    async with traced.producer() as producer:
        sent = await producer.send(Message("T", b"hello", tags="TagA", keys=["k1", "k2"]))

    ((keys, (pub,)),) = traced.messages
    assert keys == [sent.msg_id, "k1", "k2"]
    assert isinstance(pub, Pub)
    assert before <= pub.timestamp_ms <= pub.timestamp_ms + pub.cost_ms <= int(time.time() * 1000)
    assert msgspec.structs.replace(pub, timestamp_ms=0, cost_ms=0) == Pub(
        timestamp_ms=0,
        region="DefaultRegion",
        group="p",
        topic="T",
        msg_id=sent.msg_id,
        tags="TagA",
        keys="k1 k2",
        store_host=traced.broker.addr,
        body_length=5,
        cost_ms=0,
        message_type=MessageType.NORMAL,
        offset_msg_id=sent.offset_msg_id,
        success=True,
    )
    ((header, _),) = [each for each in traced.broker.sent if each[0].topic == TRACES]
    assert header.producer_group == "_INNER_TRACE_PRODUCER"


async def test_each_message_of_a_batch_has_a_trace_of_its_own(traced: Traced) -> None:
    ids = ",".join(["A" * 32, "B" * 32])
    stored = {"queueId": "0", "queueOffset": "0", "msgId": ids}
    traced.broker.on(RequestCode.SEND_BATCH_MESSAGE, lambda frame: frame.response(0, ext=stored))
    async with traced.producer() as producer:
        sent = await producer.send_batch([Message("T", b"a", tags="one"), Message("T", b"bc", keys=["k"])])

    first, second = traced.records
    assert isinstance(first, Pub)
    assert isinstance(second, Pub)
    assert [first.msg_id, second.msg_id] == sent.msg_id.split(",")
    assert [first.offset_msg_id, second.offset_msg_id] == ids.split(",")
    assert (first.tags, first.keys, first.body_length) == ("one", None, 1)
    assert (second.tags, second.keys, second.body_length) == (None, "k", 2)


async def test_a_batch_with_one_offset_id_is_traced_too(traced: Traced) -> None:
    stored = {"queueId": "0", "queueOffset": "0", "msgId": "A" * 32}
    traced.broker.on(RequestCode.SEND_BATCH_MESSAGE, lambda frame: frame.response(0, ext=stored))
    async with traced.producer() as producer:
        await producer.send_batch([Message("T", b"a"), Message("T", b"b")])

    assert [pub.offset_msg_id for pub in traced.records if isinstance(pub, Pub)] == ["A" * 32] * 2


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Message("T", b"x", delay_level=3), MessageType.DELAY),
        (Message("T", b"x", properties={"TIMER_DELAY_SEC": "9"}), MessageType.DELAY),
        (Message("T", b"x", delay_ms=9), MessageType.DELAY),
        (Message("T", b"x", deliver_at_ms=9), MessageType.DELAY),
        (Message("T", b"x", properties={"mine": "9"}), MessageType.NORMAL),
    ],
)
async def test_the_kind_of_message_is_told(traced: Traced, message: Message, kind: MessageType) -> None:
    async with traced.producer() as producer:
        await producer.send(message)

    assert [pub.message_type for pub in traced.records if isinstance(pub, Pub)] == [kind]


async def test_every_try_that_a_broker_answered_is_traced(traced: Traced) -> None:
    answers = [
        lambda frame: frame.response(ResponseCode.SYSTEM_BUSY, "busy", ext={}),
        lambda frame: frame.response(
            ResponseCode.FLUSH_DISK_TIMEOUT, ext={"msgId": "A" * 32, "queueId": "0", "queueOffset": "1"}
        ),
    ]
    traced.broker.on(SEND, lambda frame: (answers.pop(0) if answers else traced.broker.answer)(frame))
    async with traced.producer() as producer:
        await producer.send(Message("T", b"x"))

    assert [pub.success for pub in traced.records if isinstance(pub, Pub)] == [False]


async def test_nothing_is_written_where_the_broker_says_so_or_nobody_answers(traced: Traced) -> None:
    stored = {"msgId": "A" * 32, "queueId": "0", "queueOffset": "1", "TRACE_ON": "false"}
    traced.broker.on(SEND, lambda frame: frame.response(0, ext=stored))
    async with traced.producer() as producer:
        await producer.send(Message("T", b"x"))
        await producer.send_oneway(Message("T", b"x"))

    assert traced.records == []


@pytest.mark.parametrize("topic", [TRACES, "rmq_sys_TRACE_DATA_here", "Mine"])
async def test_messages_of_trace_topics_are_not_traced(traced: Traced, topic: str) -> None:
    for name in (topic, "Mine"):
        traced.namesrv.serve(name, traced.broker, queues=1)
    async with traced.client(topic="Mine") as client, Producer("p", client=client) as producer:
        await producer.send(Message(topic, b"by hand"))

    assert len(traced.broker.sent) == 1


async def test_without_the_option_nothing_is_traced(traced: Traced) -> None:
    async with Producer("p", namesrv=traced.namesrv.addr) as producer:
        await producer.send(Message("T", b"x"))
        assert producer.client.traces is None

    assert len(traced.broker.sent) == 1


def test_the_blocking_producer_traces_too(local: LocalBroker) -> None:
    options = ClientOptions(trace=TraceOptions(topic="BlockingTraces"))
    with SyncProducer("p", namesrv=local.namesrv, client_options=options) as producer:
        producer.send(Message("Blocking", b"x"))
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        assert producer.queues("BlockingTraces")


# -- listeners


class Reader:
    """A listener that performs one scripted action per call and sets `done` at the last one."""

    def __init__(self, *acts: object) -> None:
        self._acts = list(acts)
        self.done = asyncio.Event()

    async def __call__(self, messages: list[MessageExt]) -> ConsumeStatus | None:
        act = self._acts.pop(0)
        if not self._acts:
            self.done.set()
        if isinstance(act, Exception):
            raise act
        if callable(act):
            return act()
        assert act is None or isinstance(act, ConsumeStatus)
        return act


def reading(traced: Traced, client: ClientInstance, listener: Reader, **options: object) -> PushConsumer:
    settings = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, **options)  # type: ignore[arg-type]
    return PushConsumer("g", listener, "T", options=settings, client=client)


async def test_a_listeners_call_is_traced_before_and_after(traced: Traced) -> None:
    for number in range(2):
        text = f"UNIQ_KEY\x01ID{number}\x02KEYS\x01k{number} all\x02MSG_REGION\x01North"
        traced.broker.store("T", 0, b"x", text.encode())
    listener = Reader(None)
    async with traced.client() as client, reading(traced, client, listener, consume_batch_max_size=8):
        await listener.done.wait()

    first, second, third, fourth = traced.records
    assert isinstance(first, SubBefore)
    assert isinstance(third, SubAfter)
    assert (first.region, first.group, first.msg_id, first.retry_times) == ("North", "g", "ID0", 0)
    assert (first.keys, second.msg_id, second.group) == ("k0 all", "ID1", "g")  # type: ignore[union-attr]
    assert (third.msg_id, third.success, third.context_code) == ("ID0", True, ConsumeCode.SUCCESS)
    assert (third.keys, third.group, fourth.msg_id) == ("k0 all", "g", "ID1")
    assert third.timestamp_ms is not None
    assert third.timestamp_ms >= first.timestamp_ms
    assert {each.request_id for each in traced.records if isinstance(each, SubBefore | SubAfter)} == {
        first.request_id
    }
    assert traced.messages[0][0] == ["ID0", "k0", "all", "ID1", "k1"]


@pytest.mark.parametrize(
    ("act", "options", "code", "success"),
    [
        (ConsumeStatus.SUCCESS, {}, ConsumeCode.SUCCESS, True),
        (ConsumeStatus.RECONSUME_LATER, {}, ConsumeCode.FAILED, False),
        (ValueError("no"), {}, ConsumeCode.EXCEPTION, False),
        (lambda: time.sleep(0.002), {"consume_timeout_s": 0.001}, ConsumeCode.TIME_OUT, True),
    ],
)
async def test_how_a_listeners_call_ended_is_told(
    traced: Traced, act: object, options: dict[str, object], code: ConsumeCode, success: bool
) -> None:
    traced.broker.store("T", 0, b"x")
    listener = Reader(act)
    async with traced.client() as client, reading(traced, client, listener, **options):
        await listener.done.wait()

    (after,) = [each for each in traced.records if isinstance(each, SubAfter)]
    assert (after.context_code, after.success) == (code, success)


async def test_a_message_whose_trace_is_off_is_left_out(traced: Traced) -> None:
    traced.broker.store("T", 0, b"x", b"UNIQ_KEY\x01off\x02TRACE_ON\x01false")
    traced.broker.store("T", 0, b"x", b"UNIQ_KEY\x01on\x02TRACE_ON\x01true")
    listener = Reader(None)
    async with traced.client() as client, reading(traced, client, listener, consume_batch_max_size=8):
        await listener.done.wait()

    assert [each.msg_id for each in traced.records] == ["on", "on"]


async def test_what_is_polled_is_traced_as_consumed(traced: Traced) -> None:
    traced.broker.store_numbers(3)
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with traced.client() as client, PullConsumer("g", options=options, client=client) as consumer:
        await consumer.assign([MessageQueue("T", "broker-a", 0)])
        assert len(await consumer.poll()) == 3

    kinds = [type(each) for each in traced.records]
    assert kinds == [SubBefore] * 3 + [SubAfter] * 3
    assert all(each.success for each in traced.records if isinstance(each, SubAfter))


async def test_what_a_consumer_sends_back_itself_is_not_traced(traced: Traced) -> None:
    traced.broker.store("T", 0, b"x", b"UNIQ_KEY\x01ID")
    traced.broker.refuse(RequestCode.CONSUMER_SEND_MSG_BACK, ResponseCode.SYSTEM_ERROR)
    traced.namesrv.serve("%RETRY%g", traced.broker, queues=1)
    listener = Reader(ConsumeStatus.RECONSUME_LATER)
    async with traced.client() as client, reading(traced, client, listener):
        await traced.broker.wait_for(lambda: len(traced.broker.sent) == 1)

    assert [type(each) for each in traced.records] == [SubBefore, SubAfter]


# -- transactions


@pytest.mark.parametrize("region", [None, "North"])
async def test_the_end_of_a_transaction_is_traced(traced: Traced, region: str | None) -> None:
    properties = {"MSG_REGION": region} if region else {}
    message = MessageExt(
        "T", b"x", properties={**properties, "TAGS": "TagA", "KEYS": "k1 k2", "UNIQ_KEY": "ID"}
    )
    async with traced.client() as client:
        assert client.traces is not None
        client.traces.transaction_ended("p", message, "a:1", "COMMIT_MESSAGE", from_check=True)
        client.traces.transaction_ended("p", MessageExt(TRACES, b"x"), "a:1", "UNKNOW", from_check=False)

    ((keys, (end,)),) = traced.messages
    assert keys == ["ID", "k1", "k2"]
    assert isinstance(end, EndTransaction)
    assert msgspec.structs.replace(end, timestamp_ms=0) == EndTransaction(
        timestamp_ms=0,
        region=region or "DefaultRegion",
        group="p",
        topic="T",
        msg_id="ID",
        tags="TagA",
        keys="k1 k2",
        store_host="a:1",
        message_type=MessageType.COMMIT,
        transaction_id="ID",
        state="COMMIT_MESSAGE",
        from_check=True,
    )


class Commits:
    """A transaction listener that commits every transaction."""

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        return TransactionState.COMMIT

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


@pytest.mark.parametrize(("trace_on", "count"), [("true", 2), ("false", 0)])
async def test_a_transaction_is_traced_unless_the_broker_says_no(
    traced: Traced, trace_on: str, count: int
) -> None:
    stored = {"msgId": "0" * 32, "queueId": "0", "queueOffset": "1", "TRACE_ON": trace_on}
    answers = [lambda frame: frame.response(0, ext=stored)]
    traced.broker.on(SEND, lambda frame: (answers.pop(0) if answers else traced.broker.answer)(frame))
    async with traced.client() as client, TransactionProducer("p", Commits(), client=client) as producer:
        await producer.send_in_transaction(Message("T", b"x"))

    assert len(traced.records) == count


async def test_a_check_of_a_message_whose_trace_is_off_is_not_traced(traced: Traced) -> None:
    message = MessageExt("T", b"x", properties={"UNIQ_KEY": "ID", "TRACE_ON": "false"})
    async with traced.client() as client:
        assert client.traces is not None
        client.traces.transaction_ended("p", message, "a:1", "COMMIT_MESSAGE", from_check=True)

    assert traced.records == []


# -- sampling


async def test_clients_with_the_same_share_choose_the_same_messages(traced: Traced) -> None:
    async with traced.producer(sampling=0.3) as producer:
        sent = await producer.send_many(Message("T", b"x") for _ in range(400))
    chosen = {each.msg_id for each in traced.records}
    assert 60 < len(chosen) < 180

    for result in sent:
        traced.broker.store("T", 0, b"x", b"UNIQ_KEY\x01" + result.msg_id.encode())
    listener = Reader(*[None] * 400)
    async with traced.client(sampling=0.3) as client, reading(traced, client, listener):
        await listener.done.wait()
    assert {each.msg_id for each in traced.records if isinstance(each, SubAfter)} == chosen


async def test_a_share_of_nothing_traces_nothing(traced: Traced) -> None:
    async with traced.producer(sampling=0) as producer:
        await producer.send_many(Message("T", b"x") for _ in range(50))
    assert traced.records == []


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"sampling": 1.1}, "trace.sampling"),
        ({"sampling": -0.1}, "trace.sampling"),
        ({"sampling": float("nan")}, "trace.sampling"),
        ({"topic": "no topic"}, "trace.topic"),
        ({"topic": ""}, "trace.topic"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as failed:
        TraceOptions(**options)  # type: ignore[arg-type]
    assert failed.value.key == key


# -- the line


@pytest.mark.parametrize("row", [row for row in GOLDEN if row["trace"]["type"] != "Recall"])
def test_a_message_has_the_keys_that_java_gives_it(row: dict[str, object]) -> None:
    trace = msgspec.convert(row["trace"], AnyTrace)
    assert not isinstance(trace, Recall)
    line = TraceLine()
    assert line.add(trace)
    body, keys, count = line.take()
    assert (body.decode(), sorted(keys.split()), count) == (row["text"], row["keys"], 1)


def numbered(keys: Sequence[str | None]) -> list[SubBefore]:
    return [
        msgspec.structs.replace(BEFORE, msg_id=f"id{number}", keys=text) for number, text in enumerate(keys)
    ]


def all_taken(line: TraceLine) -> list[tuple[bytes, str, int]]:
    taken = []
    while line:
        taken.append(line.take())
    return taken


def test_records_share_a_message_up_to_its_size_and_its_keys() -> None:
    by_size, by_keys = TraceLine(), TraceLine()
    for trace in numbered(["k"] * 3):
        by_size.add(msgspec.structs.replace(trace, region="r" * 60_000))
    for trace in numbered(["k" * 9_000, "l" * 9_000, "m" * 9_000, "k" * 9_000]):
        by_keys.add(trace)
    assert by_size.fills_a_message
    assert by_keys.fills_a_message

    assert [count for _, _, count in all_taken(by_size)] == [2, 1]
    assert [(len(keys), count) for _, keys, count in all_taken(by_keys)] == [(18_009, 2), (18_009, 2)]
    assert not by_size.fills_a_message
    assert not by_keys.fills_a_message


def test_one_key_of_many_records_stands_once() -> None:
    line = TraceLine()
    for trace in numbered(["same", "same", None]):
        line.add(trace)
    assert [keys for _, keys, _ in all_taken(line)] == ["id0 same id1 id2"]


def test_very_long_keys_are_left_out() -> None:
    line = TraceLine()
    for trace in numbered(["订" * 8_001]):
        line.add(trace)
    line.add(msgspec.structs.replace(BEFORE, msg_id="x" * 40_000, keys=None))
    assert [keys for _, keys, _ in all_taken(line)] == ["id0", "x" * 24_000]


def test_a_full_line_takes_no_more_until_something_is_taken() -> None:
    line = TraceLine(most_bytes=200)
    taken = [line.add(trace) for trace in numbered([None] * 20)]
    assert 3 < sum(taken) < 10
    assert taken == sorted(taken, reverse=True)
    line.take()
    assert line.add(BEFORE)


# -- sending


async def test_what_fills_a_message_is_sent_at_once_and_the_rest_soon(traced: Traced) -> None:
    async with traced.producer() as producer:
        await producer.send_many(Message("T", b"x", keys=["k" * 200]) for _ in range(400))
        await traced.broker.wait_for(lambda: len(traced.records) == 400)
    assert len(traced.messages) < 20


def answer_traces(traced: Traced, answer: Script) -> None:
    def script(frame: Frame) -> Frame | None:
        return answer(frame) if (frame.ext or {})["b"] == TRACES else traced.broker.answer(frame)

    traced.broker.on(SEND, script)


async def test_a_trace_topic_that_hangs_delays_no_send_and_the_stop_by_its_limit_only(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    answer_traces(traced, lambda frame: None)
    producer = traced.producer()
    await producer.start()
    await producer.send_many(Message("T", b"x") for _ in range(700))
    begun = time.monotonic()
    await producer.stop()
    assert 2.9 < time.monotonic() - begun < 30
    assert producer.client.traces is not None
    assert producer.client.traces.dropped == 700
    assert "trace records lost in total: 700" in caplog.text


async def test_what_does_not_fit_is_counted_and_said_once(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    async with traced.client() as client:
        traces = client.traces
        assert traces is not None
        message = MessageExt("T", b"x", properties={"KEYS": "k" * 20_000, "UNIQ_KEY": "ID"})
        for _ in range(200):
            traces.consumed(traces.consuming("g", [message]), ConsumeCode.SUCCESS, success=True)
        assert traces.dropped > 100
        (line,) = caplog.messages
        assert line == "trace records lost: 1, possibly more: records arrive faster than they are sent"


async def test_a_refused_trace_is_tried_once_more_and_then_lost(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Frame] = []

    def refuse(frame: Frame) -> Frame:
        answers.append(frame.response(ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is full", ext={}))
        return answers[-1]

    answer_traces(traced, refuse)
    async with traced.producer() as producer:
        await producer.send(Message("T", b"x"))
    assert producer.client.traces is not None
    assert (len(answers), producer.client.traces.dropped) == (2, 1)
    assert "the disk is full" in caplog.text


async def test_a_trace_topic_that_nobody_knows_loses_traces_only(
    namesrv: FakeNamesrv, broker: FakeBroker, caplog: pytest.LogCaptureFixture
) -> None:
    traced = Traced(namesrv, broker)
    async with traced.producer() as producer:
        await producer.send(Message("T", b"x"))
    assert producer.client.traces is not None
    assert producer.client.traces.dropped == 1
    assert f"no route to topic {TRACES}" in caplog.text
    assert len(broker.sent) == 1


async def test_members_of_a_shared_instance_share_its_traces(traced: Traced) -> None:
    async with traced.client() as client, Producer("p", client=client) as one:
        await one.send(Message("T", b"x"))
        async with Producer("q", client=client) as other:
            await other.send(Message("T", b"x"))
    assert [pub.group for pub in traced.records if isinstance(pub, Pub)] == ["p", "q"]
    assert len(traced.messages) == 1


async def test_an_instance_that_was_never_started_closes(traced: Traced) -> None:
    await traced.client().close()
