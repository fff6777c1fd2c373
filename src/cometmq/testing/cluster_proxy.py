"""A cluster as clients see it through a bad network: fault proxies before the name server and all brokers.

async with ClusterProxy(broker.namesrv, random_faults(seed=1)) as faulty:
    async with Producer("p", namesrv=faulty.namesrv) as producer:
        ...

Routes name the brokers' own addresses, so there is a small name server behind the first proxy, which asks the
real one and puts the brokers' proxies into its answers.
"""

from __future__ import annotations

from collections import Counter

from cometmq.errors import CommandError, RemotingError
from cometmq.protocol.bodies import BrokerData, ClusterInfo, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, RemotingClient, RemotingServer
from cometmq.testing.faults import Fault, Kind, Script, no_faults
from cometmq.testing.proxy import HOST, FaultProxy, Proxy, check_target


class ClusterProxy(Proxy):
    """Fault proxies before a whole cluster; `namesrv` is what clients are given. `async with`, or
    `run_in_thread`.

    target: host:port of the real name server. script: the faults of each proxy; the name server's can be
    another one.
    """

    def __init__(self, target: str, script: Script = no_faults, namesrv_script: Script | None = None) -> None:
        self.target = target
        self.script = script
        self.brokers: dict[str, FaultProxy] = {}
        """By the brokers' own addresses; made when a client first asks for a route to one."""
        self.name_server = FaultProxy("", script if namesrv_script is None else namesrv_script)
        """The proxy before the name server."""

    @property
    def namesrv(self) -> str:
        """ "host:port" of the name server, through its proxy."""
        return self.name_server.addr

    @property
    def proxies(self) -> list[FaultProxy]:
        """All of them."""
        return [self.name_server, *self.brokers.values()]

    @property
    def happened(self) -> Counter[Kind]:
        """How often each kind of fault has come, counted by direction."""
        return sum((proxy.happened for proxy in self.proxies), Counter[Kind]())

    def inflict(self, fault: Fault) -> None:
        """A fault of all open connections to brokers, `after` bytes from now. From any thread."""
        for proxy in list(self.brokers.values()):
            proxy.inflict(fault)

    def heal(self) -> None:
        """End all faults, for good. From any thread."""
        self.script = no_faults
        for proxy in self.proxies:
            proxy.heal()

    async def start(self) -> None:
        """Listen on free ports of 127.0.0.1. Raises ConfigError for a target without sockets."""
        check_target(self.target)
        self._client = RemotingClient()
        self._routes = RemotingServer({}, default=self._answer)
        self.name_server.target = f"{HOST}:{await self._routes.start(HOST, 0)}"
        await self.name_server.start()

    async def stop(self) -> None:
        """Cut what is open and stop listening."""
        for proxy in self.proxies:
            await proxy.stop()
        await self._routes.stop(0)
        await self._client.close(0)

    async def _answer(self, connection: Connection, request: Frame) -> Frame:
        del connection
        asked = Frame.request(request.code, None, bytes(request.body), ext=request.ext)
        asked.version, asked.language = request.version, request.language
        try:
            answer = await self._client.call(self.target, asked)
        except RemotingError as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        body = bytes(answer.body)
        if answer.code == ResponseCode.SUCCESS and body:
            if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                route = TopicRouteData.decode(body)
                await self._turn_aside(route.broker_datas)
                body = route.encode()
            elif request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
                cluster = ClusterInfo.decode(body)
                await self._turn_aside(list(cluster.broker_addr_table.values()))
                body = cluster.encode()
        return request.response(answer.code, answer.remark, ext=answer.ext, body=body)

    async def _turn_aside(self, brokers: list[BrokerData]) -> None:
        """Put the proxies' addresses in the place of the brokers' own."""
        for broker in brokers:
            for broker_id, addr in broker.broker_addrs.items():
                if addr not in self.brokers:
                    proxy = FaultProxy(addr, self.script)
                    await proxy.start()
                    if self.brokers.setdefault(addr, proxy) is not proxy:
                        await proxy.stop()  # another answer was faster
                broker.broker_addrs[broker_id] = self.brokers[addr].addr
