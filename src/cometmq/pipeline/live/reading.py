"""The reading task in Spark's Python worker, which converts ranges of queues to record batches.

The worker process keeps one idle connection to each broker for its next task. A task pulls with several
concurrent requests (pulling.py). The responses of a batch are joined and decoded together
(protocol/record/arrow.py).
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from cometmq import logs
from cometmq.client.cluster.requests import PULL_STATUS, pull_request
from cometmq.errors import (
    BodyTooLarge,
    BrokerError,
    CometError,
    ConnectError,
    NoRouteError,
    RequestTimeout,
    SendFailed,
)
from cometmq.message import MessageQueue
from cometmq.periodic import Backoff
from cometmq.pipeline.base.errors import BadRecordError, DataLossError, ReplicaBehindError
from cometmq.pipeline.base.options import PullOptions
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.base.wire import Access, IdleWires, Wire
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.pulling import (
    BUSY,
    Chunk,
    PullWindow,
    Reply,
    Request,
    Segment,
    Verdict,
    pull_reply,
)
from cometmq.protocol.codes import MASTER_ID
from cometmq.protocol.compression import decompress
from cometmq.protocol.record.arrow import MAX_RAW_BYTES, BadRecord, ColumnDecoder, Origin

log = logs.logger(__name__)

_NOT_YET_S = 2.0
"""Maximum wait, in seconds, for planned records, which a restarted master lacks until it recovers."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # First and maximum pause between attempts to read, in seconds
_ROLE_S = 1.0  # Seconds for which the reader caches whether the address that it reads from is a replica's


@functools.cache
def idle_wires(access: Access) -> IdleWires:
    """Return this worker process's idle connections for equal access settings, by address and timeout."""
    return IdleWires(access)


_TAGS = "__tags__"


@dataclass(slots=True)
class Part:
    """Records of one broker in order of (queue, offset), including the records that could not be read."""

    batch: pa.RecordBatch
    bad: list[tuple[QueueRange, BadRecord]] = field(default_factory=list)
    lost: dict[MessageQueue, int] = field(default_factory=dict)


def read_batches(
    namesrv: Sequence[str],
    ranges: Sequence[QueueRange],
    addresses: dict[str, str],
    schema: pa.Schema,
    options: PullOptions,
) -> Iterator[pa.RecordBatch]:
    """Return the batches of a Spark read. The options tell whether a bad record is an error or a warning."""
    for part in read_parts(namesrv, ranges, addresses, schema, options):
        for source, bad in part.bad:
            if options.on_bad_record == "fail":
                raise BadRecordError(source.queue, bad.queue_offset, bad.stage, bad.problem)
            text = "skipping a damaged record of %s at offset %s: %s"
            log.warning(text, source.queue, bad.queue_offset, bad.problem)
        for queue, count in part.lost.items():
            log.warning("%d records of %s no longer exist at the broker and are skipped", count, queue)
        if part.batch.num_rows:
            yield part.batch


def read_parts(
    namesrv: Sequence[str],
    ranges: Sequence[QueueRange],
    addresses: dict[str, str],
    schema: pa.Schema,
    options: PullOptions,
) -> Iterator[Part]:
    """Return decoded parts with their bad and lost records, or raise DataLossError if the options say so."""
    for broker_name, group in groupby(
        sorted(ranges, key=_by_broker), key=lambda item: item.queue.broker_name
    ):
        reader = _BrokerReader(
            namesrv, broker_name, addresses.get(broker_name, ""), list(group), schema, options
        )
        yield from reader.parts()


def _by_broker(item: QueueRange) -> tuple[str, MessageQueue, int]:
    return item.queue.broker_name, item.queue, item.start


