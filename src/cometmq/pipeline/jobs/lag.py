"""The lag job: sample the lag of consumer groups, in messages and in time, into a table.

A sample requests the lag of all groups in all queues from the brokers concurrently. Spark computes rates and
forecasts from the samples. The time lag of a queue is the age of the first message that the group has not
consumed. For example, in a topic with one message per hour, the time lag is one second if the newest message
has been waiting for a second.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import asdict
from pyarrow import fs
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from cometmq import logs
from cometmq.admin.admin import Admin
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.values import GroupProgress
from cometmq.client.cluster.workers import for_each
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import BrokerError, CometError, ConfigError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.engine import run_action
from cometmq.pipeline.base.job_options import LagOptions
from cometmq.pipeline.base.options import Topics, parse_addresses
from cometmq.pipeline.base.plan import Bounds
from cometmq.pipeline.base.wire import Access
from cometmq.pipeline.jobs.archive_query import by_workers
from cometmq.pipeline.jobs.results import own_directory, structs, sums
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.unreadable import UnreadableQueues
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.objects import joined, shown
from cometmq.text import local_time

log = logs.logger(__name__)

WINDOWS_S = (60, 300, 3600)
_SLACK = 1.1  # factor that lengthens a window, because samples may be slightly late
_GROUPS_AT_ONCE = 16
_MOST = 50  # maximum rows of a list in the summary
_PROBLEMS = 10  # the summary contains at most the first 10 and the latest 10 problems
_FILE = re.compile(r"(?:_[0-9a-f]{12}-)?lag-([0-9]{13})\.parquet")  # name of a final or temporary sample file
_SPARK_READS = ("local", "hdfs")  # file systems that Spark from PyPI can read
_RECENT = 1000  # maximum number of sample files read for the newest hour
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_JOB = "lag"


class QueueLag(msgspec.Struct):
    """The lag of a group in a queue at one moment. Times are in ms.

    Attributes:
        lost: Messages that were deleted before the group consumed them.
        time_lag_ms: Age of the first message that the group has not consumed. 0 if the group has consumed all
            messages, None if the age is unknown.
    """

    sampled_ms: int
    group: str
    topic: str
    broker_name: str
    queue_id: int
    min_offset: int
    max_offset: int
    group_offset: int
    lag: int
    lost: int
    time_lag_ms: int | None


SCHEMA = pa.schema(
    [
        ("sampled_ms", pa.int64()),
        *((name, pa.string()) for name in ("group", "topic", "broker_name")),
        ("queue_id", pa.int32()),
        *((name, pa.int64()) for name in QueueLag.__struct_fields__[5:]),
    ]
)
_QUEUE = ("group", "topic", "broker_name", "queue_id")


class GroupLag(msgspec.Struct):
    """The lag of a group over all its queues and all samples of a window. Rates are in messages/s.

    Attributes:
        time_lag_ms: The largest time lag among the queues.
        expires_in_s: Seconds until retention deletes the first message that the group has not consumed, if
            the rates of the window continue. None: never.
    """

    group: str
    window_s: int
    queues: int
    samples: int
    lag: int
    max_lag: int
    lost: int
    time_lag_ms: int | None
    consumed_per_s: float | None
    stored_per_s: float | None
    expires_in_s: float | None


class LagSummary(msgspec.Struct):
    """The result of a run of the `lag` job.

    Attributes:
        samples: Number of samples taken.
        groups: The groups with the largest lag, with a row for each window that has samples.
        queues: The last sample of the queues with the largest lag.
        problems: The first and the latest of the `problem_count` failed requests.
    """

    output: str | None = None
    samples: int = 0
    group_count: int = 0
    groups: list[GroupLag] = []
    queues: list[QueueLag] = []
    problem_count: int = 0
    problems: list[str] = []
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether the requests for all groups and queues succeeded in each sample."""
        return not self.problem_count


