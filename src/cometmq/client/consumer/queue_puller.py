"""The pull loop of one assigned queue, with one request in progress at a time.

Budget, from the answer to the batches: 1.4 µs for a message of 100 bytes in batches of 32, of which the
decoding takes 1.2 µs. A subscription with tags adds 0.3 µs, and batches of one message another 0.3 µs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import groupby

from cometmq import logs
from cometmq.client.cluster.hooks import kept
from cometmq.client.cluster.requests import pull_request
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.offsets import warn_of_moved_offset
from cometmq.client.group.process_queue import Batch, FlowLimits, ProcessQueue
from cometmq.errors import BodyTooLarge, BrokerError, CometError
from cometmq.message import MessageExt, MessageQueue, PullResult, PullStatus
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.frame import Frame

log = logs.logger("cometmq.client.consumer")

PULL_MAX_IDLE_S = 120.0
"""Seconds without an answer to a pull after which its queue is reassigned (docs/reference/client.md)."""
_FLOW_CONTROL_DELAY_S = 0.02
_FLOW_CONTROL_LONG_S = 3.0
IDLE_S = 0.1
"""Minimum seconds between two pulls that return no messages."""
_HELD_S = 1.0
"""Seconds after which a pull is assumed to wait at the broker: a refusal would have come earlier."""
_FIRST_ERRORS_DELAY_S = 0.1
_UNANNOUNCED = (
    ResponseCode.SUBSCRIPTION_NOT_EXIST,
    ResponseCode.SUBSCRIPTION_NOT_LATEST,
    ResponseCode.FILTER_DATA_NOT_EXIST,
    ResponseCode.FILTER_DATA_NOT_LATEST,
)
"""Codes with which a broker may refuse a pull that arrives before the first heartbeat of this client."""

_LATE_S = 60.0
"""Seconds after which a pull without an answer is a problem. Brokers hold pulls for a shorter time."""


def unanswered(now: float, requested_at: float | None) -> str | None:
    """Return the problem if the pull that began at `requested_at` waits too long for an answer."""
    if requested_at is None or now - requested_at < _LATE_S:
        return None
    waited_s = now - requested_at
    return f"no answer to a pull for {waited_s:.0f} s; after {PULL_MAX_IDLE_S:g} s it is started again"


@dataclass(slots=True)
class FlowControl:
    """Counts for how long a broker has refused all pulls of a queue: only a long time is a problem."""

    since: float | None = None
    """The time of the first refusal since the last pull that was not refused. None: there is no refusal."""

    def refused(self, error: Exception, now: float) -> tuple[float, str | None] | None:
        """Return the delay in seconds before the next pull, and the problem to report, if there is one.

        Return None instead of both if `error` is not a refusal because of flow control.
        """
        if not isinstance(error, BrokerError) or error.code != ResponseCode.FLOW_CONTROL:
            self.since = None
            return None
        if self.since is None:
            self.since = now
        lasts = now - self.since >= _FLOW_CONTROL_LONG_S
        return _FLOW_CONTROL_DELAY_S, f"flow control refuses each pull: {error}" if lasts else None


OffsetIllegal = Callable[[ProcessQueue, int], Awaitable[None]]


@dataclass(slots=True, eq=False)
class QueuePuller:
    """Pulls one queue until it is dropped, also after failures. Repeated failures are logged once."""

    _group: ConsumerGroup
    queue: ProcessQueue
    _submit: Callable[[list[Batch]], None]
    _limits: Callable[[], FlowLimits]
    _offset_illegal: OffsetIllegal
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _errors_in_a_row: int = 0
    waiting: str | None = None
    """The reason why no pull is in progress (flow control, suspension), None while pulling."""
    _problem: str | None = None
    _requested_at: float | None = None
    """The time at which the pull in progress began."""
    _flow_control: FlowControl = field(default_factory=FlowControl)

    def __post_init__(self) -> None:
        self._resumed.set()

    @property
    def message_queue(self) -> MessageQueue:
        return self.queue.message_queue

    def problem(self, now: float) -> str | None:
        """Return the error of the last pull, unless the broker holds the present pull."""
        if self._requested_at is not None and now - self._requested_at > _HELD_S:
            return unanswered(now, self._requested_at)
        return self._problem

    def lost(self, now: float) -> bool:
        """Return whether the pull in progress has exceeded all timeouts. If so, its answer is lost."""
        limit = max(PULL_MAX_IDLE_S, self._group.options.suspend_timeout_s)
        return self._requested_at is not None and now - self._requested_at > limit

    def suspend(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def made_room(self) -> None:
        """Continue to pull if the puller waits because of a flow limit that the queue no longer exceeds."""
        if not self._room.is_set() and self.queue.over_limit(self._limits()) is None:
            self._room.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.queue.dropped:
            if not self._resumed.is_set():
                self.waiting = "suspended"
                await self._resumed.wait()
                continue
            full = self.queue.over_limit(self._limits())
            if full is not None:
                self.waiting = full
                self._room.clear()
                await self._room.wait()
                continue
            self.waiting = None
            delay = await self._pull_safely()
            self.queue.last_pull_at = loop.time()
            if delay > 0:
                await asyncio.sleep(delay)

    async def _pull_safely(self) -> float:
        """Pull once and return the seconds to the next pull."""
        self._requested_at = asyncio.get_running_loop().time()
        try:
            delay = await self._pull_once()
        except Exception as error:
            # An exception that is no CometError is a bug or a lack of memory. It is logged, and pulling
            # continues.
            return self._failed(error)
        finally:
            self._requested_at = None
        self._problem = self._flow_control.since = None
        self._errors_in_a_row = 0
        return delay

    def _failed(self, error: Exception) -> float:
        refused = self._flow_control.refused(error, asyncio.get_running_loop().time())
        if refused is not None:
            delay_s, told = refused
            if told is not None and self._problem != told:
                log.warning("%s: %s", self.message_queue, told)
            self._problem = told or self._problem
            return delay_s
        expected = isinstance(error, CometError)
        text = f"pull failed: {error if expected else repr(error)}"
        starting = isinstance(error, BrokerError) and error.code in _UNANNOUNCED
        self._errors_in_a_row += 1
        if starting and self._errors_in_a_row == 1:
            self._group.instance.heartbeat_soon()
        if self._problem != text:
            level = logging.DEBUG if starting and self._errors_in_a_row < 10 else logging.WARNING
            log.log(level, "%s: %s", self.message_queue, text, exc_info=None if expected else error)
        self._problem = text
        if starting and self._errors_in_a_row <= 10:
            return _FIRST_ERRORS_DELAY_S
        return self._group.options.pull_error_delay_s

    async def _pull_once(self) -> float:
        queue = self.queue
        group = self._group
        options = group.options
        subscription = group.subscriptions.get(self.message_queue.topic)
        if subscription is None:
            self._problem = "not subscribed any more"
            return options.pull_error_delay_s
        # In an orderly group, a pull request carries no offset for the broker to store. Otherwise a broker
        # that handled a pull late would replace the final offset of a released queue with an older offset.
        # The next owner would then consume messages again after later messages.
        carries = group.stored_by_brokers and not options.orderly

        async def request(target: ReadTarget) -> Frame:
            commits = carries and not target.is_replica
            return pull_request(
                group.name,
                self.message_queue,
                queue.next_offset,
                options.pull_batch_size,
                subscription.expression,
                expression_type=subscription.expression_type,
                carry_expression=False,
                class_filter=subscription.source is not None,
                sub_version=subscription.version,
                commit_offset=group.offsets.memory(self.message_queue) if commits else None,
                suspend_s=options.broker_suspend_s,
            )

        result = await group.pulls.pull(
            self.message_queue, subscription, request, options.suspend_timeout_s, options.max_body
        )
        if queue.dropped:
            return 0.0
        if result.status is PullStatus.OFFSET_ILLEGAL:
            warn_of_moved_offset(self.message_queue, queue.next_offset, result)
            await self._offset_illegal(queue, result.next_begin_offset)
            return 0.0
        if result.messages and self._requested_at is not None:
            queue.stats.pulled(len(result.messages), asyncio.get_running_loop().time() - self._requested_at)
        idle = not result.messages and result.next_begin_offset <= queue.next_offset
        self._submit_batches(result, kept(options.filter_hooks, subscription.filter(result.messages)))
        if idle and self._requested_at is not None:
            # A broker without messages normally holds a pull until some arrive. If a broker answers
            # immediately instead, the delay limits the rate of the pulls.
            held_s = asyncio.get_running_loop().time() - self._requested_at
            return max(options.pull_interval_s, IDLE_S - held_s)
        return options.pull_interval_s

    def _batches(self, messages: list[MessageExt], oversized: set[int]) -> list[Batch]:
        """Split messages into batches. One with a body that is too large is refused, in its own batch."""
        options = self._group.options
        if not oversized:
            return self.queue.put(messages, options.consume_batch_max_size)
        batches: list[Batch] = []
        for refused, run in groupby(messages, lambda message: message.queue_offset in oversized):
            some = self.queue.put(list(run), 1 if refused else options.consume_batch_max_size)
            for batch in some if refused else ():
                what = f"body of message {batch.messages[0].msg_id}"
                batch.refusal = BodyTooLarge(what, options.max_body, "PushOptions.max_body")
            batches += some
        return batches

    def _submit_batches(self, result: PullResult, messages: list[MessageExt]) -> None:
        queue = self.queue
        queue.next_offset = result.next_begin_offset
        if messages:
            if self.message_queue.topic == self._group.retry_topic:
                for message in messages:
                    self._group.restore_topic(message)
            self._submit(self._batches(messages, set(result.oversized)))
        elif queue.count == 0 and result.next_begin_offset > 0:
            # All messages below this offset were consumed or filtered out. Filtered messages must not count
            # as lag.
            self._group.offsets.update(self.message_queue, result.next_begin_offset)
