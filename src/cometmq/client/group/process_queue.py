"""What a push consumer holds of one queue: pulled, not yet done messages, and the offset that may be
committed.

Pulled messages are cut into batches, the unit a listener gets. Batches finish in any order; the offset to
commit is the first offset of the oldest unfinished batch, or one past the highest offset seen when none is
left. So a crash repeats messages and never skips one. Work is per batch, never per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cometmq.client.group.statistics import TopicStats
from cometmq.message import MessageExt, MessageQueue

__all__ = ["Batch", "FlowLimits", "ProcessQueue"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """When a queue stops being pulled. Sizes count in whole MiB, as RocketMQ counts them."""

    max_count: int = 1000
    max_mib: int = 100
    max_span: int = 2000


class Batch(msgspec.Struct, eq=False):
    """Consecutive messages of one queue that one listener call gets."""

    queue: ProcessQueue
    messages: list[MessageExt]
    size: int
    """Body bytes."""
    started_at: float = 0.0
    """Monotonic seconds at which a listener got it, 0 before that."""
    done: bool = False
    refusal: Exception | None = None
    """Why no listener gets it: it fails at once."""

    @property
    def first_offset(self) -> int:
        return self.messages[0].queue_offset


@dataclass(slots=True, eq=False)
class ProcessQueue:
    """One held queue. `dropped` once it is no longer ours: results that come later change nothing."""

    message_queue: MessageQueue
    next_offset: int
    """Offset of the next pull."""
    last_pull_at: float
    """Monotonic seconds; at first those of its making."""
    last_consume_at: float = field(init=False)
    dropped: bool = False
    leaving: bool = False
    """Given up: nothing more is begun, but what a running call says still counts, unless it is `dropped`."""
    stats: TopicStats = field(default_factory=TopicStats)
    """Those of its topic."""
    calls: int = 0
    """Listener calls under way."""
    count: int = 0
    body_bytes: int = 0
    _batches: deque[Batch] = field(default_factory=deque)
    _highest: int = -1

    def __post_init__(self) -> None:
        self.last_consume_at = self.last_pull_at

    def put(self, messages: Sequence[MessageExt], batch_size: int) -> list[Batch]:
        """Take pulled messages (ascending offsets, above all before); the batches to hand to listeners."""
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
        """Mark a batch as done; the offset that may be committed now, or None when nothing was held."""
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
        """Shrink an unfinished batch to the messages that must be consumed again."""
        assert kept
        assert not batch.done
        size = sum([len(message.body) for message in kept])
        self.count -= len(batch.messages) - len(kept)
        self.body_bytes -= batch.size - size
        batch.messages = kept
        batch.size = size
        batch.started_at = 0.0

    def commit_offset(self) -> int | None:
        """Lowest offset not yet done; None before the first message.

        With nothing left that is where the next pull begins: what was filtered out counts as done.
        """
        if self._batches:
            return self._batches[0].first_offset
        return max(self._highest + 1, self.next_offset) if self._highest >= 0 else None

    @property
    def done_offset(self) -> int:
        """What is below is done."""
        done = self.commit_offset()
        return self.next_offset if done is None else done

    @property
    def span(self) -> int:
        """Distance between the oldest unfinished and the newest message."""
        return self._highest - self._batches[0].first_offset if self._batches else 0

    def over_limit(self, limits: FlowLimits) -> str | None:
        """Why this queue must not be pulled now, in words for logs and health(); None when it may be."""
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
        """First and last offset held, (0, 0) when nothing is."""
        return (self._batches[0].first_offset, self._highest) if self._batches else (0, 0)

    def oldest_started_before(self, moment: float) -> Batch | None:
        """The oldest unfinished batch, if a listener has had it since before `moment` (monotonic seconds)."""
        if not self._batches:
            return None
        batch = self._batches[0]
        return batch if 0 < batch.started_at < moment else None
