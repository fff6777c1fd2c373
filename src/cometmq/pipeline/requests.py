"""The few requests that the pipeline makes, as frames, and what their answers mean."""

from __future__ import annotations

from cometmq.errors import BrokerError
from cometmq.message import MessageQueue
from cometmq.pipeline.pulling import Reply
from cometmq.protocol.codes import PullSysFlag, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    GetMaxOffsetRequestHeader,
    GetMinOffsetRequestHeader,
    GetRouteInfoRequestHeader,
    OffsetResponseHeader,
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    QueryConsumerOffsetRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)

BUSY = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLOW_CONTROL})
"""Refusals that pass by themselves: a broker that starts, stops or has too much to do."""

PULL_ANSWERS = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)


def pull_request(group: str, queue: MessageQueue, offset: int, count: int, tags: str) -> Frame:
    """A pull that carries its subscription, is never held and commits nothing."""
    header = PullMessageRequestHeader(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=int(PullSysFlag.SUBSCRIPTION),
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=tags,
        sub_version=0,
        expression_type="TAG",
    )
    return Frame.request(RequestCode.PULL_MESSAGE, header)


def pull_reply(frame: Frame) -> Reply:
    """The body is copied: the frame's own is gone with the next one received."""
    if frame.code not in PULL_ANSWERS:
        return Reply(frame.code, 0, 0, 0, b"", frame.remark or "")
    header = frame.header(PullMessageResponseHeader)
    return Reply(
        frame.code,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        bytes(frame.body),
        frame.remark or "",
    )


def route_request(topic: str) -> Frame:
    return Frame.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic=topic))


def max_offset_request(queue: MessageQueue) -> Frame:
    header = GetMaxOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id)
    return Frame.request(RequestCode.GET_MAX_OFFSET, header)


def min_offset_request(queue: MessageQueue) -> Frame:
    header = GetMinOffsetRequestHeader(topic=queue.topic, queue_id=queue.queue_id)
    return Frame.request(RequestCode.GET_MIN_OFFSET, header)


def offset_reply(frame: Frame, address: str, queue: MessageQueue) -> int:
    """Raises BrokerError for anything but success."""
    if frame.code != ResponseCode.SUCCESS:
        raise BrokerError(frame.code, remark=frame.remark or "", broker_addr=address, topic=queue.topic)
    return frame.header(OffsetResponseHeader).offset


def commit_request(group: str, queue: MessageQueue, offset: int) -> Frame:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, commit_offset=offset
    )
    return Frame.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)


def committed_request(group: str, queue: MessageQueue) -> Frame:
    header = QueryConsumerOffsetRequestHeader(
        consumer_group=group, topic=queue.topic, queue_id=queue.queue_id, set_zero_if_not_found=False
    )
    return Frame.request(RequestCode.QUERY_CONSUMER_OFFSET, header)
