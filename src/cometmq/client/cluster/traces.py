"""The trace records of a client instance about sends and listener calls.

Sends and listener calls do not wait for traces: their records go into a bounded queue. The queued records are
sent twice a second, and whenever they fill a trace message (docs/reference/client.md, Traces).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from cometmq import logs
from cometmq.client.cluster.identity import KeyMaker
from cometmq.client.cluster.options import TraceOptions
from cometmq.errors import CometError
from cometmq.message import Message, MessageExt, SendResult, SendStatus
from cometmq.periodic import Periodic
from cometmq.protocol.properties import values as names
from cometmq.protocol.traces import (
    AnyTrace,
    ConsumeCode,
    EndTransaction,
    MessageType,
    Pub,
    SubAfter,
    SubBefore,
    TraceLine,
    is_trace_topic,
)

log = logs.logger("cometmq.client.traces")

_DEFAULT_REGION = "DefaultRegion"
_EVERY_S = 0.5
_STOP_WITHIN_S = 3.0


class Consumption(msgspec.Struct, frozen=True):
    """A traced listener call that has begun and has not ended."""

    group: str
    request_id: str
    begun_ms: int
    count: int
    """The number of messages that are passed to the listener in this call."""
    traced: Sequence[tuple[str, str | None]]
    """The id and the keys of each traced message of the call."""


class Traces:
    """The traces of one client instance. Methods must be called on the loop; all but stop() do not wait.

    `send` sends a body with keys to the trace topic, or raises CometError.
    """

    def __init__(
        self, options: TraceOptions, keys: KeyMaker, send: Callable[[bytes, str], Awaitable[None]]
    ) -> None:
        self._topic = options.topic
        self._most = round(options.sampling * 2**32)
        self._keys = keys
        self._send = send
        self._line = TraceLine()
        self._sending = Periodic(
            asyncio.get_running_loop(), _EVERY_S, self._send_waiting, name=f"traces to {options.topic}"
        )
        self._problem = ""
        self.dropped = 0
        """The number of trace records lost because the queue was full or the brokers refused them."""

    def start(self) -> None:
        self._sending.start()

    async def stop(self) -> None:
        """Send the waiting records, which takes at most three seconds."""
        try:
            async with asyncio.timeout(_STOP_WITHIN_S):
                await self._sending.stop()
                while self._line:
                    await self._send_one()
        except TimeoutError:
            await self._sending.stop(cancel=True)
            self._drop(len(self._line), f"they were not sent within {_STOP_WITHIN_S:g} s at the stop")
        if self.dropped:
            log.warning("trace records lost in total: %d", self.dropped)

    # -- the recorded events

    def sent(
        self,
        group: str,
        messages: Sequence[Message],
        result: SendResult,
        addr: str,
        begun_s: float,
        *,
        half: bool,
    ) -> None:
        """Record the answer to a send that began at `begun_s` (time.monotonic). `half`: of a half message.

        Each message of a batch gets its own record, whereas Java's client writes one record for the batch.
        """
        topic = result.queue.topic
        if not result.trace_on or self._is_trace_topic(topic):
            return
        cost_ms = int((time.monotonic() - begun_s) * 1000)
        ids, offset_ids = [result.msg_id], [result.offset_msg_id]
        if len(messages) > 1:
            ids, offset_ids = result.msg_id.split(","), result.offset_msg_id.split(",")
        if len(offset_ids) < len(ids):  # RocketMQ 5 has stored the batch as one message
            offset_ids *= len(ids)
        for message, msg_id, offset_id in zip(messages, ids, offset_ids, strict=False):
            if self._is_chosen(msg_id):
                self._add(
                    Pub(
                        timestamp_ms=int(time.time() * 1000) - cost_ms,
                        region=result.region_id,
                        group=group,
                        topic=topic,
                        msg_id=msg_id,
                        tags=message.tags,
                        keys=" ".join(message.keys) or None,
                        store_host=addr,
                        body_length=len(message.body),
                        cost_ms=cost_ms,
                        message_type=MessageType.HALF if half else _type_of(message),
                        offset_msg_id=offset_id,
                        success=result.status is SendStatus.SEND_OK,
                    )
                )

    def consuming(self, group: str, messages: Iterable[MessageExt]) -> Consumption | None:
        """Record that a listener call begins. Return the data for `consumed`, None if nothing is traced."""
        now_ms, count = int(time.time() * 1000), 0
        request_id = self._keys.make()
        traced = []
        for message in messages:
            count += 1
            if not self._traces(message):
                continue
            properties, msg_id = message.properties, message.msg_id
            keys = properties.get(names.KEYS)
            traced.append((msg_id, keys))
            self._add(
                SubBefore(
                    timestamp_ms=now_ms,
                    region=properties.get(names.MSG_REGION, _DEFAULT_REGION),
                    group=group,
                    request_id=request_id,
                    msg_id=msg_id,
                    retry_times=message.reconsume_times,
                    keys=keys,
                )
            )
        return Consumption(group, request_id, now_ms, count, traced) if traced else None

    def consumed(self, call: Consumption | None, code: ConsumeCode, *, success: bool) -> None:
        """Record that a listener call has ended."""
        if call is None:
            return
        now_ms = int(time.time() * 1000)
        for msg_id, keys in call.traced:
            self._add(
                SubAfter(
                    request_id=call.request_id,
                    msg_id=msg_id,
                    cost_ms=max(now_ms - call.begun_ms, 0) // call.count,
                    success=success,
                    keys=keys,
                    context_code=code,
                    timestamp_ms=now_ms,
                    group=call.group,
                )
            )

    def transaction_ended(
        self, group: str, message: MessageExt, addr: str, state: str, *, from_check: bool
    ) -> None:
        """Record the end of a transaction, with RocketMQ's name of its state."""
        if not self._traces(message):
            return
        msg_id, properties = message.msg_id, message.properties
        self._add(
            EndTransaction(
                timestamp_ms=int(time.time() * 1000),
                region=properties.get(names.MSG_REGION, _DEFAULT_REGION),
                group=group,
                topic=message.topic,
                msg_id=msg_id,
                tags=message.tags,
                keys=properties.get(names.KEYS),
                store_host=addr,
                message_type=MessageType.COMMIT,
                transaction_id=msg_id,
                state=state,
                from_check=from_check,
            )
        )

    def _is_chosen(self, msg_id: str) -> bool:
        return self._most >= 2**32 or zlib.crc32(msg_id.encode("utf-8", "replace")) < self._most

    def _traces(self, message: MessageExt) -> bool:
        traced = message.properties.get(names.TRACE_ON) != "false" and not self._is_trace_topic(message.topic)
        return traced and self._is_chosen(message.msg_id)

    def _is_trace_topic(self, topic: str) -> bool:
        return is_trace_topic(topic, self._topic)

    # -- the queue of records

    def _add(self, trace: AnyTrace) -> None:
        line = self._line
        if not line.add(trace):
            self._drop(1, "records arrive faster than they are sent")
        elif line.fills_a_message:
            self._sending.soon()

    async def _send_waiting(self) -> None:
        if self._line:
            await self._send_one()
        while self._line.fills_a_message:
            await self._send_one()

    async def _send_one(self) -> None:
        body, keys, count = self._line.take()
        try:
            await self._send(body, keys)
        except CometError as error:
            self._drop(count, str(error))
        except BaseException:
            self.dropped += count
            raise
        else:
            self._problem = ""

    def _drop(self, count: int, why: str) -> None:
        """Count lost trace records. Log the reason, unless it was the last one and nothing was sent since."""
        self.dropped += count
        if count and why != self._problem:
            self._problem = why
            log.warning("trace records lost: %d, possibly more: %s", count, why)


