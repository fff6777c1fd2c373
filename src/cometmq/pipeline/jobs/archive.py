"""The archive job: write the messages of topics to a Parquet table, each message exactly once.

Spark plans, schedules and retries the tasks. One Python task pulls, decodes and writes the messages of its
ranges (table/task.py). The driver commits each batch in one step (table/directory.py). The directory is the
only state: a job that is killed at any point and restarted continues after the last commit. The end of a
range is fixed before the range is read, so each message is in exactly one committed range. A batch whose
record counts do not match its ranges is not committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from cometmq import logs
from cometmq.errors import BrokerError, CometError, ConfigError, Transient
from cometmq.message import MessageQueue
from cometmq.pipeline.base.declare import check_pattern, job
from cometmq.pipeline.base.engine import run_units, slots
from cometmq.pipeline.base.errors import ArchiveError, DataLossError
from cometmq.pipeline.base.job_options import ArchiveOptions, ArchiveProgress
from cometmq.pipeline.base.offsets import EARLIEST, Offsets, from_tree, to_tree
from cometmq.pipeline.base.options import Position, PullOptions, Topics, parse_addresses, parse_position
from cometmq.pipeline.base.plan import Bounds, QueueRange, default_tasks, limit_ends, pack, queue_ranges
from cometmq.pipeline.base.wire import Access
from cometmq.pipeline.live.cluster import Cluster, look_twice
from cometmq.pipeline.live.marks import Marks, marks_in, replaced, with_marks
from cometmq.pipeline.live.reading import read_parts
from cometmq.pipeline.live.unreadable import UnreadableQueue, UnreadableQueues
from cometmq.pipeline.table.bodies import Bodies
from cometmq.pipeline.table.body_schema import body_options, column_in, with_column
from cometmq.pipeline.table.directory import LONGEST_VALUE, partition_value
from cometmq.pipeline.table.formats import open_table
from cometmq.pipeline.table.groups import MOST_GROUPS, GroupLog, stored_groups
from cometmq.pipeline.table.task import ArchiveTask, QueueCount, TaskResult, run_task
from cometmq.protocol.codes import TOOLS_CONSUMER_GROUP
from cometmq.protocol.record.arrow import arrow_schema

_SAMPLE = 100  # Maximum queues, and messages per queue, from whose JSON bodies the columns are derived

log = logs.logger(__name__)


class QueueSummary(msgspec.Struct):
    """The result for a queue, or for each of its lives, of which `start` to `end` - 1 were read."""

    topic: str
    broker_name: str
    queue_id: int
    start: int
    end: int
    records: int = 0
    bad: int = 0
    lost: int = 0


class ArchiveSummary(msgspec.Struct):
    """The result of a run of the `archive` job. `msgspec.json.encode` converts it to JSON."""

    output: str
    batches: int = 0
    records: int = 0
    bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    bad: int = 0
    lost: int = 0
    seconds: float = 0.0
    resumed_behind_batch: int | None = None
    queues: list[QueueSummary] = []
    away: list[str] = []
    """Brokers with messages that are unreachable, or read at a replica, which may lack the newest ones."""
    unreadable: list[UnreadableQueue] = []
    """Queues whose unarchived messages the brokers refuse to return (live/unreadable.py)."""
    replaced: int = 0
    """Queues that were deleted and created again. How many messages this lost is unknown."""
    put_off: str | None = None
    """The last error of a continuous run that was stopped while it waited for its next attempt."""
    checkpoint_problem: str | None = None
    """Why the log's newest checkpoint could not be written. The batches are committed nevertheless."""
    groups_left_out: int = 0
    """Number of consumer groups whose offsets were not recorded because a limit was exceeded."""

    @property
    def complete(self) -> bool:
        """Whether all was archived: nothing damaged, lost, away, unreadable, replaced or put off."""
        missing = self.bad or self.lost or self.away or self.unreadable
        return not (missing or self.replaced or self.put_off)


