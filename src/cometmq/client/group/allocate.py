"""The strategies that distribute the queues of a topic among the members of a consumer group.

Every member computes the whole assignment by itself from the same sorted queues and client ids, so all
members must use the same strategy with the same parameters. A group may contain members with Java's client,
so the rules are RocketMQ's.
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


class AllocateStrategy(Protocol):
    """A strategy with a name and a function that returns the queues of one member.

    `allocate` receives the queues and the client ids in sorted order and returns the queues of `client_id`.
    """

    @property
    def name(self) -> str: ...

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]: ...


def _position(client_id: str, client_ids: Sequence[str]) -> int | None:
    """Return the index of this client among the members, None if the broker does not list it yet."""
    try:
        return client_ids.index(client_id)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class AllocateAveragely:
    """Each member gets a contiguous range of the queues.

    The lengths of the ranges differ by one at most, and the first members have the longer ranges.
    """

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
    """The members get the queues in turn, one queue at a time."""

    name: str = "AVG_BY_CIRCLE"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        index = _position(client_id, client_ids)
        return [] if index is None else list(queues[index :: len(client_ids)])


@dataclass(frozen=True, slots=True)
class AllocateByConfig:
    """A strategy that always assigns the configured queues to this member.

    The user must configure the members so that each queue has exactly one member.
    """

    queues: tuple[MessageQueue, ...]
    name: str = "CONFIG"

    def allocate(
        self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
    ) -> list[MessageQueue]:
        del client_id, queues, client_ids
        return list(self.queues)


@dataclass(frozen=True, slots=True)
class AllocateByMachineRoom:
    """A strategy that divides the queues in some machine rooms evenly among the members.

    These are the queues of brokers named `<room>@<name>` whose room is in `rooms`.
    """

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
    """A strategy that assigns the queues of each machine room to the members in the same machine room.

    The queues of a room without members go to all members.

    Args:
        queue_room: Returns the machine room of a queue, usually from its broker's name. The room must not be
            empty.
        member_room: Returns the machine room of a client id. The room must not be empty.
        inner: The strategy that distributes queues among several members.
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
    """Return the position of a text on the hash ring: the first four bytes of its MD5 hash, big-endian."""
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4], "big")


def java_text(queue: MessageQueue) -> str:
    """Return the text form of a queue in Java, which Java's client hashes."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


@dataclass(frozen=True, slots=True)
class AllocateByConsistentHash:
    """A strategy with a hash ring.

    If a member joins or leaves, only the queues next to its points on the ring move.
    """

    virtual_node_count: int = 10
    name: str = field(default="CONSISTENT_HASH")
    hashed_as: Callable[[MessageQueue], MessageQueue] | None = None
    """A function that adds a namespace to a queue, which Java's client hashes with it. None: no namespace."""

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
            at = bisect_left(ring, _ring_hash(java_text(self.hashed_as(queue) if self.hashed_as else queue)))
            if points[ring[at % len(ring)]] == client_id:
                mine.append(queue)
        return mine


def hashing(strategy: AllocateStrategy, how: Callable[[MessageQueue], MessageQueue]) -> AllocateStrategy:
    """Return a strategy that hashes `how(queue)` in place of each queue, if it hashes queues at all."""
    if isinstance(strategy, AllocateByConsistentHash):
        return replace(strategy, hashed_as=how)
    if isinstance(strategy, AllocateByMachineRoomNearby):
        return replace(strategy, inner=hashing(strategy.inner, how))
    return strategy


def share_of(
    strategy: AllocateStrategy, client_id: str, queues: Iterable[MessageQueue], client_ids: Iterable[str]
) -> list[MessageQueue]:
    """Return this member's queues by a strategy. Raises ConfigError if the strategy failed."""
    try:
        shared = sorted(set(queues)), sorted(set(client_ids))
        mine = call_hook(lambda: list(strategy.allocate(client_id, *shared)))
        if not all(isinstance(queue, MessageQueue) for queue in mine):
            raise TypeError(f"allocate() must return message queues, not {mine!r}")
    except ConfigError:
        raise
    except Exception as error:
        # The strategy is the user's code. If it fails, the member keeps its queues, and health() reports the
        # error.
        kind = type(strategy).__name__
        raise ConfigError("allocate_strategy", kind, f"a list of queues from it, not {error!r}") from error
    return mine
