"""The name server's request handlers (docs/reference/remoting.md, Name server)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias
from zlib import crc32

from cometmq import logs
from cometmq.errors import CommandError, ConfigError
from cometmq.namesrv.config import RunningConfig
from cometmq.namesrv.kv import KvFile
from cometmq.namesrv.tables import Registration, RouteTables
from cometmq.protocol import bodies, codes, headers
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.codes import RequestCode, ResponseCode, TopicSysFlag, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.java_properties import format_properties
from cometmq.remoting import Connection
from cometmq.settings import requested_settings, without_secrets
from cometmq.text import shortened

log = logs.logger(__name__)

CRC_MASK = 0x7FFF_FFFF
MAX_NAME_CHARACTERS = 255  # maximum length of the name of a broker, a cluster or a zone
MAX_ROUTE_BODY_BYTES = 64 << 10  # maximum bytes of a request with one topic's queues; enough for 600 brokers
MAX_FILTER_SERVERS = 64  # maximum filter servers of one broker
MAX_HEARTBEAT_TIMEOUT_MS = 3_600_000

Answer: TypeAlias = "Frame | Awaitable[Frame | None]"


@dataclass(eq=False)
class RequestProcessor:
    """Answers requests from the route tables. Only requests that change a file wait for I/O."""

    tables: RouteTables
    kv_file: KvFile
    config: RunningConfig
    now_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._kv = self.kv_file.tables
        self._log_limit = logs.LogLimiter(log=log)

    # -- key-value configuration

    @handles(RequestCode.PUT_KV_CONFIG)
    def put_kv_config(self, _connection: Connection, request: Frame) -> Answer:
        """Set the value of a key in a namespace, and write the key-value file."""
        asked = request.header(headers.PutKVConfigRequestHeader)
        self._kv.put(asked.namespace, asked.key, asked.value)
        return self._answered(request, self.kv_file.save, "kvConfigPath")

    @handles(RequestCode.GET_KV_CONFIG)
    def get_kv_config(self, _connection: Connection, request: Frame) -> Answer:
        """Return the value of a key in a namespace."""
        asked = request.header(headers.GetKVConfigRequestHeader)
        value = self._kv.get(asked.namespace, asked.key)
        if value is None:
            remark = f"No config item, Namespace: {asked.namespace} Key: {asked.key}"
            raise CommandError(ResponseCode.QUERY_NOT_FOUND, remark, {})
        return request.response(header=headers.GetKVConfigResponseHeader(value=value))

    @handles(RequestCode.DELETE_KV_CONFIG)
    def delete_kv_config(self, _connection: Connection, request: Frame) -> Answer:
        """Remove a key from a namespace, and write the key-value file."""
        asked = request.header(headers.GetKVConfigRequestHeader)
        self._kv.delete(asked.namespace, asked.key)
        return self._answered(request, self.kv_file.save, "kvConfigPath")

    @handles(RequestCode.GET_KVLIST_BY_NAMESPACE)
    def get_kvlist_by_namespace(self, _connection: Connection, request: Frame) -> Answer:
        """Return all key-value pairs of a namespace."""
        asked = request.header(headers.GetKVListByNamespaceRequestHeader)
        pairs = self._kv.namespace(asked.namespace)
        if pairs is None:
            raise CommandError(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {asked.namespace}")
        return request.response(body=bodies.KVTable(pairs).encode())

    async def _answered(self, request: Frame, save: Callable[[], Awaitable[None]], path: str) -> Frame:
        """Write a change to its file with `save`. `path` is the setting that holds the file's path."""
        try:
            await save()
        except OSError as error:
            log.error("cannot write to %s: %s", path, error)
            remark = f"taken, but cannot be written to {path}: {error}"
            raise CommandError.failed(remark) from error
        return request.response()

    # -- brokers

    @handles(RequestCode.REGISTER_BROKER)
    def register_broker(self, connection: Connection, request: Frame) -> Answer:
        """Register a broker with its addresses and topics."""
        asked = request.header(headers.RegisterBrokerRequestHeader)
        if asked.body_crc32 and crc32(request.body) & CRC_MASK != asked.body_crc32:
            raise CommandError.failed("crc32 not match")
        body = bodies.RegisterBrokerBody()  # a registration without a body registers no topics
        if request.body:
            body = bodies.RegisterBrokerBody.decode(request.body, bool(asked.compressed), request.version)
        replaces = self.config.now.delete_topic_with_broker_registration
        said = registration(request, asked, body, replaces)
        registered = self.tables.register(self.now_ms(), said, connection)
        if registered.left_out and self._log_limit.allows():
            log.warning(
                "the limit of topics is reached: %d topics of broker %s are ignored",
                registered.left_out, asked.broker_addr,
            )  # fmt: skip
        rival = ""
        if registered.rival is not None:
            rival = (
                f"{asked.broker_addr} and {registered.rival} both register as broker {asked.broker_name} "
                f"with id {asked.broker_id}: clients see only one of them"
            )
            if self._log_limit.allows():
                log.warning("%s", rival)
        order = self._order_topics() if self.config.now.return_order_topic_config_to_broker else None
        return request.response(
            header=headers.RegisterBrokerResponseHeader(
                ha_server_addr=registered.ha_server_addr, master_addr=registered.master_addr
            ),
            body=b"" if order is None else bodies.KVTable(order).encode(),
            remark=rival or None,
        )

    def _order_topics(self) -> dict[str, str] | None:
        if self._kv.fits(codes.ORDER_TOPIC_CONFIG):
            return self._kv.namespace(codes.ORDER_TOPIC_CONFIG)
        # The list of ordered topics is too long for the response. The broker is registered without the list,
        # because that is better than no registration.
        log.error("%s is too long for registrations: delete some of its keys", codes.ORDER_TOPIC_CONFIG)
        return None

    @handles(RequestCode.UNREGISTER_BROKER)
    def unregister_broker(self, _connection: Connection, request: Frame) -> Answer:
        """Remove a broker. The broker itself sends this request when it stops."""
        asked = request.header(headers.UnregisterBrokerRequestHeader)
        self.tables.unregister(asked.broker_addr, asked.broker_name)
        return request.response()

    @handles(RequestCode.QUERY_DATA_VERSION)
    def query_data_version(self, _connection: Connection, request: Frame) -> Answer:
        """Return whether the data version that a broker sends differs from its registered data version."""
        asked = request.header(headers.UnregisterBrokerRequestHeader)
        version = bodies.DataVersion.decode(request.body)
        changed, held = self.tables.query_data_version(self.now_ms(), asked.broker_addr, version)
        return request.response(
            header=headers.QueryDataVersionResponseHeader(changed=changed),
            body=b"" if held is None else held.encode(),
        )

    @handles(RequestCode.BROKER_HEARTBEAT)
    def broker_heartbeat(self, _connection: Connection, request: Frame) -> Answer:
        """Record a broker's heartbeat. As in 5.x, the response is SUCCESS even for an unknown broker."""
        asked = request.header(headers.BrokerHeartbeatRequestHeader)
        self.tables.heartbeat(self.now_ms(), asked.broker_addr)
        return request.response()

    @handles(RequestCode.GET_BROKER_MEMBER_GROUP)
    def get_broker_member_group(self, _connection: Connection, request: Frame) -> Answer:
        """Return the addresses of the broker processes (master and slaves) that share a broker name."""
        asked = request.header(headers.GetBrokerMemberGroupRequestHeader)
        group = self.tables.member_group(asked.cluster_name, asked.broker_name)
        return request.response(body=bodies.BrokerMemberGroup(group).encode())

    @handles(RequestCode.WIPE_WRITE_PERM_OF_BROKER)
    def wipe_write_perm_of_broker(self, connection: Connection, request: Frame) -> Answer:
        """Remove the write permission from all topics of the brokers with one broker name."""
        asked = request.header(headers.BrokerNameRequestHeader)
        count = self.tables.wipe_write_perm(asked.broker_name)
        log.info("%s removed write permission of %s: %d topics", connection.peer, asked.broker_name, count)
        return request.response(header=headers.WipeWritePermOfBrokerResponseHeader(wipe_topic_count=count))

    @handles(RequestCode.ADD_WRITE_PERM_OF_BROKER)
    def add_write_perm_of_broker(self, connection: Connection, request: Frame) -> Answer:
        """Set the permission of all topics of the brokers with one broker name to read and write."""
        asked = request.header(headers.BrokerNameRequestHeader)
        count = self.tables.add_write_perm(asked.broker_name)
        log.info("%s restored write permission of %s: %d topics", connection.peer, asked.broker_name, count)
        return request.response(header=headers.AddWritePermOfBrokerResponseHeader(add_topic_count=count))

    # -- routes and topics

    @handles(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    def get_routeinfo_by_topic(self, _connection: Connection, request: Frame) -> Answer:
        """Return the route of a topic: its queues and the addresses of their brokers."""
        asked = request.header(headers.GetRouteInfoRequestHeader)
        route = self.tables.route(asked.topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {asked.topic}"
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, remark)
        if self.config.now.order_message_enable:
            route.order_topic_conf = self._kv.get(codes.ORDER_TOPIC_CONFIG, asked.topic)
        quoted = request.version >= codes.VERSION_4_9_4 or bool(asked.accept_standard_json_only)
        if request.version >= codes.VERSION_5_0_0:
            for broker in route.broker_datas:
                broker.enable_acting_master = False
        return request.response(body=route.encode(standard=quoted))

    @handles(RequestCode.GET_BROKER_CLUSTER_INFO)
    def get_broker_cluster_info(self, _connection: Connection, request: Frame) -> Answer:
        """Return the broker names of each cluster and the addresses of each broker name."""
        return request.response(body=self.tables.cluster_info().encode())

    @handles(RequestCode.REGISTER_TOPIC_IN_NAMESRV)
    def register_topic_in_namesrv(self, _connection: Connection, request: Frame) -> Answer:
        """Register the queues that one topic has on each broker."""
        asked = request.header(headers.TopicRequestHeader)
        if len(request.body) > MAX_ROUTE_BODY_BYTES:
            problem = f"{len(request.body)} bytes of one topic's queues are more than {MAX_ROUTE_BODY_BYTES}"
            raise CommandError.failed(problem)
        route = bodies.TopicRouteData.decode(request.body)
        for queue in route.queue_datas:
            problem = topic_problem(asked.topic, queue.read_queue_nums, queue.write_queue_nums)
            if problem:
                raise CommandError.failed(problem)
        if not self.tables.register_topic(asked.topic, route.queue_datas):
            raise CommandError.failed("the limit of topics is reached")
        return request.response()

    @handles(RequestCode.DELETE_TOPIC_IN_NAMESRV)
    def delete_topic_in_namesrv(self, _connection: Connection, request: Frame) -> Answer:
        """Delete the route of a topic in the cluster that the request names, or else in all clusters."""
        asked = request.header(headers.TopicRequestHeader)
        self.tables.delete_topic(asked.topic, (request.ext or {}).get("clusterName"))
        return request.response()

    @handles(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    def get_all_topic_list_from_nameserver(self, _connection: Connection, request: Frame) -> Answer:
        """Return the names of all topics."""
        if not self.config.now.enable_all_topic_list:
            raise CommandError.failed("disable")
        return topic_list(request, self.tables.topics())

    @handles(RequestCode.GET_TOPICS_BY_CLUSTER)
    def get_topics_by_cluster(self, _connection: Connection, request: Frame) -> Answer:
        """Return the names of the topics of a cluster."""
        asked = request.header(headers.GetTopicsByClusterRequestHeader)
        self._check_lists_enabled()
        return topic_list(request, self.tables.topics_of_cluster(asked.cluster))

    @handles(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    def get_system_topic_list_from_ns(self, _connection: Connection, request: Frame) -> Answer:
        """Return the system topics: each broker has one with its cluster's name and one with its own."""
        topics, broker_addr = self.tables.system_topics()
        return topic_list(request, topics, broker_addr)

    @handles(RequestCode.GET_UNIT_TOPIC_LIST)
    def get_unit_topic_list(self, _connection: Connection, request: Frame) -> Answer:
        """Return the topics that have the system flag UNIT."""
        return self._topics_with(request, lambda flag: bool(flag & TopicSysFlag.UNIT))

    @handles(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST)
    def get_has_unit_sub_topic_list(self, _connection: Connection, request: Frame) -> Answer:
        """Return the topics that have the system flag UNIT_SUB."""
        return self._topics_with(request, lambda flag: bool(flag & TopicSysFlag.UNIT_SUB))

    @handles(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST)
    def get_has_unit_sub_ununit_topic_list(self, _connection: Connection, request: Frame) -> Answer:
        """Return the topics that have the system flag UNIT_SUB, but not UNIT."""
        both = TopicSysFlag.UNIT | TopicSysFlag.UNIT_SUB
        return self._topics_with(request, lambda flag: flag & both == TopicSysFlag.UNIT_SUB)

    def _topics_with(self, request: Frame, want: Callable[[int], bool]) -> Frame:
        self._check_lists_enabled()
        return topic_list(request, self.tables.topics_with(want))

    def _check_lists_enabled(self) -> None:
        if not self.config.now.enable_topic_list:
            raise CommandError.failed("disable")

    # -- the server's own configuration

    @handles(RequestCode.UPDATE_NAMESRV_CONFIG)
    def update_namesrv_config(self, connection: Connection, request: Frame) -> Answer:
        """Change settings and write them to the settings file."""
        changes = requested_settings(request.body)
        config = self.config.now
        refused = sorted(key for key in changes if config.black_listed(key))
        if refused:
            remark = f"Can not update config in black list: {', '.join(refused)}"
            raise CommandError(ResponseCode.NO_PERMISSION, remark)
        known = config.to_properties()
        try:
            # As in Apache's name server, settings with unknown names are ignored.
            accepted = {key: value for key, value in changes.items() if key in known}
            self.config.now = config.updated(accepted)
        except ConfigError as error:
            raise CommandError.failed(str(error)) from error
        log.info("%s changed the configuration: %s", connection.peer, ", ".join(sorted(changes)))
        if "logLevel" in changes:
            logs.use_levels(self.config.now.log_level)
        return self._answered(request, lambda: self.config.save(accepted), "configStorePath")

    @handles(RequestCode.GET_NAMESRV_CONFIG)
    def get_namesrv_config(self, _connection: Connection, request: Frame) -> Answer:
        """Return all settings of the name server, without secrets."""
        return request.response(
            body=format_properties(without_secrets(self.config.now.to_properties())).encode()
        )


def registration(
    request: Frame,
    asked: headers.RegisterBrokerRequestHeader,
    body: bodies.RegisterBrokerBody,
    replaces: bool,
) -> Registration:
    """Return the content of a REGISTER_BROKER request without invalid topics. Raises CommandError.

    The check protects clients, which connect to the registered addresses and use the registered topics.
    `replaces` tells whether registered topics that the request does not list are removed.
    """
    for field, name in (("brokerName", asked.broker_name), ("clusterName", asked.cluster_name)):
        if not name.strip() or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise _refused(field, name, f"1 to {MAX_NAME_CHARACTERS} printable characters are expected")
    if len(asked.zone_name or "") > MAX_NAME_CHARACTERS:
        raise _refused("zoneName", asked.zone_name, f"at most {MAX_NAME_CHARACTERS} characters are expected")
    if parse_address(asked.broker_addr) is None:
        raise _refused("brokerAddr", asked.broker_addr, "host:port is expected")
    if asked.ha_server_addr and parse_address(asked.ha_server_addr) is None:
        raise _refused("haServerAddr", asked.ha_server_addr, "host:port is expected")
    filter_servers = body.filter_server_list
    if filter_servers is not None:
        filter_servers = [addr for addr in filter_servers[:MAX_FILTER_SERVERS] if parse_address(addr)]
    topics = dict(body.topics)
    for topic, config in body.topics.items():
        problem = topic_problem(topic, config.read_queue_nums, config.write_queue_nums)
        if problem:
            if len(topics) == len(body.topics):  # log only the first refused topic of a registration
                log.warning("broker %s: topic %s is ignored: %s", asked.broker_addr, topic, problem)
            del topics[topic]
    timeout_ms = asked.heartbeat_timeout_millis
    if timeout_ms is not None:
        timeout_ms = min(max(0, timeout_ms), MAX_HEARTBEAT_TIMEOUT_MS)
    return Registration(
        cluster=asked.cluster_name,
        broker_name=asked.broker_name,
        broker_addr=asked.broker_addr,
        broker_id=asked.broker_id,
        ha_server_addr=asked.ha_server_addr,
        data_version=body.data_version,
        topics=topics,
        filter_servers=filter_servers,
        heartbeat_timeout_ms=timeout_ms,
        zone_name=asked.zone_name,
        single_topic_needs_known=request.version >= codes.VERSION_5_0_0,
        replaces_topics=replaces,
    )


def _refused(field: str, value: str | None, problem: str) -> CommandError:
    return CommandError.failed(f"{field} is {shortened(value or '')!r}: {problem}")


def topic_problem(topic: str, *queue_nums: int) -> str:
    """Return why a topic with these numbers of queues cannot be registered, or "" if it can."""
    if not codes.is_legal_name(topic, codes.MAX_STORED_TOPIC_LENGTH):
        return (
            f"a topic has 1 to {codes.MAX_STORED_TOPIC_LENGTH} of the characters {codes.NAME_PATTERN.pattern}"
        )
    if not all(0 <= number <= codes.MAX_QUEUES_PER_TOPIC for number in queue_nums):
        return f"a topic has 0 to {codes.MAX_QUEUES_PER_TOPIC} queues"
    return ""


def topic_list(request: Frame, topics: list[str], broker_addr: str | None = None) -> Frame:
    return request.response(body=bodies.TopicList(topics, broker_addr).encode())
