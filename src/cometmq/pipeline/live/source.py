"""The reading side of the Spark data source `cometmq`: the messages of topics as rows, in Arrow batches.

A position is one offset per queue. The end of a batch is fixed before reading begins, so a repeated batch
reads the same rows in the same order. Spark calls `partitions` and the stream's methods in Python processes
on the driver, and `read` in the workers. `pushFilters` is deliberately not implemented: in Spark 4.3 a pushed
filter also affects other scans of the same DataFrame.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cometmq import logs
from cometmq.errors import BrokerError, ConfigError, NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ReplicaBehindError
from cometmq.pipeline.base.offsets import (
    LATEST,
    START_KEY,
    Offsets,
    Tree,
    batch_range,
    from_tree,
    to_tree,
    with_start,
)
from cometmq.pipeline.base.options import Position, PullOptions, ReadOptions
from cometmq.pipeline.base.plan import (
    Bounds,
    QueueRange,
    default_tasks,
    limit_bytes,
    limit_ends,
    pack,
    queue_ranges,
    waiting_in,
)
from cometmq.pipeline.live.cluster import Cluster, look_twice
from cometmq.pipeline.live.marks import marks_in, replaced, with_marks
from cometmq.pipeline.live.pulling import BUSY
from cometmq.pipeline.live.reading import read_batches
from cometmq.pipeline.live.unreadable import UnreadableQueues, check_readable, is_unreadable
from cometmq.protocol.record.arrow import COLUMNS, arrow_schema, canonical_column

log = logs.logger(__name__)

_MADE = ("_planner", "_unreadable")  # attributes of a stream's reader that each process makes for itself
_IDLE_POLL_S = 0.1  # Minimum interval, in seconds, between two requests while there are no new messages
_REPLICA_RETRY_S = 0.2
_REGISTERED_S = 30.0  # Interval at which a broker registers (`registerNameServerPeriod`), in seconds


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """The ranges that one Spark task reads, with the brokers' addresses at the time of planning."""

    namesrv: tuple[str, ...]
    ranges: list[QueueRange]
    addresses: dict[str, str]


def check_schema(schema: StructType) -> pa.Schema:
    """Convert a user's schema to Arrow. Raises ConfigError for a repeated, unknown or mistyped column."""
    names = [canonical_column(name) or name for name in schema.names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("schema", ", ".join(twice), "each column once")
    arrow = to_arrow_schema(schema, timezone="UTC")
    for field in arrow:
        column = canonical_column(field.name)
        expected = f"columns of: {', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())}"
        if column is None or (column != "properties" and field.type != COLUMNS[column]):
            raise ConfigError("schema", f"{field.name} {field.type}", expected)
    return arrow


def full_schema() -> StructType:
    """Return the schema with all columns of the source."""
    return from_arrow_schema(arrow_schema())


class _Planner:
    """The division of the offsets to read into Spark tasks, for the batch reader and the stream reader."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.cluster = Cluster.of(options)

    def tasks(self, start: Offsets, end: Offsets) -> list[ReadTask]:
        options = self.options
        # Only brokers that have records to read are queried. Any other broker may be unreachable, and a
        # request to it would then wait until the timeout.
        read = sorted(queue for queue, offset in end.items() if start.get(queue) != offset)
        bounds = self.cluster.bounds(read, missing_ok=True)
        ranges = queue_ranges(start, end, bounds, fail_on_data_loss=options.fail_on_data_loss)
        lost = sum(item.lost for item in ranges)
        if lost:
            log.warning("%d records of the planned range no longer exist at the brokers", lost)
        # The number of local cores is used, because the planning process cannot query the Spark cluster.
        slots = len(os.sched_getaffinity(0))
        tasks = options.min_partitions or default_tasks(sum(item.count for item in ranges), slots)
        groups = pack(ranges, tasks, options.max_records_per_partition)
        addresses = self.cluster.addresses(item.queue for item in ranges)
        return [ReadTask(options.namesrv, group, addresses) for group in groups]


class CometReader(DataSourceReader):
    """The reader of a batch query. Its range is fixed when it is planned, so all actions see equal rows."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._arrow = check_schema(schema)
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        planner, topics = _Planner(self._options), self._options.topics
        with planner.cluster as cluster:
            queues = cluster.queues(topics)
            starting = self._options.starting
            if starting != Position(LATEST):
                fail = self._options.fail_on_data_loss
                check_readable(cluster, topics, fail=fail, group=starting.group)
            queues = [queue for queue in queues if not is_unreadable(cluster, queue)]
            start = cluster.resolve(starting, queues)
            # The end is resolved after the start. In the reverse order, a running consumer group could store
            # an offset in between, and this start would be after the end "latest".
            end = cluster.resolve(self._options.ending, queues)
            ending = self._options.ending
            behind = [
                queue
                for queue, offset in end.items()
                if start[queue] > offset and self._is_given(queue) and ending.offsets.get(queue, -1) < 0
            ]
            for queue in behind:
                _wait_for_replica(cluster, queue, start[queue], self._options.timeout_ms / 1000)
            if behind:
                end = cluster.resolve(ending, queues)
            for queue, offset in end.items():
                if start[queue] > offset and not self._is_given(queue):
                    # If the user gave no offsets, an end before the start is not the user's error: a queue
                    # may have been replaced, or a broker's clock set back. The range is then empty.
                    end[queue] = start[queue]
                elif start[queue] > offset and not self._options.fail_on_data_loss:
                    log.warning("%s: offsets %d to %d are not a valid range", queue, start[queue], offset)
            return planner.tasks(start, end)

    def _is_given(self, queue: MessageQueue) -> bool:
        """Return whether the user gave an offset for the queue's start or end, or a group for the start."""
        starting, ending = self._options.starting, self._options.ending
        given = (starting.offsets.get(queue, -1), ending.offsets.get(queue, -1))
        return max(given) >= 0 or starting.group is not None

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._arrow, self._options)


