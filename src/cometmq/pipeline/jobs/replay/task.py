"""One Spark task of a replay: send the messages of some source queues, each queue in order.

Messages are sent in batches. When all messages of a batch are acknowledged, the task records its progress and
then checks whether its run may continue. After a kill, only the current batch of each task may be sent twice;
the messages of the second send have the same ids as those of the first.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cometmq.client.producer.selectors import select_by_hash
from cometmq.errors import BrokerError, CometError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ReplayError, SinkRowError
from cometmq.pipeline.base.options import WriteOptions
from cometmq.pipeline.jobs.replay.state import Progress, ReplayState, Sent
from cometmq.pipeline.sink.bad_rows import BadRows
from cometmq.pipeline.sink.rows import RowMessage, message_of
from cometmq.pipeline.sink.sending import Sender
from cometmq.pipeline.sink.sink import MessageIds
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import decompress
from cometmq.protocol.properties.values import BUYER_ID, INSTANCE_ID, is_reserved
from cometmq.protocol.record.one import body_crc

COLUMNS = (
    "topic", "broker_name", "queue_id", "queue_offset", "physical_offset", "store_timestamp",
    "born_timestamp", "msg_id", "tags", "keys", "flag", "sys_flag", "body", "body_crc", "properties",
)  # fmt: skip
"""Columns of the source that a task needs."""
BATCH_MESSAGES = 4096
BATCH_BYTES = 4 << 20
BATCH_S = 2.0  # seconds after which the progress is saved, even if the current batch is not full
SHARDING_KEY = "__SHARDINGKEY"
_BURST_S = 0.05  # Messages that are due within this number of seconds are sent together
_KEPT = (BUYER_ID, INSTANCE_ID)  # Properties of RocketMQ that a replayed message keeps, besides keys and tags


class Share(msgspec.Struct, frozen=True):
    """One task's share of the rate limits: messages and bytes per second."""

    messages: float | None = None
    bytes: float | None = None


class Pace:
    """A rate limiter that computes the time for which a sender must wait."""

    def __init__(self, share: Share, now_s: float) -> None:
        self._share = share
        self._messages_at = self._bytes_at = now_s

    def wait_s(self, now_s: float, size: int) -> float:
        """Count a message of `size` bytes, and return the seconds to wait before it, mostly 0."""
        if self._share.messages is not None:
            self._messages_at = max(self._messages_at, now_s - _BURST_S) + 1 / self._share.messages
        if self._share.bytes is not None:
            self._bytes_at = max(self._bytes_at, now_s - _BURST_S) + size / self._share.bytes
        wait = max(self._messages_at, self._bytes_at) - now_s
        return wait if wait >= _BURST_S else 0.0


@dataclass(frozen=True)
class ReplayTask:
    """The settings that all tasks of a run share.

    Attributes:
        ways: The target topic and queue of each source queue.
        by_key: Whether the key of a message selects one of `queues`.
        queues: The queues of the target topics.
        shares: The rate limits, by task.
    """

    options: WriteOptions
    state: str
    run: str
    replay: str
    ways: Mapping[MessageQueue, MessageQueue]
    queues: Mapping[str, list[MessageQueue]]
    by_key: bool
    shares: Mapping[int, Share]


