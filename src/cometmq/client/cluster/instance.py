"""Connections, routes and heartbeats that producers and consumers of one program may share.

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
from cometmq.client.cluster.requests import (
    SEND_STATUS,
    NameServersUnreachable,
    broker_error,
    ordered_error,
    send_request,
)
from cometmq.client.cluster.routes import ReadTarget, RouteTable, TopicRoute, template_route, topic_route
from cometmq.client.cluster.server_requests import ConsumerPeer, Replies, ServerRequests, TransactionPeer
from cometmq.client.cluster.traces import Traces
from cometmq.errors import BrokerError, ClientStateError, CometError, NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.periodic import Backoff, Periodic, Tasks
from cometmq.protocol.bodies import HeartbeatData, ProducerData
from cometmq.protocol.codes import (
    ORDER_TOPIC_CONFIG,
    REPLY_TOPIC_POSTFIX,
    TBW102,
    TRACE_PRODUCER_GROUP,
    handlers_of,
)
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import encode_properties
from cometmq.remoting import AddressServer, Connection, RemotingClient

log = logs.logger("cometmq.client")

T = TypeVar("T")

_TRACE_TIMEOUT_S = 5.0
_HEARTBEAT_RETRY_DELAYS_S = (0.2, 1.0, 3.0, 7.0, 15.0)
"""Delays, in seconds after the loss of a broker's connection, after which heartbeats are sent again."""
# Timeout, in seconds, of the request for an ordered topic's configuration. It is short, so that a name server
# that hangs does not use up the timeout of a send.
_ORDER_CONFIG_S = 1.0
_TEMPLATE_TTL_S = 1.0
"""Seconds after which the route of a missing topic is requested again. The topic may exist by then."""
_LOOK_AGAIN_S = 0.5
"""Delay, in seconds, before the route of a missing topic is requested again. It doubles each time."""
_USED_WITHIN_S = 600.0
"""Seconds after which a route that no call has read is dropped. The newest unused routes stay."""


