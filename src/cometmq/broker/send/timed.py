"""Messages with a delivery time (timer messages): their check, their storage, and their recall handles.

See docs/reference/storage.md, Timer messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.delay_levels import ClockSteps
from cometmq.broker.base.times import mono_ms
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.protocol.codes import RETRY_PREFIX, TIMER_TOPIC, ResponseCode
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES, drop, put, value_of
from cometmq.protocol.sql.java_values import Mismatch, to_long
from cometmq.protocol.timers import RecallHandle, TimerCode, out_ms_of
from cometmq.store import Body, Clock, MessageStore, SteadyTime, TickMessage
from cometmq.text import printable

TIMES = (b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")
"""The properties that can contain a delivery time.

If a message has several of them, the first one in this list is used.
"""
_PROOF_S = 60.0
"""How long, in seconds, a clock that jumped forward must keep the new time before messages are delivered.

The period gives an operator or a time daemon the chance to correct a wrong clock. If instead the jump was
right, the messages that it made due are late already, so a further minute does little harm.
"""
# The number of property bytes that a send with a delivery time must leave free. The delivery, and the copies
# that are made of a waiting message, add properties.
_ROOM = 128


class Timed(NamedTuple):
    """The stored form of a message that waits in the timer topic. `topic` is its destination."""

    topic: str
    properties: bytes
    code: TimerCode


def without_times(properties: bytes) -> bytes:
    """Return properties without the delivery times, which are ignored if a message has a delay level."""
    for name in TIMES:
        properties = drop(properties, name)
    return properties


@dataclass(eq=False)
class TimedSends:
    """Stores messages that wait for their delivery time.

    Attributes:
        steps: The history of the difference between the monotonic clock and the wall clock. It shows the
            difference at the time when each message was stored.
        wall: The clock that decides whether a message is due. It adopts a forward jump of the wall clock only
            if the wall clock keeps the new time (SteadyTime).
    """

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables

    def __post_init__(self) -> None:
        self.steps = ClockSteps(self.clock.time_ms(), mono_ms(self.clock))
        self.wall = SteadyTime(self.clock, 0, _PROOF_S)

    def timed(self, topic: str, queue_id: int, properties: bytes) -> Timed | None:
        """Return the form in which a message waits in the timer topic, or None if it can be delivered now.

        Raises CommandError if the delivery time is invalid, or if too many messages are waiting already.
        """
        name = next((name for name in TIMES if value_of(properties, name)), None)
        # A message with TIMER_OUT_MS has already waited for its delivery time, so it does not wait again.
        if name is None or value_of(properties, b"TIMER_OUT_MS"):
            return None
        recall = bool(value_of(properties, b"TIMER_DEL_UNIQKEY"))
        self._refuse_if_not_taken(recall=recall)
        text = value_of(properties, name)
        now_ms = self.wall.now_ms() if name == b"TIMER_DELIVER_MS" else self.clock.time_ms()
        deliver_ms = _deliver_ms(name, text, now_ms)
        if deliver_ms is None:
            raise self._illegal(f"{printable(text.decode('utf-8', 'replace'), 40)} is not a number")
        if deliver_ms - now_ms > 1_000 * self.config.timer_max_delay_sec:
            raise self._illegal(f"the delay is {deliver_ms - now_ms}ms")
        if deliver_ms <= now_ms:
            if recall:
                raise self._illegal("the delivery time has passed")
            return None
        for name, value in (
            (b"TIMER_OUT_MS", b"%d" % out_ms_of(deliver_ms)),
            (b"REAL_TOPIC", topic.encode()),
            (b"REAL_QID", b"%d" % queue_id),
        ):
            properties = put(properties, name, value)
        if len(properties) > MAX_PROPERTIES_BYTES - _ROOM:
            raise self._illegal(
                f"the properties have {len(properties)} bytes, a message with a delivery time may have "
                f"{MAX_PROPERTIES_BYTES - _ROOM}"
            )
        code = TimerCode.of(properties)
        if code is None:
            raise self._illegal(f"the delivery time is {deliver_ms}")
        return Timed(topic, properties, code)

    def append(
        self,
        timed: Timed,
        body: Body,
        *,
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int,
        born_host: bytes,
        reconsume_times: int = 0,
    ) -> TickMessage:
        """Store a message in the timer topic until its delivery time. Raises StoreRefused or CommandError."""
        self.tables.topics.ensure(TIMER_TOPIC, 1)
        now_ms = self.clock.time_ms()
        ahead_ms = mono_ms(self.clock) - now_ms
        message = self.store.appender.append(
            TIMER_TOPIC, 0, body, timed.properties, flag=flag, sys_flag=sys_flag,
            born_timestamp_ms=born_timestamp_ms, born_host=born_host, reconsume_times=reconsume_times,
            tags_code=timed.code.pack(),
        )  # fmt: skip
        self.steps.note(message.queue_offset, ahead_ms)
        return message

    def handle(self, timed: Timed) -> str:
        """Return the handle with which a message can be recalled, or "" if it cannot be recalled."""
        key = value_of(timed.properties, b"UNIQ_KEY").decode("utf-8", "replace")
        if not key or timed.topic.startswith(RETRY_PREFIX):
            return ""
        return RecallHandle(timed.topic, self.config.broker_name, timed.code.out_ms + 1, key).encode()

    def _refuse_if_not_taken(self, *, recall: bool) -> None:
        if not self.config.timer_wheel_enable:
            raise CommandError.failed("accurate timer message is not enabled, timerWheelEnable is false")
        timers = self.tables.timers
        most, waiting = self.config.timer_max_waiting, timers.waiting
        # Recalls have a limit of their own: timerMaxWaiting or, if greater, the number of waiting messages.
        if recall:
            most, waiting = max(most, waiting - timers.recalls), timers.recalls
        if waiting >= most:
            raise CommandError.failed(
                f"timer message is under flow control, max num limit is {most} (timerMaxWaiting): {waiting} "
                f"{'recalls' if recall else 'messages'} wait"
            )

    def _illegal(self, what: str) -> CommandError:
        limit_ms = 1_000 * self.config.timer_max_delay_sec
        return CommandError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"timer message illegal, the delay time should not be bigger than the max delay {limit_ms}ms; or "
            f"if set del msg, the delay time should be bigger than the current time: {what}",
        )


def _deliver_ms(name: bytes, text: bytes, now_ms: int) -> int | None:
    """Return the delivery time (ms since 1970) in a property, or None if the property is not a number."""
    try:
        given = to_long(text.decode("utf-8", "replace"))
    except Mismatch:
        return None
    if name == b"TIMER_DELIVER_MS":
        return given
    return now_ms + given * (1_000 if name == b"TIMER_DELAY_SEC" else 1)
