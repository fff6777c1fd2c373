"""Our client under the commands of the Java driver, so that scenarios run with either client."""

from __future__ import annotations

import asyncio
import base64
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

from tests.client.scenarios import PATIENT
from tests.interop.driver import Deliveries, JavaError, Json

from cometmq import (
    BrokerError,
    ClientInstance,
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    OrderlyContext,
    OrderlyStatus,
    Producer,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    SendResult,
    TraceOptions,
    TransactionProducer,
    TransactionState,
    sql92,
)

TIMES = {"setDelayTimeMs": "delay_ms", "setDeliverTimeMs": "deliver_at_ms"}
STATES = {"UNKNOW": "UNKNOWN", "COMMIT_MESSAGE": "COMMIT", "ROLLBACK_MESSAGE": "ROLLBACK"}


def read(given: Json) -> Message:
    """Parse a message in the form of :func:`tests.interop.driver.message`."""
    return Message(
        given["topic"],
        base64.b64decode(given["body"]),
        tags=given.get("tags"),
        keys=given.get("keys", "").split(),
        flag=given["flag"],
        delay_level=given["delay"],
        properties=given["properties"],
        **{own: given[name] for name, own in TIMES.items() if name in given},
    )


def written(message: MessageExt) -> Json:
    return {
        "topic": message.topic,
        "brokerName": message.broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "msgId": message.msg_id,
        "body": base64.b64encode(message.body).decode(),
        "tags": message.tags,
        "keys": " ".join(message.keys) or None,
        "flag": message.flag,
        "reconsumeTimes": message.reconsume_times,
        "bornTimestamp": message.born_timestamp_ms,
        "storeTimestamp": message.store_timestamp_ms,
        "properties": dict(message.properties),
    }


def answer(result: SendResult) -> Json:
    return {
        "status": result.status.name,
        "msgId": result.msg_id,
        "brokerName": result.queue.broker_name,
        "queueId": result.queue.queue_id,
        "queueOffset": result.queue_offset,
        "recallHandle": result.recall_handle,
    }


def filters(topics: dict[str, str], sql: bool) -> dict[str, Any]:
    return {topic: sql92(text) if sql else text for topic, text in topics.items()}


class Decided:
    """A transaction listener that follows the message's properties."""

    def __init__(self) -> None:
        self.asked: list[Json] = []

    def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        return TransactionState[STATES[message.properties["local"]]]

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        self.asked.append(written(message))
        return TransactionState[STATES[message.properties["check"]]]


