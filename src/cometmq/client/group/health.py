"""What a consumer says about itself, so that nobody has to guess why messages do not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cometmq.message import MessageQueue

__all__ = ["ConsumerHealth", "QueueHealth", "problems_of"]


@dataclass(frozen=True, slots=True)
class QueueHealth:
    """How far the consumer is with one of its queues."""

    queue: MessageQueue
    next_offset: int
    """Of the next pull."""
    committed_offset: int | None
    """As this client will store it; None: nothing consumed yet."""
    done_offset: int | None
    """What is below is done: lag() counts from here. None (scheduled pulls): as committed() says."""
    held_count: int
    """Messages pulled and not yet done."""
    held_bytes: int
    since_pull_s: float
    since_consume_s: float
    waiting: str | None
    """Why no more is asked for just now: the listener is behind its limits, or the consumer is suspended."""
    problem: str | None
    """What went wrong at the last pull, or call of a scheduled function."""
    call_s: float | None = None
    """Scheduled pulls: how long the call that runs has done so."""


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """What a consumer does, and what keeps it from its work."""

    state: str
    group: str
    client_id: str = ""
    queues: tuple[QueueHealth, ...] = ()
    running_listeners: int = 0
    waiting_batches: int = 0
    consumed: int = 0
    """Messages handled since the start."""
    failed: int = 0
    """Messages whose listener failed or asked for later."""
    last_error: str | None = None
    """Of a listener."""
    problems: tuple[str, ...] = ()
    """What keeps this consumer from its work, each a sentence that names topic, queue or address."""

    @property
    def ok(self) -> bool:
        return self.state == "running" and not self.problems


def problems_of(
    shares: Mapping[str, str], queues: Iterable[QueueHealth], heartbeats: Mapping[str, str]
) -> tuple[str, ...]:
    """Sentences about topics that could not be shared out, queues, and brokers that took no heartbeat."""
    return (
        *(f"{topic}: {problem}" for topic, problem in sorted(shares.items())),
        *(
            f"{each.queue.topic}/{each.queue.broker_name}/{each.queue.queue_id}: {each.problem}"
            for each in queues
            if each.problem
        ),
        *(f"heartbeat to {addr}: {problem}" for addr, problem in sorted(heartbeats.items())),
    )
