"""The messages and methods of `apache.rocketmq.v2.MessagingService`.

The message classes belong to a descriptor pool of their own. A process can therefore also use the official
Python client, which registers the same names in protobuf's default pool. They are built at the first call of
`messages`, so a process without a gRPC endpoint does not import protobuf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cometmq.grpc.rpc import enums
from cometmq.grpc.rpc.calls import Handler, Kind, Message, Method
from cometmq.protocol.codes import MAX_FRAME_LENGTH

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

PACKAGE = "apache.rocketmq.v2"
SERVICE = f"{PACKAGE}.MessagingService"

# One paragraph for each message. Fields are numbered from 1 in this order. `*` marks a repeated field, `?` an
# optional one, and `name(...)` a oneof. A `map` has keys and values of type string.
TABLE = """
FilterExpression: FilterType type, string expression
RetryPolicy: int32 max_attempts,
    strategy(ExponentialBackoff exponential_backoff, CustomizedBackoff customized_backoff)
ExponentialBackoff: Duration initial, Duration max, float multiplier
CustomizedBackoff: Duration next*
Resource: string resource_namespace, string name
SubscriptionEntry: Resource topic, FilterExpression expression
Address: string host, int32 port
Endpoints: AddressScheme scheme, Address addresses*
Broker: string name, int32 id, Endpoints endpoints
MessageQueue: Resource topic, int32 id, Permission permission, Broker broker,
    MessageType accept_message_types*
Digest: DigestType type, string checksum
SystemProperties: string tag?, string keys*, string message_id, Digest body_digest, Encoding body_encoding,
    MessageType message_type, Timestamp born_timestamp, string born_host, Timestamp store_timestamp?,
    string store_host, Timestamp delivery_timestamp?, string receipt_handle?, int32 queue_id,
    int64 queue_offset?, Duration invisible_duration?, int32 delivery_attempt?, string message_group?,
    string trace_context?, Duration orphaned_transaction_recovery_duration?,
    DeadLetterQueue dead_letter_queue?, string lite_topic?, int32 priority?
DeadLetterQueue: string topic, string message_id
Message: Resource topic, map user_properties, SystemProperties system_properties, bytes body
Assignment: MessageQueue message_queue
Status: Code code, string message
UA: Language language, string version, string platform, string hostname
Settings: ClientType client_type?, Endpoints access_point?, RetryPolicy backoff_policy?,
    Duration request_timeout?, pub_sub(Publishing publishing, Subscription subscription), UA user_agent,
    Metric metric, map client_properties
Publishing: Resource topics*, int32 max_body_size, bool validate_message_type
Subscription: Resource group?, SubscriptionEntry subscriptions*, bool fifo?, int32 receive_batch_size?,
    Duration long_polling_timeout?, int32 lite_subscription_quota?, int32 max_lite_topic_size?
Metric: bool on, Endpoints endpoints?
OffsetOption: offset_type(Policy policy, int64 offset, int64 tail_n, int64 timestamp)

QueryRouteRequest: Resource topic, Endpoints endpoints
QueryRouteResponse: Status status, MessageQueue message_queues*
SendMessageRequest: Message messages*
SendResultEntry: Status status, string message_id, string transaction_id, int64 offset, string recall_handle
SendMessageResponse: Status status, SendResultEntry entries*
QueryAssignmentRequest: Resource topic, Resource group, Endpoints endpoints
QueryAssignmentResponse: Status status, Assignment assignments*
ReceiveMessageRequest: Resource group, MessageQueue message_queue, FilterExpression filter_expression,
    int32 batch_size, Duration invisible_duration?, bool auto_renew, Duration long_polling_timeout?,
    string attempt_id?
ReceiveMessageResponse: content(Status status, Message message, Timestamp delivery_timestamp)
AckMessageEntry: string message_id, string receipt_handle, string lite_topic?
AckMessageRequest: Resource group, Resource topic, AckMessageEntry entries*
AckMessageResultEntry: string message_id, string receipt_handle, Status status
AckMessageResponse: Status status, AckMessageResultEntry entries*
ForwardMessageToDeadLetterQueueRequest: Resource group, Resource topic, string receipt_handle,
    string message_id, int32 delivery_attempt, int32 max_delivery_attempts, string lite_topic?
