"""Numbers and names of the remoting protocol: request and response codes, flags, versions, reserved names.

Codes that only 5.x uses are listed, too, so that logs and errors can name them (docs/reference/remoting.md,
Codes, Languages and versions).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


class RequestCode(IntEnum):
    """The codes of requests."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_BROKER_OFFSET = 13
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    GET_TOPIC_CONFIG_LIST = 22
    GET_TOPIC_NAME_LIST = 23
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    TRIGGER_DELETE_FILES = 27
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_CLIENT_CONFIG = 47
    UPDATE_AND_CREATE_ACL_CONFIG = 50
    DELETE_ACL_CONFIG = 51
    GET_BROKER_CLUSTER_ACL_INFO = 52
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG = 53
    GET_TIMER_CHECK_POINT = 60
    GET_TIMER_METRICS = 61
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    SUSPEND_CONSUMER = 209
    RESUME_CONSUMER = 210
    RESET_CONSUMER_OFFSET_IN_CONSUMER = 211
    RESET_CONSUMER_OFFSET_IN_BROKER = 212
    ADJUST_CONSUMER_THREAD_POOL = 213
    WHO_CONSUME_THE_MESSAGE = 214
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    REGISTER_FILTER_SERVER = 301
    REGISTER_MESSAGE_FILTER_CLASS = 302
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    UPDATE_AND_CREATE_STATIC_TOPIC = 513
    GET_BROKER_MEMBER_GROUP = 901
    ADD_BROKER = 902
    REMOVE_BROKER = 903
    BROKER_HEARTBEAT = 904
    NOTIFY_MIN_BROKER_ID_CHANGE = 905
    EXCHANGE_BROKER_HA_INFO = 906
    GET_BROKER_HA_STATUS = 907
    RESET_MASTER_FLUSH_OFFSET = 908
    # Requests 21001 to 21010 exist only in CometMQ. Apache's brokers refuse them.
    PURGE_TOPIC = 21001
    LIST_TIMERS = 21002
    GET_RAFT_STATUS = 21003
    CHANGE_RAFT_GROUP = 21004
    COPY_SETTINGS = 21005
    LIST_ACCOUNTS = 21006
    EXPLAIN_ACCESS = 21007
    WITHDRAW_POP = 21008
    GET_LITE_STATE = 21009
    LIST_LITE_TOPICS = 21010
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    POP_ROLLBACK = 200056
    POP_LITE_MESSAGE = 200070
    LITE_SUBSCRIPTION_CTL = 200071
    NOTIFY_UNSUBSCRIBE_LITE = 200073
    GET_BROKER_LITE_INFO = 200074
    GET_PARENT_TOPIC_INFO = 200075
    GET_LITE_TOPIC_INFO = 200076
    GET_LITE_CLIENT_INFO = 200077
    GET_LITE_GROUP_INFO = 200078
    TRIGGER_LITE_DISPATCH = 200079
    BATCH_ACK_MESSAGE = 200151


NAMESRV_REQUESTS = frozenset(
    {
        RequestCode.PUT_KV_CONFIG, RequestCode.GET_KV_CONFIG, RequestCode.DELETE_KV_CONFIG,
        RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER, RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO, RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV, RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.GET_TOPICS_BY_CLUSTER, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST, RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.GET_NAMESRV_CONFIG, RequestCode.QUERY_DATA_VERSION,
        RequestCode.ADD_WRITE_PERM_OF_BROKER, RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.BROKER_HEARTBEAT,
    }
)  # fmt: skip
"""The requests that name servers handle and brokers do not."""


class ResponseCode(IntEnum):
    """The codes of responses.

    Two numbers have two meanings: 209 and 210 are failures of access commands in 4.9, and ends of a held POP
    request in 5.x. `response_name` returns the names of 4.9 for them.
    """

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    UPDATE_AND_CREATE_ACL_CONFIG_FAILED = 209
    POLLING_FULL = 209
    DELETE_ACL_CONFIG_FAILED = 210
    POLLING_TIMEOUT = 210
    UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    LMQ_QUOTA_EXCEEDED = 2017
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 2018
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