@job(ArchiveOptions)
def archive(spark: SparkSession, given: ArchiveOptions) -> ArchiveSummary:
    """Archive the messages of topics in a Parquet, Delta or Iceberg table.

    A run continues each queue after the offset that the archive's last commit records.

    Returns:
        The counts of this run by queue, and the problems.

    Raises:
        ConfigError: An argument is invalid.
        DataLossError: Messages were lost before they were archived, and `fail_on_data_loss` is set.
        ArchiveError: The directory is in use or is not an archive, or `max_bad_records` was exceeded.
        NoRouteError: A topic has no route. Other network errors are raised as they are.
    """
    _check_task(given)
    with closing(Job(spark, given)) as archiving:
        return archiving.run()


def _check_task(given: ArchiveOptions) -> None:
    if not given.output:
        raise ConfigError("output", given.output, "a directory: a path, or a URI such as hdfs:// or s3://")
    if bool(given.topics) == bool(given.pattern):
        raise ConfigError("topics", ", ".join(given.topics), "topic names or a pattern, not both")
    check_pattern("pattern", given.pattern or "")
    _check_compression(given.compression, given.compression_level)


def _check_compression(codec: str, level: int | None) -> None:
    """Raise ConfigError if the installed pyarrow does not support the compression codec or its level."""
    for key, value, given in (("compression", codec, None), ("compression_level", level, level)):
        try:
            table = pa.table({"tried": [0]})
            pq.write_table(table, pa.BufferOutputStream(), compression=codec, compression_level=given)
        except (pa.ArrowException, OSError, ValueError) as error:
            expected = f"zstd, snappy, gzip, lz4, brotli or none, and a level that it has ({error})"
            raise ConfigError(key, str(value), expected) from None


