"""Requests of a transaction producer, and its handling of a broker's transaction checks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ClientStateError,
    ConfigError,
    EndingTransaction,
    Message,
    MessageExt,
    MessageIllegal,
    MessageQueue,
    ProducerOptions,
    SendStatus,
    SyncTransactionProducer,
    TransactionProducer,
    TransactionState,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from cometmq.protocol.properties.values import decode_properties, encode_properties
from cometmq.protocol.record.one import encode_record

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
POSITION = 0xAB  # log position of each message


class Listener:
    """A transaction listener with scripted results."""

    def __init__(self, local: Any = COMMIT, check: Any = COMMIT) -> None:
        self.local, self.checked = local, check
        self.begun: list[tuple[MessageExt, object]] = []
        self.asked: list[MessageExt] = []

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> Any:
        self.begun.append((message, argument))
        return await self._say(self.local)

    async def check_local_transaction(self, message: MessageExt) -> Any:
        self.asked.append(message)
        return await self._say(self.checked)

    async def _say(self, answer: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return await answer()
        return answer


class Ends:
    """The END_TRANSACTION requests that a broker received."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.headers: list[EndTransactionRequestHeader] = []
        self.remarks: list[str | None] = []
        broker.on(RequestCode.END_TRANSACTION, self._end)

    def _end(self, frame: Frame) -> None:
        assert frame.is_oneway
        self.headers.append(frame.header(EndTransactionRequestHeader))
        self.remarks.append(frame.remark)

    async def next(self, count: int = 1) -> EndTransactionRequestHeader:
        await self.broker.wait_for(lambda: len(self.headers) >= count)
        return self.headers[count - 1]


@pytest.fixture
def ends(broker: FakeBroker) -> Ends:
    return Ends(broker)


Make = Callable[..., TransactionProducer]


@pytest.fixture
def make(namesrv: FakeNamesrv) -> Make:
    def producer(listener: object, **options: Any) -> TransactionProducer:
        topics = options.pop("topics", ())
        settings = ProducerOptions(**options)
        return TransactionProducer(
            "PG",
            listener,
            topics=topics,
            namesrv=namesrv.addr,
            options=settings,  # type: ignore[arg-type]
        )

    return producer


def ask(
    broker: FakeBroker, key: str = "K", group: str = "PG", body: bytes = b"asked", offset: int = 5
) -> None:
    """Let the broker check a transaction, on the connection of the last heartbeat."""
    properties = encode_properties({"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": key})
    header = CheckTransactionStateRequestHeader(
        tran_state_table_offset=offset, commit_log_offset=900, msg_id=key, transaction_id=key
    )
    record = encode_record("T", body, properties, queue_offset=offset, physical_offset=900)
    broker.connections[-1].oneway(Frame.request(RequestCode.CHECK_TRANSACTION_STATE, header, record))


# -- sending


@pytest.mark.parametrize(("state", "number"), [(COMMIT, 8), (ROLLBACK, 12), (UNKNOWN, 0), (None, 0)])
async def test_the_broker_is_told_how_the_local_transaction_ended(
    make: Make, broker: FakeBroker, ends: Ends, state: TransactionState | None, number: int
) -> None:
    listener = Listener(state)
    async with make(listener) as producer:
        message = Message("T", b"body", tags="A", keys=("k",), properties={"own": "1"}, delay_level=4)
        result = await producer.send_in_transaction(message, "argument")
        header = await ends.next()
    ((sent, _),) = broker.sent
    properties = decode_properties((sent.properties or "").encode())
    assert sent.sys_flag == 4
    assert properties == {
        "own": "1", "KEYS": "k", "TAGS": "A", "WAIT": "true", "UNIQ_KEY": result.msg_id,
        "TRAN_MSG": "true", "PGROUP": "PG",
    }  # fmt: skip
    assert message.delay_level == 4
    assert (result.status, result.state, result.error) == (SendStatus.SEND_OK, state or UNKNOWN, None)
    assert header == EndTransactionRequestHeader(
        producer_group="PG", tran_state_table_offset=0, commit_log_offset=POSITION,
        commit_or_rollback=number, from_transaction_check=False, msg_id=result.msg_id,
        transaction_id=result.msg_id,
    )  # fmt: skip
    ((begun, argument),) = listener.begun
    assert result.transaction_id == result.msg_id  # a 4.9 broker's response has no transaction id
    assert (begun.msg_id, begun.body, begun.tags, argument) == (result.msg_id, b"body", "A", "argument")
    assert (begun.queue, begun.offset_msg_id) == (result.queue, result.offset_msg_id)


async def test_hooks_are_told_of_each_end(make: Make, broker: FakeBroker, ends: Ends) -> None:
    told: list[EndingTransaction] = []

    def broken(ending: EndingTransaction) -> None:
        raise ValueError("a bug")

    async with make(Listener(ROLLBACK, COMMIT), end_transaction_hooks=[broken, told.append]) as producer:
        sent = await producer.send_in_transaction(Message("T", b"x"))
        await ready(broker)
        ask(broker)
        await ends.next(2)
    assert [(each.message.msg_id, each.state, each.from_check) for each in told] == [
        (sent.msg_id, ROLLBACK, False),
        ("K", COMMIT, True),
    ]
    assert {(each.group, each.broker_addr) for each in told} == {("PG", broker.addr)}