_RESPONSE_NAMES = {int(code): code.name for code in ResponseCode}


def response_name(code: int) -> str:
    """Return the name of a response code, or RESPONSE_CODE_<n> for an unknown one."""
    return _RESPONSE_NAMES.get(code) or f"RESPONSE_CODE_{code}"


def handles(*codes: RequestCode) -> Callable[[M], M]:
    """Mark a method as the handler of requests with these codes. `handlers_of` collects the handlers."""

    def mark(method: M) -> M:
        method.__dict__["request_codes"] = codes
        return method

    return mark


def handlers_of(part: object) -> dict[int, Any]:
    """Return the methods of an object that `handles` has marked as request handlers, by request code."""
    kind = part if isinstance(part, type) else type(part)
    marked = ((name, getattr(getattr(kind, name), "request_codes", ())) for name in dir(kind))
    return {int(code): getattr(part, name) for name, codes in marked for code in codes}


LANGUAGES = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS"),
    *("RUST", "NODE_JS"),
)
"""The languages of peers, by the names in JSON headers. A binary header holds n for `LANGUAGES[n]`."""
LANGUAGE_ORDINALS: dict[str, int] = {name: number for number, name in enumerate(LANGUAGES)}


def language_name(ordinal: int) -> str:
    """Return the name of the language with this ordinal, or OTHER if the ordinal is unknown."""
    return LANGUAGES[ordinal] if 0 <= ordinal < len(LANGUAGES) else "OTHER"


class SysFlag(IntFlag):
    """The bits of a message's sysFlag that CometMQ uses (see compression.py for the others)."""

    COMPRESSED = 0x1
    MULTI_TAGS = 0x2
    TRANSACTION_PREPARED = 0x4
    TRANSACTION_COMMIT = 0x8
    TRANSACTION_ROLLBACK = 0xC
    TRANSACTION_MASK = 0xC
    BORN_HOST_V6 = 0x10
    COMPRESSION_ZLIB = 0x300


class PullSysFlag(IntFlag):
    """The bits of a pull request's sysFlag."""

    COMMIT_OFFSET = 0x1
    SUSPEND = 0x2
    SUBSCRIPTION = 0x4
    CLASS_FILTER = 0x8


class Perm(IntFlag):
    """The permission bits of topics and brokers."""

    INHERIT = 0x1
    WRITE = 0x2
    READ = 0x4
    PRIORITY = 0x8


class TopicSysFlag(IntFlag):
    """The bits of a topic's topicSysFlag."""

    UNIT = 0x1
    UNIT_SUB = 0x2


# The protocol identifies a RocketMQ release by a number: its position in RocketMQ's list of releases.
VERSION_4_9_4 = 401
VERSION_4_9_7 = 407
VERSION_5_0_0 = 413

_FIRST_EXACT = 212


def version_name(number: int) -> str:
    """Return RocketMQ's name of a version number, such as V4_9_7 for 407 and V4_9_7_SNAPSHOT for 406.

    From 4.0.0 on, each minor version has ten releases, each preceded by its snapshot, so a minor version has
    20 numbers. All older numbers are named V3.
    """
    if number < _FIRST_EXACT:
        return "V3"
    line, within = divmod(number - _FIRST_EXACT, 20)
    if line >= 20:  # The number belongs to a release after 5.9
        return "HIGHER_VERSION"
    return f"V{4 + line // 10}_{line % 10}_{within // 2}" + ("" if within % 2 else "_SNAPSHOT")