class Job:
    """One run of the archive job: its options, and the values derived from the options."""

    def __init__(self, spark: SparkSession, given: ArchiveOptions) -> None:
        self.spark, self.given = spark, given
        self.pull = PullOptions(
            consumer_group=given.consumer_group or TOOLS_CONSUMER_GROUP,
            pull_batch_size=given.pull_batch_size, pulls_in_flight=given.pulls_in_flight,
            timeout_ms=given.timeout_ms, check_crc=given.check_crc, decompress=given.decompress,
            max_plain_bytes=given.max_plain_bytes, fail_on_data_loss=given.fail_on_data_loss,
            on_bad_record="skip", access=Access.of_environment(),
        )  # fmt: skip
        self.namesrv = parse_addresses(given.namesrv)
        self.topics = Topics(names=tuple(dict.fromkeys(given.topics)), pattern=given.pattern)
        self.starting = parse_position(given.starting, "starting", EARLIEST)
        self.bodies = body_options(given.body_format, given.body_schema, given.keep_body)
        self.table = open_table(given.output, given.table_format, given.catalogue)
        self.cluster = Cluster(self.namesrv, timeout_ms=self.pull.timeout_ms, access=self.pull.access)
        self.unreadable = UnreadableQueues(self.cluster, self.topics)
        self.summary = ArchiveSummary(self.table.output)
        self.group_log = GroupLog(self.table.filesystem, self.table.root)
        self.queues: dict[MessageQueue, QueueSummary] = {}
        self.started = time.monotonic()
        self.expected = 0  # number of records that this run archives, as far as is known
        self.batch = 0  # number of the next batch
        self.known: Offsets = {}  # the next offset to archive, by queue
        self.marks: Marks = {}
        self.column: pa.StructType | None = None  # type of the column of parsed bodies in the archive's table
        self.parsing: Bodies | None = None

    def close(self) -> None:
        self.cluster.close()
        self.table.close()

    def run(self) -> ArchiveSummary:
        summary, last = self.summary, self.table.prepare()
        stop = self.given.stop or threading.Event()
        interval_s = self.given.interval_s if self.given.mode == "continuous" else None
        if last is not None:
            summary.resumed_behind_batch = last["batch"]
            self.batch, self.known = last["batch"] + 1, from_tree(last["offsets"])
            self.marks, self.column = marks_in(last), column_in(last)
        while True:
            try:
                summary.put_off = None
                self._round(stop)
            except CometError as error:
                if isinstance(error, DataLossError):
                    error.setting = "fail_on_data_loss=False"
                if isinstance(error, BrokerError) and self._became_unreadable():
                    continue
                if interval_s is None or not isinstance(error, Transient):
                    raise
                summary.put_off = str(error)
                log.warning("batch %d is postponed: %s", self.batch, error)
            if interval_s is None or stop.wait(interval_s):
                summary.queues += [self.queues[queue] for queue in sorted(self.queues)]
                summary.checkpoint_problem = self.table.checkpoints.problem
                return summary

    def _round(self, stop: threading.Event) -> None:
        """Archive the messages that the brokers hold at the time of the call."""
        held = look_twice(lambda: self.cluster.bounds(self.cluster.queues(self.topics)), self.known)
        # Bounds from a replica are not certain, because the replica may lack the newest messages.
        certain = [queue for queue, bounds in held.items() if not bounds.replica]
        away = self.cluster.away(self.topics, self.known, certain)
        if away != self.summary.away:
            log.warning("brokers whose masters cannot be read: %s", ", ".join(away) or "none")
        self.summary.away = away
        self._look_for_unreadable()
        self._begin_anew(held)
        self._enter(held)
        end = {
            queue: max(held[queue].maximum, offset) if queue in held else offset
            for queue, offset in self.known.items()
        }
        self.expected = self.summary.records + sum(end.values()) - sum(self.known.values())
        while not stop.is_set() and end != self.known:
            if not self._one_batch(self.known, limit_ends(self.known, end, self.given.batch_records), held):
                self._round(stop)
                return
        if self.given.groups and self.known:
            self._keep_groups(certain)

    def _look_for_unreadable(self) -> None:
        self.summary.unreadable = self.unreadable.report(
            self.known, "They are archived once they can be read"
        )

    def _became_unreadable(self) -> bool:
        """Return whether a change of a topic has made queues unreadable since the run last checked."""
        before = {item.queue for item in self.summary.unreadable}
        with suppress(CometError):  # a failure of this check must not hide the error of the batch
            self.cluster.queues(self.topics)  # refreshes the routes, which the next call uses
            self._look_for_unreadable()
        return not before.issuperset(item.queue for item in self.summary.unreadable)

    def _keep_groups(self, queues: list[MessageQueue]) -> None:
        """Record the groups' offsets, but none beyond the archived part of its queue."""
        named = [name for name in self.given.groups if name != "*"]
        stored = stored_groups(self.cluster, queues) if "*" in self.given.groups else ()
        names = list(dict.fromkeys([*named, *stored]))
        stand = {name: self.cluster.committed(name, queues) for name in names[:MOST_GROUPS]}
        try:
            out = len(names[MOST_GROUPS:]) + self.group_log.keep(self.batch - 1, stand, self.known)
        except OSError as error:
            problem = f"positions of groups cannot be kept: {error.strerror or error}"
            raise ArchiveError(self.table.output, problem) from None
        if out and out != self.summary.groups_left_out:
            log.warning("%s: positions of %d consumer groups could not be stored", self.table.output, out)
        self.summary.groups_left_out = out

    def _begin_anew(self, held: dict[MessageQueue, Bounds]) -> None:
        """Commit the start offsets of queues that were deleted and created again."""
        fail = self.pull.fail_on_data_loss
        anew = self.cluster.replaced(self.known, self.marks, held, fail=fail, idle=True)
        if not anew:
            return
        rows = [
            _range(queue, start, start, QueueCount()) | {"replaces": self.known[queue]}
            for queue, start in sorted(anew.items())
        ]
        offsets = self.known | anew
        self._commit(offsets, self._marks_at(offsets, held, anew), rows)
        self.summary.replaced += len(anew)
        self.summary.queues += [self.queues.pop(queue) for queue in sorted(anew) if queue in self.queues]

    def _enter(self, held: dict[MessageQueue, Bounds]) -> None:
        """Commit the starts of new queues before they are read, so that "latest" keeps its meaning."""
        topics = {queue.topic for queue in self.known}
        new = sorted(held.keys() - self.known.keys())
        if not new:
            return
        fresh = [queue for queue in new if queue.topic not in topics]
        for name in dict.fromkeys(queue.topic for queue in fresh):
            if len(partition_value(name).encode()) > LONGEST_VALUE:
                expected = (
                    f"names of which directories can be made: up to {LONGEST_VALUE} bytes with %XX escapes"
                )
                raise ConfigError("topics", name, expected)
        starting = self.starting
        if topics:
            wanted = {queue: offset for queue, offset in starting.offsets.items() if queue in fresh}
            starting = Position(starting.word, wanted)
        grown = {queue: held[queue].minimum for queue in new if queue.topic in topics}
        first = self.cluster.resolve(starting, fresh)
        for queue, offset in starting.offsets.items():
            if offset > held[queue].maximum and not held[queue].replica:
                expected = f"no offset behind the end of the queue, {held[queue].maximum}"
                raise ConfigError("starting", f"{queue}: {offset}", expected)
        offsets = self.known | grown | first
        self._commit(offsets, self._marks_at(offsets, held))

    def _marks_at(
        self, offsets: Offsets, held: dict[MessageQueue, Bounds], anew: Container[MessageQueue] = ()
    ) -> Marks:
        """Return the marks of the records before `offsets`: the known ones, and the others of the brokers."""
        same = {
            queue: mark
            for queue, mark in self.marks.items()
            if offsets[queue] == self.known[queue] and queue not in anew
        }
        wanted = {queue: offsets[queue] - 1 for queue in offsets.keys() & held.keys() - same.keys()}
        return same | self.cluster.marks({queue: at for queue, at in wanted.items() if at >= 0})

    def _commit(
        self,
        offsets: Offsets,
        marks: Marks,
        ranges: Sequence[dict[str, Any]] = (),
        results: Sequence[TaskResult] = (),
        seconds: float = 0.0,
    ) -> None:
        """Commit the files and ranges of a batch together with the next offsets to archive."""
        commit: dict[str, Any] = {
            **self.table.described(self.batch, seconds),
            "offsets": to_tree(offsets),
            "ranges": ranges,
            "files": [file for result in results for file in result.files],
            "quarantine": [file for result in results for file in result.quarantine],
        }
        commit = with_column(with_marks(commit, marks), self.column)
        self.table.commit(commit)
        self.batch, self.known, self.marks = commit["batch"] + 1, offsets, marks

    def _one_batch(self, start: Offsets, end: Offsets, held: dict[MessageQueue, Bounds]) -> bool:
        """Read and commit one batch. Return False, without a commit, if a queue was replaced meanwhile."""
        began, batch = time.monotonic(), self.batch
        marks = self._marks_at(end, held)
        ranges = queue_ranges(start, end, held, fail_on_data_loss=self.pull.fail_on_data_loss)
        results = self.read_batch(batch, [item for item in ranges if item.count])
        counted = _added_up(ranges, results)
        self._check(counted, start, end, results)
        if self._replaced_meanwhile(counted, ((start, self.marks), (end, marks)), held):
            return False
        rows = [_range(queue, start[queue], end[queue], count) for queue, count in counted.items()]
        self._commit(end, marks, rows, results, time.monotonic() - began)
        self._count(start, end, counted, results)
        if (group := self.given.consumer_group) is not None:
            for refusal in self.cluster.commit(group, end)[:1]:
                log.warning("offsets of group %s could not be stored: %s", group, refusal)
        self._report(batch, 0)
        return True

    def _replaced_meanwhile(
        self,
        queues: Iterable[MessageQueue],
        edges: Iterable[tuple[Offsets, Marks]],
        held: dict[MessageQueue, Bounds],
    ) -> bool:
        """Return whether a record before a start or an end has changed: rows may be of two queues."""
        for offsets, marks in edges:
            kept = {queue: marks[queue] for queue in queues if queue in marks}
            found = self.cluster.marks({queue: offsets[queue] - 1 for queue in kept})
            for queue, error in replaced(offsets, kept, found, held).items():
                log.warning(
                    "batch %d is read again because of queue %s: %s", self.batch, queue, error.problem
                )
                return True
        return False

    def read_batch(self, batch: int, ranges: list[QueueRange]) -> list[TaskResult]:
        """Read the ranges in one Spark job. Raises the first error of its tasks."""
        records = sum(item.count for item in ranges)
        groups = pack(ranges, default_tasks(records, slots(self.spark)))
        if not groups:
            return []
        addresses = self.cluster.addresses(item.queue for item in ranges)
        self._choose_columns(ranges, addresses)
        staging = self.table.staging(batch)
        codec, level = self.given.compression, self.given.compression_level
        place = (self.namesrv, self.table.uri, staging)
        extra = (self.table.topic_in_files, self.parsing)
        tasks = [
            ArchiveTask(batch, group, addresses, *place, codec, level, self.pull, *extra) for group in groups
        ]

        def report(done: int) -> None:
            self._report(batch, records * done // len(tasks))

        on_progress = report if self.given.on_progress else None
        return run_units(self.spark, f"archive batch {batch}", run_task, tasks, on_progress=on_progress)

    def _choose_columns(self, ranges: list[QueueRange], addresses: dict[str, str]) -> None:
        """Determine the columns of parsed bodies before the first batch of the run."""
        if self.bodies is not None and self.parsing is None:
            first = [replace(item, end=min(item.end, item.start + _SAMPLE)) for item in ranges[:_SAMPLE]]
            parts = read_parts(self.namesrv, first, addresses, arrow_schema(["body"]), self.pull)
            sample = (body for part in parts for body in part.batch.column("body").to_pylist())
            self.parsing = self.bodies.bodies(self.column, sample, widen=self.table.kind != "delta")
            self.column = self.parsing.column

    def _check(
        self, counted: dict[MessageQueue, QueueCount], start: Offsets, end: Offsets, results: list[TaskResult]
    ) -> None:
        for queue, count in counted.items():
            if count.records + count.bad + count.lost != end[queue] - start[queue]:
                problem = (
                    f"{queue} offsets {start[queue]} to {end[queue]} gave {count.records} messages, "
                    f"{count.bad} bad, {count.lost} lost ones: not committed"
                )
                raise ArchiveError(self.table.output, problem)
        rows = sum(file["rows"] for result in results for file in result.files)
        if rows != sum(count.records for count in counted.values()):
            problem = f"the batch's files hold {rows} rows, not what was read: not committed"
            raise ArchiveError(self.table.output, problem)
        bad = self.summary.bad + sum(count.bad for count in counted.values())
        limit = self.given.max_bad_records
        if limit is not None and bad > limit:
            problem = f"{bad} bad records, the limit is {limit}: not committed"
            raise ArchiveError(self.table.output, problem, "max_bad_records")

    def _count(
        self, start: Offsets, end: Offsets, counted: dict[MessageQueue, QueueCount], results: list[TaskResult]
    ) -> None:
        summary = self.summary
        summary.batches += 1
        for file in (file for result in results for file in result.files):
            summary.files += 1
            summary.file_bytes += file["bytes"]
        for queue, count in counted.items():
            place = (queue.topic, queue.broker_name, queue.queue_id)
            known = self.queues.setdefault(queue, QueueSummary(*place, start[queue], end[queue]))
            known.end = end[queue]
            summary.bytes += count.bytes
            for total in (summary, known):
                total.records += count.records
                total.bad += count.bad
                total.lost += count.lost

    def _report(self, batch: int, running: int) -> None:
        if self.given.on_progress is not None:
            summary, seconds = self.summary, time.monotonic() - self.started
            records = summary.records + running
            run = self.table.run_id
            self.given.on_progress(
                ArchiveProgress(run, batch, records, self.expected, summary.bytes, seconds)
            )


def _added_up(ranges: list[QueueRange], results: list[TaskResult]) -> dict[MessageQueue, QueueCount]:
    """Return the counts of each queue: those of the tasks, and what was lost when ranges were planned."""
    counted = {item.queue: QueueCount(lost=item.lost) for item in ranges}
    for result in results:
        for queue, count in result.queues.items():
            counted[queue].add(count)
    return dict(sorted(counted.items()))


def _range(queue: MessageQueue, start: int, end: int, count: QueueCount) -> dict[str, Any]:
    """Return a commit's entry for the range of one queue."""
    return msgspec.structs.asdict(queue) | {"start": start, "end": end} | asdict(count)
