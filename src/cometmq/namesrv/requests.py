"""The name server's requests: header and body to tables, and back to an answer
(docs/reference/remoting.md, Name server)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias
from zlib import crc32

from cometmq import logs
from cometmq.errors import CommandError, ConfigError
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.kv import KvRefused, KvTables
from cometmq.namesrv.tables import Registration, RouteTables
from cometmq.protocol import headers
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import (
    BrokerMemberGroup,
    DataVersion,
    KVTable,
    RegisterBrokerBody,
    TopicList,
    TopicRouteData,
)
from cometmq.protocol.codes import (
    NAME_PATTERN,
    ORDER_TOPIC_CONFIG,
    STORED_LENGTH_MAX,
    TOPIC_QUEUES_MAX,
    VERSION_4_9_4,
    VERSION_5_0_0,
    RequestCode,
    ResponseCode,
    TopicSysFlag,
    is_legal_name,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.java_properties import PropertiesError, format_properties, parse_properties
from cometmq.remoting import Connection, Handler
from cometmq.settings import BODY_MAX
from cometmq.text import shortened

log = logs.logger(__name__)

CRC_MASK = 0x7FFF_FFFF
NAME_MAX = 255  # of a broker, a cluster, a zone
ROUTE_BODY_MAX = 64 << 10  # bytes of a request that names the queues of one topic: 600 brokers
FILTER_SERVERS_MAX = 64  # of one broker
HEARTBEAT_TIMEOUT_MAX_MS = 3_600_000

Answer: TypeAlias = "Frame | Awaitable[Frame | None]"


class Shell(Protocol):
    """What requests need from the name server around them."""

    config: NamesrvConfig

    def set_config(self, config: NamesrvConfig) -> None: ...

    async def save_config(self) -> None: ...

    async def save_kv(self) -> None: ...


class RequestProcessor:
    """Handlers by request code. Everything but file writing happens inline."""

    def __init__(self, tables: RouteTables, kv: KvTables, shell: Shell, now_ms: Callable[[], int]) -> None:
        self._tables = tables
        self._kv = kv
        self._shell = shell
        self._now_ms = now_ms

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.PUT_KV_CONFIG: self.put_kv_config,
            RequestCode.GET_KV_CONFIG: self.get_kv_config,
            RequestCode.DELETE_KV_CONFIG: self.delete_kv_config,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self.get_kv_list,
            RequestCode.REGISTER_BROKER: self.register_broker,
            RequestCode.UNREGISTER_BROKER: self.unregister_broker,
            RequestCode.QUERY_DATA_VERSION: self.query_data_version,
            RequestCode.BROKER_HEARTBEAT: self.broker_heartbeat,
            RequestCode.GET_BROKER_MEMBER_GROUP: self.get_broker_member_group,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self.register_topic,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self.get_route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self.get_cluster_info,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self.wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self.add_write_perm,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.get_all_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self.get_topics_by_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.get_system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self.get_unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self.get_unit_sub_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self.get_unit_sub_not_unit_topics,
            RequestCode.UPDATE_NAMESRV_CONFIG: self.update_config,
            RequestCode.GET_NAMESRV_CONFIG: self.get_config,
        }

    # -- key-value configuration

    def put_kv_config(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """100"""
        asked = request.header(headers.PutKVConfigRequestHeader)
        try:
            self._kv.put(asked.namespace, asked.key, asked.value)
        except KvRefused as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        return self._saved(request)

    def get_kv_config(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """101"""
        asked = request.header(headers.GetKVConfigRequestHeader)
        value = self._kv.get(asked.namespace, asked.key)
        if value is None:
            remark = f"No config item, Namespace: {asked.namespace} Key: {asked.key}"
            raise CommandError(ResponseCode.QUERY_NOT_FOUND, remark, {})
        return request.response(header=headers.GetKVConfigResponseHeader(value=value))

    def delete_kv_config(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """102"""
        asked = request.header(headers.DeleteKVConfigRequestHeader)
        self._kv.delete(asked.namespace, asked.key)
        return self._saved(request)

    def get_kv_list(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """219"""
        asked = request.header(headers.GetKVListByNamespaceRequestHeader)
        pairs = self._kv.namespace(asked.namespace)
        if pairs is None:
            raise CommandError(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {asked.namespace}")
        return request.response(body=KVTable(pairs).encode())

    async def _saved(self, request: Frame) -> Frame:
        try:
            await self._shell.save_kv()
        except OSError as error:
            log.error("cannot write the key-value configuration: %s", error)
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"taken, but cannot be written to kvConfigPath: {error}"
            ) from error
        return request.response()

    # -- brokers

    def register_broker(self, connection: Connection, request: Frame) -> Answer:
        """103"""
        asked = request.header(headers.RegisterBrokerRequestHeader)
        if asked.body_crc32 and crc32(request.body) & CRC_MASK != asked.body_crc32:
            raise CommandError(ResponseCode.SYSTEM_ERROR, "crc32 not match")
        body = registration_of(request, compressed=bool(asked.compressed))
        registered = self._tables.register(self._now_ms(), registration(request, asked, body), connection)
        if registered.refusal:
            raise CommandError(ResponseCode.SYSTEM_ERROR, registered.refusal)
        if registered.left_out:
            log.warning("no room for %d topics of broker %s", registered.left_out, asked.broker_addr)
        order = None
        if self._shell.config.return_order_topic_config_to_broker:
            order = self._order_topics()
        return request.response(
            header=headers.RegisterBrokerResponseHeader(
                ha_server_addr=registered.ha_server_addr, master_addr=registered.master_addr
            ),
            body=b"" if order is None else KVTable(order).encode(),
        )

    def _order_topics(self) -> dict[str, str] | None:
        if self._kv.fits(ORDER_TOPIC_CONFIG):
            return self._kv.namespace(ORDER_TOPIC_CONFIG)
        # A broker without the order of its topics is better than one that cannot register at all.
        log.error("%s is too long to go out with registrations: delete keys of it", ORDER_TOPIC_CONFIG)
        return None

    def unregister_broker(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """104"""
        asked = request.header(headers.UnregisterBrokerRequestHeader)
        self._tables.unregister(asked.broker_addr, asked.broker_name)
        return request.response()

    def query_data_version(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """322"""
        asked = request.header(headers.QueryDataVersionRequestHeader)
        version = DataVersion.decode(request.body)
        changed, held = self._tables.query_data_version(self._now_ms(), asked.broker_addr, version)
        return request.response(
            header=headers.QueryDataVersionResponseHeader(changed=changed),
            body=b"" if held is None else held.encode(),
        )

    def broker_heartbeat(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """904: success even for a broker that is not known, as 5.x answers"""
        asked = request.header(headers.BrokerHeartbeatRequestHeader)
        self._tables.heartbeat(self._now_ms(), asked.broker_addr)
        return request.response()

    def get_broker_member_group(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """901"""
        asked = request.header(headers.GetBrokerMemberGroupRequestHeader)
        group = self._tables.member_group(asked.cluster_name, asked.broker_name)
        return request.response(body=BrokerMemberGroup(group).encode())

    def wipe_write_perm(self, connection: Connection, request: Frame) -> Answer:
        """205"""
        asked = request.header(headers.WipeWritePermOfBrokerRequestHeader)
        count = self._tables.wipe_write_perm(asked.broker_name)
        log.info("%s wiped the write permission of %s: %d topics", connection.peer, asked.broker_name, count)
        return request.response(header=headers.WipeWritePermOfBrokerResponseHeader(wipe_topic_count=count))

    def add_write_perm(self, connection: Connection, request: Frame) -> Answer:
        """327"""
        asked = request.header(headers.AddWritePermOfBrokerRequestHeader)
        count = self._tables.add_write_perm(asked.broker_name)
        log.info("%s restored write permission of %s: %d topics", connection.peer, asked.broker_name, count)
        return request.response(header=headers.AddWritePermOfBrokerResponseHeader(add_topic_count=count))

    # -- routes and topics

    def get_route(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """105"""
        asked = request.header(headers.GetRouteInfoRequestHeader)
        route = self._tables.route(asked.topic)
        if route is None:
            raise CommandError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {asked.topic}",
            )
        if self._shell.config.order_message_enable:
            route.order_topic_conf = self._kv.get(ORDER_TOPIC_CONFIG, asked.topic)
        quoted = request.version >= VERSION_4_9_4 or bool(asked.accept_standard_json_only)
        if request.version >= VERSION_5_0_0:
            for broker in route.broker_datas:
                broker.enable_acting_master = False
        return request.response(body=route.encode(standard=quoted))

    def get_cluster_info(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """106"""
        return request.response(body=self._tables.cluster_info().encode())

    def register_topic(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """217"""
        asked = request.header(headers.RegisterTopicRequestHeader)
        if len(request.body) > ROUTE_BODY_MAX:
            problem = f"{len(request.body)} bytes of one topic's queues are more than {ROUTE_BODY_MAX}"
            raise CommandError(ResponseCode.SYSTEM_ERROR, problem)
        route = TopicRouteData.decode(request.body)
        for queue in route.queue_datas:
            problem = topic_problem(asked.topic, queue.read_queue_nums, queue.write_queue_nums)
            if problem:
                raise CommandError(ResponseCode.SYSTEM_ERROR, problem)
        if not self._tables.register_topic(asked.topic, route.queue_datas):
            raise CommandError(ResponseCode.SYSTEM_ERROR, "no more topics are kept")
        return request.response()

    def delete_topic(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """216"""
        asked = request.header(headers.TopicRequestHeader)
        self._tables.delete_topic(asked.topic, (request.ext or {}).get("clusterName"))
        return request.response()

    def get_all_topics(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """206"""
        if not self._shell.config.enable_all_topic_list:
            raise CommandError(ResponseCode.SYSTEM_ERROR, "disable")
        return topic_list(request, self._tables.topics())

    def get_topics_by_cluster(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """224"""
        asked = request.header(headers.GetTopicsByClusterRequestHeader)
        self._check_lists_enabled()
        return topic_list(request, self._tables.topics_of_cluster(asked.cluster))

    def get_system_topics(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """304"""
        topics, broker_addr = self._tables.system_topics()
        return topic_list(request, topics, broker_addr)

    def get_unit_topics(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """311"""
        return self._topics_with(request, lambda flag: bool(flag & TopicSysFlag.UNIT))

    def get_unit_sub_topics(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """312"""
        return self._topics_with(request, lambda flag: bool(flag & TopicSysFlag.UNIT_SUB))

    def get_unit_sub_not_unit_topics(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """313"""
        both = TopicSysFlag.UNIT | TopicSysFlag.UNIT_SUB
        return self._topics_with(request, lambda flag: flag & both == TopicSysFlag.UNIT_SUB)

    def _topics_with(self, request: Frame, want: Callable[[int], bool]) -> Frame:
        self._check_lists_enabled()
        return topic_list(request, self._tables.topics_with(want))

    def _check_lists_enabled(self) -> None:
        if not self._shell.config.enable_topic_list:
            raise CommandError(ResponseCode.SYSTEM_ERROR, "disable")

    # -- the server's own configuration

    def update_config(self, connection: Connection, request: Frame) -> Answer:
        """318"""
        if len(request.body) > BODY_MAX:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"{len(request.body)} bytes of settings are more than {BODY_MAX}"
            )
        try:
            changes = parse_properties(bytes(request.body).decode())
        except (UnicodeDecodeError, PropertiesError) as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"the body is no properties: {error}") from error
        config = self._shell.config
        refused = sorted(key for key in changes if config.black_listed(key))
        if refused:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"Can not update config in black list: {', '.join(refused)}"
            )
        known = config.to_properties()
        try:
            # Apache takes over what it knows and ignores the rest.
            config = config.updated({key: value for key, value in changes.items() if key in known})
        except ConfigError as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        self._shell.set_config(config)
        log.info("%s changed the configuration: %s", connection.peer, ", ".join(sorted(changes)))
        return self._config_saved(request)

    async def _config_saved(self, request: Frame) -> Frame:
        try:
            await self._shell.save_config()
        except OSError as error:
            log.error("cannot write the configuration: %s", error)
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"taken, but cannot be written to configStorePath: {error}"
            ) from error
        return request.response()

    def get_config(self, connection: Connection, request: Frame) -> Answer:  # noqa: ARG002
        """319"""
        return request.response(body=format_properties(self._shell.config.to_properties()).encode())


def registration(
    request: Frame, asked: headers.RegisterBrokerRequestHeader, body: RegisterBrokerBody
) -> Registration:
    """What a broker says of itself, checked: clients dial the addresses and make what topics and queues it
    names. Raises CommandError.
    """
    for field, name in (("brokerName", asked.broker_name), ("clusterName", asked.cluster_name)):
        if not name.strip() or len(name) > NAME_MAX or not name.isprintable():
            raise _refused(field, name, f"1 to {NAME_MAX} printable characters are wanted")
    if len(asked.zone_name or "") > NAME_MAX:
        raise _refused("zoneName", asked.zone_name, f"at most {NAME_MAX} characters are wanted")
    if parse_address(asked.broker_addr) is None:
        raise _refused("brokerAddr", asked.broker_addr, "host:port is wanted")
    if asked.ha_server_addr and parse_address(asked.ha_server_addr) is None:
        raise _refused("haServerAddr", asked.ha_server_addr, "host:port is wanted")
    filter_servers = body.filter_servers
    if filter_servers is not None:
        filter_servers = [addr for addr in filter_servers[:FILTER_SERVERS_MAX] if parse_address(addr)]
    topics = dict(body.topics)
    for topic, config in body.topics.items():
        problem = topic_problem(topic, config.read_queue_nums, config.write_queue_nums)
        if problem:
            if len(topics) == len(body.topics):  # one line, however many there are
                log.warning("broker %s: topic %s is left out: %s", asked.broker_addr, topic, problem)
            del topics[topic]
    timeout_ms = asked.heartbeat_timeout_millis
    if timeout_ms is not None:
        timeout_ms = min(max(0, timeout_ms), HEARTBEAT_TIMEOUT_MAX_MS)
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
        single_topic_needs_known=request.version >= VERSION_5_0_0,
    )


def _refused(field: str, value: str | None, problem: str) -> CommandError:
    return CommandError(ResponseCode.SYSTEM_ERROR, f"{field} is {shortened(value or '')!r}: {problem}")


def topic_problem(topic: str, *queue_nums: int) -> str:
    """Why a topic is not routed, "" if it is."""
    if not is_legal_name(topic, STORED_LENGTH_MAX):
        return f"a topic has 1 to {STORED_LENGTH_MAX} of the characters {NAME_PATTERN.pattern}"
    if not all(0 <= number <= TOPIC_QUEUES_MAX for number in queue_nums):
        return f"a topic has 0 to {TOPIC_QUEUES_MAX} queues"
    return ""


def registration_of(request: Frame, *, compressed: bool) -> RegisterBrokerBody:
    """The body of a registration; without one the broker has no topics. Raises BodyError."""
    if not request.body:
        return RegisterBrokerBody()
    return RegisterBrokerBody.decode(request.body, compressed, request.version)


def topic_list(request: Frame, topics: list[str], broker_addr: str | None = None) -> Frame:
    """The answer that all topic lists have."""
    return request.response(body=TopicList(topics, broker_addr).encode())