# Reserved names of topics and groups.
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
HANDOFF_PREFIX = "%HANDOVER%"
"""The prefix of groups that exist only for the locks of a queue handoff (client/consumer/handoff.py)."""
TBW102 = "TBW102"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = "rmq_sys_wheel_timer"
BENCHMARK_TOPIC = "BenchmarkTest"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT = "OFFSET_MOVED_EVENT"
TRANS_HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
TRANS_OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
SYSTEM_TOPIC_PREFIX = "rmq_sys_"
REPLY_TOPIC_POSTFIX = "_REPLY_TOPIC"
REVIVE_TOPIC_PREFIX = "rmq_sys_REVIVE_LOG_"
"""The prefix of the topic that logs POP consumption. The cluster's name follows it."""
ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
"""The name server's key-value namespace that stores how many queues of an ordered topic each broker has."""

UNSENDABLE_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        TIMER_TOPIC,
        TRANS_HALF_TOPIC,
        TRANS_OP_HALF_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT,
    }
)
"""Topics to which clients may not send (docs/reference/remoting.md, Sending).

Clients create timers only by properties, so TIMER_TOPIC is included, although 4.9 does not have it.
"""
SYSTEM_TOPICS = UNSENDABLE_TOPICS - {TIMER_TOPIC} | {TBW102, BENCHMARK_TOPIC, TRACE_TOPIC}
"""Topics that clients may neither create nor delete in 4.9. 5.x adds names that begin with `rmq_sys_`."""

TOOLS_CONSUMER_GROUP = "TOOLS_CONSUMER"
BUILT_IN_GROUPS = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)
"""Groups that a broker creates when it starts (docs/reference/storage.md, Topics and groups at start)."""
CID_RMQ_SYS_PREFIX = "CID_RMQ_SYS_"
TRANS_GROUP = "CID_RMQ_SYS_TRANS"
"""The group with whose consumer offsets the broker itself reads half messages and op messages."""
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
"""The broker's internal group that reads the topic with REVIVE_TOPIC_PREFIX."""
CLIENT_INNER_PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"
TRACE_PRODUCER_GROUP = "_INNER_TRACE_PRODUCER"

MAX_TOPIC_LENGTH = 127
MAX_GROUP_LENGTH = 255
MAX_STORED_TOPIC_LENGTH = 255
"""The maximum length of a topic name in a store: retry topics of 5.x (docs/reference/storage.md, Names)."""
MAX_QUEUES_PER_TOPIC = 1 << 16
"""The maximum number of a topic's queues. It protects clients; a broker's `maxTopicQueueNums` is lower."""
NAME_PATTERN = re.compile(r"[%|a-zA-Z0-9_-]+")

MASTER_ID = 0
DEFAULT_NAMESRV_PORT = 9876
DEFAULT_BROKER_PORT = 10911
MAX_FRAME_LENGTH = 16_777_216
"""The maximum length of a frame, including its length field (docs/reference/remoting.md, Frame)."""


def is_system_topic(topic: str) -> bool:
    """Return whether a topic is reserved for RocketMQ itself, by the rules of 4.9 or of 5.x."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def topics_at_start(cluster: str, broker: str) -> set[str]:
    """Return the topics, beside system topics, that a broker creates when it starts: it names them itself."""
    return {cluster, broker, cluster + REPLY_TOPIC_POSTFIX}


def is_system_group(group: str) -> bool:
    """Return whether a group is reserved for RocketMQ itself."""
    return group.startswith(CID_RMQ_SYS_PREFIX) or group in BUILT_IN_GROUPS


def is_legal_name(name: str, longest: int) -> bool:
    """Return whether `name` is a legal name of a topic or group with at most `longest` characters.

    Every name from a client or file must be checked: names become directories and parts of table keys.
    """
    return len(name) <= longest and NAME_PATTERN.fullmatch(name) is not None


def has_retry_topic(group: str) -> bool:
    """Return whether a group's name is short enough for the names of its retry and dead-letter topics."""
    return len(RETRY_PREFIX) + len(group) <= MAX_TOPIC_LENGTH
