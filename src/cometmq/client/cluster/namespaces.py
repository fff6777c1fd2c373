"""Namespaces, which let several users of one cluster use the same names of topics and groups.

The program uses plain names. The client converts them to `namespace%name` in requests and back in answers
(docs/reference/client.md, Namespaces).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.acl import Credentials, sign
from cometmq.protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    ConsumerRunningInfo,
    HeartbeatData,
    LockBatchBody,
    SubscriptionData,
)
from cometmq.protocol.codes import (
    CLIENT_INNER_PRODUCER_GROUP,
    DLQ_PREFIX,
    NAMESRV_REQUESTS,
    ORDER_TOPIC_CONFIG,
    RETRY_PREFIX,
    TRACE_PRODUCER_GROUP,
    RequestCode,
    is_system_topic,
)
from cometmq.protocol.frame import Frame

_FIELDS = ("topic", "originTopic", "group", "groupName", "consumerGroup", "producerGroup", "compareGroup")
"""Header fields that contain names of topics or groups in any request."""
_LETTERS = ("a", "b")
"""Two header fields of requests that send messages: field "a" contains the group, field "b" the topic."""
_SENDS = frozenset(
    {RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2}
)
_LOCKS = frozenset({RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ})
_SYSTEM_GROUPS = frozenset({CLIENT_INNER_PRODUCER_GROUP, TRACE_PRODUCER_GROUP})
_INSTANCE = re.compile(r"MQ_INST_\w+_\w+(?=\.)")


def instance_of(namesrv: Iterable[str]) -> str:
    """Return the `MQ_INST_<word>_<word>` with which the first name server's host name begins, or ""."""
    found = _INSTANCE.match(next(iter(namesrv), ""))
    return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespaces of a client.

    Attributes:
        name: The namespace that is added to names as a prefix, "" for none.
        v2: The namespace of RocketMQ 5, sent as a field of each request for proxies, "" for none.
        exempt: Topics outside any namespace besides the system topics. The client adds the reply topics that
            it discovers.
    """

    name: str = ""
    v2: str = ""
    exempt: set[str] = field(default_factory=set, compare=False)

    def __bool__(self) -> bool:
        return bool(self.name or self.v2)

    def wrap(self, name: str) -> str:
        """Return the name with the namespace, unless it is a system name or has the namespace already."""
        if not self.name or not name:
            return name
        prefix, rest = _split(name)
        if (
            rest.startswith(f"{self.name}%")
            or is_system_topic(rest)
            or rest in _SYSTEM_GROUPS
            or rest in self.exempt
        ):
            return name
        return f"{prefix}{self.name}%{rest}"

    def unwrap(self, name: str) -> str:
        """Return the name without the namespace."""
        if not self.name:
            return name
        prefix, rest = _split(name)
        return prefix + rest.removeprefix(f"{self.name}%")

    def own(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that belong to this namespace, with the prefix removed."""
        return [self.unwrap(name) for name in names if self.wrap(name) == name]

    def wrap_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return the queue with the namespace in its topic."""
        return MessageQueue(self.wrap(queue.topic), queue.broker_name, queue.queue_id)

    def unwrap_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return the queue without the namespace in its topic."""
        return MessageQueue(self.unwrap(queue.topic), queue.broker_name, queue.queue_id)

    def preparation(self, credentials: Credentials | None, sign_all: bool) -> Callable[[Frame], None] | None:
        """Return a function that adds the namespace to a request and signs it, None if there is neither.

        Requests to name servers are signed only with `sign_all`.
        """
        wrap = self.wrap_request if self else None
        if credentials is None:
            return wrap

        def prepare(frame: Frame) -> None:
            if wrap is not None:
                wrap(frame)
            if sign_all or frame.code not in NAMESRV_REQUESTS:
                sign(frame, credentials)

        return prepare

    def wrap_running_info(self, info: ConsumerRunningInfo) -> ConsumerRunningInfo:
        """Return the running info of a consumer with the namespace added to its names."""
        properties = {**info.properties, "consumerGroup": self.wrap(info.properties["consumerGroup"])}
        return replace(
            info,
            properties=properties,
            subscription_set=self._subscriptions(info.subscription_set),
            mq_table={self.wrap_queue(queue): each for queue, each in info.mq_table.items()},
            status_table={self.wrap(topic): each for topic, each in info.status_table.items()},
        )

    def unwrap_messages(self, messages: Iterable[MessageExt]) -> None:
        """Remove the namespace from the topics of messages. The properties stay unchanged."""
        if self.name:
            for message in messages:
                message.topic = self.unwrap(message.topic)

    def wrap_request(self, frame: Frame) -> None:
        """Add the namespace to the names in an outgoing request. A second call changes nothing."""
        ext = dict(frame.ext or {})
        if self.v2:
            ext |= {"nsd": "true", "ns": self.v2}
        if self.name:
            for field in _LETTERS if frame.code in _SENDS else _FIELDS:
                if field in ext:
                    ext[field] = self.wrap(ext[field])
            if frame.code == RequestCode.GET_KV_CONFIG and ext.get("namespace") == ORDER_TOPIC_CONFIG:
                ext["key"] = self.wrap(ext["key"])
            self._wrap_body(frame)
        frame.ext_fields, frame.typed = ext, None

    def _wrap_body(self, frame: Frame) -> None:
        if frame.code == RequestCode.HEART_BEAT:
            beat = HeartbeatData.decode(frame.body)
            producers = [
                replace(each, group_name=self.wrap(each.group_name)) for each in beat.producer_data_set
            ]
            consumers = [self._consumer(each) for each in beat.consumer_data_set]
            frame.body = replace(beat, producer_data_set=producers, consumer_data_set=consumers).encode()
        elif frame.code in _LOCKS:
            lock = LockBatchBody.decode(frame.body)
            queues = [self.wrap_queue(queue) for queue in lock.mq_set]
            group = self.wrap(lock.consumer_group)
            frame.body = replace(lock, consumer_group=group, mq_set=queues).encode()
        elif frame.code == RequestCode.CHECK_CLIENT_CONFIG:
            asked = CheckClientRequestBody.decode(frame.body)
            wanted = asked.subscription_data
            if wanted is not None:
                wanted = replace(wanted, topic=self.wrap(wanted.topic))
            frame.body = replace(
                asked, group=self.wrap(asked.group), subscription_data=wanted, namespace=self.name
            ).encode()

    def _consumer(self, data: ConsumerData) -> ConsumerData:
        wanted = self._subscriptions(data.subscription_data_set)
        return replace(data, group_name=self.wrap(data.group_name), subscription_data_set=wanted)

    def _subscriptions(self, wanted: Iterable[SubscriptionData]) -> list[SubscriptionData]:
        return [replace(each, topic=self.wrap(each.topic)) for each in wanted]


def _split(name: str) -> tuple[str, str]:
    """Split a name into the prefix of retry or dead-letter topics ("" for other names) and the rest."""
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