@pytest.mark.parametrize("wrong", [ValueError("no money"), "COMMIT"])
async def test_what_the_local_transaction_raises_is_in_the_result(
    make: Make, ends: Ends, caplog: pytest.LogCaptureFixture, wrong: object
) -> None:
    async with make(Listener(wrong)) as producer:
        result = await producer.send_in_transaction(Message("T", b"x"))
        assert (await ends.next()).commit_or_rollback == 0
    assert result.state is UNKNOWN
    assert type(result.error) is (ValueError if isinstance(wrong, ValueError) else TypeError)
    assert type(result.error).__name__ in (ends.remarks[0] or "")
    assert "execute_local_transaction of group PG failed" in caplog.text


@pytest.mark.parametrize("status", ["FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"])
async def test_what_is_not_safe_is_rolled_back_without_a_local_transaction(
    make: Make, broker: FakeBroker, ends: Ends, status: str
) -> None:
    ext = {"msgId": "7F0000010000277700000000000000AB", "queueId": "0", "queueOffset": "0"}
    broker.on(RequestCode.SEND_MESSAGE_V2, lambda frame: frame.response(ResponseCode[status], ext=ext))
    listener = Listener()
    async with make(listener) as producer:
        result = await producer.send_in_transaction(Message("T", b"x"))
        assert (await ends.next()).commit_or_rollback == 12
    assert (result.status.name, result.state, listener.begun) == (status, ROLLBACK, [])


async def test_a_send_that_fails_begins_nothing(make: Make, broker: FakeBroker, ends: Ends) -> None:
    broker.refuse(RequestCode.SEND_MESSAGE_V2, ResponseCode.MESSAGE_ILLEGAL)
    listener = Listener()
    async with make(listener) as producer:
        with pytest.raises(Exception, match="MESSAGE_ILLEGAL"):
            await producer.send_in_transaction(Message("T", b"x"))
    assert (listener.begun, ends.headers) == ([], [])


@pytest.mark.parametrize("properties", [{"TIMER_DELAY_SEC": "1"}, {"TRAN_MSG": "true"}, {"x": "y" * 32_700}])
async def test_messages_that_cannot_be_part_of_a_transaction(make: Make, properties: dict[str, str]) -> None:
    async with make(Listener()) as producer:
        with pytest.raises(MessageIllegal):
            await producer.send_in_transaction(Message("T", b"x", properties=properties))
        with pytest.raises(MessageIllegal):
            await producer.send_in_transaction("no message")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["delay_ms", "deliver_at_ms"])
async def test_a_message_of_a_transaction_has_no_delivery_time(
    make: Make, broker: FakeBroker, field: str
) -> None:
    async with make(Listener()) as producer:
        with pytest.raises(
            MessageIllegal, match=f"a transaction message cannot be delayed: {field}"
        ) as caught:
            await producer.send_in_transaction(Message("T", b"x", **{field: 60_000}))
    assert caught.value.field == field
    assert broker.sent == []


@pytest.mark.parametrize("kind", [{"priority": 1}, {"lite_topic": "a"}])
async def test_a_message_of_a_transaction_or_batch_has_neither_priority_nor_lite_topic(
    make: Make, broker: FakeBroker, kind: dict[str, Any]
) -> None:
    message = Message("T", b"x", **kind)
    async with make(Listener()) as producer:
        with pytest.raises(MessageIllegal, match="a transaction message cannot have a") as caught:
            await producer.send_in_transaction(message)
        assert caught.value.field == next(iter(kind))
        with pytest.raises(MessageIllegal, match="a message of a batch cannot have a"):
            await producer.send_batch([message])
    assert broker.sent == []


async def test_a_stop_waits_for_local_transactions(make: Make, ends: Ends) -> None:
    goes_on = asyncio.Event()

    async def slow() -> TransactionState:
        await goes_on.wait()
        return COMMIT

    listener = Listener(slow)
    producer = make(listener)
    await producer.start()
    sending = asyncio.create_task(producer.send_in_transaction(Message("T", b"x")))
    await ends.broker.wait_for(lambda: bool(ends.broker.sent))
    stopping = asyncio.create_task(producer.stop())
    goes_on.set()
    assert (await sending).state is COMMIT
    await stopping
    assert (await ends.next()).commit_or_rollback == 8


async def test_plain_methods_run_in_threads(make: Make, broker: FakeBroker, ends: Ends) -> None:
    threads: list[str] = []

    class Plain:
        def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
            threads.append(threading.current_thread().name)
            return COMMIT

        def check_local_transaction(self, message: MessageExt) -> TransactionState:
            threads.append(threading.current_thread().name)
            return ROLLBACK

    async with make(Plain()) as producer:
        await producer.send_in_transaction(Message("T", b"x"))
        ask(broker)
        assert (await ends.next(2)).commit_or_rollback == 12
    assert all(name.startswith("cometmq-PG") for name in threads)
    assert len(threads) == 2