class OurDriver(Deliveries):
    """The commands of java/driver/Driver.java that scenarios use, as methods of the same names."""

    version = "ours"
    running = True

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="our-client")
        self._thread.start()
        self._open: dict[str, tuple[ClientInstance, Any]] = {}
        self._listeners: dict[str, Decided] = {}

    def call(self, op: str, **arguments: Any) -> Any:
        return self.start(op, **arguments).result(120)

    def start(self, op: str, **arguments: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._run(op, arguments), self._loop)

    async def _run(self, op: str, arguments: dict[str, Any]) -> Any:
        try:
            if op.endswith("_stop"):
                return await self._stop(arguments["name"])
            return await getattr(self, op)(**arguments)
        except BrokerError as error:
            raise JavaError(type(error).__name__, str(error), error.code) from error

    def send(self, producer: str, messages: list[Json], mode: str = "sync", **arguments: Any) -> list[Json]:
        result: list[Json] = self.call("send_all", name=producer, mode=mode, messages=messages, **arguments)
        return result

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for name in list(self._open):
            await self._stop(name)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=30)  # tasks that nothing has awaited

    async def _start(self, name: str, namesrv: str, trace: bool, make: Any) -> None:
        options = ClientOptions(
            api_timeout_s=30.0,
            instance_name=name,
            heartbeat_interval_s=1.0,
            trace=TraceOptions() if trace else None,
        )
        client = ClientInstance(namesrv, options)
        await client.start()
        self._open[name] = client, make(client)
        try:
            await self._open[name][1].start()
        except BaseException:
            await self._stop(name)
            raise

    async def _stop(self, name: str) -> None:
        client, user = self._open.pop(name)
        await user.stop()
        await client.stop()

    async def producer_start(self, name: str, namesrv: str, group: str = "p", trace: bool = False) -> None:
        await self._start(
            name, namesrv, trace, lambda client: Producer(group, client=client, options=PATIENT)
        )

    async def send_all(
        self, name: str, messages: list[Json], mode: str = "sync", select: int = 0
    ) -> list[Json]:
        producer = self._open[name][1]
        how: Json = {"selector": lambda queues, *_: sorted(queues)[select % len(queues)]}
        return [
            answer(await producer.send(read(each), **(how if mode == "selector" else {})))
            for each in messages
        ]

    async def recall(self, name: str, topic: str, handle: str) -> str:
        found: str = await self._open[name][1].recall(handle)
        return found

    async def push_start(
        self,
        name: str,
        namesrv: str,
        group: str,
        topics: dict[str, str],
        trace: bool = False,
        sql: bool = False,
        orderly: bool = False,
        suspendMillis: int = 200,  # noqa: N803 -- the command's own words
        maxReconsumeTimes: int | None = None,  # noqa: N803
        **plan: Any,
    ) -> None:
        listener = self._orderly(name, **plan) if orderly else self._concurrent(name, **plan)
        options = PushOptions(
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            orderly=orderly,
            suspend_current_queue_s=suspendMillis / 1000,
            max_reconsume_times=maxReconsumeTimes,
            rebalance_interval_s=1.0,
        )
        make = lambda client: PushConsumer(  # noqa: E731
            group, listener, filters(topics, sql), client=client, options=options
        )
        await self._start(name, namesrv, trace, make)

    def _concurrent(self, name: str, failTimes: int = 0, failDelayLevel: int = 0) -> Any:  # noqa: N803
        async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
            began = time.monotonic_ns()
            (message,) = messages
            fails = message.reconsume_times < int(message.properties.get("fails", failTimes))
            ended = time.monotonic_ns()
            self.report(name, [written(message)], failed=fails, began=began, ended=ended)
            context.delay_level = failDelayLevel
            return ConsumeStatus.RECONSUME_LATER if fails else ConsumeStatus.SUCCESS

        return listener

    def _orderly(self, name: str, failTimes: int = 0, answers: list[str] | None = None) -> Any:  # noqa: N803
        tries: Counter[str] = Counter()
        calls = itertools.chain(answers or (), itertools.repeat("SUCCESS"))

        async def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
            began = time.monotonic_ns()
            (message,) = messages
            fails = tries[message.msg_id] < int(message.properties.get("fails", failTimes))
            tries[message.msg_id] += 1
            ended = time.monotonic_ns()
            self.report(name, [written(message)], failed=fails, began=began, ended=ended)
            if answers:
                context.auto_commit = False
                return OrderlyStatus[next(calls)]
            return OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT if fails else OrderlyStatus.SUCCESS

        return listener

    async def lite_start(
        self, name: str, namesrv: str, group: str, topics: dict[str, str], sql: bool = False
    ) -> None:
        options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        await self._start(
            name, namesrv, False, lambda client: PullConsumer(group, client=client, options=options)
        )
        for topic, expression in filters(topics, sql).items():
            await self._open[name][1].assign_topic(topic, expression=expression)

    async def lite_poll(self, name: str, timeout: int = 3000) -> list[Json]:  # noqa: ASYNC109
        return [written(each) for each in await self._open[name][1].poll(timeout / 1000)]

    async def transaction_start(self, name: str, namesrv: str, group: str, trace: bool = False) -> None:
        listener = self._listeners[name] = Decided()
        await self._start(
            name,
            namesrv,
            trace,
            lambda client: TransactionProducer(group, listener, client=client, options=PATIENT),
        )

    async def transaction_send(self, name: str, messages: list[Json]) -> list[Json]:
        states = {ours: theirs for theirs, ours in STATES.items()}
        results = []
        for each in messages:
            sent = await self._open[name][1].send_in_transaction(read(each), None)
            results.append({"msgId": sent.msg_id, "state": states[sent.state.name]})
        return results

    async def transaction_asked(self, name: str) -> list[Json]:
        return list(self._listeners[name].asked)
