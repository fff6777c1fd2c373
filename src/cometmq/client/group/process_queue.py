"""The pulled but not yet consumed messages of one queue, and the offset that may be committed.

Pulled messages are divided into batches, the unit of a listener call. Batches finish in any order. The offset
to commit is the first offset of the oldest unfinished batch, or one past the highest offset if no batch is
unfinished. So a crash repeats messages and never skips a message. The code does its work once per batch, not
once per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cometmq.client.group.statistics import TopicStats
from cometmq.message import MessageExt, MessageQueue, add_properties
from cometmq.protocol.properties.values import CONSUME_START_TIME

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """The limits of the pulled but not yet consumed messages of a queue. Pulling pauses at each limit.

    Attributes:
        max_count: The maximum number of messages, 1 to 65535.
        max_mib: The maximum size of the bodies in MiB, 1 to 1024. RocketMQ counts whole MiB.
        max_span: The maximum distance between the oldest and the newest offset, 1 to 65535.
    """

    max_count: int = 1000
    max_mib: int = 100
    max_span: int = 2000


class Batch(msgspec.Struct, eq=False):
    """Consecutive messages of one queue for one listener call."""

    queue: ProcessQueue
    messages: list[MessageExt]
    size: int
    """The total size of the messages' bodies in bytes."""
    started_at: float = 0.0
    """Start time of the listener call in monotonic seconds; 0 before the call."""
    done: bool = False
    refusal: Exception | None = None
    """The reason why the batch fails without a listener call."""

    @property
    def first_offset(self) -> int:
        return self.messages[0].queue_offset

    def add_start_time(self, start_s: float) -> None:
        """Set the property CONSUME_START_TIME of the messages, as Java's client does (seconds since 1970)."""
        add_properties(self.messages, {CONSUME_START_TIME: str(int(start_s * 1000))})


@dataclass(slots=True, eq=False)
class ProcessQueue:
    """An assigned queue. Once it is `dropped`, another member may own it, and late results have no effect."""

    message_queue: MessageQueue
    next_offset: int
    """The offset of the next pull."""
    last_pull_at: float
    """Time of the last pull in monotonic seconds. Before the first pull: the time of the assignment."""
    last_consume_at: float = field(init=False)
    dropped: bool = False
    leaving: bool = False
    """Whether the queue is being released: no call begins, and the results of running calls still count."""
    stats: TopicStats = field(default_factory=TopicStats)
    """The statistics of the queue's topic."""
    calls: int = 0
    """The number of running listener calls."""
    count: int = 0
    body_bytes: int = 0
    _batches: deque[Batch] = field(default_factory=deque)
    _highest: int = -1

    def __post_init__(self) -> None:
        self.last_consume_at = self.last_pull_at

    def put(self, messages: Sequence[MessageExt], batch_size: int) -> list[Batch]:
        """Add pulled messages with ascending, new offsets, and return the batches for the listener."""
        if not messages:
            return []
        batches: list[Batch] = []
        for start in range(0, len(messages), batch_size):
            chunk = list(messages[start : start + batch_size])
            batches.append(Batch(self, chunk, sum([len(message.body) for message in chunk])))
        self._batches.extend(batches)
        self.count += len(messages)
        self.body_bytes += sum([batch.size for batch in batches])
        self._highest = messages[-1].queue_offset
        return batches

    def finish(self, batch: Batch) -> int | None:
        """Mark a batch as finished, and return the offset that may be committed, or None if there is none."""
        if batch.done:
            return self.commit_offset()
        batch.done = True
        self.count -= len(batch.messages)
        self.body_bytes -= batch.size
        batches = self._batches
        while batches and batches[0].done:
            batches.popleft()
        return self.commit_offset()

    def keep(self, batch: Batch, kept: list[MessageExt]) -> None:
        """Reduce an unfinished batch to the messages that must be consumed again."""
        assert kept
        assert not batch.done
        size = sum([len(message.body) for message in kept])
        self.count -= len(batch.messages) - len(kept)
        self.body_bytes -= batch.size - size
        batch.messages = kept
        batch.size = size
        batch.started_at = 0.0

    def commit_offset(self) -> int | None:
        """Return the lowest unfinished offset, or None before the first message.

        If no message is unfinished, return the offset of the next pull: filtered messages count as consumed.
        """
        if self._batches:
            return self._batches[0].first_offset
        return max(self._highest + 1, self.next_offset) if self._highest >= 0 else None

    @property
    def done_offset(self) -> int:
        """The offset below which all messages are consumed."""
        done = self.commit_offset()
        return self.next_offset if done is None else done

    @property
    def span(self) -> int:
        """The distance between the offsets of the oldest unfinished message and the newest message."""
        return self._highest - self._batches[0].first_offset if self._batches else 0

    def over_limit(self, limits: FlowLimits) -> str | None:
        """Describe the limit that prevents a pull, for logs and health(). Return None if there is none."""
        if self.count > limits.max_count:
            return f"{self.count} messages held, limit {limits.max_count}"
        if self.body_bytes // _MIB > limits.max_mib:
            return f"{self.body_bytes // _MIB} MiB held, limit {limits.max_mib}"
        if self.span > limits.max_span:
            return (
                f"offsets span {self.span}, limit {limits.max_span}: an old message is still being consumed"
            )
        return None

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last offset of the unfinished messages, (0, 0) if there are none."""
        return (self._batches[0].first_offset, self._highest) if self._batches else (0, 0)

    @property
    def taken(self) -> tuple[int, int, int]:
        """Three zeros: only an OrderlyQueue has delivered, uncommitted messages."""
        return 0, 0, 0

    def oldest_started_before(self, moment: float) -> Batch | None:
        """Return the oldest unfinished batch if its call began before `moment` (monotonic seconds)."""
        if not self._batches:
            return None
        batch = self._batches[0]
        return batch if 0 < batch.started_at < moment else None


class LeasedQueue(ProcessQueue):
    """The queue of messages that are leased to this member. The queue itself is not assigned to a member."""
