"""The broker's registration with all name servers: at the start, periodically, and after topic changes.

Each name server has a NamesrvLink, so that an unreachable name server does not delay the others. All changes
that occur during a registration are sent together in the next registration.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.topics import READ_WRITE, TopicTable
from cometmq.errors import CometError, ConnectError
from cometmq.periodic import Periodic
from cometmq.protocol import headers
from cometmq.protocol.bodies import KVTable, RegisterBrokerBody, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import AddressServer, RemotingClient

log = logs.logger(__name__)

UNREGISTER_TIMEOUT_S = 3.0
NO_MASTER_S = 2.0
"""The interval, in seconds, between the registrations of a slave that does not know its master yet."""


class NamesrvLink(msgspec.Struct, eq=False):
    """Keeps a broker registered with one name server."""

    namesrv: str
    registrar: Registrar
    _task: asyncio.Task[None] | None = None
    _again: bool = False
    known: bool = False
    """Whether the name server accepted the last registration."""
    problem: str = ""
    """The remark of the name server on an accepted registration: another broker has the same name and id."""

    def register(self) -> asyncio.Task[None]:
        """Register, also after a registration in progress. Return a task that ends with the last one."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            self._again = True
        return self._task

    async def _run(self) -> None:
        await asyncio.sleep(0)  # Send all topic changes of the current event-loop tick in one registration
        while True:
            self._again = False
            try:
                await self._register()
            except CometError as error:
                self.known = False
                log.warning("name server %s: could not register: %s", self.namesrv, error)
            if not self._again:
                return

    async def _register(self) -> None:
        registrar = self.registrar
        header, body = registrar.registration()
        frame = Frame.request(RequestCode.REGISTER_BROKER, header, body)
        answer = await registrar.client.call(self.namesrv, frame, registrar.timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            self.known = False
            log.warning(
                "name server %s refused the registration: %d %s", self.namesrv, answer.code, answer.remark
            )
            return
        if not self.known:
            self.known = True
            log.info("registered with name server %s as %s", self.namesrv, header.broker_addr)
        self.problem = answer.remark or ""
        if self.problem:
            log.warning("name server %s: %s", self.namesrv, self.problem)
        known = answer.header(headers.RegisterBrokerResponseHeader)
        if known.master_addr and known.ha_server_addr:
            registrar.on_master(known.master_addr, known.ha_server_addr)
        if answer.body:
            registrar.topics.set_ordered(KVTable.decode(answer.body).table)

    async def unregister(self) -> None:
        """Cancel a registration that is in progress, and unregister the broker."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        frame = Frame.request(RequestCode.UNREGISTER_BROKER, self.registrar.leaving())
        try:
            await self.registrar.client.call(self.namesrv, frame, UNREGISTER_TIMEOUT_S)
        except CometError as error:
            log.info("name server %s: could not unregister: %s", self.namesrv, error)


@dataclass(eq=False)
class Registrar:
    """Keeps one broker registered with all its name servers."""

    config: BrokerConfig
    topics: TopicTable
    address: BrokerAddress
    client: RemotingClient
    on_master: Callable[[str, str], None] = lambda _addr, _ha_addr: None
    """Called with the master's address and HA address, if a name server returns these to a slave."""
    lacks_master: Callable[[], bool] = lambda: False
    """Returns whether this broker is a slave that does not know its master."""
    filter_servers: Sequence[str] = ()  # Addresses of this broker's filter servers

    def __post_init__(self) -> None:
        self._links: dict[str, NamesrvLink] = {}
        self._timer = Periodic(
            asyncio.get_running_loop(),
            self._period_s,
            self.register,
            name="registration with the name servers",
        )
        self._stopped = False
        self._found: tuple[str, ...] = ()
        self._address_server: AddressServer | None = None

    def _period_s(self) -> float:
        return NO_MASTER_S if self.lacks_master() else self.config.register_period_ms / 1000

    async def route(self, topic: str) -> TopicRouteData | None:
        """Return a topic's route from the first name server that answers, or None if there is none."""
        frame_of = partial(
            Frame.request, RequestCode.GET_ROUTEINFO_BY_TOPIC, headers.GetRouteInfoRequestHeader(topic=topic)
        )
        for addr in self.config.namesrv_addresses or self._found:
            try:
                answer = await self.client.call(addr, frame_of(), self.timeout_s)
                if answer.code == ResponseCode.SUCCESS:
                    return TopicRouteData.decode(answer.body)
            except CometError as error:
                log.info("name server %s: no route of topic %s: %s", addr, topic, error)
        return None

    @property
    def timeout_s(self) -> float:
        """The timeout of a registration, in seconds."""
        return self.config.register_broker_timeout_mills / 1000

    async def start(self) -> None:
        """Register with all name servers, and do so periodically. A failure is only logged."""
        config = self.config
        if config.fetch_namesrv_addr_by_address_server and not config.namesrv_addr:
            domain, sub_group = config.rmq_address_server_domain, config.rmq_address_server_sub_group
            self._address_server = AddressServer(domain, sub_group, None, self._use)
            try:
                await self._address_server.start()
            except ConnectError as error:
                log.warning("not registered, because no name server address is available yet: %s", error)
        await self.registered()
        self._timer.start()

    def _use(self, namesrv: tuple[str, ...]) -> None:
        if set(namesrv) != set(self._found):
            log.info("name servers: %s", ";".join(namesrv))
            self._found = namesrv
            self.register()

    def register(self) -> list[asyncio.Task[None]]:
        """Register with all name servers: those of `namesrvAddr` or, if it is empty, the address server's."""
        if self._stopped or not self.address.port:  # A broker has no address before it listens
            return []
        addresses = self.config.namesrv_addresses or self._found
        for addr in addresses:
            if addr not in self._links:
                self._links[addr] = NamesrvLink(addr, self)
        for addr in [known for known in self._links if known not in addresses]:
            del self._links[addr]
        return [link.register() for link in self._links.values()]

    async def registered(self) -> None:
        """Register with all name servers. Return when all have answered, or after the timeout."""
        tasks = self.register()
        if tasks:
            await asyncio.wait(tasks, timeout=self.timeout_s)

    def state(self) -> tuple[int, int]:
        """Return two numbers: name servers that have registered this broker, and all known name servers."""
        links = self._links.values()
        return sum(link.known for link in links), len(links)

    def problem(self) -> str:
        """Return what a name server reports of a registration that it accepted, "" if there is nothing."""
        return next((link.problem for link in self._links.values() if link.problem), "")

    def registration(self) -> tuple[headers.RegisterBrokerRequestHeader, bytes]:
        """Return the header and the body of a REGISTER_BROKER request with the current topics."""
        config = self.config
        topics = self.topics.table
        if config.broker_permission & READ_WRITE != READ_WRITE:
            # If `brokerPermission` is restricted, register each topic with at most the broker's permissions.
            topics = {
                name: msgspec.structs.replace(topic, perm=topic.perm & config.broker_permission)
                for name, topic in topics.items()
            }
        body = RegisterBrokerBody.of(topics, self.topics.version, list(self.filter_servers)).encode(
            compressed=config.compressed_register
        )
        header = headers.RegisterBrokerRequestHeader(
            **self._identity(),
            ha_server_addr=self.address.ha_text,
            compressed=config.compressed_register,
            body_crc32=zlib.crc32(body) & 0x7FFF_FFFF,
        )
        return header, body

    def leaving(self) -> headers.UnregisterBrokerRequestHeader:
        """Return the header of an UNREGISTER_BROKER request."""
        return headers.UnregisterBrokerRequestHeader(**self._identity())

    def _identity(self) -> dict[str, Any]:
        return {
            "broker_name": self.config.broker_name,
            "broker_addr": self.address.text,
            "cluster_name": self.config.broker_cluster_name,
            "broker_id": self.config.broker_id,
        }

    async def stop(self) -> None:
        """Unregister from every name server."""
        self._stopped = True
        self._timer.cancel()
        if self._address_server is not None:
            await self._address_server.stop()
        await asyncio.gather(*(link.unregister() for link in self._links.values()))