TIMERS = frozenset({names.TIMER_DELAY_SEC, names.TIMER_DELAY_MS, names.TIMER_DELIVER_MS})


def _type_of(message: Message) -> MessageType:
    timed = message.is_delayed or (message.properties and not TIMERS.isdisjoint(message.properties))
    return MessageType.DELAY if timed else MessageType.NORMAL


C = TypeVar("C")
S = TypeVar("S", bound=Enum)

_HANDLED = {"SUCCESS", "COMMIT"}


def traced(
    listener: Callable[[list[MessageExt], C], Awaitable[S]],
    traces: Traces | None,
    group: str,
    time_out_s: float,
) -> Callable[[list[MessageExt], C], Awaitable[S]]:
    """Return a listener that records a trace before and after each call. Calls over time_out_s timed out."""
    if traces is None:
        return listener

    async def call(messages: list[MessageExt], context: C) -> S:
        consumption = traces.consuming(group, messages)
        begun = time.monotonic()
        code, success = ConsumeCode.EXCEPTION, False
        try:
            status = await listener(messages, context)
            success = status.name in _HANDLED
            if time.monotonic() - begun >= time_out_s:
                code = ConsumeCode.TIME_OUT
            else:
                code = ConsumeCode.SUCCESS if success else ConsumeCode.FAILED
            return status
        finally:
            traces.consumed(consumption, code, success=success)

    return call


def trace_polled(traces: Traces, group: str, messages: Sequence[MessageExt]) -> None:
    """Record that polled messages were consumed successfully, as the result is not known to the client."""
    traces.consumed(traces.consuming(group, messages), ConsumeCode.SUCCESS, success=True)
