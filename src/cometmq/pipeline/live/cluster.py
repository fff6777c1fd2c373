"""What planning asks a cluster: which queues there are, what they hold, which offset a time means.

Calls block and retry: an exception in a planning method ends a streaming query at once, so what passes by
itself within the time-out (a broker that restarts, a broken connection) is waited for here.
"""

from __future__ import annotations

import contextlib
import math
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
    broker_error,
    commit_request,
    committed_request,
    max_offset_request,
    min_offset_request,
    offset_in,
    pull_request,
    route_in,
    route_request,
    succeeded,
)
from cometmq.client.cluster.routes import RouteTable, TopicRoute, template_route, topic_route
from cometmq.client.group.offsets import commit_rounds
from cometmq.errors import (
    BrokerError,
    CometError,
    ConfigError,
    ConnectError,
    NoRouteError,
    RemotingError,
)
from cometmq.message import MessageQueue
from cometmq.pipeline.base.offsets import EARLIEST, LATEST, Offsets
from cometmq.pipeline.base.options import Position, Topics
from cometmq.pipeline.base.plan import Bounds, shrunk, spread
from cometmq.pipeline.base.wire import PLAIN, Access, IdleWires
from cometmq.pipeline.live.marks import Marks, mark_at, mark_of, resume
from cometmq.pipeline.live.pulling import BUSY, Reply, pull_reply
from cometmq.protocol.bodies import ClusterInfo, TopicConfig, TopicList
from cometmq.protocol.codes import (
    MASTER_ID,
    TBW102,
    TOOLS_CONSUMER_GROUP,
    VERSION_5_0_0,
    RequestCode,
    ResponseCode,
    is_system_topic,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import TopicRequestHeader

log = logs.logger(__name__)

_RETRY_S = 0.2
_AT_ONCE = 256  # requests in flight: more could fill the buffers of both directions and stand still
_RECORDS_AT_ONCE = 8  # each answer may have 4 MiB
_AWAY_S = (1.0, 30.0)  # pause between looks for a broker that is away: the first, the longest
_REFUSED_S = 10.0  # how long an address without a connection comes last
_ROUTE_S = 5.0  # how old a route may be for looks that follow each other
_SAMPLES = 64  # records whose size is looked at before a batch is limited by bytes
_SHRUNK_S = 1.0  # pause before a second look at a queue that looks shorter than it was
_NOT_THERE = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED})
_NEW_TOPIC_QUEUES = 4  # what producers ask for when their first message creates a topic
T = TypeVar("T")