def sample(
    namesrv: str, groups: Sequence[str] = (), *, timeout_ms: int = 30_000
) -> tuple[list[QueueLag], list[str]]:
    """Return the current lag of groups, and a description of each failed request.

    Without names, all groups are sampled. Raises UnknownNameError for a named group that does not exist, and
    network errors if no broker of a named group answers.
    """
    addresses = parse_addresses(namesrv)
    thread = LoopThread.acquire()
    try:
        found, problems = thread.run(_ask(namesrv, groups))
    finally:
        thread.release()
    places = [
        (group.group, MessageQueue(row.topic, row.broker_name, row.queue_id), row.consumer_offset)
        for group in found
        for row in group.queues
    ]
    with Cluster(addresses, timeout_ms=timeout_ms, access=Access.of_environment()) as cluster:
        unreadable = _unreadable(cluster, places, problems)
        places += unreadable
        queues = sorted({queue for _, queue, _ in places})
        bounds = cluster.bounds(queues, missing_ok=True)
        away = {queue.broker_name for queue in queues if queue not in bounds}
        problems += [f"broker {name} does not answer" for name in sorted(away)]
        places = [place for place in places if place[1] in bounds]
        wanted = {
            (place[1], max(place[2], bounds[place[1]].minimum))
            for place in places
            if place not in unreadable and place[2] < bounds[place[1]].maximum
        }
        stored = _store_times(cluster, wanted, problems)
    now_ms = time.time_ns() // 1_000_000
    return [_queue_lag(*place, bounds[place[1]], stored, now_ms) for place in places], problems


def _unreadable(
    cluster: Cluster, places: Sequence[tuple[str, MessageQueue, int]], problems: list[str]
) -> list[tuple[str, MessageQueue, int]]:
    """Return group, queue and offset of each lag that no broker reports: that of unreadable queues."""
    topics: dict[str, set[str]] = {}
    for group, queue, _ in places:
        topics.setdefault(group, set()).add(queue.topic)
    every = Topics(tuple(sorted({queue.topic for _, queue, _ in places})))
    found = [item.queue for item in UnreadableQueues(cluster, every, lenient=True).find({})]
    added = []
    for group, own in topics.items():
        queues = sorted(queue for queue in found if queue.topic in own)
        stored = cluster.committed(group, queues)
        for queue, held in cluster.bounds(queues, missing_ok=True).items():
            offset = max(stored.get(queue, 0), held.minimum)
            if offset < held.maximum:
                added.append((group, queue, stored.get(queue, held.minimum)))
                problems.append(
                    f"group {group}: {held.maximum - offset} messages of {queue.topic} lie in "
                    f"{queue.broker_name}/{queue.queue_id}, which cannot be read"
                )
    return added


def _queue_lag(
    group: str,
    queue: MessageQueue,
    offset: int,
    held: Bounds,
    stored: Mapping[tuple[MessageQueue, int], int],
    now_ms: int,
) -> QueueLag:
    # The group's offset may exceed the maximum offset in `held`: the bounds may come from a replica that
    # lacks messages which the group has consumed.
    end = max(held.maximum, offset)
    first = max(offset, held.minimum)
    time_lag_ms = None if first < end else 0
    if (queue, first) in stored:
        time_lag_ms = max(now_ms - stored[queue, first], 0)
    place = (queue.topic, queue.broker_name, queue.queue_id)
    offsets = (held.minimum, end, offset, end - offset, first - offset)
    return QueueLag(now_ms, group, *place, *offsets, time_lag_ms)


def _store_times(
    cluster: Cluster, wanted: set[tuple[MessageQueue, int]], problems: list[str]
) -> dict[tuple[MessageQueue, int], int]:
    """Return the store times of the messages at these offsets that a broker returns."""
    stored: dict[tuple[MessageQueue, int], int] = {}
    while True:
        try:
            for each in _rounds(wanted):
                found = cluster.marks(each).items()
                stored |= {(queue, each[queue]): mark.stored_ms for queue, mark in found}
            return stored
        except BrokerError as error:  # The error concerns one topic, so only the other topics are retried.
            left = {place for place in wanted if place[0].topic != error.topic}
            problems.append(str(error))
            if len(left) == len(wanted):
                return stored
            wanted = left - stored.keys()