class ClientInstance(LifeCycle):
    """A client instance: connections, routes and heartbeats that several producers and consumers may share.

    Create it inside the running event loop. The creator starts and stops it.

    Args:
        namesrv: The name servers as a sequence of `host:port` or as text with `;` between them. Default: the
            environment variable COMETMQ_NAMESRV or NAMESRV_ADDR, otherwise 127.0.0.1:9876.
        options: The settings. Default: ClientOptions().
    """

    def __init__(
        self, namesrv: str | Sequence[str] | None = None, options: ClientOptions | None = None
    ) -> None:
        self.options = options = options if options is not None else ClientOptions()
        domain = options.namesrv_domain
        addrs = namesrv_addresses(namesrv, domain)
        address = options.client_ip or local_address(addrs[0] if addrs else domain or "")
        self.client_id = client_id_of(address, self.options)
        name = f"client {self.client_id}"
        super().__init__(name)
        self.keys = KeyMaker(address)
        self.consumers: dict[str, ConsumerPeer] = {}
        self.transactions: dict[str, TransactionPeer] = {}
        self._producers: dict[str, int] = {}
        self.replies = Replies()
        given = options.namespace
        self.namespace = Namespace(
            instance_of(addrs) if given is None else given,
            options.namespace_v2 or "",
            set() if options.trace is None else {options.trace.topic},
        )
        self._requests = ServerRequests(self.consumers, self.transactions, self.replies, self.namespace)
        self.remoting = RemotingClient(
            handlers_of(self._requests),
            on_close=self._connection_closed,
            outgoing=self.namespace.preparation(options.credentials, options.sign_to_name_servers),
            ssl_context=options.tls_context,
            address_map=options.addresses,
        )
        self.namesrv = NamesrvApi(self.remoting, addrs, options.api_timeout_s)
        self._address_server: AddressServer | None = None
        if not addrs and domain is not None:
            self._address_server = AddressServer(
                domain, options.namesrv_domain_sub_group, options.unit_name, self.namesrv.use
            )
        self.brokers = BrokerApi(self.remoting, options.api_timeout_s, self.namespace)
        self.routes, self.reads = RouteTable(), Reads(self)
        self.heartbeat_problems: dict[str, str] = {}
        """The error of the last heartbeat, by broker address."""
        self.loop = self._loop = loop = asyncio.get_running_loop()
        self._heartbeats = Periodic(
            loop, options.heartbeat_interval_s, self._beat, name=f"heartbeat of {name}"
        )
        self._route_refreshes = Periodic(
            loop, options.route_interval_s, self.refresh_routes, name=f"refresh of routes of {name}"
        )
        self._background = Tasks()
        self._fetching: dict[str, asyncio.Task[TopicRoute]] = {}
        self._settling: dict[str, asyncio.Task[object]] = {}
        """The repeated requests for the routes of new topics and, even after their end, of missing topics."""
        self._settling_turn = asyncio.Lock()
        self._template_until: dict[str, float] = {}
        self._forget_at = self.loop.time() + _USED_WITHIN_S
        self._announced: set[str] = set()
        """The addresses of the brokers that have received a heartbeat on the present connection."""
        self._announcing: dict[str, list[asyncio.TimerHandle]] = {}
        """The scheduled heartbeats to each broker whose connection was lost, by the broker's address."""
        self._producers_registered = self._producers_announced = 0
        """The number of producers registered so far, and the number announced by heartbeats."""
        self._introduction: asyncio.Task[object] | None = None
        self._reply_topics: set[str] = set()
        """The reply topics whose routes are known. Each cluster that gets requests has a reply topic."""
        self._clusters_known = False
        self.traces: Traces | None = None
        if options.trace is not None:
            self.traces = Traces(options.trace, self.keys, self._send_traces)

    # -- life

    async def start(self) -> None:
        """Start the periodic work. Repeated calls are allowed.

        No request is sent, except to an address server if the options name one.

        Raises:
            ConnectError: The address server returned no name server.
        """
        self._check_loop()
        if self._state == "starting":
            # Another caller is starting the instance: wait for the end of that start.
            async with self._turn:
                pass
        if self._state != "running":
            await super().start()

    async def _begin(self) -> None:
        if self._address_server is not None:
            await self._address_server.start()
        self._heartbeats.start()
        self._route_refreshes.start()
        if self.traces is not None:
            self.traces.start()

    async def close(self) -> None:
        """Stop the instance, also if it was never started."""
        if self._state == "new":
            self._state = "running"
        await self.stop()

    async def _end(self, *, drain: bool) -> None:
        if self.traces is not None and drain:
            await self.traces.stop()
        if self._address_server is not None:
            await self._address_server.stop()
        for addr in list(self._announcing):
            self._cancel_announcements(addr)
        tasks = [*self._background, *self._fetching.values()]
        for task in tasks:
            task.cancel()
        periodics = (self._heartbeats.stop(cancel=True), self._route_refreshes.stop(cancel=True))
        await asyncio.gather(*tasks, *periodics, return_exceptions=True)
        await self.remoting.close()

    # -- routes

    async def publish_route(
        self, topic: str, template: str = TBW102, template_queue_nums: int = 4
    ) -> TopicRoute:
        """Return the route with the queues to which messages of a topic may be sent.

        A topic without a route gets the route of the template topic, whose brokers create a topic when its
        first message arrives. An ordered topic without a route does not get that route: the topic exists,
        only its brokers are unreachable, and messages on other brokers would break the order.

        Raises:
            NameServersUnreachable: No name server answers. This is a NoRouteError.
            NoRouteError: There is no route.
        """
        route = self.routes.get(topic)
        if route is not None and route.write_queues:
            expires = self._template_until.get(topic, 0.0)
            if not route.from_template or self.loop.time() < expires:
                return route
        try:
            route = await self._fetch(topic)
        except NoRouteError as error:
            if route is not None and route.write_queues:
                # The known route, made from the template topic's route, is still valid for sends.
                return route
            if isinstance(error, NameServersUnreachable):
                raise
            return await self._from_template(topic, template, template_queue_nums, error)
        if not route.write_queues:
            raise NoRouteError(
                topic,
                [(self.namesrv.current, "a route without a queue that may be written")],
                "Look at the permissions, and whether each broker has a master (mqadmin topicRoute).",
            )
        return route

    async def _from_template(
        self, topic: str, template: str, queue_nums: int, error: NoRouteError
    ) -> TopicRoute:
        with contextlib.suppress(BrokerError, RemotingError, TimeoutError):
            async with asyncio.timeout(_ORDER_CONFIG_S):
                ordered = await self.namesrv.kv_config(ORDER_TOPIC_CONFIG, topic)
            if ordered:
                raise ordered_error(error, ordered)
        self.namespace.exempt.add(template)
        try:
            route = await self.namesrv.route_as(
                template, lambda data: template_route(topic, data, queue_nums)
            )
        except NoRouteError:
            # Raise the error about the caller's topic instead of the error about the template topic.
            raise error from None
        if not route.write_queues:
            raise error
        self._template_until[topic] = self.loop.time() + _TEMPLATE_TTL_S
        self._put(route)
        return route

    async def read_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the readable queues of a topic. Raises NoRouteError."""
        route = self.routes.get(topic)
        if route is None or route.from_template:
            route = await self._fetch(topic)
        return route.read_queues

    async def _fetch(self, topic: str) -> TopicRoute:
        """Request a route. Concurrent callers for the same topic share one request."""
        task = self._fetching.get(topic)
        if task is None:
            task = self.loop.create_task(self._fetch_now(topic), name=f"cometmq-route-{topic}")
            self._fetching[topic] = task
            task.add_done_callback(lambda done: self._fetched(topic, done))
        try:
            # Shielded, so that the cancellation of one caller does not cancel the request that others share.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._state in ("stopping", "stopped") and caller is not None and not caller.cancelling():
                raise self._not_running() from None  # the stop of this instance has cancelled the request
            raise
        finally:
            del task  # breaks a reference cycle: the task's error refers to this frame

    async def _fetch_now(self, topic: str) -> TopicRoute:
        exempt = self.namespace.exempt
        may_be_reply_topic = self.namespace.name and topic.endswith(REPLY_TOPIC_POSTFIX)
        if may_be_reply_topic and not self._clusters_known and topic not in exempt:
            # Exempt each cluster's reply topic from the namespace, but no other topic with a similar name.
            clusters = (await self.namesrv.cluster_info()).cluster_addr_table
            exempt.update(cluster + REPLY_TOPIC_POSTFIX for cluster in clusters)
            self._clusters_known = True
        try:
            route = await self.namesrv.route_as(topic, partial(topic_route, topic))
        except NoRouteError:
            if topic not in self.routes and topic not in self._settling:
                self._settle(topic)
            raise
        self._put(route)
        return route

    def _settle(self, topic: str) -> None:
        """Request a missing route again soon, then at growing intervals: the topic may be a new one."""

        async def settle() -> None:
            limit_s = self.options.route_interval_s
            pauses = Backoff(_LOOK_AGAIN_S, limit_s)
            while (pause_s := pauses.next_s()) < limit_s:
                await asyncio.sleep(pause_s)
                if not self._is_named(topic):
                    break
                async with self._settling_turn:
                    await self._refresh(topic)
            if topic in self.routes or not self._is_named(topic):
                self._settling.pop(topic, None)

        self._settling[topic] = self.in_background(settle(), f"cometmq-settle-{topic}")

    def _is_named(self, topic: str) -> bool:
        """Return whether a consumer or transaction producer has named the topic."""
        return any(topic in peer.topics() for peer in self._peers)

    @property
    def _peers(self) -> list[ConsumerPeer | TransactionPeer]:
        return [*self.consumers.values(), *self.transactions.values()]

    def _fetched(self, topic: str, task: asyncio.Task[TopicRoute]) -> None:
        self._fetching.pop(topic, None)
        if not task.cancelled():
            task.exception()  # retrieve the exception, because asyncio would log an unretrieved one

    def _put(self, route: TopicRoute) -> None:
        if not self.routes.put(route):
            return
        if route.unusable:
            log.warning("the route of %s contains invalid addresses: %r", route.topic, route.unusable)
        for consumer in self.consumers.values():
            if route.topic in consumer.topics():
                consumer.wake_rebalance()
        if not self.routes.addresses(replicas=bool(self.consumers)) <= self._announced:
            self._heartbeats.soon()

    def refresh_soon(self, topic: str) -> None:
        """Request the route of a topic in the background, because the known route may be outdated."""
        if self._state == "running" and topic not in self._fetching:
            self.in_background(self.refresh_routes([topic]), f"cometmq-refresh-{topic}")

    def in_background(self, work: Coroutine[object, object, object], name: str) -> asyncio.Task[object]:
        """Run a coroutine as a task that ends at the latest when this instance stops."""
        return self._background.start(work, name=name)

    async def refresh_routes(self, topics: Iterable[str] | None = None) -> dict[str, CometError]:
        """Request the routes of `topics`, by default of all topics in use. Return the failures by topic.

        After a failure the known route of the topic stays valid until a broker refuses a request.
        """
        wanted = set(self.routes.topics) if topics is None else set(topics)
        if topics is None:
            wanted.update(*(peer.topics() for peer in self._peers))
            wanted -= self._forget_routes()
            self._settling = {
                topic: task for topic, task in self._settling.items() if topic in wanted or not task.done()
            }
        failures: dict[str, CometError] = {}
        for topic in sorted(wanted):
            failure = await self._refresh(topic)
            if failure is not None:
                failures[topic] = failure
        self.routes.forget_unrouted()
        return failures

    def _forget_routes(self) -> set[str]:
        """Drop unused routes, at most once per `_USED_WITHIN_S` seconds. Return the topics of dropped routes.

        If a transaction producer is registered, all routes are kept: any broker in them may send transaction
        checks.
        """
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
        """Return the address of a broker's master. Raises NoRouteError for `topic` if there is no master."""
        addr = self.routes.master(broker_name)
        if addr is None:
            raise self._unknown_broker(broker_name, topic, "a master")
        return addr

    async def find_addr(self, queue: MessageQueue) -> str:
        """Return the address of a queue's master or, if there is none, of a replica.

        Requests the topic's route if neither is known. Raises NoRouteError if the route has no such address.
        """
        return await self._find(queue, lambda: self.routes.any(queue.broker_name), "any replica")

    async def find_master(self, queue: MessageQueue) -> str:
        """Return the address of a queue's master. Requests the route if it is unknown."""
        return await self._find(queue, lambda: self.routes.master(queue.broker_name), "a master")

    async def read_targets(self, queue: MessageQueue, broker_id: int) -> list[ReadTarget]:
        """Return the brokers to read a queue from, as `RouteTable.read_targets`. Raises NoRouteError."""
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
        """Return the client ids of a group's members. Brokers of the topic are asked in turn."""
        failure: CometError | None = None
        for addr in self.routes.readers_of(topic):
            try:
                return await self.brokers.consumer_ids(addr, group)
            except CometError as error:
                failure = error
        raise failure if failure is not None else self._unknown_broker("(any)", topic, "any replica")

    async def _send_traces(self, body: bytes, keys: str) -> None:
        """Send trace records to any broker of the trace topic. Raises CometError after two tries."""
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

    # -- registration at brokers

    def register_producer(self, group: str) -> None:
        """Register a producer group for heartbeats. The next heartbeat, which announces it, is sent soon."""
        self._producers[group] = self._producers.get(group, 0) + 1
        self._producers_registered += 1
        self._heartbeats.soon()

    def register_transactions(self, group: str, peer: TransactionPeer) -> None:
        """Register a transaction producer of a group. Raises ClientStateError if there is another one."""
        if group in self.transactions:
            why = f"client {self.client_id} has a transaction producer of group {group} already"
            raise ClientStateError(why)
        self.transactions[group] = peer

    def register_consumer(self, group: str, peer: ConsumerPeer) -> None:
        """Register a consumer of a group. Raises ClientStateError if there is another one."""
        if group in self.consumers:
            raise ClientStateError(f"client {self.client_id} already has a consumer of group {group}")
        self.consumers[group] = peer

    async def unregister_producer(self, group: str) -> None:
        """Notify the brokers that the last producer of a group has left."""
        left = self._producers.get(group, 0) - 1
        if left > 0:
            self._producers[group] = left
            return
        if self._producers.pop(group, None) is not None:
            await self._unregister(producer_group=group)

    async def unregister_consumer(self, group: str) -> None:
        """Notify the brokers that a consumer has left."""
        if self.consumers.pop(group, None) is not None:
            await self._unregister(consumer_group=group)

    async def _unregister(self, producer_group: str | None = None, consumer_group: str | None = None) -> None:
        """Tell all brokers that this client leaves a producer group or a consumer group.

        Without this request, a broker would remove the client from the group only after a timeout of 120 s,
        and the other members would rebalance only then.
        """

        async def unregister(addr: str) -> None:
            try:
                await self.brokers.unregister_client(addr, self.client_id, producer_group, consumer_group)
            except CometError as error:
                log.info("broker %s could not be notified that %s leaves: %s", addr, self.client_id, error)

        await asyncio.gather(*(unregister(addr) for addr in sorted(self._announced)))

    def heartbeat_soon(self) -> None:
        """Send heartbeats in the background."""
        self._heartbeats.soon()

    async def _beat(self) -> None:
        # Send the queries for other members' subscriptions before the heartbeats: a broker may store only the
        # subscriptions in the group's latest heartbeat, so after a heartbeat of this member it would return
        # this member's own. The heartbeats need not wait for the answers.
        comparisons = asyncio.gather(
            *(peer.compare_subscriptions() for peer in self.consumers.values()), return_exceptions=True
        )
        await asyncio.sleep(0)
        await self.send_heartbeats()
        await comparisons

    async def send_heartbeats(self) -> None:
        """Send heartbeats for all groups to all brokers. Failures are stored in `heartbeat_problems`."""
        if not self._producers and not self.consumers:
            return
        registered = self._producers_registered
        body = HeartbeatData(
            client_id=self.client_id,
            producer_data_set=[ProducerData(group_name=group) for group in sorted(self._producers)],
            consumer_data_set=[peer.heartbeat() for _, peer in sorted(self.consumers.items())],
        )
        addrs = self.routes.addresses(replicas=bool(self.consumers))
        await asyncio.gather(*(self._heartbeat_to(addr, body) for addr in sorted(addrs)))
        self._producers_announced = max(self._producers_announced, registered)
        for addr in set(self.heartbeat_problems) - addrs:
            del self.heartbeat_problems[addr]

    async def introduce(self, route: TopicRoute, end: float) -> None:
        """Send heartbeats to all brokers that may forward the reply to a request.

        These are the brokers of all clusters that store the request's topic. Wait for the heartbeats until
        `end`, on the loop's clock. If a broker refuses its heartbeat or cannot be reached, later calls do not
        wait for it.
        """
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
        if missing or self._producers_announced < self._producers_registered:
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

    def _connection_closed(self, connection: Connection) -> None:
        """Schedule heartbeats to a broker whose connection was lost: the broker has removed this client."""
        self._announced.discard(connection.addr)
        if self._state == "running" and (self.consumers or self.transactions or self.replies):
            self._cancel_announcements(connection.addr)
            self._announcing[connection.addr] = [
                self.loop.call_later(delay_s, self._repeat_announcement, connection.addr)
                for delay_s in _HEARTBEAT_RETRY_DELAYS_S
            ]
            self._announcing[connection.addr].append(
                self.loop.call_later(
                    _HEARTBEAT_RETRY_DELAYS_S[-1], self._cancel_announcements, connection.addr
                )
            )

    def _cancel_announcements(self, addr: str) -> None:
        for timer in self._announcing.pop(addr, ()):
            timer.cancel()

    def _repeat_announcement(self, addr: str) -> None:
        if self._state == "running" and addr in self.routes.addresses(replicas=True) - self._announced:
            self._heartbeats.soon()