ForwardMessageToDeadLetterQueueResponse: Status status
HeartbeatRequest: Resource group?, ClientType client_type
HeartbeatResponse: Status status
EndTransactionRequest: Resource topic, string message_id, string transaction_id,
    TransactionResolution resolution, TransactionSource source, string trace_context
EndTransactionResponse: Status status
PrintThreadStackTraceCommand: string nonce
ReconnectEndpointsCommand: string nonce
ThreadStackTrace: string nonce, string thread_stack_trace?
VerifyMessageCommand: string nonce, Message message
VerifyMessageResult: string nonce
RecoverOrphanedTransactionCommand: Message message, string transaction_id
NotifyUnsubscribeLiteCommand: string lite_topic
TelemetryCommand: Status status?, command(Settings settings, ThreadStackTrace thread_stack_trace,
    VerifyMessageResult verify_message_result,
    RecoverOrphanedTransactionCommand recover_orphaned_transaction_command,
    PrintThreadStackTraceCommand print_thread_stack_trace_command,
    VerifyMessageCommand verify_message_command,
    ReconnectEndpointsCommand reconnect_endpoints_command,
    NotifyUnsubscribeLiteCommand notify_unsubscribe_lite_command)
NotifyClientTerminationRequest: Resource group?
NotifyClientTerminationResponse: Status status
ChangeInvisibleDurationRequest: Resource group, Resource topic, string receipt_handle,
    Duration invisible_duration, string message_id, string lite_topic?, bool suspend?
ChangeInvisibleDurationResponse: Status status, string receipt_handle
PullMessageRequest: Resource group, MessageQueue message_queue, int64 offset, int32 batch_size,
    FilterExpression filter_expression, Duration long_polling_timeout
PullMessageResponse: content(Status status, Message message, int64 next_offset)
UpdateOffsetRequest: Resource group, MessageQueue message_queue, int64 offset
UpdateOffsetResponse: Status status
GetOffsetRequest: Resource group, MessageQueue message_queue
GetOffsetResponse: Status status, int64 offset
QueryOffsetRequest: MessageQueue message_queue, QueryOffsetPolicy query_offset_policy, Timestamp timestamp?
QueryOffsetResponse: Status status, int64 offset
RecallMessageRequest: Resource topic, string recall_handle
RecallMessageResponse: Status status, string message_id
SyncLiteSubscriptionRequest: LiteSubscriptionAction action, Resource topic, Resource group,
    string lite_topic_set*, int64 version?, OffsetOption offset_option?
SyncLiteSubscriptionResponse: Status status
"""

ENUMS: dict[str, type[IntEnum]] = {
    name: found
    for name, found in vars(enums).items()
    if isinstance(found, type) and issubclass(found, IntEnum) and found is not IntEnum
}
NESTED_ENUMS = {"Policy": "OffsetOption"}
"""The enums that are declared inside a message, with the message's name."""