def in_task(task: ReplayTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Send the rows in order, in `mapInArrow`. The one row returned is a pickled Progress or CometError."""
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        return
    number = first.column("task")[0].as_py()
    sending = Sending(task, number)
    try:
        with Sender(task.options, on_illegal=sending.refused) as sender:
            outcome: Progress | CometError = sending.send_all(sender, _rows(first, batches))
    except CometError as error:
        outcome = error
    yield pa.record_batch([pa.array([pickle.dumps(outcome)], pa.binary())], ["outcome"])


def _rows(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    batch: pa.RecordBatch | None = first
    while batch is not None:
        columns = []
        for name in COLUMNS:
            column = batch.column(name)
            if name.endswith("_timestamp"):
                column = pc.divide(column.cast(pa.int64()), 1000)
            columns.append(column.to_pylist())
        for values in zip(*columns, strict=True):
            yield dict(zip(COLUMNS, values, strict=True))
        batch = next(others, None)


@dataclass
class Sending:
    """The state of one task while it sends."""

    task: ReplayTask
    number: int
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        task = self.task
        self._state = ReplayState(task.state)
        self.progress = self._state.saved(task.run, self.number)
        self._before = self.progress.messages, self.progress.bytes, self.progress.bad
        self._sent = {sent.queue: sent for sent in self.progress.queues}
        self._done_before = {sent.queue: sent.offset for sent in self.progress.queues}
        self._ids: dict[MessageQueue, Callable[[int], str]] = {}
        # The name of the file of bad messages contains the number of bad messages that earlier attempts of
        # this task recorded. An attempt that finds no more of them overwrites the previous attempt's file,
        # and an attempt that finds more keeps that file.
        self._bad = BadRows(self._state.bad_path, f"{task.run}-{self.number}-{self.progress.bad}")
        self._pace = Pace(task.shares.get(self.number, Share()), self.clock())
        self._rows: Counter[MessageQueue] = Counter()

    def refused(self, message: RowMessage, refusal: BrokerError) -> None:
        self._bad.refused(message, refusal)

    def send_all(self, sender: Sender, rows: Iterator[dict[str, Any]]) -> Progress:
        """Send until the end of the rows, or until another run takes over. Raises errors of sending."""
        held, size, since = 0, 0, self.clock()
        self._state.save(self.task.run, self.number, self.progress)
        if not self._state.owned_by(self.task.run):
            return self.progress
        for row in rows:
            sent = self._place(row)
            if sent is None:
                continue
            message = self._message(row, sent.queue)
            if message is not None:
                bytes_ = len(message.body) + len(message.properties)
                if not self._may_send(sender, self._pace.wait_s(self.clock(), bytes_)):
                    break
                sender.send(message, self._target(message, row))
                held, size = held + 1, size + bytes_
            self._done(row, sent)
            if held >= BATCH_MESSAGES or size >= BATCH_BYTES or self.clock() - since >= BATCH_S:
                self._write_down(sender)
                held, size, since = 0, 0, self.clock()
                if not self._state.owned_by(self.task.run):
                    return self.progress
        self._write_down(sender)
        return self.progress

    def _may_send(self, sender: Sender, wait_s: float) -> bool:
        """Wait as the rate limit requires. Return False if another run has taken over."""
        if wait_s:
            sender.flush()
        while wait_s > BATCH_S:
            self.sleep(BATCH_S)
            wait_s -= BATCH_S
            if not self._state.owned_by(self.task.run):
                return False
        if wait_s:
            self.sleep(wait_s)
        return True

    def _write_down(self, sender: Sender) -> None:
        """Wait until all messages are acknowledged, then save the progress of this task."""
        sender.flush()
        self._bad.flush()
        progress, (messages, bytes_, bad) = self.progress, self._before
        progress.messages = messages + sender.messages
        progress.bytes = bytes_ + sender.bytes
        progress.bad = bad + self._bad.count
        progress.queues = list(self._sent.values())
        progress.doubled = progress.rows - progress.messages - progress.bad - progress.own
        self._state.save(self.task.run, self.number, progress)

    def _place(self, row: dict[str, Any]) -> Sent | None:
        """Return the progress of the row's queue, or None if the row was handled. Raises ReplayError."""
        queue = MessageQueue(row["topic"], row["broker_name"], row["queue_id"])
        sent, offset, place = self._sent.get(queue), row["queue_offset"], row["physical_offset"]
        if sent is None:
            sent = self._sent[queue] = Sent(queue)
        self._rows[queue] += 1
        same = (offset, place) == (sent.offset, sent.physical_offset)
        if same or offset <= self._done_before.get(queue, -1):
            # The row was handled by an earlier attempt of this task. The saved number of rows may include
            # the row already, so the number is not increased but is at least the number read by this attempt.
            sent.rows = max(sent.rows, self._rows[queue])
            return None
        if offset == sent.offset or place <= sent.physical_offset:
            raise began_anew(queue)
        return sent

    def _done(self, row: dict[str, Any], sent: Sent) -> None:
        sent.offset, sent.physical_offset = row["queue_offset"], row["physical_offset"]
        sent.rows = max(sent.rows, self._rows[sent.queue])

    def _message(self, row: dict[str, Any], queue: MessageQueue) -> RowMessage | None:
        """Return the message for a row, or None if the row must not be sent."""
        if ("REPLAY_ID", self.task.replay) in (row["properties"] or ()):
            # This replay itself sent the message, to a topic that is also a source. It is not sent again.
            self.progress.own += 1
            return None
        offset = row["queue_offset"]
        make_id = self._ids.get(queue)
        if make_id is None:
            make_id = MessageIds(self.task.replay, f"{queue.topic}/{queue.broker_name}", queue.queue_id)
            self._ids[queue] = make_id
        try:
            return replayed(row, self.task.ways[queue].topic, make_id(offset), self.task.replay)
        except SinkRowError as error:
            given = {
                name: row[name] for name in ("topic", "body", "tags", "keys", "properties", "flag", "msg_id")
            }
            reason = {"field": error.field, "problem": error.problem}
            self._bad.add(given | reason | {"delay_level": None, "sharding_key": None})
            return None

    def _target(self, message: RowMessage, row: dict[str, Any]) -> MessageQueue:
        if self.task.by_key and message.sharding_key is not None:
            return select_by_hash(self.task.queues[message.topic], None, message.sharding_key)
        return self.task.ways[MessageQueue(row["topic"], row["broker_name"], row["queue_id"])]


def began_anew(queue: MessageQueue) -> ReplayError:
    problem = (
        "the source has messages of it from before and after it began anew, and their offsets give no order; "
        "choose a time window that holds one of the two"
    )
    return ReplayError(f"queue {queue.topic} {queue.broker_name} {queue.queue_id}", problem)


def replayed(row: Mapping[str, Any], target: str, msg_id: str, replay: str) -> RowMessage:
    """Return the message to send for a row of COLUMNS. Raises SinkRowError.

    The message has the row's body (decompressed), keys, tags, flag and the user's properties, without
    RocketMQ's own properties. REPLAY_… properties record its origin.
    """
    given = [pair for pair in row["properties"] or () if not is_reserved(pair[0]) or pair[0] in _KEPT]
    origin = {
        "REPLAY_ID": replay,
        "REPLAY_TOPIC": row["topic"],
        "REPLAY_BROKER": row["broker_name"],
        "REPLAY_QUEUE": str(row["queue_id"]),
        "REPLAY_OFFSET": str(row["queue_offset"]),
        "REPLAY_MSG_ID": row["msg_id"],
        "REPLAY_BORN_TIME": str(row["born_timestamp"]),
        "REPLAY_STORE_TIME": str(row["store_timestamp"]),
    }
    sharding_key = next((value for name, value in given if name == SHARDING_KEY), None)
    if sharding_key is None and row["keys"]:
        sharding_key = next(iter(row["keys"].split()), None)
    return message_of(
        row["queue_offset"], target, _plain_body(row), msg_id,
        tags=row["tags"], keys=row["keys"], properties=[*given, *origin.items()], flag=row["flag"],
        sharding_key=sharding_key,
    )  # fmt: skip


def _plain_body(row: Mapping[str, Any]) -> bytes:
    """Return the decompressed body of a row.

    Some sources decompress bodies, others do not. The stored checksum is that of the compressed body: a body
    that matches the checksum is still compressed if the message has the flag COMPRESSED.
    """
    body: bytes | None = row["body"]
    if body is None:
        raise SinkRowError(row["queue_offset"], "body", "is not in the source, an archive without bodies")
    if row["sys_flag"] & SysFlag.COMPRESSED and body_crc(body) == row["body_crc"]:
        try:
            return decompress(row["sys_flag"], body)
        except CometError as error:
            raise SinkRowError(row["queue_offset"], "body", str(error)) from None
    return body
