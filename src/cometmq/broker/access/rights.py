"""The rights that each kind of request requires (docs/security.md, Access).

Apache's 4.9 broker checks the topics and groups of ten kinds of requests, reserves five kinds for admins, and
requires only a signature for all other kinds. In CometMQ, every kind that this module does not list requires
an admin, so a kind that is added later is refused to other accounts until this module permits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from cometmq.broker.access.accounts import Perm
from cometmq.errors import BodyError
from cometmq.protocol import bodies, codes
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PullMessageRequestHeader, SendMessageRequestHeader
from cometmq.protocol.pop import subscribed_topic

EITHER = Perm.PUB | Perm.SUB
MAX_RESOURCES = 10_000
"""The maximum number of topics and groups in one heartbeat."""


class Right(NamedTuple):
    """A required permission for a topic or, if `group` is true, for a consumer group."""

    perm: Perm
    name: str
    group: bool = False

    def __str__(self) -> str:
        return f"{'group' if self.group else 'topic'}:{self.name}"


Rights = list[Right]


def topic_right(perm: Perm, name: str) -> Right:
    """Return the permission for a topic or, for a retry topic, the permission for its consumer group."""
    if name.startswith(codes.RETRY_PREFIX):
        return group_right(name.removeprefix(codes.RETRY_PREFIX))
    return Right(perm, name)


def group_right(name: str) -> Right:
    """Return the right to consume as a member of the consumer group `name`."""
    return Right(Perm.SUB, name.removeprefix(codes.HANDOFF_PREFIX), True)


def consumer_rights(topic: str, group: str) -> Rights:
    """Return the rights to receive a topic's messages as a member of a group."""
    return [topic_right(Perm.SUB, topic), group_right(group)]


def by_default(right: Right) -> bool:
    """Return whether `defaultTopicPerm` or `defaultGroupPerm` of an account can grant a right.

    They cannot grant the right to act as a system group, or the right to read reply topics or system topics
    (which hold delayed, half and timer messages, and traces). For these, an account needs an explicit
    permission.
    """
    if right.group:
        return not right.name.startswith(codes.CID_RMQ_SYS_PREFIX)
    kept = codes.is_system_topic(right.name) or right.name.endswith(codes.REPLY_TOPIC_POSTFIX)
    return not (kept and right.perm & Perm.SUB)


def needed(frame: Frame) -> Rights | None:
    """Return the rights that a request requires: [] if a signature is enough, None if it requires an admin.

    Raises ProtocolError if the request cannot be parsed.
    """
    find = _NEEDS.get(frame.code)
    return None if find is None else find(frame)


def is_trace(rights: Rights) -> bool:
    """Return whether the only required right is to send traces, which every account has."""
    return len(rights) == 1 and rights[0] == (Perm.PUB, codes.TRACE_TOPIC, False)


def _send(frame: Frame) -> Rights:
    return [topic_right(Perm.PUB, frame.header(SendMessageRequestHeader).topic)]


def _reply(frame: Frame) -> Rights | None:
    """Return the rights that a reply requires, or None if the reply requires an admin.

    The properties of a reply, not its topic, determine the client that receives it. So the right to send to
    an ordinary topic is not sufficient: a reply whose topic is no reply topic requires an admin.
    """
    topic = frame.header(SendMessageRequestHeader).topic
    return [topic_right(Perm.PUB, topic)] if topic.endswith(codes.REPLY_TOPIC_POSTFIX) else None


def _pull(frame: Frame) -> Rights:
    header = frame.header(PullMessageRequestHeader)
    return consumer_rights(header.topic, header.consumer_group)


def _pop(frame: Frame) -> Rights:
    """Return the rights to pop as a group, or to ack. An ack's topic may be the group's retry topic."""
    ext = frame.ext or {}
    group = ext.get("consumerGroup", "")
    return consumer_rights(subscribed_topic(ext.get("topic", ""), group), group)


def _each(body: str, groups: Iterable[tuple[str, list[str]]]) -> Rights:
    """Return the rights to groups and their topics. Raises BodyError if there are too many in the body."""
    rights: dict[Right, None] = {}
    for group, topics in groups:
        rights.update(dict.fromkeys([group_right(group), *(topic_right(Perm.SUB, each) for each in topics)]))
        if len(rights) > MAX_RESOURCES:
            raise BodyError(body, f"more than {MAX_RESOURCES} topics and groups")
    return list(rights)


def _batch_ack(frame: Frame) -> Rights:
    acks = bodies.BatchAckMessageRequestBody.decode(frame.body).acks
    return _each("BatchAckMessageRequestBody", ((ack.consumer_group, [ack.topic]) for ack in acks))