# Numbers of google.protobuf.FieldDescriptorProto.Type and Label.
_SCALARS = {"float": 2, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _ENUM = 11, 14
_OPTIONAL, _REPEATED = 1, 3
_WELL_KNOWN = ("Duration", "Timestamp")
_PARAGRAPH = re.compile(r"^(\w+):((?:.|\n )*)$", re.MULTILINE)
_TOKEN = re.compile(r"(?P<oneof>\w+)\(|(?P<end>\))|(?P<type>\w+) (?P<name>\w+)(?P<mark>[?*]?)")


MAX_SMALL_REQUEST = 1 << 20
"""The maximum size, in bytes, of a request without message bodies. One of 1,024 acks has about 150 KiB."""
_STREAMS = {"ReceiveMessage": Kind.SERVER_STREAM, "PullMessage": Kind.SERVER_STREAM, "Telemetry": Kind.BIDI}
"""The methods that are not unary."""


def service_methods(handlers: Mapping[str, Handler]) -> dict[bytes, Method]:
    """Return methods by path, for handlers by method name, for instance "SendMessage"."""
    return {f"/{SERVICE}/{name}".encode(): _method(name, handler) for name, handler in handlers.items()}


def _method(name: str, handler: Handler) -> Method:
    m = messages()
    request_name, response_name = f"{name}Request", f"{name}Response"
    if name == "Telemetry":
        request_name = response_name = "TelemetryCommand"
    response = getattr(m, response_name)

    def status_response(code: int, text: str) -> Message:
        found: Message = response(status=m.Status(code=code, message=text))
        return found

    kind = _STREAMS.get(name, Kind.UNARY)
    max_request = MAX_FRAME_LENGTH if name == "SendMessage" else MAX_SMALL_REQUEST
    return Method(name, kind, getattr(m, request_name).FromString, status_response, handler, max_request)


@cache
def messages() -> SimpleNamespace:
    """Return the message classes, by their names; `Duration` and `Timestamp` are protobuf's own types."""
    from google.protobuf import descriptor_pool, duration_pb2, message_factory, timestamp_pb2

    pool = descriptor_pool.DescriptorPool()
    for known in (duration_pb2, timestamp_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(_file().SerializeToString())
    names = [f"{PACKAGE}.{name}" for name, _ in _PARAGRAPH.findall(TABLE)]
    names += [f"google.protobuf.{name}" for name in _WELL_KNOWN]
    found = [message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names]
    return SimpleNamespace(**{each.DESCRIPTOR.name: each for each in found})


def _file() -> FileDescriptorProto:
    """Return the descriptor of a file that declares all messages and enums."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name="cometmq/messaging.proto", package=PACKAGE, syntax="proto3")
    file.dependency.extend(f"google/protobuf/{name.lower()}.proto" for name in _WELL_KNOWN)
    for name, found in ENUMS.items():
        if name not in NESTED_ENUMS:
            _declare_enum(file.enum_type.add(name=name), found)
    for name, fields in _PARAGRAPH.findall(TABLE):
        _declare_message(file.message_type.add(name=name), fields)
    return file


def _declare_enum(declared: EnumDescriptorProto, found: type[IntEnum]) -> None:
    for member in found:
        declared.value.add(name=member.name, number=member.value)


def _declare_message(declared: DescriptorProto, fields: str) -> None:
    for name, message in NESTED_ENUMS.items():
        if message == declared.name:
            _declare_enum(declared.enum_type.add(name=name), ENUMS[name])
    optional = []
    oneof: int | None = None
    for token in _TOKEN.finditer(fields):
        if token["oneof"]:
            oneof = len(declared.oneof_decl)
            declared.oneof_decl.add(name=token["oneof"])
        elif token["end"]:
            oneof = None
        else:
            repeated = token["mark"] == "*" or token["type"] == "map"
            field = declared.field.add(
                name=token["name"],
                number=len(declared.field) + 1,
                label=_REPEATED if repeated else _OPTIONAL,
                oneof_index=oneof,
                **_type_of(declared, token["type"], token["name"]),
            )
            if token["mark"] == "?":
                optional.append(field)
    # protobuf requires a oneof for each optional field, after all other oneofs.
    for field in optional:
        field.proto3_optional = True
        field.oneof_index = len(declared.oneof_decl)
        declared.oneof_decl.add(name=f"_{field.name}")


def _type_of(message: DescriptorProto, type_name: str, field: str) -> dict[str, Any]:
    """Return the arguments of a field's descriptor that give its type. A map's entry type is declared."""
    if type_name in _SCALARS:
        return {"type": _SCALARS[type_name]}
    if type_name in _WELL_KNOWN:
        return {"type": _MESSAGE, "type_name": f".google.protobuf.{type_name}"}
    if type_name == "map":
        entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        for number, name in enumerate(("key", "value"), 1):
            entry.field.add(name=name, number=number, label=_OPTIONAL, type=_SCALARS["string"])
        return {"type": _MESSAGE, "type_name": f".{PACKAGE}.{message.name}.{entry.name}"}
    if type_name in NESTED_ENUMS:
        return {"type": _ENUM, "type_name": f".{PACKAGE}.{NESTED_ENUMS[type_name]}.{type_name}"}
    return {"type": _ENUM if type_name in ENUMS else _MESSAGE, "type_name": f".{PACKAGE}.{type_name}"}
