"""Traces of what consumers do with their messages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from cometmq.client.cluster.traces import Traces
from cometmq.message import MessageExt
from cometmq.protocol.traces import ConsumeCode

__all__ = ["trace_polled", "traced"]

C = TypeVar("C")
S = TypeVar("S", bound=Enum)

_HANDLED = {"SUCCESS", "COMMIT"}


def traced(
    listener: Callable[[list[MessageExt], C], Awaitable[S]],
    traces: Traces | None,
    group: str,
    time_out_s: float,
) -> Callable[[list[MessageExt], C], Awaitable[S]]:
    """Return the listener with a trace before and after each call.

    A call longer than time_out_s is overdue.
    """
    if traces is None:
        return listener

    async def call(messages: list[MessageExt], context: C) -> S:
        consumption = traces.consuming(group, messages)
        begun = time.monotonic()
        code, success = ConsumeCode.EXCEPTION, False
        try:
            status = await listener(messages, context)
            success = status.name in _HANDLED
            if time.monotonic() - begun >= time_out_s:
                code = ConsumeCode.TIME_OUT
            else:
                code = ConsumeCode.SUCCESS if success else ConsumeCode.FAILED
            return status
        finally:
            traces.consumed(consumption, code, success=success)

    return call


def trace_polled(traces: Traces, group: str, messages: Sequence[MessageExt]) -> None:
    """Record messages that a caller has polled. Their processing is unknown and counts as a success."""
    traces.consumed(traces.consuming(group, messages), ConsumeCode.SUCCESS, success=True)