# -- being asked


async def ready(broker: FakeBroker) -> None:
    """Wait until the producer has sent a heartbeat."""
    await broker.wait_for(lambda: bool(broker.heartbeats))


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (COMMIT, 8),
        (ROLLBACK, 12),
        (UNKNOWN, 0),
        (None, 0),
        (ValueError("x"), 0),
        (asyncio.CancelledError("what the listener awaited was cancelled"), 0),
    ],
)
async def test_the_broker_is_answered_with_what_it_asked_for(
    make: Make, broker: FakeBroker, ends: Ends, answer: object, number: int
) -> None:
    listener = Listener(check=answer)
    async with make(listener, topics=["T"]):
        await ready(broker)
        ask(broker, offset=77)
        header = await ends.next()
    assert header == EndTransactionRequestHeader(
        producer_group="PG", tran_state_table_offset=77, commit_log_offset=900,
        commit_or_rollback=number, from_transaction_check=True, msg_id="K", transaction_id="K",
    )  # fmt: skip
    assert [(message.msg_id, message.body) for message in listener.asked] == [("K", b"asked")]
    assert (ends.remarks[0] is not None) == isinstance(answer, BaseException)


async def test_it_announces_itself_before_it_sends_and_after_a_lost_connection(
    make: Make, broker: FakeBroker
) -> None:
    async with make(Listener(), topics="T"):
        await ready(broker)
        assert [data.group_name for data in broker.heartbeats[-1].producer_data_set] == ["PG"]
        broker.connections[-1].close()
        await broker.wait_for(lambda: len(broker.heartbeats) > 1)


async def test_other_groups_and_nonsense_are_not_answered(make: Make, broker: FakeBroker, ends: Ends) -> None:
    listener = Listener()
    async with make(listener, topics=["T"]):
        await ready(broker)
        ask(broker, group="Other")
        header = CheckTransactionStateRequestHeader(tran_state_table_offset=1, commit_log_offset=1)
        for body in (b"", b"no record"):
            nonsense = Frame.request(RequestCode.CHECK_TRANSACTION_STATE, header, body)
            broker.connections[-1].oneway(nonsense)
        ask(broker, key="good")
        assert (await ends.next()).msg_id == "good"
    assert len(ends.headers) == len(listener.asked) == 1


async def test_checks_run_some_at_a_time_wait_in_a_bounded_line_and_are_dropped_beyond(
    make: Make, broker: FakeBroker, ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = asyncio.Event()

    async def slow() -> TransactionState:
        await goes_on.wait()
        return COMMIT

    listener = Listener(check=slow)
    async with make(listener, topics=["T"], checks_at_once=2, max_checks_waiting=3):
        await ready(broker)
        for number in range(2):
            ask(broker, key=f"K{number}")
        await until(lambda: len(listener.asked) >= 2)
        for number in range(2, 7):
            ask(broker, key=f"K{number}")
        await until(lambda: caplog.text.count("is dropped") >= 2)
        assert len(listener.asked) == 2
        goes_on.set()
        await ends.next(5)
    assert sorted(header.msg_id or "" for header in ends.headers) == [f"K{number}" for number in range(5)]


async def test_nobody_is_asked_once_the_producer_is_stopped(
    namesrv: FakeNamesrv, broker: FakeBroker, ends: Ends
) -> None:
    async with ClientInstance(namesrv.addr) as shared:
        first = TransactionProducer("PG", Listener(), topics=["T"], client=shared)
        await first.start()
        await ready(broker)
        with pytest.raises(ClientStateError, match="has a transaction producer of group PG already"):
            await TransactionProducer("PG", Listener(), client=shared).start()
        assert shared.transactions["PG"] is first
        await first.stop()
        ask(broker)
        await shared.brokers.max_offset(broker.addr, MessageQueue("T", "broker-a", 0))  # follows the check
        listener = Listener()
        async with TransactionProducer("PG", listener, topics=["T"], client=shared):
            ask(broker, key="second")
            assert (await ends.next()).msg_id == "second"


@pytest.mark.parametrize("listener", [None, object(), print])
def test_what_is_no_listener_is_refused(listener: object) -> None:
    with pytest.raises(ConfigError, match="execute_local_transaction"):
        TransactionProducer("PG", listener)  # type: ignore[arg-type]


def test_topics_are_checked() -> None:
    with pytest.raises(MessageIllegal):
        TransactionProducer("PG", Listener(), topics=["bad topic"])


async def test_blocking(namesrv: FakeNamesrv, broker: FakeBroker, ends: Ends) -> None:
    listener = Listener()

    def use() -> TransactionState:
        with SyncTransactionProducer("PG", listener, topics=["T"], namesrv=namesrv.addr) as producer:
            producer.send(Message("T", b"usual"))
            return producer.send_in_transaction(Message("T", b"x"), 1).state

    assert await asyncio.to_thread(use) is COMMIT
    await ends.next()
    assert [argument for _, argument in listener.begun] == [1]
