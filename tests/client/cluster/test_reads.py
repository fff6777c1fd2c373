"""The broker that each kind of consumer reads from while the master is killed, paused, busy or back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv, pull_answer
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ClientOptions,
    ConsumeFromWhere,
    MessageExt,
    MessageQueue,
    MessageStream,
    PullConsumer,
    PullOptions,
    PullTurn,
    PushConsumer,
    PushOptions,
)
from cometmq.cli.listening import Watch
from cometmq.client.cluster import reads
from cometmq.client.group.subscription import as_subscription
from cometmq.errors import BrokerError, CometError, NoRouteError, RemotingError
from cometmq.message import PullResult
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame

QUEUE = MessageQueue("T", "broker-a", 0)
FIRST = ConsumeFromWhere.FIRST_OFFSET
WAITS = {"broker_suspend_s": 0.1, "suspend_timeout_s": 0.5}
PULL = PullOptions(consume_from_where=FIRST, **WAITS)
PUSH = PushOptions(consume_from_where=FIRST, pull_error_delay_s=0.01, **WAITS)
Seen = list[bytes]
Consumer = Callable[[ClientInstance, Seen], Coroutine[Any, Any, None]]


def keep(seen: Seen, messages: list[MessageExt]) -> None:
    seen += [message.body for message in messages]


async def by_pull(client: ClientInstance, seen: Seen) -> None:
    async with PullConsumer("g", client=client, options=PULL) as consumer:
        offset = 0
        while True:
            with suppress(RemotingError):  # the broker is paused; the next pull goes to another one
                result = await consumer.pull(QUEUE, offset, timeout_s=0.5)
                offset = result.next_begin_offset
                keep(seen, result.messages)
            await asyncio.sleep(0.01)


async def by_poll(client: ClientInstance, seen: Seen, *, subscribes: bool) -> None:
    async with PullConsumer("g", client=client, options=PULL) as consumer:
        await (consumer.subscribe("T") if subscribes else consumer.assign([QUEUE]))
        async for message in consumer:
            seen.append(message.body)


async def by_schedule(client: ClientInstance, seen: Seen) -> None:
    async def function(queue: MessageQueue, turn: PullTurn) -> None:
        offset = len(seen)
        result = await turn.consumer.pull(queue, offset, timeout_s=0.5)
        keep(seen, result.messages)
        turn.next_delay_s = 0.01

    async with PullConsumer("g", client=client, options=PULL) as consumer:
        await consumer.schedule("T", function)
        await asyncio.Event().wait()


async def by_push(client: ClientInstance, seen: Seen) -> None:
    async def listener(messages: list[MessageExt]) -> None:
        keep(seen, messages)

    async with PushConsumer("g", listener, "T", client=client, options=PUSH):
        await asyncio.Event().wait()


async def by_stream(client: ClientInstance, seen: Seen) -> None:
    async with MessageStream("g", "T", client=client, options=PUSH) as stream:
        async for message in stream:
            seen.append(message.body)
            await stream.ack(message)


async def by_tail(client: ClientInstance, seen: Seen) -> None:
    async def show(result: PullResult) -> None:
        keep(seen, result.messages)

    watch = Watch(client, as_subscription("T", "*"), 0, show)
    await watch.start()
    try:
        await asyncio.Event().wait()
    finally:
        await watch.stop()


KINDS: dict[str, Consumer] = {
    "pull": by_pull,
    "assign": partial(by_poll, subscribes=False),
    "subscribe": partial(by_poll, subscribes=True),
    "schedule": by_schedule,
    "push": by_push,
    "stream": by_stream,
    "tail": by_tail,
}


class Pair:
    """A master, its replica, and a name server that lists both."""

    def __init__(self, master: FakeBroker, replica: FakeBroker, namesrv: FakeNamesrv) -> None:
        self.master, self.replica, self.namesrv = master, replica, namesrv
        for broker in (master, replica):
            broker.on(RequestCode.PULL_MESSAGE, partial(self.pull, broker))
        namesrv.serve("T", master, queues=1)
        self.list_both()
        self.suggested = 0

    def list_both(self) -> None:
        addrs = {0: self.master.addr, 1: self.replica.addr}
        self.namesrv.routes["T"].broker_datas[0].broker_addrs = addrs

    def pull(self, broker: FakeBroker, frame: Frame) -> Frame:
        """Respond immediately, even without a message; the master adds the broker that the test suggests."""
        offset, end = 0, len(broker.records.get(("T", 0), []))
        answer = broker.pull(frame)
        offset = broker.pulls[-1].queue_offset
        if answer is None:
            answer = pull_answer(frame, ResponseCode.PULL_NOT_FOUND, offset, end)
        if broker is self.master:
            answer.ext["suggestWhichBrokerId"] = str(self.suggested)
        return answer

    async def stop_master(self) -> None:
        await self.master.__aexit__(None, None, None)

    def pause_master(self) -> None:
        self.master.scripts = {code: lambda _: None for code in RequestCode}


@pytest.fixture
async def pair(broker: FakeBroker, namesrv: FakeNamesrv) -> AsyncIterator[Pair]:
    async with FakeBroker("broker-a") as replica:
        yield Pair(broker, replica, namesrv)


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_PROBE_INTERVALS_S", (0.05, 0.05))


@asynccontextmanager
async def consuming(pair: Pair, kind: str) -> AsyncIterator[Seen]:
    seen: Seen = []
    options = ClientOptions(api_timeout_s=0.5)
    async with ClientInstance(pair.namesrv.addr, options) as client:
        task = asyncio.create_task(KINDS[kind](client, seen))
        try:
            yield seen
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def numbers(count: int) -> Seen:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_consumer_starts_and_reads_at_a_replica_whose_master_is_not_listed(
    pair: Pair, kind: str
) -> None:
    await pair.stop_master()
    del pair.namesrv.routes["T"].broker_datas[0].broker_addrs[0]
    pair.replica.store_numbers(3)
    async with consuming(pair, kind) as seen:
        await until(lambda: len(seen) == 3)
    assert seen == numbers(3)


@pytest.mark.parametrize("kind", ["assign", "subscribe", "push", "stream"])
async def test_a_consumer_that_starts_with_an_old_route_reads_the_replica_of_a_master_that_was_killed(
    pair: Pair, kind: str
) -> None:
    pair.replica.store_numbers(3)
    pair.replica.offsets["T", 0] = 1
    seen: Seen = []
    async with ClientInstance(pair.namesrv.addr, ClientOptions(api_timeout_s=0.5)) as client:
        await client.find_addr(QUEUE)
        await pair.stop_master()
        del pair.namesrv.routes["T"].broker_datas[0].broker_addrs[0]
        task = asyncio.create_task(KINDS[kind](client, seen))
        try:
            await until(lambda: len(seen) == 2)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    assert seen == numbers(3)[1:]


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (state, kind)
        for state in ("killed", "paused", "busy")
        for kind in KINDS
        if (state, kind) != ("paused", "tail")  # pulls of this kind wait 25 s
    ],
)
async def test_reading_goes_on_at_a_replica_and_returns_to_the_master(
    pair: Pair, kind: str, state: str
) -> None:
    pair.master.store_numbers(2)
    async with consuming(pair, kind) as seen, AsyncExitStack() as stack:
        await until(lambda: len(seen) == 2)
        pair.replica.store_numbers(4)
        match state:
            case "killed":
                await pair.stop_master()
            case "paused":
                scripts = dict(pair.master.scripts)
                pair.pause_master()
            case _:
                pair.suggested = 1
        await until(lambda: len(seen) == 4)
        match state:
            case "killed":
                port = int(pair.master.addr.rpartition(":")[2])
                pair.master = FakeBroker("broker-a")
                pair.master.on(RequestCode.PULL_MESSAGE, partial(pair.pull, pair.master))
                await pair.master.start(port)
                stack.push_async_callback(pair.stop_master)
            case "paused":
                pair.master.scripts = scripts
            case _:
                pair.suggested = 0
        pair.master.records.clear()
        pair.master.store_numbers(6)
        await until(lambda: len(seen) == 6)
    assert seen == numbers(6)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *((kind, ResponseCode.TOPIC_NOT_EXIST) for kind in KINDS),
        ("push", ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ("push", ResponseCode.SYSTEM_BUSY),
    ],
)
async def test_a_replica_that_lacks_a_fresh_topic_is_passed_over_in_silence(
    pair: Pair, kind: str, code: ResponseCode, caplog: pytest.LogCaptureFixture
) -> None:
    pair.suggested = 1
    pair.replica.refuse(RequestCode.PULL_MESSAGE, code)
    pair.master.store_numbers(2)
    with caplog.at_level(logging.INFO):
        async with consuming(pair, kind) as seen:
            await until(lambda: len(seen) == 2)
            refused = pair.replica.requests.count(RequestCode.PULL_MESSAGE)
            await until(lambda: pair.replica.requests.count(RequestCode.PULL_MESSAGE) > refused)
            pair.master.records.clear()
            pair.master.store_numbers(3)
            await until(lambda: len(seen) == 3)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_replicas_refusal_is_raised_while_its_master_cannot_be_asked(pair: Pair) -> None:
    await pair.stop_master()
    pair.replica.refuse(RequestCode.PULL_MESSAGE, ResponseCode.TOPIC_NOT_EXIST)
    async with PullConsumer("g", namesrv=pair.namesrv.addr) as consumer:
        with pytest.raises(BrokerError) as caught:
            await consumer.pull(QUEUE, 0)
    assert caught.value.code == ResponseCode.TOPIC_NOT_EXIST


async def test_bounds_and_times_of_queues_are_asked_of_a_replica_too(pair: Pair) -> None:
    await pair.stop_master()
    pair.replica.store_numbers(3)
    pair.replica.on(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, lambda it: it.response(0, ext={"offset": "7"}))
    asked: list[Callable[[PullConsumer], Awaitable[int]]] = [
        lambda consumer: consumer.min_offset(QUEUE),
        lambda consumer: consumer.max_offset(QUEUE),
        lambda consumer: consumer.offset_by_time(QUEUE, 1),
    ]
    async with PullConsumer("g", namesrv=pair.namesrv.addr) as consumer:
        assert [await ask(consumer) for ask in asked] == [0, 3, 7]


async def test_without_any_broker_the_first_failure_is_raised(pair: Pair) -> None:
    await pair.stop_master()
    await pair.replica.__aexit__(None, None, None)
    async with PullConsumer("g", namesrv=pair.namesrv.addr) as consumer:
        with pytest.raises(CometError, match=pair.master.addr):
            await consumer.pull(QUEUE, 0)
    pair.namesrv.routes["T"].broker_datas.clear()
    async with PullConsumer("g", namesrv=pair.namesrv.addr) as consumer:
        with pytest.raises(NoRouteError, match="any replica of broker broker-a"):
            await consumer.pull(QUEUE, 0)
