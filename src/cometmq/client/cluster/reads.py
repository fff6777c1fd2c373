"""The choice of the broker from which a queue is read: its master or a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol, TypeVar

import msgspec

from cometmq import logs
from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.requests import queue_request
from cometmq.client.cluster.routes import ReadTarget, RouteTable
from cometmq.errors import BrokerError, CometError, ConnectError, RemotingError
from cometmq.message import MessageQueue
from cometmq.periodic import Backoff
from cometmq.protocol.codes import MASTER_ID, RequestCode

log = logs.logger("cometmq.client")

T = TypeVar("T")

_PROBE_INTERVALS_S = (0.5, 10.0)
"""Seconds before the first probe of an unreachable broker, doubled after each probe, and their maximum."""


class Instance(Protocol):
    """The part of a client instance that `Reads` uses."""

    @property
    def routes(self) -> RouteTable: ...

    @property
    def brokers(self) -> BrokerApi: ...

    async def read_targets(self, queue: MessageQueue, broker_id: int) -> list[ReadTarget]: ...

    def refresh_soon(self, topic: str) -> None: ...

    def in_background(self, work: Coroutine[object, object, object], name: str) -> asyncio.Task[object]: ...


class Reads(msgspec.Struct, eq=False):
    """The reads of one client instance.

    A read goes to the broker id that the broker's last answer suggested, by default to the master. If that
    broker cannot be reached, other brokers are read until the unreachable broker answers a probe. If a
    replica refuses a read, for example because it does not have a new topic yet, the master is read instead.
    """

    _instance: Instance
    _probes: dict[str, asyncio.Task[object]] = msgspec.field(default_factory=dict)

    async def run(
        self, queue: MessageQueue, read: Callable[[ReadTarget], Awaitable[T]], broker_id: int = MASTER_ID
    ) -> T:
        """Read a queue at the first of its brokers that serves the read.

        Args:
            queue: The queue. Its topic's route is requested if no known route contains its broker.
            read: Makes one attempt, for the next broker after a ConnectError, for the master after a refusal.
            broker_id: The broker id that the last answer suggested.

        Raises:
            NoRouteError: No route contains an address of the broker.
            BrokerError: The master refused, or a replica refused while its master is unreachable.
            RemotingError: No broker is reachable, or an answer did not arrive.
        """
        tried: set[str] = set()
        failure: CometError | None = None
        while True:
            targets = await self._instance.read_targets(queue, broker_id)
            target = next((each for each in targets if each.addr not in tried), None)
            if target is None:
                assert failure is not None
                raise failure
            tried.add(target.addr)
            try:
                return await read(target)
            except BrokerError as error:
                master = self._instance.routes.master(queue.broker_name)
                if not target.is_replica or master is None or master in tried | self._unreachable:
                    raise
                log.debug("%s: replica %s refused, trying the master: %s", queue, target.addr, error)
                broker_id, failure = MASTER_ID, error
            except RemotingError as error:
                # If the error contains an address other than the broker's, a filter server caused the error.
                if error.addr != target.addr:
                    raise
                self._failed(queue, target.addr)
                if not isinstance(error, ConnectError):
                    raise
                failure = failure or error

    @property
    def _unreachable(self) -> set[str]:
        return self._instance.routes.unreachable

    def _failed(self, queue: MessageQueue, addr: str) -> None:
        """Refresh the topic's route. If the queue has other brokers, avoid this one until it answers."""
        self._instance.refresh_soon(queue.topic)
        others = len(self._instance.routes.all_of(queue.broker_name)) > 1
        if others and addr not in self._probes:
            log.info("broker %s is unreachable: %s is read from another broker", addr, queue.broker_name)
            self._unreachable.add(addr)
            self._probes[addr] = self._instance.in_background(self._probe(queue, addr), "cometmq-probe")

    async def _probe(self, queue: MessageQueue, addr: str) -> None:
        probes = Backoff(*_PROBE_INTERVALS_S)
        try:
            while addr in self._instance.routes.all_of(queue.broker_name):
                await asyncio.sleep(probes.next_s())
                try:
                    # Any answer, even a refusal, proves that the broker is reachable again.
                    await self._instance.brokers.ask(addr, queue_request(RequestCode.GET_MIN_OFFSET, queue))
                except CometError:
                    continue
                log.info("broker %s is reachable again", addr)
                return
        finally:
            self._unreachable.discard(addr)
            del self._probes[addr]
