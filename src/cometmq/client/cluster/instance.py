"""What producers and consumers of one program may share: connections, routes, heartbeats.

async with ClientInstance("127.0.0.1:9876") as client:
    async with Producer("p", client=client) as producer, PushConsumer("c", listener, "T", client=client):
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TypeVar

from cometmq import logs
from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.identity import KeyMaker, client_id_of, local_address
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.client.cluster.namespaces import Namespace, instance_of
from cometmq.client.cluster.namesrv_api import NamesrvApi
from cometmq.client.cluster.options import ClientOptions, namesrv_addresses
from cometmq.client.cluster.reads import Reads
from cometmq.client.cluster.replies import Replies
from cometmq.client.cluster.requests import SEND_STATUS, broker_error, send_request
from cometmq.client.cluster.routes import ReadTarget, RouteTable, TopicRoute, template_route, topic_route
from cometmq.client.cluster.server_requests import ConsumerPeer, ServerRequests, TransactionPeer
from cometmq.client.cluster.traces import Traces
from cometmq.errors import BrokerError, ClientStateError, CometError, NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic
from cometmq.protocol.acl import Credentials, sign
from cometmq.protocol.bodies import HeartbeatData, ProducerData
from cometmq.protocol.codes import (
    NAMESRV_REQUESTS,
    ORDER_TOPIC_CONFIG,
    REPLY_TOPIC_POSTFIX,
    TBW102,
    TRACE_PRODUCER_GROUP,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import encode_properties
from cometmq.remoting import AddressServer, Connection, RemotingClient
from cometmq.text import printable

__all__ = ["Client", "ClientInstance"]

log = logs.logger("cometmq.client")

T = TypeVar("T")

_TRACE_TIMEOUT_S = 5.0
_ANNOUNCE_AGAIN_S = (0.2, 1.0, 3.0, 7.0, 15.0)
"""When, after a connection was lost, its broker is told again who is here: it may take a while to start."""
_TEMPLATE_TTL_S = 1.0
"""A route made from the template is asked again after this: the topic may have come into being meanwhile."""
_USED_WITHIN_S = 600.0
"""Of the routes that were not used for so long only some are kept."""


def _before_leaving(
    namespace: Namespace, credentials: Credentials | None, signs_all: bool
) -> Callable[[Frame], None] | None:
    """What is done with each request last: the signature is of the names in the namespace."""
    wrap = namespace.wrap_request if namespace else None
    if credentials is None:
        return wrap

    def leave(frame: Frame) -> None:
        if wrap is not None:
            wrap(frame)
        if signs_all or frame.code not in NAMESRV_REQUESTS:
            sign(frame, credentials)

    return leave


class ClientInstance(LifeCycle):
    """To be made inside the running loop. Whoever makes one starts and stops it."""

    def __init__(
        self, namesrv: str | Sequence[str] | None = None, options: ClientOptions | None = None
    ) -> None:
        self.options = options if options is not None else ClientOptions()
        domain = self.options.namesrv_domain
        addrs = namesrv_addresses(namesrv, domain)
        address = self.options.client_ip or local_address(addrs[0] if addrs else domain or "")
        self.client_id = client_id_of(address, self.options)
        super().__init__(f"client {self.client_id}")
        self.keys = KeyMaker(address)
        self.consumers: dict[str, ConsumerPeer] = {}
        self.transactions: dict[str, TransactionPeer] = {}
        self._producers: dict[str, int] = {}
        self.replies = Replies()
        given = self.options.namespace
        self.namespace = Namespace(
            instance_of(addrs) if given is None else given,
            self.options.namespace_v2 or "",
            set() if self.options.trace is None else {self.options.trace.topic},
        )
        self._requests = ServerRequests(self.consumers, self.transactions, self.replies, self.namespace)
        self.remoting = RemotingClient(
            self._requests.handlers(),
            on_close=self._connection_closed,
            outgoing=_before_leaving(
                self.namespace, self.options.credentials, self.options.sign_to_name_servers
            ),
            ssl_context=self.options.tls_context,
            address_map=self.options.addresses,
        )
        self.namesrv = NamesrvApi(self.remoting, addrs, self.options.api_timeout_s)
        self._address_server: AddressServer | None = None
        if not addrs and domain is not None:
            self._address_server = AddressServer(
                domain, self.options.namesrv_domain_sub_group, self.options.unit_name, self.namesrv.use
            )
        self.brokers = BrokerApi(self.remoting, self.options.api_timeout_s, self.namespace)
        self.routes, self.reads = RouteTable(), Reads(self)
        self.heartbeat_problems: dict[str, str] = {}
        """Broker address -> why the last heartbeat failed."""
        self.loop = self._loop = asyncio.get_running_loop()
        self._heartbeats = Periodic(
            self.loop,
            self.options.heartbeat_interval_s,
            self._beat,
            name=f"heartbeat of client {self.client_id}",
        )
        self._route_rounds = Periodic(
            self.loop,
            self.options.route_interval_s,
            self.refresh_routes,
            name=f"refresh of routes of client {self.client_id}",
        )
        self._refreshing: set[asyncio.Task[object]] = set()
        self._fetching: dict[str, asyncio.Task[TopicRoute]] = {}
        self._template_until: dict[str, float] = {}
        self._forget_at = self.loop.time() + _USED_WITHIN_S
        self._announced: set[str] = set()
        """Broker addresses that know of us by a heartbeat on the present connection."""
        self._announcing: dict[str, list[asyncio.TimerHandle]] = {}
        """When brokers whose connection was lost are told again."""
        self._joined = self._told_of = 0
        """Producers that came in all, and how many of them a heartbeat has told of."""
        self._introduction: asyncio.Task[object] | None = None
        self._reply_topics: set[str] = set()
        """Those whose route is known: one for each cluster of a request's topic."""
        self._clusters_asked = False
        self.traces: Traces | None = None
        if self.options.trace is not None:
            self.traces = Traces(self.options.trace, self.keys, self._send_traces)

    # -- life

    async def start(self) -> None:
        """Start the periodic work. May be called again; no server is asked for anything yet, but an address
        server for the name servers: ConnectError if it does not name any."""
        self._check_loop()
        if self._state == "starting":
            async with self._turn:  # of whoever shares it, and came first
                pass
        if self._state != "running":
            await super().start()

    async def _begin(self) -> None:
        if self._address_server is not None:
            await self._address_server.start()
        self._heartbeats.start()
        self._route_rounds.start()
        if self.traces is not None:
            self.traces.start()

    async def close(self) -> None:
        """As stop, also for an instance that was never started."""
        if self._state == "new":
            self._state = "running"
        await self.stop()

    async def _end(self, *, drain: bool) -> None:
        if self.traces is not None and drain:
            await self.traces.stop()
        if self._address_server is not None:
            await self._address_server.stop()
        self._heartbeats.cancel()
        self._route_rounds.cancel()
        for addr in list(self._announcing):
            self._announce_no_more(addr)
        tasks = [*self._refreshing, *self._fetching.values()]
        for task in tasks:
            task.cancel()
        periodics = (self._heartbeats.stop(), self._route_rounds.stop())
        await asyncio.gather(*tasks, *periodics, return_exceptions=True)
        await self.remoting.close()

    # -- routes

    async def publish_route(
        self, topic: str, template: str = TBW102, template_queue_nums: int = 4
    ) -> TopicRoute:
        """Where messages of a topic may be sent. A topic nobody knows gets the route of the template topic,
        whose brokers create topics at their first message; but not one that is ordered, because its brokers
        are only away. Raises NoRouteError."""
        route = self.routes.get(topic)
        if route is not None and route.write_queues and not self._template_expired(route):
            return route
        try:
            route = await self._fetch(topic)
        except NoRouteError as error:
            if route is not None and route.write_queues:
                return route  # the template's route, still good for sending
            return await self._from_template(topic, template, template_queue_nums, error)
        if not route.write_queues:
            raise NoRouteError(
                topic,
                [(self.namesrv.current, "a route without a queue that may be written")],
                "Look at the permissions, and whether each broker has a master (mqadmin topicRoute).",
            )
        return route

    def _template_expired(self, route: TopicRoute) -> bool:
        return route.from_template and self.loop.time() >= self._template_until.get(route.topic, 0.0)

    async def _from_template(
        self, topic: str, template: str, queue_nums: int, error: NoRouteError
    ) -> TopicRoute:
        with contextlib.suppress(BrokerError, RemotingError):
            ordered = await self.namesrv.kv_config(ORDER_TOPIC_CONFIG, topic)
            if ordered:
                hint = f"it is ordered, and the brokers of its queues ({printable(ordered, 200)}) are away"
                raise NoRouteError(topic, error.asked, hint)
        self.namespace.exempt.add(template)
        try:
            route = await self.namesrv.route_as(
                template, lambda data: template_route(topic, data, queue_nums)
            )
        except NoRouteError:
            raise error from None  # names the topic that the caller asked for
        if not route.write_queues:
            raise error
        self._template_until[topic] = self.loop.time() + _TEMPLATE_TTL_S
        self._put(route)
        return route

    async def read_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be read. Raises NoRouteError."""
        route = self.routes.get(topic)
        if route is None or route.from_template:
            route = await self._fetch(topic)
        return route.read_queues

    async def _fetch(self, topic: str) -> TopicRoute:
        """Ask for a route; all who want the same one at the same time share one request."""
        task = self._fetching.get(topic)
        if task is None:
            task = self.loop.create_task(self._fetch_now(topic), name=f"cometmq-route-{topic}")
            self._fetching[topic] = task
            task.add_done_callback(lambda done: self._fetched(topic, done))
        try:
            # Shielded: one caller's cancellation must not take the answer from the others.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._state in ("stopping", "stopped") and caller is not None and not caller.cancelling():
                raise self._not_running() from None  # the question was cancelled
            raise
        finally:
            del task  # its error holds this frame

    async def _fetch_now(self, topic: str) -> TopicRoute:
        if self.namespace.name and topic.endswith(REPLY_TOPIC_POSTFIX):
            await self._tell_reply_topics_apart(topic)
        route = await self.namesrv.route_as(topic, partial(topic_route, topic))
        self._put(route)
        return route

    async def _tell_reply_topics_apart(self, topic: str) -> None:
        """The reply topics of clusters are in no namespace. Other topics whose names end like theirs are."""
        if not self._clusters_asked and topic not in self.namespace.exempt:
            clusters = (await self.namesrv.cluster_info()).cluster_addr_table
            self.namespace.exempt.update(cluster + REPLY_TOPIC_POSTFIX for cluster in clusters)
            self._clusters_asked = True

    def _fetched(self, topic: str, task: asyncio.Task[TopicRoute]) -> None:
        self._fetching.pop(topic, None)
        if not task.cancelled():
            task.exception()  # seen: its callers may have gone

    def _put(self, route: TopicRoute) -> None:
        changed = self.routes.put(route)
        if not changed:
            return
        if route.unusable:
            log.warning("the route of %s names what are no addresses: %r", route.topic, route.unusable)
        for consumer in self.consumers.values():
            if route.topic in consumer.topics():
                consumer.wake_rebalance()
        if not self.routes.addresses(replicas=bool(self.consumers)) <= self._announced:
            self._heartbeats.soon()

    def refresh_soon(self, topic: str) -> None:
        """Ask for a route in the background: something says that it may be old."""
        if self._state == "running" and topic not in self._fetching:
            self.in_background(self.refresh_routes([topic]), f"cometmq-refresh-{topic}")

    def in_background(self, work: Coroutine[object, object, object], name: str) -> asyncio.Task[object]:
        """Run a coroutine as a task that ends with this instance."""
        task = self.loop.create_task(work, name=name)
        self._refreshing.add(task)
        task.add_done_callback(self._refreshing.discard)
        return task

    async def refresh_routes(self, topics: Iterable[str] | None = None) -> dict[str, CometError]:
        """Ask for the routes of these topics, else of all that are used; the failures by topic. A route that
        is known stays good until brokers say otherwise."""
        wanted = set(self.routes.topics) if topics is None else set(topics)
        if topics is None:
            for consumer in self.consumers.values():
                wanted.update(consumer.topics())
            for producer in self.transactions.values():
                wanted.update(producer.topics())
            wanted -= self._forget_routes()
        failures: dict[str, CometError] = {}
        for topic in sorted(wanted):
            failure = await self._refresh(topic)
            if failure is not None:
                failures[topic] = failure
        self.routes.forget_unrouted()
        return failures

    def _forget_routes(self) -> set[str]:
        """Now and then, drop routes that nobody uses. Brokers of any topic may ask a transaction producer."""
        if self.loop.time() < self._forget_at:
            return set()
        self._forget_at = self.loop.time() + _USED_WITHIN_S
        kept = {topic for consumer in self.consumers.values() for topic in consumer.topics()}
        if self.transactions:
            kept.update(self.routes.topics)
        dropped = set(self.routes.forget_unused(kept))
        for topic in dropped:
            self._template_until.pop(topic, None)
        self._reply_topics -= dropped
        return dropped

    async def _refresh(self, topic: str) -> CometError | None:
        try:
            await self._fetch(topic)
        except CometError as error:
            log.debug("route of %s was not refreshed: %s", topic, error)
            return error
        return None

    # -- brokers

    def master_addr(self, broker_name: str, topic: str = "*") -> str:
        """Raises NoRouteError, about `topic`, for a broker without a known master."""
        addr = self.routes.master(broker_name)
        if addr is None:
            raise self._unknown_broker(broker_name, topic, "a master")
        return addr

    async def find_addr(self, queue: MessageQueue) -> str:
        """The master of a queue's broker, else a replica; asks for the topic's route if need be."""
        return await self._find(queue, lambda: self.routes.any(queue.broker_name), "any replica")

    async def find_master(self, queue: MessageQueue) -> str:
        """The master of a queue's broker, asking for the topic's route if it is not known yet."""
        return await self._find(queue, lambda: self.routes.master(queue.broker_name), "a master")

    async def read_targets(self, queue: MessageQueue, broker_id: int) -> list[ReadTarget]:
        """Return the brokers that may serve a read of a queue, at least one (RouteTable.read_targets)."""
        return await self._find(
            queue, lambda: self.routes.read_targets(queue.broker_name, broker_id) or None, "any replica"
        )

    async def _find(self, queue: MessageQueue, look: Callable[[], T | None], role: str) -> T:
        self.routes.use(queue.topic)
        found = look()
        if found is None:
            await self._fetch(queue.topic)
            found = look()
            if found is None:
                raise self._unknown_broker(queue.broker_name, queue.topic, role)
        return found

    def _unknown_broker(self, broker_name: str, topic: str, role: str) -> NoRouteError:
        return NoRouteError(
            topic,
            [(self.namesrv.current, f"no route names the address of {role} of broker {broker_name}")],
            "Is the broker down, or registered under another name? (mqadmin clusterList)",
        )

    async def consumer_ids(self, topic: str, group: str) -> list[str]:
        """The client ids of a group's members, from any broker of the topic, masters first."""
        failure: CometError | None = None
        for addr in self.routes.readers_of(topic):
            try:
                return await self.brokers.consumer_ids(addr, group)
            except CometError as error:
                failure = error
        raise failure if failure is not None else self._unknown_broker("(any)", topic, "any replica")

    async def _send_traces(self, body: bytes, keys: str) -> None:
        """Send records of traces to any broker of the trace topic. Raises CometError after two tries."""
        assert self.options.trace is not None
        topic = self.options.trace.topic
        properties = {names.KEYS: keys, names.UNIQ_KEY: self.keys.make(), names.WAIT: "true"}
        text = encode_properties(properties).decode()
        for tries_left in (1, 0):
            route = await self.publish_route(topic)
            queue = random.choice(route.write_queues)
            try:
                addr = self.master_addr(queue.broker_name, topic)
                request = send_request(TRACE_PRODUCER_GROUP, topic, queue, body, text)
                answer = await self.brokers.ask(addr, request, _TRACE_TIMEOUT_S)
                if answer.code in SEND_STATUS:
                    return
                raise broker_error(answer, addr, topic)
            except CometError:
                self.refresh_soon(topic)
                if not tries_left:
                    raise

    # -- who we are, told to brokers

    def register_producer(self, group: str) -> None:
        """Announce a producer group from the next heartbeat on, which comes soon."""
        self._producers[group] = self._producers.get(group, 0) + 1
        self._joined += 1
        self._heartbeats.soon()

    def register_transactions(self, group: str, peer: TransactionPeer) -> None:
        """Let a transaction producer answer brokers. Raises ClientStateError if its group has one."""
        if group in self.transactions:
            why = f"client {self.client_id} has a transaction producer of group {group} already"
            raise ClientStateError(why)
        self.transactions[group] = peer

    def register_consumer(self, group: str, peer: ConsumerPeer) -> None:
        """Announce a consumer and let it answer brokers. Raises ClientStateError if its group has one."""
        if group in self.consumers:
            raise ClientStateError(f"client {self.client_id} has a consumer of group {group} already")
        self.consumers[group] = peer

    async def unregister_producer(self, group: str) -> None:
        """Tell the brokers that the last producer of a group leaves."""
        left = self._producers.get(group, 0) - 1
        if left > 0:
            self._producers[group] = left
            return
        if self._producers.pop(group, None) is not None:
            await self._say_goodbye(producer_group=group)

    async def unregister_consumer(self, group: str) -> None:
        """Tell the brokers that a consumer leaves."""
        if self.consumers.pop(group, None) is not None:
            await self._say_goodbye(consumer_group=group)

    async def _say_goodbye(
        self, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """Tell the brokers that know of us: the others take over at once instead of after 120 s."""

        async def tell(addr: str) -> None:
            try:
                await self.brokers.unregister_client(addr, self.client_id, producer_group, consumer_group)
            except CometError as error:
                log.info("broker %s was not told that %s leaves: %s", addr, self.client_id, error)

        await asyncio.gather(*(tell(addr) for addr in sorted(self._announced)))

    def heartbeat_soon(self) -> None:
        """Announce all groups in the background."""
        self._heartbeats.soon()

    async def _beat(self) -> None:
        # Their questions leave before our heartbeats, which wait for no answer.
        looks = asyncio.gather(
            *(peer.look_at_group() for peer in self.consumers.values()), return_exceptions=True
        )
        await asyncio.sleep(0)
        await self.send_heartbeats()
        await looks

    async def send_heartbeats(self) -> None:
        """Announce all groups to all brokers. Never raises: `heartbeat_problems` says what failed."""
        if not self._producers and not self.consumers:
            return
        joined, body = self._joined, self._heartbeat()
        addrs = self.routes.addresses(replicas=bool(self.consumers))
        await asyncio.gather(*(self._heartbeat_to(addr, body) for addr in sorted(addrs)))
        self._told_of = max(self._told_of, joined)
        for addr in set(self.heartbeat_problems) - addrs:
            del self.heartbeat_problems[addr]

    async def introduce(self, route: TopicRoute, end: float) -> None:
        """Have the brokers that may bring a reply know this client: those of the topic of the request, and
        all others of their clusters, which take replies as well. Those that take no heartbeat are not waited
        for again. end: of the caller's time, by the loop's clock."""
        for cluster in {broker.cluster for broker in route.data.broker_datas}:
            topic = cluster + REPLY_TOPIC_POSTFIX
            self.namespace.exempt.add(topic)
            if topic not in self._reply_topics:
                with contextlib.suppress(CometError, TimeoutError):
                    async with asyncio.timeout_at(end):
                        await self._fetch(topic)
                    self._reply_topics.add(topic)
            self.routes.use(topic)
        missing = self.routes.addresses(replicas=False) - self._announced - self.heartbeat_problems.keys()
        if missing or self._told_of < self._joined:
            if self._introduction is None or self._introduction.done():
                self._introduction = self.in_background(self.send_heartbeats(), "cometmq-introduction")
            await asyncio.wait([self._introduction], timeout=max(end - self.loop.time(), 0.0))

    async def _heartbeat_to(self, addr: str, body: HeartbeatData) -> None:
        try:
            await self.brokers.heartbeat(addr, body)
        except CometError as error:
            text = str(error)
            if self.heartbeat_problems.get(addr) != text:
                log.warning("heartbeat failed: %s", text)
            self.heartbeat_problems[addr] = text
            self._announced.discard(addr)
        else:
            self._announced.add(addr)
            self.heartbeat_problems.pop(addr, None)

    def _heartbeat(self) -> HeartbeatData:
        return HeartbeatData(
            client_id=self.client_id,
            producer_data_set=[ProducerData(group_name=group) for group in sorted(self._producers)],
            consumer_data_set=[peer.heartbeat() for _, peer in sorted(self.consumers.items())],
        )

    def _connection_closed(self, connection: Connection) -> None:
        """A broker forgets a client with its connection: whom it calls announces itself again soon."""
        self._announced.discard(connection.addr)
        if self._state == "running" and (self.consumers or self.transactions or self.replies):
            self._announce_no_more(connection.addr)
            self._announcing[connection.addr] = [
                self.loop.call_later(delay_s, self._announce_again, connection.addr)
                for delay_s in _ANNOUNCE_AGAIN_S
            ]
            self._announcing[connection.addr].append(
                self.loop.call_later(_ANNOUNCE_AGAIN_S[-1], self._announce_no_more, connection.addr)
            )

    def _announce_no_more(self, addr: str) -> None:
        for timer in self._announcing.pop(addr, ()):
            timer.cancel()

    def _announce_again(self, addr: str) -> None:
        if self._state == "running" and addr in self.routes.addresses(replicas=True) - self._announced:
            self._heartbeats.soon()


class Client(LifeCycle):
    """Works on a client instance: one that others share, or one of its own towards `namesrv`."""

    def __init__(
        self,
        name: str,
        namesrv: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        super().__init__(name)
        self._namesrv = namesrv
        self._client_options = client_options
        self._client = client
        self._shared = client is not None
        options = client.options if client is not None else client_options
        self.telemetry = options.telemetry if options is not None else None
        """OpenTelemetry's spans, if the client options asked for them."""

    @property
    def client(self) -> ClientInstance:
        """The connections, routes and heartbeats it uses. Raises ClientStateError before the start."""
        if self._client is None:
            raise self._not_running()
        return self._client

    async def _start_client(self) -> ClientInstance:
        if self._client is None:
            self._client = ClientInstance(self._namesrv, self._client_options)
        await self._client.start()
        return self._client

    async def _close_client(self) -> None:
        if self._client is not None and not self._shared:
            await self._client.close()
