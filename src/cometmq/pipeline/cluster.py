"""What planning asks a cluster: which queues there are, what they hold, which offset a time means.

Calls block and retry: an exception in a planning method ends a streaming query at once, so what passes by
itself within the time-out (a broker that restarts, a broken connection) is waited for here.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from cometmq import logs
from cometmq.client.cluster.requests import (
    NO_ROUTE_HINT,
    PULL_STATUS,
    UNREACHABLE_HINT,
    commit_request,
    max_offset_request,
    min_offset_request,
    offset_in,
    pull_request,
    route_in,
    route_request,
    succeeded,
)
from cometmq.client.cluster.routes import RouteTable, TopicRoute, template_route, topic_route
from cometmq.client.consumer.offsets import commit_rounds
from cometmq.errors import BrokerError, CometError, ConfigError, NoRouteError, RecordError, RemotingError
from cometmq.message import MessageQueue
from cometmq.pipeline.marks import Marks, mark_of, resume
from cometmq.pipeline.offsets import EARLIEST, LATEST, Offsets
from cometmq.pipeline.options import Position, Topics
from cometmq.pipeline.plan import Bounds, shrunk
from cometmq.pipeline.pulling import BUSY, Reply, pull_reply
from cometmq.pipeline.wire import IdleWires
from cometmq.protocol.bodies import ClusterInfo, TopicList
from cometmq.protocol.codes import TBW102, TOOLS_CONSUMER_GROUP, RequestCode, ResponseCode, is_system_topic
from cometmq.protocol.frame import Frame

log = logs.logger(__name__)

_RETRY_S = 0.2
_AT_ONCE = 256  # requests in flight: more could fill the buffers of both directions and stand still
_RECORDS_AT_ONCE = 8  # each answer may have 4 MiB
_AWAY_S = (1.0, 30.0)  # pause between looks for a broker that is away: the first, the longest
_SHRUNK_S = 1.0  # pause before a second look at a queue that looks shorter than it was
_NOT_THERE = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED})
_NEW_TOPIC_QUEUES = 4  # what producers ask for when their first message creates a topic
T = TypeVar("T")


class Cluster:
    """Connections to the name servers and brokers of one cluster, opened when needed. For one thread only."""

    def __init__(self, namesrv: Sequence[str], *, timeout_ms: int) -> None:
        self._namesrv = tuple(namesrv)
        self._timeout_s = timeout_ms / 1000
        self._wires = IdleWires()
        self._routes = RouteTable()
        self._away: dict[str, _Away] = {}  # by broker name

    # -- routes

    def queues(self, topics: Topics) -> list[MessageQueue]:
        """The readable queues, sorted. Raises NoRouteError for a topic that no name server knows."""
        if topics.queues:
            for topic in {queue.topic for queue in topics.queues}:
                self.route(topic)
            return list(topics.queues)
        names = self._names(topics, wait=True)
        found = [queue for name in names for queue in self.route(name).read_queues]
        return sorted(set(found))

    def _names(self, topics: Topics, *, wait: bool) -> tuple[str, ...]:
        if topics.pattern is None:
            return topics.names or tuple(sorted({queue.topic for queue in topics.queues}))
        pattern = re.compile(topics.pattern)
        return tuple(name for name in self.topic_names(wait=wait) if pattern.fullmatch(name))

    def topic_names(self, *, wait: bool = True) -> list[str]:
        """Topics of users, system topics left out. wait: for name servers, as long as the time-out allows."""
        frame = self._ask_namesrv(Frame.request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER), wait=wait)
        return sorted(name for name in TopicList.decode(frame.body).topic_list if not is_system_topic(name))

    def route(self, topic: str) -> TopicRoute:
        """Raises NoRouteError with what each name server answered."""
        return self._within_timeout(lambda: self._route(topic), give_up=_unknown_topic)

    def write_queues(self, topic: str, *, wait: bool = True) -> tuple[MessageQueue, ...]:
        """Where messages of a topic may go, by a fresh look; for a topic that does not exist yet, where its
        first message creates it. wait: for name servers that are away, as long as the time-out allows.
        """
        try:
            return (self.route(topic) if wait else self._route(topic)).write_queues
        except NoRouteError as error:
            try:
                template = self._route(TBW102)
            except NoRouteError:
                raise error from None
            route = template_route(topic, template.data, _NEW_TOPIC_QUEUES)
            self._routes.put(route)
            return route.write_queues

    def away(self, topics: Topics, known: Iterable[MessageQueue], held: Iterable[MessageQueue]) -> list[str]:
        """Names of the brokers that hold messages of these topics but cannot be read now, sorted.

        known: queues that were read before, held: those that can be read now. The broker of a known queue is
        away unless it is registered (then it no longer has the topic); a broker of the route is away if the
        topic may not be read there.
        """
        here = {(queue.topic, queue.broker_name) for queue in held}
        gone = {
            queue.broker_name
            for queue in known
            if topics.includes(queue) and (queue.topic, queue.broker_name) not in here
        }
        if gone:
            frame = self._ask_namesrv(Frame.request(RequestCode.GET_BROKER_CLUSTER_INFO))
            gone -= ClusterInfo.decode(frame.body).broker_addr_table.keys()
        for topic in {*topics.names, *(topic for topic, _ in here)}:
            route = self._routes.get(topic) or self.route(topic)
            routed = {item.broker_name for item in route.data.queue_datas}
            gone |= {name for name in routed if (topic, name) not in here}
        return sorted(gone)

    def _route(self, topic: str) -> TopicRoute:
        asked: list[tuple[str, str]] = []
        reached = False
        for address in self._namesrv:
            try:
                frame = self._call(address, [route_request(topic)])[0]
            except RemotingError as error:
                asked.append((address, str(error)))
                continue
            reached = True
            data = route_in(frame)
            if not isinstance(data, str):
                route = topic_route(topic, data)
                self._routes.put(route)
                return route
            asked.append((address, data))
        raise NoRouteError(topic, asked, NO_ROUTE_HINT if reached else UNREACHABLE_HINT)

    def addresses(self, queues: Iterable[MessageQueue]) -> dict[str, str]:
        """The addresses to read from, by broker name; brokers that are away are left out."""
        named = {queue.broker_name for queue in queues}
        found = {name: self._routes.any(name) for name in sorted(named)}
        return {name: address for name, address in found.items() if address is not None}

    def address_of(self, queue: MessageQueue) -> str:
        """Where to read the queue now, by a fresh look. Raises NoRouteError if its broker is away."""
        self._route(queue.topic)
        return _registered(queue, self._routes.any(queue.broker_name), self._namesrv)

    def fresh_master(self, queue: MessageQueue) -> str:
        """The address of its broker's master, by a fresh look. Raises NoRouteError if there is none now."""
        self._route(queue.topic)
        return _registered(queue, self._routes.master(queue.broker_name), self._namesrv)

    def master_of(self, queue: MessageQueue) -> str:
        """Where to write to the queue. Raises NoRouteError if the broker has no master now."""
        address = self._routes.master(queue.broker_name)
        if address is None:
            self.write_queues(queue.topic)
            address = self._routes.master(queue.broker_name)
        return _registered(queue, address, self._namesrv)

    # -- offsets

    def bounds(
        self, queues: Sequence[MessageQueue], *, missing_ok: bool = False
    ) -> dict[MessageQueue, Bounds]:
        """What each queue holds; the two requests for each queue are all in flight at once.

        missing_ok: ask once, and leave out queues whose brokers cannot be asked instead of raising the error.
        """
        found: dict[MessageQueue, Bounds] = {}
        for own in _by_broker(queues):
            try:
                ask = partial(self._bounds_of, own)
                found |= ask() if missing_ok else self._within_timeout(ask)
            except (RemotingError, NoRouteError, BrokerError):
                if not missing_ok:
                    raise
        return found

    def _bounds_of(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, Bounds]:
        address = self._known_or_fresh(queues[0])
        replica = address != self._routes.master(queues[0].broker_name)
        frames = [make(queue) for queue in queues for make in (min_offset_request, max_offset_request)]
        answers = iter(self._call(address, frames))
        return {
            queue: Bounds(
                offset_in(next(answers), address, queue), offset_in(next(answers), address, queue), replica
            )
            for queue in queues
        }

    def look(self, topics: Topics, known: Iterable[MessageQueue]) -> dict[MessageQueue, Bounds]:
        """The `bounds` of the queues of `topics` and of those `known` from before, for callers that ask again
        and again. Queues whose broker does not answer, or refuses for the moment, are left out.

        If a name server does not answer or does not know a topic, brokers are taken to be where they were. A
        broker that is away is named in a warning and not asked again for a while. Raises NoRouteError,
        RemotingError or BrokerError when no broker at all answers.
        """
        queues = {queue for queue in known if topics.includes(queue)}
        failure: CometError | None = None
        try:
            for name in self._names(topics, wait=False):
                try:
                    queues.update(filter(topics.includes, self._route(name).read_queues))
                except NoRouteError as error:
                    failure = error
        except RemotingError as error:
            failure = error
        bounds: dict[MessageQueue, Bounds] = {}
        for own in _by_broker(sorted(queues)):
            try:
                bounds |= self._unless_away(own)
            except (RemotingError, NoRouteError, BrokerError) as error:
                if isinstance(error, BrokerError) and error.code not in BUSY:
                    raise
                failure = error
        if failure is not None and not bounds:
            raise failure
        return bounds

    def _unless_away(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, Bounds]:
        name = queues[0].broker_name
        away, address = self._away.get(name), self._routes.any(name)
        if away is not None and away.address == address and time.monotonic() < away.until:
            raise away.error
        try:
            found = self._bounds_of(queues)
        except CometError as error:
            pause = _AWAY_S[0] if away is None else min(2 * away.pause, _AWAY_S[1])
            if away is None:
                log.warning("broker %s is away, %d queues wait for it: %s", name, len(queues), error)
            self._away[name] = _Away(error, address, pause, time.monotonic() + pause)
            raise
        if self._away.pop(name, None) is not None:
            log.warning("broker %s is back", name)
        return found

    def marks(self, offsets: Mapping[MessageQueue, int]) -> Marks:
        """The marks of the records at these offsets; those that are not there or damaged, or whose broker is
        away, are left out. Raises BrokerError when a broker refuses."""
        found: Marks = {}
        for own in _by_broker(sorted(offsets)):
            with contextlib.suppress(RemotingError, NoRouteError):
                for first in range(0, len(own), _RECORDS_AT_ONCE):
                    each = own[first : first + _RECORDS_AT_ONCE]
                    found |= self._within_timeout(partial(self._marks_of, each, offsets))
        return found

    def _marks_of(self, queues: Sequence[MessageQueue], offsets: Mapping[MessageQueue, int]) -> Marks:
        found: Marks = {}
        replies = self._pull_one([(queue, offsets[queue]) for queue in queues])
        for queue, reply in zip(queues, replies, strict=True):
            if reply.body:
                with contextlib.suppress(RecordError):
                    offset, mark = mark_of(reply.body)
                    if offset == offsets[queue]:
                        found[queue] = mark
        return found

    def replaced(
        self, read: Offsets, kept: Marks, held: Mapping[MessageQueue, Bounds], *, fail: bool, idle: bool
    ) -> Offsets:
        """marks.resume, after a look at the last record read of each queue that has grown; with `idle` also
        of those that have not."""
        looked_at = {
            queue: read[queue] - 1
            for queue in kept.keys() & held.keys()
            if held[queue].maximum >= read[queue] + (not idle) and read[queue] > held[queue].minimum
        }
        return resume(read, kept, self.marks(looked_at), held, fail=fail, offset_at=self.offset_at)

    def _pull_one(self, wanted: Sequence[tuple[MessageQueue, int]]) -> list[Reply]:
        """The first record at or behind each offset of one broker's queues. Raises BrokerError for a refusal:
        it says nothing about what the queue holds."""
        address = self._known_or_fresh(wanted[0][0])
        frames = [pull_request(TOOLS_CONSUMER_GROUP, queue, offset, 1, "*") for queue, offset in wanted]
        replies = [pull_reply(frame) for frame in self._call(address, frames)]
        for (queue, _), reply in zip(wanted, replies, strict=True):
            if reply.code not in PULL_STATUS:
                raise BrokerError(reply.code, remark=reply.remark, broker_addr=address, topic=queue.topic)
        return replies

    def _known_or_fresh(self, queue: MessageQueue) -> str:
        address = self._routes.any(queue.broker_name)
        return address if address is not None else self.address_of(queue)

    def resolve(self, position: Position, queues: Sequence[MessageQueue]) -> Offsets:
        """The offset that a position means in each queue. Raises ConfigError for a queue that is not read."""
        given = position.offsets
        strange = sorted(given.keys() - set(queues))
        if strange:
            known = ", ".join(map(str, queues))
            raise ConfigError("offsets", str(strange[0]), f"a queue that is read: {known}")
        bounds = self.bounds(queues)
        offsets: Offsets = {}
        for queue in queues:
            offset = given.get(queue, position.word)
            if position.timestamp_ms is not None:
                offset = self.offset_at(queue, bounds[queue], position.timestamp_ms)
            words = {EARLIEST: bounds[queue].minimum, LATEST: bounds[queue].maximum}
            offsets[queue] = words.get(offset, offset)
        return offsets

    def offset_at(self, queue: MessageQueue, bounds: Bounds, timestamp_ms: int) -> int:
        """The first offset whose message was stored at or after `timestamp_ms`, else the queue's end.

        It is found by halving over the messages themselves: the brokers' own search (code 29) means the
        nearest message in 4.x and the next one in 5.x. Store times of a queue ascend, except where a broker's
        clock was set back.
        """
        low, high = bounds.minimum, bounds.maximum
        while low < high:
            middle = (low + high) // 2
            behind, stored_ms = self._within_timeout(partial(self._store_time, queue, middle))
            if stored_ms is None or stored_ms < timestamp_ms:
                low = min(behind, high)
            else:
                high = middle
        return low

    def _store_time(self, queue: MessageQueue, offset: int) -> tuple[int, int | None]:
        """(the next offset that is not gone, store time of the first message at or behind `offset`, None if
        that is gone). Raises BrokerError while the broker refuses or does not hold the offset, RecordError
        for a damaged message: its time could be anything."""
        (reply,) = self._pull_one([(queue, offset)])
        if reply.body:
            at, mark = mark_of(reply.body)
            return max(at, offset) + 1, mark.stored_ms
        if reply.next_begin > offset:
            return reply.next_begin, None
        address = self._known_or_fresh(queue)
        raise BrokerError(reply.code, remark=reply.remark, broker_addr=address, topic=queue.topic)

    def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Store a consumer group's offsets on the brokers' masters; brokers that are away are left out."""
        for own in _by_broker(sorted(offsets)):
            address = self._routes.master(own[0].broker_name)
            if address is not None and own[0].broker_name not in self._away:
                try:
                    for each in commit_rounds(own):
                        self._call(address, [commit_request(group, queue, offsets[queue]) for queue in each])
                except RemotingError:
                    continue

    # -- connections

    def _ask_namesrv(self, request: Frame, *, wait: bool = True) -> Frame:
        def ask() -> Frame:
            failure: RemotingError | None = None
            for address in self._namesrv:
                try:
                    return succeeded(self._call(address, [request])[0], address)
                except RemotingError as error:
                    failure = error
            assert failure is not None
            raise failure

        return self._within_timeout(ask) if wait else ask()

    def _within_timeout(
        self, action: Callable[[], T], give_up: Callable[[CometError], bool] = lambda _: False
    ) -> T:
        """Repeat what fails in a way that may pass, as long as the time-out allows."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return action()
            except (RemotingError, NoRouteError, BrokerError) as error:
                if isinstance(error, BrokerError) and error.code not in BUSY | _NOT_THERE:
                    raise
                if give_up(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
                self._routes = RouteTable()

    def _call(self, address: str, frames: Sequence[Frame]) -> list[Frame]:
        wire = self._wires.connect(address, self._timeout_s)
        answers: list[Frame] = []
        for first in range(0, len(frames), _AT_ONCE):
            answers += wire.call_many(frames[first : first + _AT_ONCE])
        self._wires.keep(wire)
        return answers

    def close(self) -> None:
        self._wires.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Away:
    """A broker that did not answer: why, how long it is left alone at that address, and until when."""

    error: CometError
    address: str | None
    pause: float
    until: float


def look_twice(
    look: Callable[[], dict[MessageQueue, Bounds]], read: Mapping[MessageQueue, int]
) -> dict[MessageQueue, Bounds]:
    """What `look` finds. It looks again if a queue is shorter than what was `read` from it: a broker that has
    just started may still be making its queues from its log."""
    held = look()
    if shrunk(read, held):
        time.sleep(_SHRUNK_S)
        held = look()
    return held


def _by_broker(queues: Iterable[MessageQueue]) -> list[list[MessageQueue]]:
    """The queues of each broker, brokers by name."""
    groups: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        groups.setdefault(queue.broker_name, []).append(queue)
    return [groups[name] for name in sorted(groups)]


def _registered(queue: MessageQueue, address: str | None, namesrv: Sequence[str]) -> str:
    if address is None:
        raise NoRouteError(queue.topic, [(item, f"no broker named {queue.broker_name}") for item in namesrv])
    return address


def _unknown_topic(error: CometError) -> bool:
    """Whether a name server said that there is no such topic: waiting does not help then."""
    return isinstance(error, NoRouteError) and error.hint == NO_ROUTE_HINT
