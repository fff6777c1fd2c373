"""Which queues this member of a group should hold, and what that changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cometmq.client.consumer.allocate import AllocateStrategy
from cometmq.message import MessageQueue

__all__ = ["Changes", "changes", "share_of"]

PULL_MAX_IDLE_S = 120.0
"""A held queue whose pull has not come back for this long is given up and taken anew
(`rocketmq.client.pull.pullMaxIdleTime`: docs/reference/client.md, Rebalance)."""


@dataclass(frozen=True, slots=True)
class Changes:
    drop: tuple[MessageQueue, ...]
    add: tuple[MessageQueue, ...]

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)


def share_of(
    strategy: AllocateStrategy, client_id: str, queues: Iterable[MessageQueue], client_ids: Iterable[str]
) -> list[MessageQueue]:
    """This member's queues. Everyone sorts alike: queues by topic, broker name, queue id; ids as text."""
    return strategy.allocate(client_id, sorted(set(queues)), sorted(set(client_ids)))


def changes(
    held: Collection[MessageQueue],
    wanted: Collection[MessageQueue],
    expired: Collection[MessageQueue] = (),
) -> Changes:
    """`drop` comes before `add` in effect: a queue is never pulled twice by one client. `expired`: held
    queues that are to be taken anew."""
    wanted_set = set(wanted)
    held_set = set(held)
    kept = held_set & wanted_set - set(expired)
    return Changes(drop=tuple(sorted(held_set - kept)), add=tuple(sorted(wanted_set - kept)))