class _BrokerReader:
    def __init__(
        self,
        namesrv: Sequence[str],
        broker_name: str,
        address: str,
        ranges: list[QueueRange],
        schema: pa.Schema,
        options: PullOptions,
    ) -> None:
        self._namesrv = namesrv
        self._address = address
        self._queue = ranges[0].queue
        self._options = options
        self._window = PullWindow(
            ranges,
            step=options.pull_batch_size,
            depth=options.pulls_in_flight,
            filtered=options.by_tags or options.sql is not None,
            held_bytes=options.batch_bytes,
        )
        self._assembler = _Assembler(schema, broker_name, options)
        self._flying: dict[int, Segment] = {}
        self._patience: dict[Segment, float] = {}  # Time at which to stop waiting, by segment
        self._timeout_s = options.timeout_ms / 1000
        self._pauses = _Pauses(self._timeout_s)
        # Whether the broker's address is a replica's is cached: the time at which the cached value expires,
        # and the value.
        self._role = (0.0, False)
        self._broker_id = MASTER_ID
        self._follows_suggestions = True

    def parts(self) -> Iterator[Part]:
        wire = self._connect()
        try:
            while True:
                complete = [*self._window.ready(), *self._window.begun()]
                try:
                    # The next pulls are sent before the batch is decoded, so that the broker processes them
                    # during the decoding.
                    self._send(wire, list(self._window.requests()))
                except SendFailed as error:
                    wire = self._reconnect(error)
                yield from self._assembler.add(complete)
                if self._window.finished:
                    break
                try:
                    for frame in wire.receive_some() if self._flying else ():
                        self._answered(self._flying.pop(frame.opaque), pull_reply(frame))
                        self._pauses.reset()
                except (SendFailed, RequestTimeout) as error:
                    wire.close()
                    wire = self._reconnect(error)
            yield from self._assembler.rest()
        except BaseException:
            # If Spark needs no more rows (`limit`), it closes this generator, which raises GeneratorExit
            # here. Responses may still be under way on this connection, so it cannot be used again.
            wire.close()
            raise
        idle_wires(self._options.access).keep(wire)

    def _send(self, wire: Wire, requests: list[Request]) -> None:
        if not requests:
            return
        group, sql = self._options.consumer_group, self._options.sql
        expression, kind = (self._options.tags, "TAG") if sql is None else (sql, "SQL92")
        frames = [
            pull_request(group, each.source.queue, at, wanted, expression, expression_type=kind, bulk=True)
            for each, at, wanted in requests
        ]
        for number, item in zip(wire.send(frames), requests, strict=True):
            self._flying[number] = item.segment

    def _answered(self, segment: Segment, reply: Reply) -> None:
        if self._broker_id != MASTER_ID and (reply.missing or reply.code not in PULL_STATUS):
            self._read_at(MASTER_ID)
        if reply.code in BUSY:
            self._on_replica()  # Raises SendFailed if the master is back; the reader then connects to it
        elif reply.missing and self._on_replica():
            if not self._waited(segment, self._timeout_s):
                return
            if reply.next_begin <= segment.at:
                raise ReplicaBehindError(
                    segment.source.queue, segment.at, self._address, reply.minimum, reply.maximum
                )
        verdict = self._window.answered(segment, reply)
        if verdict is Verdict.PROGRESS:
            self._patience.pop(segment, None)
            if reply.suggested != MASTER_ID and self._follows_suggestions:
                self._follows_suggestions = False
                self._read_at(reply.suggested)
        elif verdict is Verdict.NOT_YET:
            if self._waited(segment, _NOT_YET_S):
                self._window.give_up(segment, reply)
        elif reply.code not in BUSY or self._waited(segment, self._timeout_s):
            raise BrokerError(
                reply.code, remark=reply.remark, broker_addr=self._address, topic=segment.source.queue.topic
            )
        if segment.lost and self._options.fail_on_data_loss:
            place = (segment.source.queue, segment.start, segment.end, segment.minimum, segment.maximum)
            raise DataLossError(*place, f"{segment.lost} records are gone")

    def _read_at(self, broker_id: int) -> None:
        """Continue to read from the master or a replica. Raises SendFailed if the connection is to another.

        A task follows a busy master's suggestion to read from a replica only once, because each change of the
        address costs a connection. It returns to the master if the replica lacks the offsets or refuses.
        """
        self._broker_id, self._role = broker_id, (0.0, False)
        self._on_replica()

    def _waited(self, segment: Segment, patience_s: float) -> bool:
        """Return True after `patience_s` seconds of waiting for the segment. Else pause and retry it."""
        until = self._patience.setdefault(segment, time.monotonic() + patience_s)
        if time.monotonic() >= until:
            return True
        time.sleep(_PAUSE_S)
        self._window.retry(segment)
        return False

    def _connect(self) -> Wire:
        if self._address:
            try:
                return idle_wires(self._options.access).connect(self._address, self._timeout_s)
            except ConnectError:
                pass  # The broker may have moved since the planning, so look up its address
        return self._find()

    def _reconnect(self, error: CometError) -> Wire:
        self._flying.clear()
        self._window.lost_connection()
        self._pauses.failed(error)
        return self._find()

    def _find(self) -> Wire:
        """Look up the broker's current address and connect to it. Failures are retried until the timeout."""
        with self._cluster() as cluster:
            while True:
                try:
                    self._address = cluster.address_of(self._queue, self._broker_id)
                    self._role = (0.0, False)
                    return idle_wires(self._options.access).connect(self._address, self._timeout_s)
                except CometError as error:
                    self._pauses.failed(error)

    def _on_replica(self) -> bool:
        """Return whether a replica is read. Raises SendFailed if the broker is now elsewhere."""
        if time.monotonic() >= self._role[0]:
            replica = True
            with suppress(NoRouteError, ConnectError), self._cluster() as cluster:
                address = cluster.address_of(self._queue, self._broker_id)
                if address != self._address:
                    raise SendFailed(
                        self._address, f"broker {self._queue.broker_name} has moved to {address}"
                    )
                replica = cluster.is_replica(self._queue, address)
            self._role = (time.monotonic() + _ROLE_S, replica)
        return self._role[1]

    def _cluster(self) -> Cluster:
        return Cluster(self._namesrv, timeout_ms=self._options.timeout_ms, access=self._options.access)


