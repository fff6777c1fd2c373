"""Bulk work on Spark: units of work, each of which is one task of one Spark job.

Every job of the pipeline runs its work through this module. The driver divides the work into units,
`run_units` runs each unit in a task, and the driver evaluates the results (archive.py repeats this for each
batch). A task pulls, decodes and writes by itself: only units and results pass through Spark. The module uses
no feature that Spark Connect lacks (RDDs, accumulators), so a job runs the same on this machine, on a cluster
and through Spark Connect.
"""

from __future__ import annotations

import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from cometmq.errors import CometError
from cometmq.pipeline.base.errors import JobFailed, JobStopped

_POLL_S = 0.2
_CANCEL_S = 10.0  # seconds to wait for a cancelled job; Spark kills the worker of a cancelled task after 2 s
_MANY = 1_000_000  # length of a range to count task slots with; must exceed the slots of any cluster
_RAISED = re.compile(r"Traceback \(most recent call last\):\n(?: .*\n)+(.+)")
_CALLED = re.compile(r"An error occurred while calling .*\n: (?:[\w.$]+: )?(.+)")
_FAILURE = re.compile(r"most recent failure: Lost task .*?\): (?:[\w.$]+: )?(.+)")

U = TypeVar("U")
R = TypeVar("R")


def run_units(
    spark: SparkSession,
    name: str,
    work: Callable[[U], R],
    units: Sequence[U],
    *,
    on_progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> list[R]:
    """Call `work(unit)` in one Spark task for each of `units`. Return the results in the order of the units.

    Units and results are pickled. Every task receives all units, so a unit should have at most a few kB and
    refer to large data by name. Spark repeats a task whose worker died or whose `work` raised an error, up to
    spark.task.maxFailures times, so `work` must be repeatable. A CometError that `work` raises is returned to
    the driver as the task's result, because a retry would not help. When all tasks have ended, the first such
    error in the order of the units is raised.

    `name` is the job's name in Spark's pages and errors. `on_progress` is called with the number of finished
    tasks when it has changed. The tasks are cancelled when `stop` is set or the calling thread is
    interrupted. Raises JobStopped after `stop`, and JobFailed when Spark abandons a task or the job.
    """
    if not units:
        return []
    frame = spark.range(0, len(units), 1, len(units)).mapInArrow(
        _in_tasks(work, [pickle.dumps(unit) for unit in units]), "unit bigint, outcome binary"
    )
    rows = run_action(spark, name, frame.collect, on_progress=on_progress, stop=stop)
    return outcomes_in(sorted(rows, key=lambda row: row.unit))


def outcomes_in(rows: Sequence[Row]) -> list[Any]:
    """Return the objects that tasks pickled into the column `outcome`. Raises the first CometError in it."""
    outcomes: list[Any] = [pickle.loads(row.outcome) for row in rows]
    for outcome in outcomes:
        if isinstance(outcome, CometError):
            raise outcome
    return outcomes


def run_action(
    spark: SparkSession,
    name: str,
    action: Callable[[], R],
    *,
    on_progress: Callable[[int], None] | None = None,
    on_look: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> R:
    """Call `action`, which runs Spark jobs of this session in the calling thread, and return its result.

    `on_look` is called several times per second while the action runs. The meaning of `on_progress` and
    `stop`, and the errors, are the same as for `run_units`.
    """
    stop = stop or threading.Event()
    if stop.is_set():
        raise JobStopped(name)
    try:
        job, nothing = _job_of(spark, name), lambda *_: None
        return _watched(spark, action, job, on_progress or nothing, on_look or nothing, stop)
    except (PySparkException, Py4JError) as error:
        raise (JobStopped(name) if stop.is_set() else JobFailed(name, cause(error))) from error


def slots(spark: SparkSession) -> int:
    """Return the number of tasks that can run concurrently now. It grows while a new cluster starts."""
    if isinstance(spark, SparkSession):
        return spark.sparkContext.defaultParallelism
    # Spark Connect does not report the number of task slots, but it divides a range into one partition for
    # each slot.
    parts = spark.range(_MANY).selectExpr("spark_partition_id() AS part")
    return int(parts.selectExpr("max(part) + 1 AS parts").collect()[0].parts)


def _in_tasks(
    work: Callable[[U], R], units: Sequence[bytes]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow` that maps unit indexes to pickled results or CometErrors."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            try:
                outcome: R | CometError = work(pickle.loads(units[number]))
            except CometError as error:
                outcome = error
            columns = [pa.array([number], pa.int64()), pa.array([pickle.dumps(outcome)], pa.binary())]
            yield pa.record_batch(columns, ["unit", "outcome"])

    return run


class _ClassicJob:
    """A job of a classic Spark session: a Spark job group. The JVM of the session belongs to this process."""

    def __init__(self, context: SparkContext, name: str, mark: str) -> None:
        self._context, self._name, self._group = context, name, mark

    @contextmanager
    def known(self) -> Iterator[None]:
        """Mark the Spark operations of the calling thread in the `with` body as operations of the job.

        The mark is not removed, because the thread ends after the body.
        """
        self._context.setJobGroup(self._group, self._name, interruptOnCancel=True)
        yield

    def done(self) -> int:
        """Return the number of finished tasks."""
        tracker, done = self._context.statusTracker(), 0
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info else ():
                state = tracker.getStageInfo(int(stage))
                done += state.numCompletedTasks if state else 0
        return done

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


class _ConnectJob:
    """A job of a Spark Connect session, identified by a tag. The server reports progress periodically."""

    def __init__(self, spark: SparkSession, mark: str) -> None:
        self._spark, self._tag, self._done = spark, mark, 0

    @contextmanager
    def known(self) -> Iterator[None]:
        thread = threading.get_ident()

        def heard(*, stages: Any, **_: Any) -> None:
            # Spark calls this progress handler for every operation of the session, in the thread that waits
            # for that operation. Only the operations of this job's thread are counted.
            if threading.get_ident() == thread:
                self._done = sum(stage.num_completed_tasks for stage in stages)

        handler: Any = heard  # Any, because importing the handler's type requires gRPC
        self._spark.addTag(self._tag)
        self._spark.registerProgressHandler(handler)
        try:
            yield
        finally:
            self._spark.removeProgressHandler(handler)

    def done(self) -> int:
        return self._done

    def cancel(self) -> None:
        self._spark.interruptTag(self._tag)


def _job_of(spark: SparkSession, name: str) -> _ClassicJob | _ConnectJob:
    mark = f"cometmq-{uuid.uuid4().hex}"
    # A Spark Connect session is not an instance of this class, although PySpark's type hints declare the same
    # class for classic sessions and Spark Connect sessions.
    if isinstance(spark, SparkSession):
        return _ClassicJob(spark.sparkContext, name, mark)
    return _ConnectJob(spark, mark)


def _watched(
    spark: SparkSession,
    action: Callable[[], R],
    job: _ClassicJob | _ConnectJob,
    on_progress: Callable[[int], None],
    on_look: Callable[[], None],
    stop: threading.Event,
) -> R:
    """Return the action's result. One thread runs the action, another thread polls the job and cancels it.

    The calling thread can be interrupted, so it does not use Py4J: on Ctrl-C, PySpark's signal handler calls
    Py4J in the main thread. If that thread were already waiting for a Py4J response, the two calls would
    receive each other's responses.
    """
    ended: Future[R] = Future()
    interrupted, over = threading.Event(), threading.Event()
    done, failures = [0], list[Exception]()

    def act() -> None:
        try:
            with job.known():
                ended.set_result(action())
        except BaseException as error:
            ended.set_exception(error)

    def watch() -> None:
        last = False
        while not last:
            last = over.wait(_POLL_S)  # after the end, poll once more to count the last tasks
            try:
                if not (stop.is_set() or interrupted.is_set()):
                    done[0] = job.done()
                elif not last:
                    job.cancel()  # cancel repeatedly, because Spark may not have registered the job yet
            except Exception as error:
                failures.append(error)

    InheritableThread(target=act, session=spark, daemon=True).start()
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    seen = 0
    try:
        while not ended.done():
            wait([ended], _POLL_S)  # an interrupted join() would make Python treat the thread as ended
            if failures and not ended.done():
                raise failures[0]
            if done[0] != seen:
                seen = done[0]
                on_progress(seen)
            on_look()
    except BaseException:
        interrupted.set()
        wait([ended], _CANCEL_S)
        raise
    finally:
        over.set()
        watching.join(_CANCEL_S)
    result = ended.result()
    if done[0] != seen:
        on_progress(done[0])
    return result


def cause(error: Exception) -> str:
    """Return the line of Spark's error that names the cause: the exception of a task, if one was raised."""
    text = str(error)
    raised = _RAISED.findall(text)
    found = raised[-1] if raised else _FAILURE.search(text) or _CALLED.search(text)
    return (found if isinstance(found, str) else found[1] if found else text).strip().partition("\n")[0]
