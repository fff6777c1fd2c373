"""Request frames that clients and pipelines send, and functions that check and read the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from cometmq.errors import BodyError, BrokerError, CometError, NoRouteError, RemotingError
from cometmq.message import MessageQueue, PullStatus, SendStatus
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import TBW102, PullSysFlag, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    GetKVConfigRequestHeader,
    GetKVConfigResponseHeader,
    GetRouteInfoRequestHeader,
    OffsetResponseHeader,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.text import printable

T = TypeVar("T")

PULL_STATUS = {
    int(ResponseCode.SUCCESS): PullStatus.FOUND,
    int(ResponseCode.PULL_NOT_FOUND): PullStatus.NO_NEW_MSG,
    int(ResponseCode.PULL_RETRY_IMMEDIATELY): PullStatus.NO_MATCHED_MSG,
    int(ResponseCode.PULL_OFFSET_MOVED): PullStatus.OFFSET_ILLEGAL,
}
"""The status of a pull by response code. Any other code means that the broker refused the pull."""
SEND_STATUS = {
    int(ResponseCode.SUCCESS): SendStatus.SEND_OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}
"""The status of a send by response code. Any other code means that the message was not stored."""

_SEND = int(RequestCode.SEND_MESSAGE_V2)
_SEND_BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
_SEND_REPLY = int(RequestCode.SEND_REPLY_MESSAGE_V2)

NO_ROUTE_HINT = (
    "Create the topic (mqadmin updateTopic), or let brokers create it (autoCreateTopicEnable=true); "
    "if it exists, look whether its broker is registered there (mqadmin clusterList)."
)
UNREACHABLE_HINT = (
    "No name server answered: is one running there? (cometmq standalone starts one at 127.0.0.1:9876)"
)
ACCESS_HINT = "the broker asks for an account: access_key and secret_key of ClientOptions, COMETMQ_ACCESS_KEY"
_HINTS: dict[int, str] = {
    ResponseCode.SYSTEM_BUSY: "the broker refuses work for a moment: slow down or try again",
    ResponseCode.TOPIC_NOT_EXIST: "create the topic (mqadmin updateTopic) or set autoCreateTopicEnable",
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: "create the group (mqadmin updateSubGroup), or switch on "
    "autoCreateSubscriptionGroup",
    ResponseCode.NO_PERMISSION: "look at the permissions of broker, topic and group",
    ResponseCode.SERVICE_NOT_AVAILABLE: "the broker takes no messages: full disk, replica, or stopping",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "this server's version does not know the request, or it is a "
    "server of another kind: by default name servers listen on port 9876, brokers on 10911",
}


def hint_of(code: int, remark: str = "") -> str:
    """Return a hint on how to avoid an error, given its response code and remark. "" if there is no hint."""
    return ACCESS_HINT if "AclException" in remark else _HINTS.get(code, "")


def broker_error(answer: Frame, addr: str, topic: str = "", key: str = "") -> BrokerError:
    """Return the BrokerError that describes a broker's refusal."""
    return BrokerError(
        answer.code,
        remark=answer.remark or "",
        broker_addr=addr,
        topic=topic,
        key=key,
        hint=hint_of(answer.code, answer.remark or ""),
    )


def succeeded(answer: Frame, addr: str, topic: str = "", key: str = "") -> Frame:
    """Return the answer. Raises BrokerError if the answer's code is not SUCCESS."""
    if answer.code != ResponseCode.SUCCESS:
        raise broker_error(answer, addr, topic, key)
    return answer


def route_request(topic: str) -> Frame:
    """Return the request for the route of a topic."""
    return Frame.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))


def kv_request(namespace: str, key: str) -> Frame:
    """Return the request for a value in the KV configuration of a name server."""
    return Frame.request(RequestCode.GET_KV_CONFIG, GetKVConfigRequestHeader(namespace=namespace, key=key))


def kv_value(answer: Frame | RemotingError) -> str | None:
    """Return the value in a name server's answer to `kv_request`, None if the answer has none."""
    if isinstance(answer, Frame) and answer.code == ResponseCode.SUCCESS:
        return answer.header(GetKVConfigResponseHeader).value
    return None


class NameServersUnreachable(NoRouteError):
    """No name server answered."""


class RouteAnswers(Generic[T]):
    """The answers of the name servers to the request for a topic's route.

    An answer with an invalid route, for which `read` raises BodyError, is ignored if another name server
    returns a valid one. `first` is the address of the first name server that answered otherwise, "" before
    that.
    """

    def __init__(self, topic: str, read: Callable[[TopicRouteData], T]) -> None:
        self._topic, self._read = topic, read
        self._asked: list[tuple[str, str]] = []
        self._unreadable: BodyError | None = None
        self._hint = NO_ROUTE_HINT
        self.first = ""

    def take(self, addr: str, answer: Frame | RemotingError) -> T | None:
        """Return the route in an answer, converted by `read`. If there is none, keep the reason."""
        if not isinstance(answer, Frame):
            self._asked.append((addr, str(answer)))
            return None
        found = None
        try:
            if answer.code == ResponseCode.SUCCESS and answer.body:
                found = self._read(TopicRouteData.decode(answer.body))
        except BodyError as error:
            self._unreadable = self._unreadable or error
            return None
        self.first = self.first or addr
        if found is None:
            self._asked.append((addr, str(BrokerError(answer.code, remark=answer.remark or ""))))
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                self._hint = hint_of(answer.code)
        return found

    @property
    def failure(self) -> CometError:
        """The error if no route is valid: BodyError if there was an invalid one, otherwise NoRouteError."""
        if self._unreadable is not None:
            return self._unreadable
        if not self.first:
            return NameServersUnreachable(self._topic, self._asked, UNREACHABLE_HINT)
        return NoRouteError(self._topic, self._asked, self._hint)


