"""Bodies between clients and brokers: heartbeats, members, locks, offsets, running info.

See docs/reference/remoting.md, Heartbeats, Members and locks, Requests to clients.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.json_body import Body, QueueKeyed, always, empty, write_fastjson
from cometmq.protocol.lenient import Json

CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
CONSUME_FROM_WHERE = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
# The names of the values of each enum field, in the order of their ordinals. They are needed because C++
# clients send ordinals where Java clients send names (docs/reference/remoting.md, Heartbeats).
_ENUMS = {
    "consumeType": CONSUME_TYPES,
    "messageModel": MESSAGE_MODELS,
    "consumeFromWhere": CONSUME_FROM_WHERE,
}


def _with_names(value: Json) -> Json:
    """Return a JSON object whose enum ordinals are replaced by names."""
    if not isinstance(value, dict):
        return value
    named = dict(value)
    for field, names in _ENUMS.items():
        found = named.get(field)
        if isinstance(found, int) and not isinstance(found, bool):
            if not 0 <= found < len(names):
                raise BodyError(
                    "consumer data", f"ordinal {found} is not within 0 to {len(names) - 1}", field
                )
            named[field] = names[found]
    return named


def _each(value: Json) -> list[Json]:
    """Return the elements of a set, which some clients write as an object or as null."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


# -- heartbeats


class SubscriptionData(Body):
    """A consumer group's subscription to a topic.

    Attributes:
        tags_set, code_set: The tags of the expression and their Java hashes; empty for `*` and for SQL92.
        sub_version: The version in ms. A higher version replaces a lower one.
    """

    topic: str = always("")
    sub_string: str = always("")
    tags_set: list[str] = empty(list)
    code_set: list[int] = empty(list)
    sub_version: int = always(0)
    expression_type: str = always("TAG")
    class_filter_mode: bool = always(False)
    filter_class_source: str | None = None


class ProducerData(Body):
    """A producer group of a client."""

    group_name: str


class ConsumerData(Body):
    """A consumer group of a client."""

    group_name: str
    consume_type: str = always("CONSUME_PASSIVELY")
    message_model: str = always("CLUSTERING")
    consume_from_where: str = always("CONSUME_FROM_LAST_OFFSET")
    subscription_data_set: list[SubscriptionData] = empty(list)
    unit_mode: bool = always(False)

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        named = _with_names(value)
        return {**named, "subscriptionDataSet": _each(value.get("subscriptionDataSet"))}


class HeartbeatData(Body):
    """The content of a client's heartbeat (body of request 34). The last two fields exist only in 5.x."""

    client_id: str = always("", name="clientID")
    producer_data_set: list[ProducerData] = empty(list)
    consumer_data_set: list[ConsumerData] = empty(list)
    heartbeat_fingerprint: int | None = None
    without_sub: bool | None = None

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        consumers = [
            ConsumerData.prepare(c) if isinstance(c, dict) else c for c in _each(value.get("consumerDataSet"))
        ]
        producers = _each(value.get("producerDataSet"))
        return {**value, "consumerDataSet": consumers, "producerDataSet": producers}


class CheckClientRequestBody(Body):
    """A subscription that the broker must check (body of request 46)."""

    client_id: str = always("")
    group: str = always("")
    subscription_data: SubscriptionData | None = None
    namespace: str | None = None


# -- members and locks


class ConsumerList(Body):
    """The client ids of a consumer group (response to request 38)."""

    consumer_id_list: list[str] = empty(list)


class OffsetMovedEvent(Body):
    """The body of a message in OFFSET_MOVED_EVENT: the offset requested by a group, and its replacement."""

    message_queue: MessageQueue
    consumer_group: str = always("")
    offset_request: int = always(0)
    offset_new: int = always(0)


class LockBatchBody(Body):
    """Queues that a client requests to lock or to unlock (body of requests 41 and 42)."""

    consumer_group: str = always("")
    client_id: str = always("")
    mq_set: list[MessageQueue] = empty(list)
    only_this_broker: bool | None = None