def _rounds(wanted: set[tuple[MessageQueue, int]]) -> list[dict[MessageQueue, int]]:
    """Divide offsets, of which groups may have several in a queue, into few mappings of one per queue."""
    rounds: list[dict[MessageQueue, int]] = []
    used: dict[MessageQueue, int] = {}
    for queue, offset in sorted(wanted):
        number = used.get(queue, 0)
        used[queue] = number + 1
        if number == len(rounds):
            rounds.append({})
        rounds[number][queue] = offset
    return rounds


async def _ask(namesrv: str, groups: Sequence[str]) -> tuple[list[GroupProgress], list[str]]:
    problems: list[str] = []
    async with Admin(namesrv) as admin:
        silent: dict[str, CometError] = {}
        places = {} if groups else await admin.group_places(missing=silent)
        problems += [f"broker {name}: its groups are missing: {error}" for name, error in silent.items()]

        async def ask(group: str) -> GroupProgress | None:
            missing: dict[str, CometError] = {}
            answering = {name: addr for name, addr in places.get(group, {}).items() if name not in silent}
            try:
                found = await admin.progress(group, brokers=answering, missing=missing)
            except CometError as error:
                if groups:
                    raise
                problems.append(f"group {group}: {error}")
                return None
            problems.extend(f"group {group}: {error}" for error in missing.values())
            return found

        found = await for_each(groups or places, ask, _GROUPS_AT_ONCE)
    return [each for each in found if each is not None], problems


