"""kill -9 of a broker with all kinds of waiting messages, and of `dlq resend` midway.

They are levels, retries, SQL consumers, dead letters, orderly members and traces. COMETMQ_KILL_CYCLES sets
the number of cycles (a twentieth of it), COMETMQ_KILL_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.client.scenarios import names
from tests.faults.test_kill import CYCLES, SEED
from tests.interop.comet import CometBroker, CometNamesrv
from tests.kit.waiting import until

from cometmq import (
    Admin,
    ClientOptions,
    CometError,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    OrderlyStatus,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushOptions,
    TraceOptions,
    sql92,
)
from cometmq.admin import Selection
from cometmq.admin.dead_letters import origin_id
from cometmq.testing import History, check_history

EVEN = "n = 0 OR n = 2 OR n = 4 OR n = 6 OR n = 8"
FIRST = ConsumeFromWhere.FIRST_OFFSET


class Servers:
    """A name server, and a broker that is killed and restarted on its port and store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name_server = CometNamesrv(directory / "names")
        self.namesrv = f"127.0.0.1:{self.name_server.port}"
        self._runs = itertools.count()
        self.broker = self._start(0)

    def _start(self, port: int) -> CometBroker:
        place = self.directory / f"broker-{next(self._runs)}"
        return CometBroker(place, self.namesrv, port=port, store=self.directory / "store")

    def kill_and_start(self) -> None:
        self.broker.kill()
        self.broker = self._start(self.broker.port)

    def end(self) -> None:
        self.broker.kill()
        self.name_server.kill()


class Sent:
    """Numbered messages of a topic: all attempted and all acknowledged ones."""

    def __init__(self, namesrv: str, topic: str, delays: bool) -> None:
        self.topic = topic
        self.delays = delays
        self.tried_ms: dict[bytes, int] = {}
        self.sure: set[bytes] = set()
        self.last_id = ""
        self.history = History()
        self._numbers = itertools.count(1)
        self.producer = Producer(
            f"p-{topic}",
            namesrv=namesrv,
            options=ProducerOptions(retry_times=0, send_timeout_s=5),
            client_options=ClientOptions(trace=TraceOptions()),
        )

    async def one(self) -> None:
        number = next(self._numbers)
        body = b"%d" % number
        level = 1 if self.delays and number % 3 == 0 else 0
        message = Message(self.topic, body, delay_level=level, properties={"n": str(number % 10)})
        self.tried_ms[body] = time.time_ns() // 1_000_000 + 1000 * level
        sending = self.history.begin("send", message=body.decode(), topic=self.topic)
        try:
            result = await self.producer.send(message)
        except CometError:
            self.history.unknown(sending)
            await asyncio.sleep(0.05)
        else:
            queue = str(result.queue.queue_id)
            self.history.ok(sending, queue=queue, offset=result.queue_offset, key=queue)
            self.last_id = result.msg_id
            self.sure.add(body)

    @contextlib.asynccontextmanager
    async def traffic(self) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def send() -> None:
            while not stop.is_set():
                await self.one()
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(send()) for _ in range(2)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)


