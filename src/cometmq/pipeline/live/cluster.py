"""Requests to a cluster for planning: its queues, their offsets, and the offset for a time.

Calls block, and retry temporary failures (a restarting broker, a broken connection) until the timeout,
because an exception in a planning method ends a streaming query immediately.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from cometmq import logs
from cometmq.client.cluster.requests import (
    PULL_STATUS,
    NameServersUnreachable,
    RouteAnswers,
    broker_error,
    commit_request,
    committed_request,
    kv_request,
    kv_value,
    offset_in,
    ordered_error,
    pull_request,
    queue_request,
    route_request,
    succeeded,
)
from cometmq.client.cluster.routes import RouteTable, TopicRoute, template_route, topic_route
from cometmq.client.group.offsets import commit_rounds
from cometmq.errors import BrokerError, CometError, ConfigError, ConnectError, NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.periodic import Backoff
from cometmq.pipeline.base.offsets import EARLIEST, LATEST, Offsets
from cometmq.pipeline.base.options import Position, ReadOptions, Topics, WriteOptions
from cometmq.pipeline.base.plan import Bounds, shrunk, spread
from cometmq.pipeline.base.wire import PLAIN, Access, IdleWires
from cometmq.pipeline.live.marks import Marks, mark_at, mark_of, resume
from cometmq.pipeline.live.pulling import BUSY, Reply, pull_reply
from cometmq.protocol.bodies import ClusterInfo, TopicConfig, TopicList
from cometmq.protocol.codes import (
    MASTER_ID,
    ORDER_TOPIC_CONFIG,
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
# Maximum concurrent requests on a connection. More could fill the socket buffers of both directions: this
# side would then wait for the broker to read requests, and the broker for this side to read responses.
_AT_ONCE = 256
_RECORDS_AT_ONCE = 8  # Maximum concurrent requests for records, because each response may have 4 MiB
# First and maximum interval between attempts to reach an unreachable broker, in seconds.
_AWAY_S = (1.0, 30.0)
_REFUSED_S = 10.0  # Seconds during which an address that refused a connection is tried last
_ROUTE_S = 5.0  # Seconds for which a route, or the list of all topics, is used before it is requested again
# Number of records, over all queues, whose sizes are used to estimate each queue's mean record size. With the
# estimates, a batch's limit in bytes is converted to offsets.
_SAMPLES = 64
_SHRUNK_S = 1.0  # Pause before `look_twice` repeats a call, in seconds
_NOT_THERE = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED})
_NEW_TOPIC_QUEUES = 4  # Number of queues that a producer requests when its first message creates a topic
T = TypeVar("T")


class Cluster:
    """Connections to the name servers and brokers of one cluster, opened on demand. Not thread-safe."""

    def __init__(self, namesrv: Sequence[str], *, timeout_ms: int, access: Access = PLAIN) -> None:
        self._namesrv = tuple(namesrv)
        self._timeout_s = timeout_ms / 1000
        self._wires = IdleWires(access)
        self._routes = RouteTable()
        self._away: dict[str, _Away] = {}  # Unreachable brokers by name
        # Addresses to which a connection failed. Until the stored time, other addresses are tried first.
        self._refused: dict[str, float] = {}
        self._routed: dict[str, float] = {}  # Time of each topic's last lookup
        # Time of the last request for all topic names, and the names.
        self._listed: tuple[float, list[str]] = (-math.inf, [])
        self._ordinary: set[str] = set()  # Topics whose kind was checked and is supported by the source

    @classmethod
    def of(cls, options: ReadOptions | WriteOptions) -> Self:
        return cls(options.namesrv, timeout_ms=options.timeout_ms, access=options.access)

    # -- routes

    def queues(self, topics: Topics) -> list[MessageQueue]:
        """Return the readable queues, sorted. Raises NoRouteError, or ConfigError for unsupported topics."""
        names = self.names(topics, wait=True)
        found = {queue for name in names for queue in self.route(name).read_queues}
        self._check_kinds(names)
        return sorted(topics.queues or found)

    def names(self, topics: Topics, *, wait: bool) -> tuple[str, ...]:
        """Return the topics' names. A pattern asks the name servers, with `wait` until the timeout."""
        if topics.pattern is None:
            return topics.names or tuple(sorted({queue.topic for queue in topics.queues}))
        pattern, now = re.compile(topics.pattern), time.monotonic()
        if wait or self._away or now - self._listed[0] >= _ROUTE_S:
            self._listed = (now, self.topic_names(wait=wait))
        return tuple(name for name in self._listed[1] if pattern.fullmatch(name))

    def _check_kinds(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a 5.x topic that is compacted, static or of the message type LITE."""
        first: list[MessageQueue] = []
        for name in set(names) - self._ordinary:
            route = self._routes.get(name) or self.route(name)
            if route.data.topic_queue_mapping_by_broker:
                raise _not_ordinary(name, "the topic is static: its queues move between brokers")
            first += route.read_queues[:1]
        for own in _by_broker(first):
            with contextlib.suppress(RemotingError, NoRouteError):
                headers = [TopicRequestHeader(topic=queue.topic) for queue in own]
                frames = [Frame.request(RequestCode.GET_TOPIC_CONFIG, header) for header in headers]
                for queue, answer in zip(own, self._call(self._known_or_fresh(own[0]), frames), strict=True):
                    # A broker of RocketMQ 4.9 refuses this request. Its topics have no attributes, so there
                    # is nothing to check.
                    if answer.code == ResponseCode.SUCCESS and answer.body:
                        _check_attributes(queue.topic, TopicConfig.decode(answer.body).attributes or {})
                    self._ordinary.add(queue.topic)

    def topic_names(self, *, wait: bool = True) -> list[str]:
        """Return the topics of users. With `wait`, retry until the timeout if no name server responds."""
        frame = self._ask_namesrv(Frame.request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER), wait=wait)
        return sorted(name for name in TopicList.decode(frame.body).topic_list if not is_system_topic(name))

    def route(self, topic: str) -> TopicRoute:
        """Return the current route of a topic. Raises NoRouteError with the name servers' responses."""
        return self._within_timeout(lambda: self._route(topic), unknown_ok=False)

    def write_queues(self, topic: str, *, wait: bool = True) -> tuple[MessageQueue, ...]:
        """Return the writable queues of a topic, or those that the first message to a new topic would create.

        With `wait`, retry until the timeout if no name server responds.
        """
        try:
            return (self.route(topic) if wait else self._route(topic)).write_queues
        except NameServersUnreachable:
            raise
        except NoRouteError as error:
            for _, answer in self._name_servers(kv_request(ORDER_TOPIC_CONFIG, topic)):
                if ordered := kv_value(answer):
                    raise ordered_error(error, ordered) from None
            try:
                template = self._route(TBW102)
            except NoRouteError:
                raise error from None
            route = template_route(topic, template.data, _NEW_TOPIC_QUEUES)
            self._routes.put(route)
            return route.write_queues

    def away(self, topics: Topics, known: Iterable[MessageQueue], held: Iterable[MessageQueue]) -> list[str]:
        """Return the sorted names of brokers that may hold messages of the topics but are not readable now.

        These have a queue in `known` but none in `held` of that topic, and no name server lists them, or the
        current route of a topic names them, but they have no queue of it in `held`.
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
        """Return whether the last request for the offsets of this broker's queues failed."""
        return broker_name in self._away

    def _route(self, topic: str) -> TopicRoute:
        answers = RouteAnswers(topic, partial(topic_route, topic))
        for address, answer in self._name_servers(route_request(topic)):
            route = answers.take(address, answer)
            self._prefer(answers.first)
            if route is not None:
                self._routes.put(route)
                self._routed[topic] = time.monotonic()
                return route
        raise answers.failure

    def _recent_route(self, topic: str) -> TopicRoute:
        """Return a route that is up to `_ROUTE_S` seconds old, or a new one while a broker is away."""
        known = self._routes.get(topic)
        if known is None or self._away or time.monotonic() - self._routed.get(topic, 0.0) >= _ROUTE_S:
            return self._route(topic)
        return known

    def addresses(self, queues: Iterable[MessageQueue]) -> dict[str, str]:
        """Return the address to read from for each broker name that has a known one."""
        named = {queue.broker_name for queue in queues}
        return {name: found[0] for name in sorted(named) if (found := self._in_turn(name, MASTER_ID))}

    def address_of(self, queue: MessageQueue, broker_id: int = MASTER_ID) -> str:
        """Return an address to read from, that of the broker id first. Raises NoRouteError, ConnectError."""
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
        self._refused = {each: until for each, until in self._refused.items() if until > time.monotonic()}
        self._routes.unreachable = set(self._refused)
        return [target.addr for target in self._routes.read_targets(broker_name, broker_id)]

    def master_of(self, queue: MessageQueue) -> str:
        """Return the address of the queue's master, for writes. Raises NoRouteError without one."""
        address = self._routes.master(queue.broker_name)
        if address is None:
            self.write_queues(queue.topic)
            address = self._routes.master(queue.broker_name)
        return _registered(queue, address, self._namesrv)

    # -- offsets

    def bounds(
        self, queues: Sequence[MessageQueue], *, missing_ok: bool = False
    ) -> dict[MessageQueue, Bounds]:
        """Return the offsets that each queue holds, with two concurrent requests per queue.

        With `missing_ok`, requests are not retried, and queues whose broker fails are omitted.
        """
        found: dict[MessageQueue, Bounds] = {}
        tolerated = (RemotingError, NoRouteError, BrokerError) if missing_ok else ()
        for own in _by_broker(queues):
            ask = partial(self._bounds_of, own)
            with contextlib.suppress(*tolerated):
                found |= ask() if missing_ok else self._within_timeout(ask)
        return found

    def _bounds_of(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, Bounds]:
        address = self._known_or_fresh(queues[0])
        replica = self.is_replica(queues[0], address)
        codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        frames = [queue_request(code, queue) for queue in queues for code in codes]
        answers = iter(self._call(address, frames))
        return {
            queue: Bounds(
                offset_in(next(answers), address, queue), offset_in(next(answers), address, queue), replica
            )
            for queue in queues
        }

    def look(self, topics: Topics, known: Iterable[MessageQueue]) -> dict[MessageQueue, Bounds]:
        """Return the `bounds` of the topics' current and `known` queues, for repeated calls.

        Queues whose broker is unreachable or refuses temporarily are omitted: it is named in a warning and
        then skipped for a growing pause. If a name server does not respond or does not know a topic, the last
        known addresses are used. Raises NoRouteError, RemotingError or BrokerError if no broker responds.
        """
        queues = {queue for queue in known if topics.includes(queue)}
        failure: CometError | None = None
        try:
            for name in self.names(topics, wait=False):
                try:
                    queues.update(filter(topics.includes, self._recent_route(name).read_queues))
                except NoRouteError as error:
                    failure = error
                    if isinstance(error, NameServersUnreachable):
                        break
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
            if away is None:
                text = "broker %s is unreachable, reading of %d queues waits for it: %s"
                log.warning(text, name, len(queues), error)
            pauses = Backoff(*_AWAY_S) if away is None else away.pauses
            self._away[name] = _Away(error, address, pauses, time.monotonic() + pauses.next_s())
            raise
        if self._away.pop(name, None) is not None:
            log.warning("broker %s is reachable again", name)
        return found

    def marks(self, offsets: Mapping[MessageQueue, int]) -> Marks:
        """Return the mark of each whole record of a reachable broker. Raises BrokerError if one refuses."""
        found = self._pull_each(
            sorted(offsets.items()), lambda _, offset, reply: mark_at(offset, reply.body), away_ok=True
        )
        return {queue: mark for queue, mark in found if mark is not None}

    def sizes(self, start: Offsets, ends: Offsets) -> dict[MessageQueue, float]:
        """Return the mean size of sampled records in bytes, for each queue of a reachable broker."""
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
        """Return the result of `read` for each offset's record. Its temporary errors are retried."""
        by_broker: dict[str, list[tuple[MessageQueue, int]]] = {}
        for place in wanted:
            by_broker.setdefault(place[0].broker_name, []).append(place)
        found: list[tuple[MessageQueue, T]] = []

        def pull(each: Sequence[tuple[MessageQueue, int]]) -> list[tuple[MessageQueue, T]]:
            pairs = zip(each, self._pull_one(each), strict=True)
            return [(queue, read(queue, offset, reply)) for (queue, offset), reply in pairs]

        tolerated = (RemotingError, NoRouteError) if away_ok else ()
        for _, own in sorted(by_broker.items()):
            with contextlib.suppress(*tolerated):
                for first in range(0, len(own), _RECORDS_AT_ONCE):
                    each = own[first : first + _RECORDS_AT_ONCE]
                    found += self._within_timeout(partial(pull, each))
        return found

    def replaced(
        self, read: Offsets, kept: Marks, held: Mapping[MessageQueue, Bounds], *, fail: bool, idle: bool
    ) -> Offsets:
        """Return where to read on in replaced queues, by their marks. `idle`: without new messages, too."""
        looked_at = {
            queue: read[queue] - 1
            for queue in kept.keys() & held.keys()
            if held[queue].maximum >= read[queue] + (not idle) and read[queue] > held[queue].minimum
        }
        return resume(read, kept, self.marks(looked_at), held, fail=fail, offset_at=self.offset_at)

    def _pull_one(self, wanted: Sequence[tuple[MessageQueue, int]]) -> list[Reply]:
        """Return the first record at or after each offset, for queues of one broker. Raises BrokerError."""
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
        """Convert a position to offsets. Raises ConfigError for other queues, or a group without any."""
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
                expected = "a group with offsets stored for what is read"
                raise ConfigError("startingGroup", position.group, expected)
            offsets |= stored
        return offsets | self.offsets_at(times, bounds)

    def committed(self, group: str, queues: Sequence[MessageQueue]) -> Offsets:
        """Return the group's stored offsets; queues without a stored offset are omitted."""
        found: Offsets = {}
        for own in _by_broker(queues):
            frames = [committed_request(group, queue, set_zero_if_not_found=False) for queue in own]
            for frame in frames:
                frame.version = VERSION_5_0_0  # CometMQ ignores `set_zero_if_not_found` of older clients
            address, answers = self.ask(own[0], frames)
            for queue, answer in zip(own, answers, strict=True):
                if answer.code != ResponseCode.QUERY_NOT_FOUND:
                    found[queue] = offset_in(answer, address, queue)
        return found

    def ask(self, queue: MessageQueue, frames: Sequence[Frame]) -> tuple[str, list[Frame]]:
        """Send requests to the queue's broker, with retries. Return its address and the responses."""

        def once() -> tuple[str, list[Frame]]:
            address = self._known_or_fresh(queue)
            return address, self._call(address, frames)

        return self._within_timeout(once)

    def offset_at(self, queue: MessageQueue, bounds: Bounds, timestamp_ms: int) -> int:
        return self.offsets_at({queue: timestamp_ms}, {queue: bounds})[queue]

    def offsets_at(self, times: Mapping[MessageQueue, int], bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Return the offset of each queue's first message stored at or after a time in ms, or its end.

        A binary search over the messages finds it, concurrently for all queues. The brokers' own search
        (request code 29) returns the nearest message in 4.x and the next one in 5.x. Store times ascend
        within a queue, except where a broker's clock was set back.
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
        """Return the offset after the message in a pull's response, and its store time.

        If the message at `offset` was deleted, these are the offset at which the broker suggests to continue,
        and None. Raises BrokerError while the broker lacks the offset, and RecordError for a damaged message.
        """
        if reply.body:
            at, mark = mark_of(reply.body)
            return max(at, offset) + 1, mark.stored_ms
        if reply.next_begin > offset:
            return reply.next_begin, None
        address = self._known_or_fresh(queue)
        raise BrokerError(reply.code, remark=reply.remark, broker_addr=address, topic=queue.topic)

    def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> list[BrokerError]:
        """Store a group's offsets on reachable masters. Return refusals: 5.x refuses an unknown group."""
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
            failure: RemotingError = ConnectError("(no name server)", "none is known")
            for address, answer in self._name_servers(request):
                if isinstance(answer, Frame):
                    self._prefer(address)
                    return succeeded(answer, address)
                failure = answer
            raise failure

        return self._within_timeout(ask) if wait else ask()

    def _name_servers(self, request: Frame) -> Iterator[tuple[str, Frame | RemotingError]]:
        """Yield each name server's address with its response or error, the preferred server first."""
        for address in self._namesrv:
            try:
                yield address, self._call(address, [request])[0]
            except RemotingError as error:
                yield address, error

    def _prefer(self, address: str) -> None:
        """Send requests to this name server first from now on, because it has responded."""
        self._namesrv = tuple(sorted(self._namesrv, key=lambda each: each != address))

    def _within_timeout(self, action: Callable[[], T], *, unknown_ok: bool = True) -> T:
        """Repeat an action that fails temporarily until it succeeds or the timeout has passed.

        With `unknown_ok`, an action that fails because a topic is unknown is repeated, too.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return action()
            except (RemotingError, NoRouteError, BrokerError) as error:
                if isinstance(error, BrokerError) and error.code not in BUSY | _NOT_THERE:
                    raise
                unknown = isinstance(error, NoRouteError) and not isinstance(error, NameServersUnreachable)
                if (unknown and not unknown_ok) or time.monotonic() > deadline:
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
    """An unreachable broker: its last error, the pauses between attempts, the time of the next attempt."""

    error: CometError
    address: str | None
    pauses: Backoff
    until: float


def look_twice(
    look: Callable[[], dict[MessageQueue, Bounds]], read: Mapping[MessageQueue, int]
) -> dict[MessageQueue, Bounds]:
    """Return the result of `look`, of a second call if queues shrank: restarted brokers rebuild them."""
    held = look()
    if shrunk(read, held):
        time.sleep(_SHRUNK_S)
        held = look()
    return held


def _by_broker(queues: Iterable[MessageQueue]) -> list[list[MessageQueue]]:
    groups: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        groups.setdefault(queue.broker_name, []).append(queue)
    return [groups[name] for name in sorted(groups)]


def _check_attributes(topic: str, attributes: Mapping[str, str]) -> None:
    if attributes.get("cleanup.policy", "").upper() == "COMPACTION":
        raise _not_ordinary(topic, "the topic is compacted: missing offsets would look like lost messages")
    if attributes.get("message.type", "").upper() == "LITE":
        raise _not_ordinary(topic, "the topic contains light topics, which have their own queues")


def _not_ordinary(topic: str, problem: str) -> ConfigError:
    return ConfigError("subscribe", topic, f"an ordinary topic, but {problem}")


def _registered(queue: MessageQueue, address: str | None, namesrv: Sequence[str]) -> str:
    if address is None:
        raise NoRouteError(queue.topic, [(item, f"no broker named {queue.broker_name}") for item in namesrv])
    return address
