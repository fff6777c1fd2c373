"""One Spark task of a redrive: send the dead letters of some groups again.

The task uses the code of `cometmq dlq resend` (admin/dead_letters.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa

from cometmq.admin.admin import Admin
from cometmq.admin.dead_letters import Resending, resend
from cometmq.errors import CometError
from cometmq.message import MessageExt
from cometmq.pipeline.base.wire import PLAIN, Access
from cometmq.protocol.codes import DLQ_PREFIX, SysFlag
from cometmq.protocol.record.one import body_crc

LEFT = "LEFT"
"""State of a dead letter that was not tried because an earlier one of the same group could not be sent."""
_BATCH_ROWS = 1000
_PLACE = ("topic", "broker_name", "queue_id", "queue_offset", "physical_offset")
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("topic", "broker_name")),
        ("queue_id", pa.int32()),
        *((name, pa.int64()) for name in ("queue_offset", "physical_offset")),
        *((name, pa.string()) for name in ("group", "msg_id", "original_topic", "state", "target")),
        *((name, pa.string()) for name in ("copy_offset_msg_id", "problem")),
    ]
)
"""Columns of a dead letter's result. `state` is one of the admin client's `Resend`, or `LEFT`."""


@dataclass(frozen=True)
class RedriveTask:
    """The settings that all tasks of a run share."""

    namesrv: str
    how: Resending
    access: Access = PLAIN


def in_task(task: RedriveTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Send dead letters, sorted by topic, and return rows of SCHEMA, in `mapInArrow`."""
    letters = (letter_of(row) for batch in batches for row in batch.to_pylist(maps_as_pydicts="lossy"))
    with asyncio.Runner() as runner:
        results = _redriven(task, letters)
        while rows := runner.run(_some(results)):
            yield pa.RecordBatch.from_pylist(rows, SCHEMA)


async def _some(results: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while len(rows) < _BATCH_ROWS and (row := await anext(results, None)) is not None:
        rows.append(row)
    return rows


async def _redriven(task: RedriveTask, letters: Iterator[MessageExt]) -> AsyncIterator[dict[str, Any]]:
    async with Admin(task.namesrv, options=task.access.client_options()) as admin:
        for topic, some in itertools.groupby(letters, key=lambda letter: letter.topic):
            taken: deque[MessageExt] = deque()
            group = topic.removeprefix(DLQ_PREFIX)
            try:
                # Results arrive in the order of the dead letters, so each result belongs to the oldest dead
                # letter in `taken`.
                async for result in resend(admin.client, _taking(some, taken), group, task.how):
                    said = msgspec.structs.asdict(result) | {"state": result.state.value}
                    yield _row(taken.popleft(), group, said)
            except CometError as error:
                # The remaining dead letters are read one by one, because a list of them could have millions
                # of entries.
                for letter in itertools.chain(taken, some):
                    yield _row(letter, group, {"state": LEFT, "problem": str(error)})


async def _taking(letters: Iterator[MessageExt], taken: deque[MessageExt]) -> AsyncIterator[MessageExt]:
    for letter in letters:
        taken.append(letter)
        yield letter


def _row(letter: MessageExt, group: str, said: dict[str, Any]) -> dict[str, Any]:
    row = {name: getattr(letter, name) for name in _PLACE} | {"group": group, "msg_id": letter.msg_id}
    return row | {name: said.get(name) for name in SCHEMA.names if name not in row}


def letter_of(row: dict[str, Any]) -> MessageExt:
    """Convert a row with a body to a message like those that the admin client receives from a broker.

    If the body does not match the stored checksum, the source has decompressed it, and the message does not
    have the flag COMPRESSED.
    """
    sys_flag, body = row["sys_flag"], row["body"]
    if sys_flag & SysFlag.COMPRESSED and body_crc(body) != row["body_crc"]:
        sys_flag &= ~int(SysFlag.COMPRESSED)
    names = ("topic", "broker_name", "queue_id", "queue_offset", "physical_offset", "flag", "born_host",
             "store_host", "reconsume_times", "body_crc")  # fmt: skip
    return MessageExt(
        **{name: row[name] for name in names},
        body=body,
        sys_flag=sys_flag,
        properties=row["properties"] or {},
        born_timestamp_ms=_ms(row["born_timestamp"]),
        store_timestamp_ms=_ms(row["store_timestamp"]),
    )


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
