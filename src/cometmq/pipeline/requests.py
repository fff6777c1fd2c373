"""What the answer to a pull says to the pipeline, and which refusals pass."""

from __future__ import annotations

from cometmq.client.cluster.requests import PULL_STATUS
from cometmq.pipeline.pulling import Reply
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PullMessageResponseHeader

BUSY = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLOW_CONTROL})
"""Refusals that pass by themselves: a broker that starts, stops or has too much to do."""


def pull_reply(frame: Frame) -> Reply:
    """The body is copied: the frame's own is gone with the next one received."""
    if frame.code not in PULL_STATUS:
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
