"""The health report of a consumer, which names the reasons why messages are not consumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cometmq.message import MessageQueue


@dataclass(frozen=True, slots=True)
class QueueHealth:
    """The progress of a consumer in one queue.

    Attributes:
        queue: The queue.
        next_offset: The offset of the next pull.
        committed_offset: The offset that this client will store. None: no message was consumed yet.
        done_offset: The offset below which all messages are consumed. lag() counts from it. None: a scheduled
            function has not set an offset yet, so lag() uses committed().
        held_count: The number of pulled messages that are not consumed yet.
        held_bytes: The size of these messages in bytes.
        since_pull_s: The seconds since the last pull.
        since_consume_s: The seconds since a message was last consumed.
        waiting: The reason why nothing is pulled now, for example flow control or a suspended consumer.
        problem: The error of the last pull, or of the last call of a scheduled function.
        call_s: Scheduled pulls: the duration of the running call in seconds.
    """

    queue: MessageQueue
    next_offset: int
    committed_offset: int | None
    done_offset: int | None
    held_count: int
    held_bytes: int
    since_pull_s: float
    since_consume_s: float
    waiting: str | None
    problem: str | None
    call_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """The state of a consumer and its problems.

    Attributes:
        state: `new`, `starting`, `running`, `stopping` or `stopped`.
        group: The name of the consumer group.
        client_id: The client id at the brokers.
        queues: The progress in each assigned queue.
        running_listeners: The number of running listener calls.
        waiting_batches: The number of batches that wait for a listener call.
        consumed: The number of messages consumed since the start.
        failed: The number of messages whose listener raised an exception or returned RECONSUME_LATER.
        last_error: The last exception of the listener.
        problems: The problems that prevent consumption, each a sentence with a topic, queue or address.
        ok: Whether the consumer is running without problems.
    """

    state: str
    group: str
    client_id: str = ""
    queues: tuple[QueueHealth, ...] = ()
    running_listeners: int = 0
    waiting_batches: int = 0
    consumed: int = 0
    failed: int = 0
    last_error: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.state == "running" and not self.problems


def problems_of(
    shares: Mapping[str, str], queues: Iterable[QueueHealth], heartbeats: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a sentence about each failed rebalance, failed pull, and broker that refused a heartbeat."""
    return (
        *(f"{topic}: {problem}" for topic, problem in sorted(shares.items())),
        *(
            f"{each.queue.topic}/{each.queue.broker_name}/{each.queue.queue_id}: {each.problem}"
            for each in queues
            if each.problem
        ),
        *(f"heartbeat to {addr}: {problem}" for addr, problem in sorted(heartbeats.items())),
    )