class Failing:
    """A listener that fails once for each message.

    Messages ending with 7 become dead letters unless resent.
    """

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self.handled: set[bytes] = set()
        self.resent: Counter[bytes] = Counter()
        self.tries: dict[bytes, set[int]] = defaultdict(set)
        self.early: list[bytes] = []

    async def __call__(self, messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        (message,) = messages
        if "DLQ_RESEND_TIMES" in message.properties:
            self.resent[message.body] += 1
            return ConsumeStatus.SUCCESS
        self.tries[message.body].add(message.reconsume_times)
        if message.store_timestamp_ms < self.sent.tried_ms[message.body]:
            self.early.append(message.body)
        hopeless = message.body.endswith(b"7")
        if message.reconsume_times and not hopeless:
            self.handled.add(message.body)
            return ConsumeStatus.SUCCESS
        context.delay_level = -1 if message.reconsume_times else 1
        return ConsumeStatus.RECONSUME_LATER


class Orderly:
    """A listener of orderly members that records its calls."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.bodies: set[bytes] = set()

    async def __call__(self, messages: list[MessageExt]) -> OrderlyStatus:
        (message,) = messages
        queue = str(message.queue_id)
        place = {"topic": message.topic, "queue": queue, "offset": message.queue_offset, "key": queue}
        call = self.history.begin("handle", group="g", message=message.body.decode(), **place)
        # Shorter than a broker's restart: calls that take longer may overlap.
        await asyncio.sleep(random.choice((0.001, 0.005, 0.02)))
        self.history.ok(call)
        self.bodies.add(message.body)
        return OrderlyStatus.SUCCESS


@pytest.mark.slow("kills brokers")
@pytest.mark.representative
async def test_what_is_promised_holds_through_kills(tmp_path: Path) -> None:
    print(f"COMETMQ_KILL_SEED={SEED}")
    dice, servers = random.Random(SEED), await asyncio.to_thread(Servers, tmp_path)
    try:
        await through_kills(servers, dice)
    finally:
        servers.end()


async def through_kills(servers: Servers, dice: random.Random) -> None:
    name, strict = names("kill"), names("kill-order")
    namesrv = servers.namesrv
    sent, ordered = Sent(namesrv, name.topic, delays=True), Sent(namesrv, strict.topic, delays=False)
    failing, orderly = Failing(sent), Orderly(ordered.history)
    chosen: set[bytes] = set()

    async def even(messages: list[MessageExt]) -> None:
        assert all(int(message.properties["n"]) % 2 == 0 for message in messages)
        chosen.update(message.body for message in messages)

    def member(
        group: str, listener: Callable[..., object], what: object, in_order: bool = False
    ) -> PushConsumer:
        options = PushOptions(consume_from_where=FIRST, orderly=in_order)
        return PushConsumer(group, listener, what, namesrv=namesrv, options=options)  # type: ignore[arg-type]

    async with contextlib.AsyncExitStack() as stack:
        for each in (sent, ordered):
            await stack.enter_async_context(each.producer)
            await each.one()
        await stack.enter_async_context(member(name.group, failing, name.topic))
        await stack.enter_async_context(member(f"{name.group}-sql", even, {name.topic: sql92(EVEN)}))
        await stack.enter_async_context(member(strict.group, orderly, strict.topic, True))
        async with sent.traffic(), ordered.traffic():
            for _ in range(max(1, CYCLES // 20)):
                await asyncio.sleep(dice.uniform(0.5, 1.5))
                await asyncio.to_thread(servers.kill_and_start)
                await stack.enter_async_context(member(strict.group, orderly, strict.topic, True))
            await asyncio.sleep(1)
        sure = frozenset(sent.sure)
        dead = {body for body in sure if body.endswith(b"7")}

        async def all_done() -> bool:
            by_sql = {body for body in sure if int(body) % 2 == 0}
            return sure - dead <= failing.handled and by_sql <= chosen and ordered.sure <= orderly.bodies

        await until(all_done, "everything that was acknowledged handled")
        await check_dead_letters(servers, name.group, dead, failing)
        await check_traces(namesrv, sent)
    assert failing.early == []
    for body in sure:
        # A message that could not become a dead letter before a kill gets one more attempt.
        assert failing.tries[body] - ({2} if body in dead else set()) == {0, 1}
    check_history(ordered.history.lines()).verify()


async def check_dead_letters(servers: Servers, group: str, dead: set[bytes], failing: Failing) -> None:
    """Check that all dead letters exist and that a repeated `dlq resend` sends each once.

    A delay level may deliver a message twice after a kill, and each copy becomes a dead letter.
    """
    async with Admin(servers.namesrv) as admin:

        async def found() -> Counter[bytes]:
            letters = [letter async for letter in admin.dead_letters(Selection(group=group))]
            return Counter(body for body, _ in {(each.body, origin_id(each)) for each in letters})

        async def all_dead() -> bool:
            return dead <= (await found()).keys()

        await until(all_dead, "all dead letters")
        letters = await found()
    command = [sys.executable, "-m", "cometmq", "dlq", "resend", group, "--all"]
    environment = {**os.environ, "NAMESRV_ADDR": servers.namesrv}
    first = await asyncio.create_subprocess_exec(*command, "--rate", "5", env=environment)

    async def some_came() -> bool:
        return len(failing.resent) >= 2

    await until(some_came, "two sent again")
    first.kill()
    await first.wait()
    assert failing.resent.total() < letters.total()
    second = await asyncio.create_subprocess_exec(*command, env=environment)
    assert await second.wait() == 0

    async def all_came() -> bool:
        return failing.resent.total() >= letters.total()

    await until(all_came, "all sent again")
    assert failing.resent == letters


async def check_traces(namesrv: str, sent: Sent) -> None:
    """Check the producer's traces, which are written again after a kill, since the producer survives."""
    await sent.one()
    async with Admin(namesrv) as admin:

        async def traced() -> bool:
            return bool(await admin.traces(sent.last_id))

        await until(traced, "a trace of the last message")