class SampleFiles:
    """The files in which the lag job stores its samples. `output` is the output directory of the job."""

    def __init__(self, output: str) -> None:
        self._uri = joined(output, "samples")
        self.filesystem, self.root = open_filesystem(self._uri)

    def names(self) -> list[str]:
        found = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        return sorted(info.base_name for info in found if info.base_name.startswith("lag-"))

    def read(self, spark: SparkSession, names: Sequence[str]) -> DataFrame:
        if self.filesystem.type_name not in _SPARK_READS:
            return by_workers(spark, self._uri, [{"path": name} for name in names], SCHEMA)
        place = shown(self._uri) if "://" in self._uri else self.root
        paths = [f"{place}/{name}" for name in names]
        return spark.read.schema(from_arrow_schema(SCHEMA)).parquet(*paths)

    def newest(self, spark: SparkSession) -> DataFrame | None:
        """Return the newest hour's samples, or None: at the newest one, a broker may have been away."""
        names = [name for name in self.names() if _FILE.fullmatch(name)]
        last_ms = _taken_ms(names[-1]) if names else 0
        recent = [name for name in names[-_RECENT:] if _taken_ms(name) >= last_ms - _HOUR_MS]
        return self.read(spark, recent) if recent else None

    def evenly(self, spark: SparkSession, most: int) -> DataFrame | None:
        """Return the rows of up to `most` sample files, evenly spaced, with the newest. None: no file."""
        names = self.names()
        step = -(-len(names) // most)
        return self.read(spark, names[::-step]) if names else None


def _taken_ms(name: str) -> int:
    return int(name.removeprefix("lag-").removesuffix(".parquet"))


class Samples(SampleFiles):
    """The table of samples: one Parquet file per sample, named after the interval in which it was taken.

    A sample is written completely or not at all. If a killed or concurrent run has already written a sample
    for the interval, that sample is kept. Once an hour, samples that are `keep_days` older than the newest
    sample are removed.
    """

    def __init__(self, output: str, interval_s: float, keep_days: float = 30.0) -> None:
        place = own_directory(output, _JOB)
        self.output = shown(place)
        super().__init__(place)
        self.filesystem.create_dir(self.root, recursive=True)
        self._interval_ms = max(int(interval_s * 1000), 1)
        self._keep_ms = int(keep_days * _DAY_MS)
        self._removed_ms: int | None = None

    def append(self, rows: Sequence[QueueLag], now_ms: int) -> bool:
        """Write a sample. Return False if the table already has a sample of the same interval."""
        slot = now_ms - now_ms % self._interval_ms
        name = f"lag-{slot:013d}.parquet"
        if self.filesystem.get_file_info(f"{self.root}/{name}").type != fs.FileType.NotFound:
            return False
        table = pa.Table.from_pylist([asdict(row) for row in rows], SCHEMA)
        staged = f"{self.root}/_{uuid.uuid4().hex[:12]}-{name}"
        with self.filesystem.open_output_stream(staged) as stream:
            pq.write_table(table, stream)
        self.filesystem.move(staged, f"{self.root}/{name}")
        if self._removed_ms is None or now_ms - self._removed_ms >= _HOUR_MS:
            self._removed_ms = now_ms
            self._remove(min(now_ms - self._keep_ms, slot))
        return True

    def since(self, spark: SparkSession, since_ms: int) -> DataFrame:
        """Return the samples taken at or after `since_ms`. The table must have at least one such sample."""
        least = f"lag-{max(since_ms - self._interval_ms, 0):013d}.parquet"
        names = [name for name in self.names() if name >= least]
        return self.read(spark, names).filter(F.col("sampled_ms") >= since_ms)

    def _remove(self, before_ms: int) -> None:
        """Remove the sample files, final or temporary, of intervals that began before `before_ms`."""
        for info in self.filesystem.get_file_info(fs.FileSelector(self.root)):
            taken = _FILE.fullmatch(info.base_name)
            if taken and int(taken[1]) < before_ms:
                with suppress(FileNotFoundError):  # another run has removed the file
                    self.filesystem.delete_file(info.path)


def queue_windows(samples: DataFrame, now_ms: int, window_s: int, retention_h: float) -> DataFrame:
    """Return the GroupLag columns of each group and queue for the window that ends at `now_ms`."""
    inside = samples.filter(F.col("sampled_ms") >= now_ms - int(window_s * 1000 * _SLACK))
    ends = [
        end(name, "sampled_ms").alias(f"{word}_{name}")
        for word, end in (("first", F.min_by), ("last", F.max_by))
        for name in ("group_offset", "max_offset", "time_lag_ms", "lag", "lost")
    ]
    spans = [F.min("sampled_ms").alias("first_ms"), F.max("sampled_ms").alias("last_ms")]
    found = inside.groupBy(*_QUEUE).agg(
        F.count("*").alias("samples"), F.max("lag").alias("max_lag"), *spans, *ends
    )
    span = F.nullif(F.col("last_ms") - F.col("first_ms"), F.lit(0))

    def rate(name: str) -> Column:
        grown = F.col(f"last_{name}") - F.col(f"first_{name}")
        return F.when(grown >= 0, grown * 1000 / span)  # a rate is NULL if the offset was reset

    slope = (F.col("last_time_lag_ms") - F.col("first_time_lag_ms")) / span
    left = F.greatest(F.lit(retention_h * 3_600_000) - F.col("last_time_lag_ms"), F.lit(0.0))
    return found.select(
        *_QUEUE,
        F.lit(window_s).alias("window_s"),
        "samples",
        F.col("last_lag").alias("lag"),
        "max_lag",
        F.col("last_lost").alias("lost"),
        F.col("last_time_lag_ms").alias("time_lag_ms"),
        rate("group_offset").alias("consumed_per_s"),
        rate("max_offset").alias("stored_per_s"),
        F.when((F.col("last_lag") > 0) & (slope > 0), left / slope / 1000).alias("expires_in_s"),
    )


def group_windows(queues: DataFrame) -> DataFrame:
    """Add up the rows of `queue_windows` by group. Return them in the columns of `GroupLag`."""
    return queues.groupBy("group", "window_s").agg(
        F.count("*").cast("int").alias("queues"),
        F.max("samples").alias("samples"),
        *sums("lag", "max_lag", "lost", "consumed_per_s", "stored_per_s"),
        F.max("time_lag_ms").alias("time_lag_ms"),
        F.min("expires_in_s").alias("expires_in_s"),
    )


class _Sampling:
    """The samples of a run, their table (if any), and the problems of the run, which are logged, too."""

    def __init__(self, take: Callable[[], tuple[list[QueueLag], list[str]]], table: Samples | None) -> None:
        self._take = take
        self._table = table
        self.tries = 0
        self.samples = 0
        self.newest: list[QueueLag] = []
        self.newest_ms = 0
        self.kept = False  # true once the table contains a sample of this run
        self._taken: list[QueueLag] = []
        self.failed: CometError | None = None
        self.problem_count = 0
        self._first: list[str] = []
        self._latest: deque[str] = deque(maxlen=_PROBLEMS)

    def take(self) -> None:
        """Take a sample, or note why it failed. Errors of the arguments are raised at the first."""
        self.tries += 1
        try:
            self.newest, problems = self._take()
        except CometError as error:
            if not self.samples and isinstance(error, ConfigError | UnknownNameError):
                raise
            self.failed = error
            self._note([f"no sample: {error}"])
        else:
            self.samples += 1
            self.newest_ms = time.time_ns() // 1_000_000
            self._note(problems)
            if self._table is not None:
                try:
                    self._table.append(self.newest, self.newest_ms)
                    self.kept = True
                except (OSError, pa.ArrowException) as error:  # continue: the next write may succeed
                    self._note([f"not in the table: {error}"])
            if not self.kept:
                since_ms = self._since_ms()
                self._taken = [row for row in self._taken if row.sampled_ms >= since_ms] + self.newest

    def read(self, spark: SparkSession) -> DataFrame:
        """Return the samples of the last hour, also those of earlier runs in the table."""
        if self._table is not None and self.kept:
            return self._table.since(spark, self._since_ms())
        return spark.createDataFrame(pa.Table.from_pylist([asdict(row) for row in self._taken], SCHEMA))

    def problems(self) -> list[str]:
        left_out = self.problem_count - len(self._first) - len(self._latest)
        return [*self._first, *([f"... {left_out} more ..."] if left_out else []), *self._latest]

    def _since_ms(self) -> int:
        return self.newest_ms - int(WINDOWS_S[-1] * 1000 * _SLACK)

    def _note(self, problems: Sequence[str]) -> None:
        at = local_time(time.time_ns() // 1_000_000)
        for number, problem in enumerate(problems):
            if number < _PROBLEMS:
                log.warning("%s", problem)
            kept = self._first if len(self._first) < _PROBLEMS else self._latest
            kept.append(f"{at}: {problem}")
        self.problem_count += len(problems)


@job(LagOptions)
def lag(spark: SparkSession, given: LagOptions) -> LagSummary:
    """Sample the lag of consumer groups and report their rates and forecasts.

    A sample fails without ending the job if no server answers.

    Returns:
        The groups and queues with the largest lag, and the failed requests.

    Raises:
        ConfigError: An argument is invalid.
        UnknownNameError: A named group has consumed nothing.
        JobFailed: A Spark job failed. Network errors are raised as they are if no sample could be taken.
    """
    stop = given.stop or threading.Event()
    table = None if given.output is None else Samples(given.output, given.interval_s, given.keep_days)
    run = _Sampling(lambda: sample(given.namesrv, given.groups, timeout_ms=given.timeout_ms), table)
    while not stop.is_set():
        run.take()
        if given.on_progress is not None:
            given.on_progress(run.tries, given.samples or None)
        if run.tries == given.samples:
            break
        # Wait until the next interval begins.
        stop.wait(given.interval_s - time.time() % given.interval_s)
    if run.failed is not None and not run.samples:
        raise run.failed
    summary = LagSummary(None if table is None else table.output, run.samples)
    summary.problem_count, summary.problems = run.problem_count, run.problems()
    if run.newest:
        frame = run.read(spark)
        summary.groups = run_action(spark, _JOB, lambda: _sum_up(frame, run.newest_ms, given.retention_h))
    summary.group_count = len({row.group for row in run.newest})
    run.newest.sort(key=lambda row: (-(row.time_lag_ms or 0), -row.lag))
    summary.queues = run.newest[:_MOST]
    return summary


def _sum_up(samples: DataFrame, now_ms: int, retention_h: float) -> list[GroupLag]:
    windows = [queue_windows(samples, now_ms, each, retention_h) for each in WINDOWS_S]
    found = group_windows(reduce(DataFrame.unionByName, windows))
    worst = found.orderBy(F.desc_nulls_last("time_lag_ms"), F.desc("lag"), "group", "window_s")
    return structs(GroupLag, worst.limit(_MOST * len(WINDOWS_S)))