class Cluster:
    """Connections to the name servers and brokers of one cluster, opened when needed. For one thread only."""

    def __init__(self, namesrv: Sequence[str], *, timeout_ms: int, access: Access = PLAIN) -> None:
        self._namesrv = tuple(namesrv)
        self._timeout_s = timeout_ms / 1000
        self._wires = IdleWires(access)
        self._routes = RouteTable()
        self._away: dict[str, _Away] = {}  # by broker name
        self._refused: dict[str, float] = {}  # addresses that come last, and until when
        self._routed: dict[str, float] = {}  # when each topic was looked up
        self._listed: tuple[float, list[str]] = (-math.inf, [])  # when, and the names of all topics
        self._ordinary: set[str] = set()  # topics that can be read

    # -- routes

    def queues(self, topics: Topics) -> list[MessageQueue]:
        """The readable queues, sorted. Raises NoRouteError for a topic that no name server knows, ConfigError
        for one whose messages do not lie at each of its offsets."""
        names = self.names(topics, wait=True)
        found = {queue for name in names for queue in self.route(name).read_queues}
        self._check_kinds(names)
        return sorted(topics.queues or found)

    def names(self, topics: Topics, *, wait: bool) -> tuple[str, ...]:
        """The topics. wait: list those of a pattern now, and wait for name servers."""
        if topics.pattern is None:
            return topics.names or tuple(sorted({queue.topic for queue in topics.queues}))
        pattern, now = re.compile(topics.pattern), time.monotonic()
        if wait or self._away or now - self._listed[0] >= _ROUTE_S:
            self._listed = (now, self.topic_names(wait=wait))
        return tuple(name for name in self._listed[1] if pattern.fullmatch(name))

    def _check_kinds(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a topic of 5.x that is compacted or static, or holds light topics. Nothing is
        known of a topic whose broker is away."""
        first: list[MessageQueue] = []
        for name in set(names) - self._ordinary:
            route = self._routes.get(name) or self.route(name)
            if route.data.topic_queue_mapping_by_broker:
                raise _not_ordinary(name, "is static: its queues move between brokers")
            first += route.read_queues[:1]
        for own in _by_broker(first):
            with contextlib.suppress(RemotingError, NoRouteError):
                headers = [TopicRequestHeader(topic=queue.topic) for queue in own]
                frames = [Frame.request(RequestCode.GET_TOPIC_CONFIG, header) for header in headers]
                for queue, answer in zip(own, self._call(self._known_or_fresh(own[0]), frames), strict=True):
                    if answer.code == ResponseCode.SUCCESS and answer.body:  # 4.9 does not know the request
                        _check_attributes(queue.topic, TopicConfig.decode(answer.body).attributes or {})
                    self._ordinary.add(queue.topic)

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

    def known_route(self, topic: str) -> TopicRoute | None:
        return self._routes.get(topic)

    def is_away(self, broker_name: str) -> bool:
        """Whether the broker did not answer the last `look`."""
        return broker_name in self._away

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
                self._routed[topic] = time.monotonic()
                return route
            asked.append((address, data))
        raise NoRouteError(topic, asked, NO_ROUTE_HINT if reached else UNREACHABLE_HINT)

    def _recent_route(self, topic: str) -> TopicRoute:
        """The route as it was a moment ago, for those who look again and again; a fresh one while a broker is
        away."""
        known = self._routes.get(topic)
        if known is None or self._away or time.monotonic() - self._routed.get(topic, 0.0) >= _ROUTE_S:
            return self._route(topic)
        return known

    def addresses(self, queues: Iterable[MessageQueue]) -> dict[str, str]:
        """The addresses to read from, by broker name; brokers that are away are left out."""
        named = {queue.broker_name for queue in queues}
        return {name: found[0] for name in sorted(named) if (found := self._in_turn(name, MASTER_ID))}

    def address_of(self, queue: MessageQueue, broker_id: int = MASTER_ID) -> str:
        """Return where to read the queue now, by a fresh route: the broker id that was suggested, or another
        one while that cannot be connected. Raises NoRouteError or ConnectError if the broker is away."""
        self._route(queue.topic)
        return self._reachable(queue, broker_id)

    def is_replica(self, queue: MessageQueue, address: str) -> bool:
        return address != self._routes.master(queue.broker_name)

    def _reachable(self, queue: MessageQueue, broker_id: int = MASTER_ID) -> str:
        addresses, failure = self._in_turn(queue.broker_name, broker_id), None
        for address in addresses if len(addresses) > 1 else ():
            try:
                self._wires.keep(self._wires.connect(address, self._timeout_s))
                return address
            except ConnectError as error:
                self._refused[address] = time.monotonic() + _REFUSED_S
                failure = failure or error
        if failure is not None:
            raise failure
        return _registered(queue, next(iter(addresses), None), self._namesrv)

    def _in_turn(self, broker_name: str, broker_id: int) -> list[str]:
        """Return a broker's addresses in the order of RouteTable.read_targets."""
        now = time.monotonic()
        self._refused = {address: until for address, until in self._refused.items() if until > now}
        self._routes.unreachable = set(self._refused)
        return [target.addr for target in self._routes.read_targets(broker_name, broker_id)]

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
        replica = self.is_replica(queues[0], address)
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
            for name in self.names(topics, wait=False):
                try:
                    queues.update(filter(topics.includes, self._recent_route(name).read_queues))
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
        self._check_kinds({queue.topic for queue in bounds})
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
        found = self._pull_each(
            sorted(offsets.items()), lambda _, offset, reply: mark_at(offset, reply.body), away_ok=True
        )
        return {queue: mark for queue, mark in found if mark is not None}

    def sizes(self, start: Offsets, ends: Offsets) -> dict[MessageQueue, float]:
        """The mean stored size of some records in the range of each queue, in bytes; queues whose broker is
        away are left out."""
        found: dict[MessageQueue, list[int]] = {}
        places = spread(start, ends, _SAMPLES)
        for queue, size in self._pull_each(places, lambda _q, _o, reply: len(reply.body), away_ok=True):
            if size:
                found.setdefault(queue, []).append(size)
        return {queue: sum(each) / len(each) for queue, each in found.items()}

    def _pull_each(
        self,
        wanted: Iterable[tuple[MessageQueue, int]],
        read: Callable[[MessageQueue, int, Reply], T],
        *,
        away_ok: bool = False,
    ) -> list[tuple[MessageQueue, T]]:
        """What `read` makes of the record at each of these places, several asked for at once. A BrokerError
        that it raises is waited for like a refusal. away_ok: leave out brokers that are away."""
        by_broker: dict[str, list[tuple[MessageQueue, int]]] = {}
        for place in wanted:
            by_broker.setdefault(place[0].broker_name, []).append(place)
        found: list[tuple[MessageQueue, T]] = []

        def pull(each: Sequence[tuple[MessageQueue, int]]) -> list[tuple[MessageQueue, T]]:
            pairs = zip(each, self._pull_one(each), strict=True)
            return [(queue, read(queue, offset, reply)) for (queue, offset), reply in pairs]

        for _, own in sorted(by_broker.items()):
            try:
                for first in range(0, len(own), _RECORDS_AT_ONCE):
                    each = own[first : first + _RECORDS_AT_ONCE]
                    found += self._within_timeout(partial(pull, each))
            except (RemotingError, NoRouteError):
                if not away_ok:
                    raise
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
        return self._reachable(queue) if self._routes.any(queue.broker_name) else self.address_of(queue)

    def resolve(self, position: Position, queues: Sequence[MessageQueue]) -> Offsets:
        """The offset that a position means in each queue. Raises ConfigError for a queue that is not read,
        and for a group that has stored no offset."""
        given = position.offsets
        strange = sorted((given.keys() | position.times.keys()) - set(queues))
        if strange:
            known = ", ".join(map(str, queues))
            raise ConfigError("offsets", str(strange[0]), f"a queue that is read: {known}")
        bounds = self.bounds(queues)
        offsets: Offsets = {}
        for queue in queues:
            offset = given.get(queue, position.word)
            words = {EARLIEST: bounds[queue].minimum, LATEST: bounds[queue].maximum}
            offsets[queue] = words.get(offset, offset)
        times = position.times
        if position.timestamp_ms is not None:
            times = dict.fromkeys(queues, position.timestamp_ms)
        if position.group is not None:
            stored = self.committed(position.group, queues)
            if queues and not stored:
                raise ConfigError(
                    "startingGroup", position.group, "a group with offsets stored for what is read"
                )
            offsets |= stored
        return offsets | self.offsets_at(times, bounds)

    def committed(self, group: str, queues: Sequence[MessageQueue]) -> Offsets:
        """What the group has stored; queues that it has nothing for are left out."""
        found: Offsets = {}
        for own in _by_broker(queues):
            frames = [committed_request(group, queue, set_zero_if_not_found=False) for queue in own]
            for frame in frames:
                frame.version = VERSION_5_0_0  # of older clients CometMQ does not read that field
            address, answers = self.ask(own[0], frames)
            for queue, answer in zip(own, answers, strict=True):
                if answer.code != ResponseCode.QUERY_NOT_FOUND:
                    found[queue] = offset_in(answer, address, queue)
        return found

    def ask(self, queue: MessageQueue, frames: Sequence[Frame]) -> tuple[str, list[Frame]]:
        """(address, answers) of the broker that has the queue; what passes by itself is waited for."""

        def once() -> tuple[str, list[Frame]]:
            address = self._known_or_fresh(queue)
            return address, self._call(address, frames)

        return self._within_timeout(once)

    def offset_at(self, queue: MessageQueue, bounds: Bounds, timestamp_ms: int) -> int:
        """As `offsets_at`, for one queue."""
        return self.offsets_at({queue: timestamp_ms}, {queue: bounds})[queue]

    def offsets_at(self, times: Mapping[MessageQueue, int], bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """In each queue the first offset whose message was stored at or after its time in ms, else the end.

        They are found by halving over the messages themselves, in all queues at once: the brokers' own search
        (code 29) means the nearest message in 4.x and the next one in 5.x. Store times of a queue ascend,
        except where a broker's clock was set back.
        """
        low = {queue: bounds[queue].minimum for queue in times}
        high = {queue: bounds[queue].maximum for queue in times}
        while searched := [queue for queue in sorted(low) if low[queue] < high[queue]]:
            middles = {queue: (low[queue] + high[queue]) // 2 for queue in searched}
            for queue, (behind, stored_ms) in self._pull_each(middles.items(), self._store_time):
                if stored_ms is None or stored_ms < times[queue]:
                    low[queue] = min(behind, high[queue])
                else:
                    high[queue] = middles[queue]
        return low

    def _store_time(self, queue: MessageQueue, offset: int, reply: Reply) -> tuple[int, int | None]:
        """(the next offset that is not gone, store time of the first message at or behind `offset`, None if
        that is gone). Raises BrokerError while the broker does not hold the offset, RecordError for a damaged
        message: its time could be anything."""
        if reply.body:
            at, mark = mark_of(reply.body)
            return max(at, offset) + 1, mark.stored_ms
        if reply.next_begin > offset:
            return reply.next_begin, None
        address = self._known_or_fresh(queue)
        raise BrokerError(reply.code, remark=reply.remark, broker_addr=address, topic=queue.topic)

    def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> list[BrokerError]:
        """Store a consumer group's offsets on the brokers' masters; brokers that are away are left out. What
        brokers refused: 5.x takes no offset of a group that it does not know."""
        refused: list[BrokerError] = []
        for own in _by_broker(sorted(offsets)):
            address = self._routes.master(own[0].broker_name)
            if address is not None and own[0].broker_name not in self._away:
                with contextlib.suppress(RemotingError):
                    for each in commit_rounds(own):
                        frames = [commit_request(group, queue, offsets[queue]) for queue in each]
                        answers = self._call(address, frames)
                        refused += [broker_error(one, address) for one in answers if one.code]
        return refused

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


def _check_attributes(topic: str, attributes: Mapping[str, str]) -> None:
    if attributes.get("cleanup.policy", "").upper() == "COMPACTION":
        raise _not_ordinary(topic, "is compacted: offsets without a message look like loss")
    if attributes.get("message.type", "").upper() == "LITE":
        raise _not_ordinary(topic, "holds light topics, which have queues of their own")


def _not_ordinary(topic: str, problem: str) -> ConfigError:
    return ConfigError("subscribe", topic, f"an ordinary topic; this one {problem}")


def _registered(queue: MessageQueue, address: str | None, namesrv: Sequence[str]) -> str:
    if address is None:
        raise NoRouteError(queue.topic, [(item, f"no broker named {queue.broker_name}") for item in namesrv])
    return address


def _unknown_topic(error: CometError) -> bool:
    """Whether a name server said that there is no such topic: waiting does not help then."""
    return isinstance(error, NoRouteError) and error.hint == NO_ROUTE_HINT