def ordered_error(error: NoRouteError, order_conf: str) -> NoRouteError:
    """Return the error for an ordered topic without a route: other queues would break the order."""
    brokers = printable(order_conf, 200)
    return NoRouteError(
        error.topic, error.asked, f"it is ordered, and the brokers of its queues ({brokers}) are missing"
    )


def send_request(
    group: str,
    topic: str,
    queue: MessageQueue,
    body: bytes,
    properties: str,
    *,
    flag: int = 0,
    sys_flag: int = 0,
    batch: bool = False,
    reply: bool = False,
    reconsume: tuple[int, int] | None = None,
    template: str = TBW102,
    template_queue_nums: int = 4,
) -> Frame:
    """Return the request to store a message, or several messages with `batch`.

    If the response code is a key of SEND_STATUS, the messages were stored. Any other code is a refusal.

    Args:
        batch: The body contains several messages, encoded by protocol/batch.py.
        reply: The message is a reply, which the broker delivers to the client that sent the request.
        reconsume: For a message sent to a retry topic: its number of retries and their maximum.
        template: The topic whose settings the broker uses if it creates the topic.
    """
    # Write the header's fields as text, because encoding a typed header would take three times as long.
    ext = {
        "a": group,
        "b": topic,
        "c": template,
        "d": str(template_queue_nums),
        "e": str(queue.queue_id),
        "f": str(sys_flag),
        "g": str(int(time.time() * 1000)),
        "h": str(flag),
        "i": properties,
        "j": "0",
        "k": "false",
        "m": "true" if batch else "false",
        "n": queue.broker_name,
    }
    if reconsume is not None:
        ext["j"], ext["l"] = map(str, reconsume)
    code = _SEND_BATCH if batch else _SEND_REPLY if reply else _SEND
    return Frame.request(code, None, body, ext=ext)


def pull_request(
    group: str,
    queue: MessageQueue,
    offset: int,
    max_count: int = 32,
    expression: str = "*",
    *,
    expression_type: str = "TAG",
    carry_expression: bool = True,
    class_filter: bool = False,
    sub_version: int = 0,
    commit_offset: int | None = None,
    suspend_s: float = 0.0,
    bulk: bool | None = None,
) -> Frame:
    """Return the request to pull messages.

    A response code in PULL_STATUS is the result of the pull, not a refusal.

    Args:
        carry_expression: Send the filter expression. False: the broker uses the expression in the group's
            heartbeat.
        class_filter: The request is for a filter server that has the group's filter class.
        commit_offset: The broker stores this offset for the group.
        suspend_s: The maximum time for which the broker waits for a message.
        bulk: Allow up to 1,024 messages and 1 MiB in the answer. Only CometMQ's broker supports this.
    """
    sys_flag = 0
    if commit_offset is not None:
        sys_flag |= PullSysFlag.COMMIT_OFFSET
    if suspend_s > 0:
        sys_flag |= PullSysFlag.SUSPEND
    if carry_expression:
        sys_flag |= PullSysFlag.SUBSCRIPTION
    if class_filter:
        sys_flag |= PullSysFlag.CLASS_FILTER
    header = PullMessageRequestHeader(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=max_count,
        sys_flag=int(sys_flag),
        commit_offset=commit_offset or 0,
        suspend_timeout_millis=int(suspend_s * 1000),
        subscription=expression if carry_expression else None,
        sub_version=sub_version,
        expression_type=expression_type,
        bname=queue.broker_name,
        bulk=bulk,
    )
    return Frame.request(RequestCode.PULL_MESSAGE, header)


def queue_request(code: RequestCode, queue: MessageQueue) -> Frame:
    """Return a request about a queue, whose header names only the queue.

    The answer to GET_MIN_OFFSET, and to GET_MAX_OFFSET (0 for an unknown queue), is read by `offset_in`.
    """
    header = QueueRequestHeader(topic=queue.topic, queue_id=queue.queue_id, bname=queue.broker_name)
    return Frame.request(code, header)


def committed_request(group: str, queue: MessageQueue, *, set_zero_if_not_found: bool | None = None) -> Frame:
    """Return the request for the offset that a group has stored. `offset_in` reads the answer.

    If the group has stored no offset, the broker answers 0 while the queue's first message (offset 0) is in
    memory, otherwise QUERY_NOT_FOUND. With set_zero_if_not_found=False, CometMQ's broker and RocketMQ 5.x
    always answer QUERY_NOT_FOUND for such a group.
    """
    header = QueryConsumerOffsetRequestHeader(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        set_zero_if_not_found=set_zero_if_not_found,
        bname=queue.broker_name,
    )
    return Frame.request(RequestCode.QUERY_CONSUMER_OFFSET, header)


def commit_request(group: str, queue: MessageQueue, offset: int) -> Frame:
    """Return the request to store a group's offset."""
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        commit_offset=offset,
        bname=queue.broker_name,
    )
    return Frame.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)


def offset_in(answer: Frame, addr: str, queue: MessageQueue) -> int:
    """Return the offset in an answer. Raises BrokerError if the answer's code is not SUCCESS."""
    return succeeded(answer, addr, queue.topic).header(OffsetResponseHeader).offset
