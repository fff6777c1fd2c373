"""A proxy for a whole cluster: fault-injecting proxies before the name server and every broker.

    async with ClusterProxy(broker.namesrv, random_faults(seed=1)) as faulty:
        async with Producer("p", namesrv=faulty.namesrv) as producer:
            ...

Routes contain the addresses of the brokers. Therefore a small name server between the first proxy and the
real name server replaces these addresses by those of the brokers' proxies.
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
    """Fault-injecting proxies before the name server and all brokers of a cluster.

    Start it with `async with`, with `start` and `stop`, or with `run_in_thread` for blocking code. Clients
    connect to `namesrv`.

    Args:
        target: Address ("host:port") of the real name server.
        script: Faults of the connections through each proxy. Default: none.
        namesrv_script: Faults of the connections to the name server, if they differ from `script`.
    """

    def __init__(self, target: str, script: Script = no_faults, namesrv_script: Script | None = None) -> None:
        self.target = target
        self.script = script
        self.brokers: dict[str, FaultProxy] = {}
        """The proxies before the brokers, by broker address.

        The proxy of a broker is created when a client first requests a route that contains the broker.
        """
        self.name_server = FaultProxy("", script if namesrv_script is None else namesrv_script)
        """Proxy before the name server."""

    @property
    def namesrv(self) -> str:
        """Address ("host:port") of the name server's proxy, for clients."""
        return self.name_server.addr

    @property
    def proxies(self) -> list[FaultProxy]:
        """All proxies of the cluster. The first proxy is that of the name server."""
        return [self.name_server, *self.brokers.values()]

    @property
    def happened(self) -> Counter[Kind]:
        """Number of injected faults by kind. A fault of both directions counts twice."""
        return sum((proxy.happened for proxy in self.proxies), Counter[Kind]())

    def inflict(self, fault: Fault) -> None:
        """Inject a fault into all open connections to brokers. May be called from any thread.

        Args:
            fault: The fault. Its `after` counts bytes from the call on.

        Raises:
            ClientStateError: A proxy is not running.
        """
        for proxy in list(self.brokers.values()):
            proxy.inflict(fault)

    def heal(self) -> None:
        """End all faults and inject no more into later connections. May be called from any thread.

        Raises:
            ClientStateError: A proxy is not running.
        """
        self.script = no_faults
        for proxy in self.proxies:
            proxy.heal()

    async def start(self) -> None:
        """Listen on free ports of 127.0.0.1.

        Raises:
            ConfigError: The target is the address of a `TestBroker`, which has no sockets.
        """
        check_target(self.target)
        self._client = RemotingClient()
        self._routes = RemotingServer({}, default=self._answer)
        self.name_server.target = f"{HOST}:{await self._routes.start(HOST, 0)}"
        await self.name_server.start()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
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
        """Replace the brokers' addresses by the addresses of their proxies."""
        for broker in brokers:
            for broker_id, addr in broker.broker_addrs.items():
                if addr not in self.brokers:
                    proxy = FaultProxy(addr, self.script)
                    await proxy.start()
                    if self.brokers.setdefault(addr, proxy) is not proxy:
                        await proxy.stop()  # A concurrent request has already created a proxy for the broker
                broker.broker_addrs[broker_id] = self.brokers[addr].addr
