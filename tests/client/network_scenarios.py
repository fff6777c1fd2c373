"""A producer and two consumers under random connection faults, and a check that no message is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from tests.client.scenarios import names
from tests.kit.waiting import until

from cometmq import (
    ClientOptions,
    CometError,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushOptions,
    reply_to,
)
from cometmq.testing import ClusterProxy, Expected, History, Kind, Report, check_history, random_faults

T = TypeVar("T")

MESSAGES = 20
SEND_S, API_S = 2.0, 1.0
LATE_S = 25.0
"""Extra time, in seconds, that a call may take beyond its own limits on a busy machine."""
CLIENT = ClientOptions(api_timeout_s=API_S, route_interval_s=1.0, heartbeat_interval_s=1.0)
PRODUCER = ProducerOptions(send_timeout_s=SEND_S, retry_times=3)
CONSUMER = PushOptions(
    consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
    rebalance_interval_s=1.0,
    broker_suspend_s=1.0,
    suspend_timeout_s=2.0,
    pull_error_delay_s=0.05,
    persist_interval_s=0.5,
)


class BadNetwork:
    """One run for one seed: its proxies, clients and history."""

    def __init__(self, namesrv: str, seed: int) -> None:
        self.dice = random.Random(seed)
        # Sometimes a stall lasts longer than the client's timeouts.
        longest = 3.0 if self.dice.random() < 0.1 else 0.2
        script = random_faults(seed, share=0.7, within=8 * 1024, seconds=longest)
        self.proxy = ClusterProxy(namesrv, script)
        name = names(f"net-{seed}")
        self.topic, self.group = name.topic, name.group
        self.history = History()
        self.sure: set[str] = set()
        self.handled: set[str] = set()
        self.refusal = ""

    async def listener(self, messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        (message,) = messages
        body = message.body.split()[0].decode()
        place: dict[str, Any] = {}
        if message.reconsume_times == 0:  # retries come from the group's retry topic
            place = {
                "topic": self.topic, "queue": str(message.queue_id), "offset": message.queue_offset,
            }  # fmt: skip
        call = self.history.begin("handle", group=self.group, message=body, **place)
        await asyncio.sleep(0)
        fails = message.reconsume_times == 0 and body.endswith("7")
        (self.history.fail if fails else self.history.ok)(call)
        if fails:
            context.delay_level = 1
            return ConsumeStatus.RECONSUME_LATER
        self.handled.add(body)
        if "REPLY_TO_CLIENT" in message.properties:
            with contextlib.suppress(CometError):  # the requester gets no reply, or repeats its request
                reply = reply_to(message, b"re: " + body.encode())
                await in_time(lambda: self.producer.send(reply), SEND_S + 2 * API_S)
        return ConsumeStatus.SUCCESS

    async def run(self) -> Report:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.proxy)
            namesrv = self.proxy.namesrv
            self.producer = Producer(self.group, namesrv=namesrv, options=PRODUCER, client_options=CLIENT)
            await stack.enter_async_context(self.producer)
            for _ in range(2):
                consumer = await self._consumer()
                stack.push_async_callback(in_time, consumer.stop, CONSUMER.drain_timeout_s)
            for begin in range(0, MESSAGES, 5):
                sends = (self._send(begin + number) for number in range(4))
                await asyncio.gather(*sends, self._ask(begin + 4))
                await asyncio.sleep(self.dice.uniform(0, 0.05))
            self.proxy.heal()
            later = itertools.count(MESSAGES)

            async def well_again() -> bool:
                await self._send(number := next(later))  # a busy broker may refuse the send
                return f"{number}" in self.sure

            async def answered_again() -> bool:
                await self._ask(number := next(later))
                return f"{number}" in self.sure

            await until(well_again, f"{self.topic}: the producer well again; {self.refusal}")
            await until(answered_again, f"{self.topic}: requests answered again; {self.refusal}")

            async def all_handled() -> bool:
                return self.sure <= self.handled

            await until(all_handled, f"{self.topic}: all that was acknowledged handled")
        return check_history(self.history.lines(), Expected())

    async def _consumer(self) -> PushConsumer:
        """Start a consumer, and retry until the start succeeds."""
        while True:
            consumer = PushConsumer(
                self.group, self.listener, self.topic, namesrv=self.proxy.namesrv, options=CONSUMER,
                client_options=CLIENT,
            )  # fmt: skip
            try:
                await in_time(consumer.start, 10 * API_S)
                return consumer
            except CometError as error:
                self.refusal = repr(error)

    def _message(self, body: str) -> Message:
        size = self.dice.choice((10, 10, 1000, 20_000))
        return Message(self.topic, body.encode() + b" " + self.dice.randbytes(size).hex().encode())

    async def _ask(self, number: int) -> None:
        message = self._message(body := f"{number}")
        asking = self.history.begin("send", message=body, topic=self.topic)
        try:
            reply = await in_time(lambda: self.producer.request(message, timeout_s=SEND_S), SEND_S)
        except CometError as error:
            self.history.unknown(asking)
            self.refusal = repr(error)
        else:
            assert reply.body == b"re: " + body.encode()
            self.history.ok(asking)
            self.sure.add(body)

    async def _send(self, number: int) -> None:
        message = self._message(body := f"{number}")
        sending = self.history.begin("send", message=body, topic=self.topic)
        try:
            result = await in_time(lambda: self.producer.send(message), SEND_S + 2 * API_S)
        except CometError as error:
            self.history.unknown(sending)
            self.refusal = repr(error)
        else:
            self.history.ok(sending, queue=str(result.queue.queue_id), offset=result.queue_offset)
            self.sure.add(body)


async def in_time(work: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """Await a result or a typed error within a time limit, with a margin for a busy machine."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(work(), limit_s + 30)
    finally:
        took = time.monotonic() - began
        assert took < limit_s + LATE_S, f"{took:.1f} s instead of {limit_s:g}"


async def a_bad_network_loses_and_invents_nothing(namesrv: str) -> None:
    scenarios = [BadNetwork(namesrv, seed) for seed in range(1, 9)]
    for report in await asyncio.gather(*(each.run() for each in scenarios)):
        report.verify()
    faults = sum((each.proxy.happened for each in scenarios), Counter[Kind]())
    assert faults.total() > 2 * len(scenarios)