def _wait_for_replica(cluster: Cluster, queue: MessageQueue, end: int, timeout_s: float) -> None:
    """Wait until the queue is read from its master, or the replica holds `end`. Raises ReplicaBehindError."""
    deadline = time.monotonic() + timeout_s
    while (held := cluster.bounds([queue])[queue]).replica and held.maximum < end:
        address = cluster.address_of(queue)  # Looks up the route again, which lists the master if it is back
        if time.monotonic() >= deadline:
            raise ReplicaBehindError(queue, end, address, held.minimum, held.maximum)
        time.sleep(_REPLICA_RETRY_S)


class CometStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query, for which Spark makes all calls in one driver process.

    Spark logs the position that a batch reaches: an offset for each queue, and the mark (marks.py) of the
    record just before it. If that record has another mark later, the queue has been replaced. The marks are
    compared before any record is read: when a batch is planned, and again after a restart.
    """

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._arrow = check_schema(schema)
        self._options = options
        self._initial: Tree | None = None
        self._latest: Tree | None = None
        self._target: dict[MessageQueue, Bounds] | None = None
        self._planned: Tree | None = None  # End of the last batch that this run has planned
        self._planned_at: float | None = None  # Time when the last batch with records was planned
        self._looked_at = 0.0
        self._silent_since: float | None = None  # Time since which no broker has responded

    @cached_property
    def _planner(self) -> _Planner:
        return _Planner(self._options)

    @cached_property
    def _unreadable(self) -> UnreadableQueues:
        return UnreadableQueues(self._planner.cluster, self._options.topics, ask=False, lenient=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _MADE}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        if self._initial is None:
            cluster = self._planner.cluster
            queues = cluster.queues(self._options.topics)
            initial = cluster.resolve(self._options.starting, queues)
            self._initial = to_tree(initial)
            if self._target is not None:
                # The end of an AvailableNow run was fixed before its start was resolved, so a start at
                # "latest" may be after that end.
                for queue, held in self._target.items():
                    self._target[queue] = Bounds(held.minimum, max(held.maximum, initial.get(queue, 0)))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        cluster = self._planner.cluster
        self._target = _readable(cluster, cluster.bounds(cluster.queues(self._options.topics)))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begin = from_tree(start)
        held = self._target if self._target is not None else self._look(begin)
        if self._target is not None and self._latest is None:
            self._warn_of_left(begin, held)
        self._latest = to_tree({queue: bounds.maximum for queue, bounds in held.items()})
        self._planned = None
        kept = {queue: mark for queue, mark in marks_in(start).items() if queue in begin}
        fail = self._options.fail_on_data_loss
        # A continuous stream checks ten times per second whether queues have been replaced, so it checks only
        # queues with new messages. A run with the trigger AvailableNow checks all queues.
        idle = self._target is not None
        read = begin | self._planner.cluster.replaced(begin, kept, held, fail=fail, idle=idle)
        # A queue whose broker is unreachable has no known bounds and keeps its position. This batch reads
        # nothing from a new queue: it only records the queue's first offset, at which the next batch starts.
        # Thus the start of every range is logged before the range is read.
        latest = read | {
            queue: max(bounds.maximum, read[queue]) if queue in read else bounds.minimum
            for queue, bounds in held.items()
        }
        end = self._ends(read, latest, limit)
        first = self._initial is not None and START_KEY not in start and start == self._initial
        if end == begin == read and not first:
            return start
        same = {queue: mark for queue, mark in kept.items() if end[queue] == begin[queue] == read[queue]}
        moved = {queue: end[queue] - 1 for queue in held if end[queue] and queue not in same}
        # Spark usually logs only the end of a batch, because it is also the start of the next batch. The
        # returned position contains the start, too, if this is the first batch, even an empty one, or if the
        # batch does not start at the end of the previous batch.
        logged = with_start(end, read) if first or read != begin else to_tree(end)
        self._planned = with_marks(logged, same | self._planner.cluster.marks(moved))
        return self._planned

    def _warn_of_left(self, begin: Offsets, held: Mapping[MessageQueue, Bounds]) -> None:
        """Log warnings about queues that a run with the trigger AvailableNow will not read to the end."""
        cluster, topics = self._planner.cluster, self._options.topics
        self._unreadable.report(begin, "They are left for the next run")
        away = [
            queue
            for queue in begin
            if queue not in held and topics.includes(queue) and not is_unreadable(cluster, queue)
        ]
        if away:
            text = "%d queues have no reachable broker, the first is %s; they are read in the next run"
            log.warning(text, len(away), min(away))

    def _ends(self, read: Offsets, latest: Offsets, limit: ReadLimit) -> Offsets:
        """Return the end of the next batch: its start, `read`, if it must wait for more records."""
        waiting = sum(waiting_in(read, latest).values())
        if isinstance(limit, ReadAllAvailable) or not waiting:
            return latest
        options, now = self._options, time.monotonic()
        # As in Kafka's source, the first batch of a run does not wait for `minOffsetsPerTrigger`. A run of
        # AvailableNow never waits, because it reads only what exists.
        waits = self._target is None and waiting < (options.min_offsets_per_trigger or 0)
        if waits and self._planned_at is not None and now - self._planned_at < options.max_trigger_delay_s:
            return {queue: read.get(queue, offset) for queue, offset in latest.items()}
        self._planned_at = now
        ends = limit_ends(read, latest, limit.max_rows) if isinstance(limit, ReadMaxRows) else latest
        if options.max_bytes_per_trigger is not None:
            sizes = self._planner.cluster.sizes(read, ends)
            ends = limit_bytes(read, ends, sizes, options.max_bytes_per_trigger)
        return ends

    def _look(self, begin: Offsets) -> dict[MessageQueue, Bounds]:
        """Return the first and end offsets of queues on the brokers that respond.

        The result is empty if no broker responds. Raises the last error if no broker has responded for longer
        than the sum of two times: the timeout, and the interval at which brokers register at a name server.
        """
        # Without a trigger interval, Spark calls this method 100 times per second, so the method limits the
        # requests.
        time.sleep(max(0.0, self._looked_at + _IDLE_POLL_S - time.monotonic()))
        self._looked_at = time.monotonic()
        cluster, topics = self._planner.cluster, self._options.topics
        try:
            held = look_twice(lambda: cluster.look(topics, begin), begin)
        except (RemotingError, NoRouteError, BrokerError) as error:
            if isinstance(error, BrokerError) and error.code not in BUSY:
                raise
            self._silent_since = self._silent_since or self._looked_at
            patience_s = self._options.timeout_ms / 1000 + _REGISTERED_S
            if self._looked_at - self._silent_since > patience_s:
                raise
            return {}
        self._silent_since = None
        # An unreadable queue keeps its position, like a queue of an unreachable broker.
        self._unreadable.report(begin, "They are read once they can be")
        return _readable(cluster, held)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = batch_range(start, end)
        if end != self._planned:
            self._check_logged(start, end)
        return self._planner.tasks(first, last)

    def _check_logged(self, start: Tree, end: Tree) -> None:
        """Check that the queues of a batch that an earlier run planned have not been replaced since.

        Raises DataLossError if marks differ. Without `failOnDataLoss`, this is only logged: the batch reads
        the records that have its offsets now, and the next one continues as in any replaced queue
        (`marks.resume`).
        """
        cluster = self._planner.cluster
        first, last = batch_range(start, end)
        read = {queue for queue, offset in last.items() if offset != first.get(queue)}
        for tree in (end,) if START_KEY in end else (start, end):
            kept, offsets = marks_in(tree), from_tree(tree)
            held = cluster.bounds(sorted(kept.keys() & offsets.keys() & read), missing_ok=True)
            found = cluster.marks({queue: offsets[queue] - 1 for queue in held})
            for error in replaced(offsets, kept, found, held).values():
                if self._options.fail_on_data_loss:
                    raise error
                log.warning("%s: %s", error.queue, error.problem)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition, self._arrow, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Publish the progress for lag displays. Spark calls this a batch late, never for the last one."""
        if self._options.commit_group is not None:
            for refusal in self._planner.cluster.commit(self._options.commit_group, from_tree(end))[:1]:
                log.warning(
                    "offsets of group %s could not be stored: %s", self._options.commit_group, refusal
                )

    def stop(self) -> None:
        if "_planner" in self.__dict__:
            self._planner.cluster.close()


def _readable(cluster: Cluster, held: dict[MessageQueue, Bounds]) -> dict[MessageQueue, Bounds]:
    return {queue: bounds for queue, bounds in held.items() if not is_unreadable(cluster, queue)}


def _read(partition: InputPartition | None, schema: pa.Schema, pull: PullOptions) -> Iterator[pa.RecordBatch]:
    if not isinstance(partition, ReadTask):  # Spark passes InputPartition(None) if there is nothing to read
        return iter(())
    return read_batches(partition.namesrv, partition.ranges, partition.addresses, schema, pull)