class LockBatchResult(Body):
    """The queues that a client has locked (response to request 41)."""

    lock_ok_mq_set: list[MessageQueue] = empty(list, name="lockOKMQSet")


# -- offsets


class ResetOffsetBody(QueueKeyed):
    """New offsets by queue (body of request 220, response to request 222)."""

    offset_table: dict[MessageQueue, int] = empty(dict)

    def encode_for_cpp(self) -> bytes:
        """Return the encoded body with the offsets as a list, which C++ clients expect."""
        rows = [
            msgspec.to_builtins(queue) | {"offset": offset}
            for queue, offset in sorted(self.offset_table.items())
        ]
        return write_fastjson({"offsetTable": rows})

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        table = value.get("offsetTable")
        if not isinstance(table, list):
            return value
        rows = [row for row in table if isinstance(row, dict)]
        try:
            return {
                "offsetTable": {
                    MessageQueue(str(row["topic"]), str(row["brokerName"]), int(row["queueId"])): row[
                        "offset"
                    ]
                    for row in rows
                }
            }
        except (KeyError, TypeError) as error:
            raise BodyError(
                cls.__name__, f"an entry of the list has a missing or wrong field: {error}", "offsetTable"
            ) from None


class GetConsumerStatusBody(QueueKeyed):
    """The offsets of one consumer (response to request 221), or of each client (response to request 223)."""

    message_queue_table: dict[MessageQueue, int] = empty(dict)
    consumer_table: dict[str, dict[MessageQueue, int]] = empty(dict)


# -- state of a running consumer


class ProcessQueueInfo(Body):
    """One queue of a consumer. Times are in ms. `droped` is Java's spelling; Go writes `dropped`."""

    commit_offset: int = always(0)
    cached_msg_min_offset: int = always(0)
    cached_msg_max_offset: int = always(0)
    cached_msg_count: int = always(0)
    cached_msg_size_in_mib: int = always(0, name="cachedMsgSizeInMiB")
    transaction_msg_min_offset: int = always(0)
    transaction_msg_max_offset: int = always(0)
    transaction_msg_count: int = always(0)
    locked: bool = always(False)
    try_unlock_times: int = always(0)
    last_lock_timestamp: int = always(0)
    droped: bool = always(False)
    last_pull_timestamp: int = always(0)
    last_consume_timestamp: int = always(0)

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        return {**value, "droped": value["dropped"]} if "dropped" in value else value


class ConsumeStatus(Body):
    """A consumer's statistics for one topic. Response times are in ms, rates in messages per second."""

    pull_rt: float = always(0.0, name="pullRT")
    pull_tps: float = always(0.0, name="pullTPS")
    consume_rt: float = always(0.0, name="consumeRT")
    consume_ok_tps: float = always(0.0, name="consumeOKTPS")
    consume_failed_tps: float = always(0.0, name="consumeFailedTPS")
    consume_failed_msgs: int = always(0)


class ConsumerRunningInfo(QueueKeyed):
    """The state of a consumer (request 307). `properties` has its settings; tools read those like PROP_X."""

    properties: dict[str, str] = empty(dict)
    subscription_set: list[SubscriptionData] = empty(list)
    mq_table: dict[MessageQueue, ProcessQueueInfo] = empty(dict)
    status_table: dict[str, ConsumeStatus] = empty(dict)
    jstack: str | None = None
    mq_pop_table: dict[MessageQueue, dict[str, Any]] | None = None

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        prepared = {**value, "subscriptionSet": _each(value.get("subscriptionSet"))}
        properties = value.get("properties")
        if isinstance(properties, dict):
            prepared["properties"] = {
                key: _as_text(item) for key, item in properties.items() if item is not None
            }
        queues = value.get("mqTable")
        if isinstance(queues, dict):
            prepared["mqTable"] = {
                key: ProcessQueueInfo.prepare(item) if isinstance(item, dict) else item
                for key, item in queues.items()
            }
        return prepared


def _as_text(value: Json) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


class ConsumeMessageDirectlyResult(Body):
    """A listener's result for one message, such as CR_SUCCESS (response to request 309)."""

    order: bool = always(False)
    auto_commit: bool = always(True)
    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: int = always(0)