def _fields(
    perm: Perm, topic: str = "", group: str = "", *, optional: tuple[str, ...] = ()
) -> Callable[[Frame], Rights]:
    """Return a function that finds the rights in ext fields. A missing one, unless optional, counts as ""."""

    def find(frame: Frame) -> Rights:
        ext = frame.ext or {}
        rights = []
        if topic and (ext.get(topic) or topic not in optional):
            rights.append(topic_right(perm, ext.get(topic, "")))
        if group and (ext.get(group) or group not in optional):
            rights.append(group_right(ext.get(group, "")))
        return rights

    return find


def _heartbeat(frame: Frame) -> Rights:
    consumers = bodies.HeartbeatData.decode(frame.body).consumer_data_set
    return _each(
        "HeartbeatData",
        ((each.group_name, [s.topic for s in each.subscription_data_set]) for each in consumers),
    )


def _lite_subscriptions(frame: Frame) -> Rights:
    entries = bodies.LiteSubscriptionCtlRequestBody.decode(frame.body).subscription_set
    return _each("LiteSubscriptionCtlRequestBody", ((entry.group, [entry.topic]) for entry in entries))


def _locks(frame: Frame) -> Rights:
    body = bodies.LockBatchBody.decode(frame.body)
    topics = {queue.topic for queue in body.mq_set}
    return [group_right(body.consumer_group), *(topic_right(Perm.SUB, topic) for topic in sorted(topics))]


def _assignment(frame: Frame) -> Rights:
    body = bodies.QueryAssignmentRequestBody.decode(frame.body)
    return consumer_rights(body.topic, body.consumer_group)


def _check_client(frame: Frame) -> Rights:
    body = bodies.CheckClientRequestBody.decode(frame.body)
    rights = [group_right(body.group)]
    if body.subscription_data is not None:
        rights.append(topic_right(Perm.SUB, body.subscription_data.topic))
    return rights


def _nothing(_frame: Frame) -> Rights:
    return []


_NEEDS: dict[int, Callable[[Frame], Rights | None]] = {
    RequestCode.SEND_MESSAGE: _send,
    RequestCode.SEND_MESSAGE_V2: _send,
    RequestCode.SEND_BATCH_MESSAGE: _send,
    RequestCode.RECALL_MESSAGE: _fields(Perm.PUB, "topic"),
    RequestCode.SEND_REPLY_MESSAGE: _reply,
    RequestCode.SEND_REPLY_MESSAGE_V2: _reply,
    # The handlers of END_TRANSACTION and VIEW_MESSAGE_BY_ID check the rights themselves, because the topic is
    # known only after the message has been read.
    RequestCode.END_TRANSACTION: _nothing,
    RequestCode.VIEW_MESSAGE_BY_ID: _nothing,
    RequestCode.PULL_MESSAGE: _pull,
    RequestCode.LITE_PULL_MESSAGE: _pull,
    RequestCode.POP_MESSAGE: _pop,
    RequestCode.POP_LITE_MESSAGE: _pop,
    RequestCode.LITE_SUBSCRIPTION_CTL: _lite_subscriptions,
    RequestCode.PEEK_MESSAGE: _pop,
    RequestCode.NOTIFICATION: _pop,
    RequestCode.POLLING_INFO: _pop,
    RequestCode.WITHDRAW_POP: _nothing,  # It concerns only pops of its own connection
    RequestCode.ACK_MESSAGE: _pop,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _pop,
    RequestCode.BATCH_ACK_MESSAGE: _batch_ack,
    RequestCode.QUERY_ASSIGNMENT: _assignment,
    # CometMQ's consumers send this request to read the retry policy of their group.
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: _fields(Perm.SUB, group="group"),
    RequestCode.CONSUMER_SEND_MSG_BACK: _fields(Perm.SUB, "originTopic", "group", optional=("originTopic",)),
    RequestCode.QUERY_MESSAGE: _fields(Perm.SUB, "topic"),
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.UNREGISTER_CLIENT: _fields(Perm.SUB, group="consumerGroup", optional=("consumerGroup",)),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: _fields(Perm.SUB, group="consumerGroup"),
    # CometMQ's consumers send this request to compare the subscriptions of their group's members.
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _fields(Perm.SUB, group="consumerGroup"),
    RequestCode.QUERY_CONSUMER_OFFSET: _fields(Perm.SUB, "topic", "consumerGroup"),
    RequestCode.UPDATE_CONSUMER_OFFSET: _fields(Perm.SUB, "topic", "consumerGroup"),
    RequestCode.LOCK_BATCH_MQ: _locks,
    RequestCode.UNLOCK_BATCH_MQ: _locks,
    RequestCode.CHECK_CLIENT_CONFIG: _check_client,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _fields(EITHER, "topic"),
    RequestCode.GET_MAX_OFFSET: _fields(EITHER, "topic"),
    RequestCode.GET_MIN_OFFSET: _fields(EITHER, "topic"),
    RequestCode.GET_EARLIEST_MSG_STORETIME: _fields(EITHER, "topic"),
}