class _Pauses(Backoff):
    """Growing pauses. `failed` raises the last error if nothing has succeeded for `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(_PAUSE_S, _LONGEST_PAUSE_S)
        self._limit_s = limit_s
        self._since = 0.0

    def failed(self, error: CometError) -> None:
        now = time.monotonic()
        if not self.failures:
            self._since = now
        elif now - self._since >= self._limit_s:
            raise error
        time.sleep(self.next_s())


class _Assembler:
    """A buffer that collects the records of responses until they fill a batch, and then decodes them."""

    def __init__(self, schema: pa.Schema, broker_name: str, options: PullOptions) -> None:
        self._options = options
        self._schema = schema
        wanted = schema
        if options.by_tags:
            # The broker compares only hashes of tags, so the task compares the tags themselves, in an extra
            # column.
            self._tags = pa.array([tag.strip() for tag in options.tags.split("||")], pa.string())
            wanted = schema.append(pa.field(_TAGS, pa.string()))
        self._decoder = ColumnDecoder(
            wanted,
            broker_name=broker_name,
            check_crc=options.check_crc,
            decompress=partial(plain_body, options.max_plain_bytes) if options.decompress else None,
            plain_bytes=options.batch_bytes,
        )
        self._bodies: list[bytes] = []
        self._starts: list[int] = []
        self._sources: list[QueueRange] = []
        # For each queue range in `_sources`, the byte position in the buffer at which the range's records end
        self._ends: list[int] = []
        self._size = 0
        self._bad: list[tuple[QueueRange, BadRecord]] = []
        self._lost: dict[MessageQueue, int] = {}

    def add(self, segments: Iterable[Segment]) -> Iterator[Part]:
        for segment in segments:
            self._bad += [(segment.source, _broken(segment, *item)) for item in segment.broken]
            if segment.lost:
                queue = segment.source.queue
                self._lost[queue] = self._lost.get(queue, 0) + segment.lost
            chunks = segment.chunks
            segment.chunks, segment.broken, segment.lost = [], [], 0
            for chunk in chunks:
                self._add_chunk(segment.source, chunk)
                if (
                    len(self._starts) >= self._options.batch_records
                    or self._size >= self._options.batch_bytes
                ):
                    yield from self.rest()

    def _add_chunk(self, source: QueueRange, chunk: Chunk) -> None:
        base = self._size
        self._bodies.append(chunk.body)
        self._starts.extend([base + start for start in chunk.starts] if base else chunk.starts)
        self._size += len(chunk.body)
        if self._sources and self._sources[-1] is source:
            self._ends[-1] = self._size
        else:
            self._sources.append(source)
            self._ends.append(self._size)

    def rest(self) -> Iterator[Part]:
        """Decode the buffered records, in parts whose decompressed bodies have a limited size."""
        if not (self._bodies or self._bad or self._lost):
            return
        origins = [
            Origin(end, source.queue.topic, source.queue.queue_id)
            for source, end in zip(self._sources, self._ends, strict=True)
        ]
        for batch, found in self._decoder.decode(b"".join(self._bodies), self._starts, origins):
            bad = [(self._sources[bisect_right(self._ends, item.position)], item) for item in found]
            if self._options.by_tags:
                kept = pc.is_in(batch.column(_TAGS), value_set=self._tags)
                batch = batch.filter(kept).select(self._schema.names)
            yield Part(batch, self._bad + bad, self._lost)
            self._bad, self._lost = [], {}
        self._bodies, self._starts, self._sources, self._ends, self._size = [], [], [], [], 0


def plain_body(limit: int, sys_flag: int, body: bytes) -> bytes:
    """Return the decompressed body. Raises BodyTooLarge for a body of more than `limit` bytes."""
    try:
        return decompress(sys_flag, body, limit)
    except BodyTooLarge as error:
        raise BodyTooLarge(error.what, error.limit, "maxPlainBytes") from None


def _broken(segment: Segment, offset: int, raw: bytes) -> BadRecord:
    queue_id, problem = segment.source.queue.queue_id, "the length or magic number cannot be"
    return BadRecord(0, "layout", problem, queue_id, offset, None, raw[:MAX_RAW_BYTES])
