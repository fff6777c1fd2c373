"""Helpers for the tests of timers."""

from __future__ import annotations

import asyncio
import time

from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    ListTimersRequestHeader,
    ListTimersResponseHeader,
    RecallMessageRequestHeader,
)
from cometmq.protocol.record.one import iter_records


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def recall(peer, handle, topic="Orders"):
    header = RecallMessageRequestHeader(topic=topic, recall_handle=handle, producer_group="PG")
    return await peer.call(RequestCode.RECALL_MESSAGE, header)


async def waiting(peer, **header):
    answer = await peer.call(RequestCode.LIST_TIMERS, ListTimersRequestHeader(**header))
    assert answer.code == 0, answer.remark
    return list(iter_records(answer.body)), answer.header(ListTimersResponseHeader)


def short_retention():
    """Return settings with which retention deletes all but the newest segment."""
    return {"mappedFileSizeCommitLog": "65536", "fileReservedTime": "0", "deleteWhen": "25"}


async def fill(broker, peer):
    """Fill segments after the waiting messages."""
    while len(broker.parts.store.log.segments) < 4:
        await peer.send(topic="Filler", body=b"x" * 8_000)


async def move_all(broker, peer):
    """Fill segments after the waiting messages and run one retention pass."""
    await fill(broker, peer)
    store = broker.parts.store
    store.retention.delete_now()
    await asyncio.wait_for(store.retention.run_now(log_too=True), 10)
