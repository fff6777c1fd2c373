"""How the queues of a topic are shared among the members of a consumer group.

Every member computes the whole assignment alone, from the same sorted queues and the same sorted client ids,
so all members must run the same strategy with the same parameters. The rules are RocketMQ's: a group may mix
our members with Java's.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cometmq.client.cluster.workers import call_hook
from cometmq.errors import ConfigError
from cometmq.message import MessageQueue

__all__ = [
    "AllocateAveragely",
    "AllocateAveragelyByCircle",
    "AllocateByConfig",
    "AllocateByConsistentHash",
    "AllocateByMachineRoom",
    "AllocateByMachineRoomNearby",
    "AllocateStrategy",
    "hashing",
    "share_of",
]


class AllocateStrategy(Protocol):
    """`queues` and `client_ids` come sorted; the answer holds the queues of `client_id`."""

    @property
    def name(self) -> str: ...

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]: ...


def _position(client_id: str, client_ids: Sequence[str]) -> int | None:
    """Own index; None, which owns nothing, while the broker does not list this client."""
    try:
        return client_ids.index(client_id)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class AllocateAveragely:
    """Contiguous runs whose lengths differ by at most one; the first members take the longer ones."""

    name: str = "AVG"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        index = _position(client_id, client_ids)
        if index is None:
            return []
        size, longer = divmod(len(queues), len(client_ids))
        start = index * size + min(index, longer)
        return list(queues[start : start + size + (index < longer)])


@dataclass(frozen=True, slots=True)
class AllocateAveragelyByCircle:
    """Queues dealt out one by one in turn."""

    name: str = "AVG_BY_CIRCLE"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        index = _position(client_id, client_ids)
        return [] if index is None else list(queues[index :: len(client_ids)])


@dataclass(frozen=True, slots=True)
class AllocateByConfig:
    """The queues that the user wrote down, whoever else is in the group."""

    queues: tuple[MessageQueue, ...]
    name: str = "CONFIG"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        del client_id, queues, client_ids
        return list(self.queues)


@dataclass(frozen=True, slots=True)
class AllocateByMachineRoom:
    """Only queues on brokers named `<room>@<name>` whose room is one of `rooms`, shared evenly."""

    rooms: Collection[str]
    name: str = "MACHINE_ROOM"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        index = _position(client_id, client_ids)
        if index is None:
            return []
        mine = [queue for queue in queues if self._in_rooms(queue.broker_name)]
        size, rest = divmod(len(mine), len(client_ids))
        share = mine[index * size : (index + 1) * size]
        if rest > index:
            share.append(mine[index + size * len(client_ids)])
        return share

    def _in_rooms(self, broker_name: str) -> bool:
        room, at, name = broker_name.partition("@")
        return bool(at) and "@" not in name and room in self.rooms


@dataclass(frozen=True, slots=True)
class AllocateByMachineRoomNearby:
    """The queues of a room go to the members in that room; those of rooms without a member to all members.

    queue_room, member_room: the room of a queue (as a rule told by its broker's name) and of a client id,
    which must not be empty. inner: how what goes to several members is shared.
    """

    queue_room: Callable[[MessageQueue], str]
    member_room: Callable[[str], str]
    inner: AllocateStrategy = field(default_factory=AllocateAveragely)

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{self.inner.name}"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        if _position(client_id, client_ids) is None:
            return []
        members: dict[str, list[str]] = {}
        for member in client_ids:
            members.setdefault(_room(self.member_room(member), member), []).append(member)
        by_room: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_room.setdefault(_room(self.queue_room(queue), str(queue)), []).append(queue)
        mine: list[MessageQueue] = []
        for room in sorted(by_room):
            sharing = members.get(room, client_ids)
            if client_id in sharing:
                mine += self.inner.allocate(client_id, by_room[room], sharing)
        return mine


def _room(name: str, of: str) -> str:
    if not name:
        raise ConfigError("allocate_strategy", f"no machine room for {of}", "the name of a room")
    return name


def _ring_hash(text: str) -> int:
    """First four bytes of MD5, big-endian: the point of `text` on the ring."""
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    """The queue as Java prints it, which is what gets hashed."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


@dataclass(frozen=True, slots=True)
class AllocateByConsistentHash:
    """A hash ring: when a member comes or goes, only the queues next to its points move."""

    virtual_node_count: int = 10
    name: str = field(default="CONSISTENT_HASH")
    hashed_as: Callable[[MessageQueue], MessageQueue] | None = None
    """Set by a consumer in a namespace: what is hashed is a queue's name there, as Java's client does it."""

    def __post_init__(self) -> None:
        if self.virtual_node_count < 0:
            raise ValueError(f"virtual_node_count is {self.virtual_node_count}; it must be 0 or more")

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        if _position(client_id, client_ids) is None or not self.virtual_node_count:
            return []
        points = {
            _ring_hash(f"{member}-{replica}"): member
            for member in client_ids
            for replica in range(self.virtual_node_count)
        }
        ring = sorted(points)
        mine: list[MessageQueue] = []
        for queue in queues:
            at = bisect_left(ring, _ring_hash(_java_text(self.hashed_as(queue) if self.hashed_as else queue)))
            if points[ring[at % len(ring)]] == client_id:
                mine.append(queue)
        return mine


def hashing(strategy: AllocateStrategy, how: Callable[[MessageQueue], MessageQueue]) -> AllocateStrategy:
    """The strategy, which hashes (if it does) what `how` makes of a queue."""
    if isinstance(strategy, AllocateByConsistentHash):
        return replace(strategy, hashed_as=how)
    if isinstance(strategy, AllocateByMachineRoomNearby):
        return replace(strategy, inner=hashing(strategy.inner, how))
    return strategy


def share_of(
    strategy: AllocateStrategy, client_id: str, queues: Iterable[MessageQueue], client_ids: Iterable[str]
) -> list[MessageQueue]:
    """This member's queues. All sort alike: queues by topic, broker name and id, client ids as text.

    Raises ConfigError for a strategy that fails.
    """
    try:
        shared = sorted(set(queues)), sorted(set(client_ids))
        mine = call_hook(lambda: list(strategy.allocate(client_id, *shared)))
        if not all(isinstance(queue, MessageQueue) for queue in mine):
            raise TypeError(f"allocate() gave {mine!r}")
    except ConfigError:
        raise
    except Exception as error:
        # It is the user's code. The member keeps what it holds, and health() says why.
        kind = type(strategy).__name__
        raise ConfigError("allocate_strategy", kind, f"a list of queues from it, not {error!r}") from error
    return mine
