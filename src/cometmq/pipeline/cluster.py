"""What the pipeline's planning asks a cluster: which queues there are, what they hold, which offset a time
means.

Synchronous, with retries inside: an exception in a planning method ends a streaming query at once, so what
passes by itself within the time-out (a broker that restarts, a broken connection) is waited for here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from cometmq.client.namesrv_api import NO_ROUTE_HINT, UNREACHABLE_HINT
from cometmq.client.remote_offsets import commit_rounds
from cometmq.client.routes import RouteTable, TopicRoute, template_route, topic_route
from cometmq.errors import BrokerError, CometError, ConfigError, NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.pipeline.offsets import EARLIEST, LATEST, Offsets
from cometmq.pipeline.options import SYSTEM_GROUP, Position, Topics
from cometmq.pipeline.plan import Bounds
from cometmq.pipeline.requests import (
    commit_request,
    committed_request,
    max_offset_request,
    min_offset_request,
    offset_reply,
    pull_reply,
    pull_request,
    route_request,
)
from cometmq.pipeline.wire import Wire
from cometmq.protocol.bodies import TopicList, TopicRouteData
from cometmq.protocol.codes import TBW102, RequestCode, ResponseCode, is_system_topic
from cometmq.protocol.frame import Frame
from cometmq.protocol.record import decode_record

_RETRY_S = 0.2
_AT_ONCE = 256  # requests in flight: more could fill the buffers of both directions and stand still
_NEW_TOPIC_QUEUES = 4  # what producers ask for when their first message creates a topic
T = TypeVar("T")


class Cluster:
    """Connections to the name servers and brokers of one cluster, opened when needed. Not for several
    threads.
    """

    def __init__(self, namesrv: Sequence[str], *, timeout_ms: int) -> None:
        self._namesrv = tuple(namesrv)
        self._timeout_s = timeout_ms / 1000
        self._wires: dict[str, Wire] = {}
        self._routes = RouteTable()

    # -- routes

    def queues(self, topics: Topics) -> list[MessageQueue]:
        """The readable queues, sorted. Raises NoRouteError for a topic that no name server knows."""
        if topics.queues:
            for topic in {queue.topic for queue in topics.queues}:
                self.route(topic)
            return list(topics.queues)
        names = topics.names
        if topics.pattern is not None:
            pattern = re.compile(topics.pattern)
            names = tuple(name for name in self.topic_names() if pattern.fullmatch(name))
        found = [queue for name in names for queue in self.route(name).read_queues]
        return sorted(set(found))

    def topic_names(self) -> list[str]:
        """Topics of users, system topics left out."""
        frame = self._ask_namesrv(Frame.request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        return sorted(name for name in TopicList.decode(frame.body).topic_list if not is_system_topic(name))

    def route(self, topic: str) -> TopicRoute:
        """Raises NoRouteError with what each name server answered."""
        return self._within_timeout(lambda: self._route(topic), give_up=_unknown_topic)

    def write_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Where messages of a topic may go; for a topic that does not exist yet, where its first message
        creates it.
        """
        try:
            return self.route(topic).write_queues
        except NoRouteError as error:
            try:
                template = self._route(TBW102)
            except NoRouteError:
                raise error from None
            route = template_route(topic, template.data, _NEW_TOPIC_QUEUES)
            self._routes.put(route)
            return route.write_queues

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
            if frame.code == ResponseCode.SUCCESS and frame.body:
                route = topic_route(topic, TopicRouteData.decode(frame.body))
                self._routes.put(route)
                return route
            asked.append((address, str(BrokerError(frame.code, remark=frame.remark or ""))))
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
        """What each queue holds, with two requests a queue that are all in flight at once.

        missing_ok: leave out queues whose brokers cannot be asked instead of raising the broker's error.
        """
        found: dict[MessageQueue, Bounds] = {}
        for broker_name in sorted({queue.broker_name for queue in queues}):
            own = [queue for queue in queues if queue.broker_name == broker_name]
            try:
                found |= self._within_timeout(lambda own=own: self._bounds_of(own))  # type: ignore[misc]
            except (RemotingError, NoRouteError):
                if not missing_ok:
                    raise
        return found

    def _bounds_of(self, queues: list[MessageQueue]) -> dict[MessageQueue, Bounds]:
        address = self._known_or_fresh(queues[0])
        frames = [make(queue) for queue in queues for make in (min_offset_request, max_offset_request)]
        answers = iter(self._call(address, frames))
        return {
            queue: Bounds(
                offset_reply(next(answers), address, queue), offset_reply(next(answers), address, queue)
            )
            for queue in queues
        }

    def _known_or_fresh(self, queue: MessageQueue) -> str:
        address = self._routes.any(queue.broker_name)
        return address if address is not None else self.address_of(queue)

    def resolve(self, position: Position, queues: Sequence[MessageQueue]) -> Offsets:
        """The offset of each queue that a position means. Raises ConfigError for offsets of queues that are
        not there.
        """
        given = position.by_queue()
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
        """The first offset whose message was stored at or after `timestamp_ms`, the queue's end if there is
        none.

        Found by halving over the messages themselves: the brokers' own search (code 29) means the nearest
        message in 4.x and the next one in 5.x. Store times of a queue ascend, except where a broker's clock
        was set back.
        """
        low, high = bounds.minimum, bounds.maximum
        while low < high:
            middle = (low + high) // 2
            stored_ms = self._within_timeout(lambda at=middle: self._store_time(queue, at))  # type: ignore[misc]
            if stored_ms is None or stored_ms < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def _store_time(self, queue: MessageQueue, offset: int) -> int | None:
        """Store time of the message at `offset`, None if it is gone."""
        address = self._known_or_fresh(queue)
        reply = pull_reply(self._call(address, [pull_request(SYSTEM_GROUP, queue, offset, 1, "*")])[0])
        if reply.code == ResponseCode.SUCCESS and reply.body:
            return decode_record(reply.body, 0).store_timestamp_ms
        if reply.next_begin or reply.code != ResponseCode.SYSTEM_ERROR:
            return None
        raise BrokerError(reply.code, remark=reply.remark, broker_addr=address, topic=queue.topic)

    def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Store a consumer group's offsets on the brokers' masters; brokers that are away are left for the
        next time.
        """
        for broker_name in sorted({queue.broker_name for queue in offsets}):
            address = self._routes.master(broker_name)
            own = [queue for queue in sorted(offsets) if queue.broker_name == broker_name]
            if address is not None:
                try:
                    for each in commit_rounds(own):
                        self._call(address, [commit_request(group, queue, offsets[queue]) for queue in each])
                except RemotingError:
                    continue

    def committed(self, group: str, queues: Sequence[MessageQueue]) -> Offsets:
        """A consumer group's offsets; queues without one are left out."""
        found: Offsets = {}
        for broker_name in sorted({queue.broker_name for queue in queues}):
            own = [queue for queue in queues if queue.broker_name == broker_name]
            address = self.master_of(own[0])
            answers = self._call(address, [committed_request(group, queue) for queue in own])
            for queue, frame in zip(own, answers, strict=True):
                if frame.code != ResponseCode.QUERY_NOT_FOUND:
                    found[queue] = offset_reply(frame, address, queue)
        return found

    # -- connections

    def _ask_namesrv(self, request: Frame) -> Frame:
        def ask() -> Frame:
            failure: RemotingError | None = None
            for address in self._namesrv:
                try:
                    frame = self._call(address, [request])[0]
                except RemotingError as error:
                    failure = error
                    continue
                if frame.code != ResponseCode.SUCCESS:
                    raise BrokerError(frame.code, remark=frame.remark or "", broker_addr=address)
                return frame
            assert failure is not None
            raise failure

        return self._within_timeout(ask)

    def _within_timeout(
        self, action: Callable[[], T], give_up: Callable[[CometError], bool] = lambda _: False
    ) -> T:
        """Repeat what fails in a way that may pass, as long as the time-out allows."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return action()
            except (RemotingError, NoRouteError) as error:
                if give_up(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
                self._routes = RouteTable()

    def _call(self, address: str, frames: Sequence[Frame]) -> list[Frame]:
        wire = self._wires.pop(address, None)
        if wire is not None and not wire.usable():
            wire.close()
            wire = None
        wire = wire or Wire(address, self._timeout_s)
        answers: list[Frame] = []
        for first in range(0, len(frames), _AT_ONCE):
            answers += wire.call_many(frames[first : first + _AT_ONCE])
        self._wires[address] = wire
        return answers

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _registered(queue: MessageQueue, address: str | None, namesrv: Sequence[str]) -> str:
    if address is None:
        raise NoRouteError(queue.topic, [(item, f"no broker named {queue.broker_name}") for item in namesrv])
    return address


def _unknown_topic(error: CometError) -> bool:
    """Whether a name server was reached and says that there is no such topic: waiting does not help."""
    return isinstance(error, NoRouteError) and error.hint == NO_ROUTE_HINT
