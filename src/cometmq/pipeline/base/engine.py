"""Bulk work on Spark: units, each of them one task of one Spark job.

Every job of the pipeline runs its work here. The driver cuts the work into units, `run_units` hands each to a
task, and the driver decides over the results (archive.py does so for each batch). A task pulls, decodes and
writes by itself: only units and results pass through Spark. What Spark Connect lacks is not used (RDDs,
accumulators), so a job runs the same on this machine, on a cluster and through Spark Connect.
"""

from __future__ import annotations

import pickle
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from cometmq.errors import CometError
from cometmq.pipeline.base.errors import JobFailed, JobStopped

_POLL_S = 0.2
_CANCEL_S = 10.0  # workers are killed two seconds after their task was
_MANY = 1_000_000  # more than slots
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
    """Call `work(unit)` in one Spark task for each of `units`; the results, in the order of the units.

    Units and results are pickled. Every task gets all units, so a unit names what is large instead of holding
    it: a few kB at most. name: of the job, as Spark's pages and errors show it. on_progress is called
    with the number of finished tasks, whenever it has changed.

    Spark runs a task again when its worker died or `work` raised, up to spark.task.maxFailures times, so
    `work` can be repeated. A CometError is a result instead: trying again would not help. When all tasks have
    ended, the first one in the order of the units is raised as it is.

    The tasks are cancelled when `stop` is set or the calling thread is interrupted. Raises JobStopped after
    `stop`, JobFailed when Spark gave up a task or the whole job.
    """
    if not units:
        return []
    frame = spark.range(0, len(units), 1, len(units)).mapInArrow(
        _in_tasks(work, [pickle.dumps(unit) for unit in units]), "unit bigint, outcome binary"
    )
    rows = run_action(spark, name, frame.collect, on_progress=on_progress, stop=stop)
    return outcomes_in(sorted(rows, key=lambda row: row.unit))


def outcomes_in(rows: Sequence[Row]) -> list[Any]:
    """What tasks pickled into their column `outcome`. Raises the first CometError among it."""
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

    on_look is called some times a second meanwhile; on_progress, `stop` and the errors are those of
    `run_units`.
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
    """How many tasks run at once, as far as the session knows now. A new cluster's grow while it starts."""
    if isinstance(spark, SparkSession):
        return spark.sparkContext.defaultParallelism
    # Spark Connect does not say, but it cuts a range into as many parts.
    parts = spark.range(_MANY).selectExpr("spark_partition_id() AS part")
    return int(parts.selectExpr("max(part) + 1 AS parts").collect()[0].parts)


def _in_tasks(
    work: Callable[[U], R], units: Sequence[bytes]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: from the numbers of units to their outcomes, which are results or CometErrors."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column("id").to_pylist()):
            try:
                outcome: R | CometError = work(pickle.loads(units[number]))
            except CometError as error:
                outcome = error
            columns = [pa.array([number], pa.int64()), pa.array([pickle.dumps(outcome)], pa.binary())]
            yield pa.record_batch(columns, ["unit", "outcome"])

    return run


class _Job(Protocol):
    """What classic sessions and Spark Connect do differently."""

    def known(self) -> AbstractContextManager[None]:
        """While the body of the calling thread runs the job, it is told from others. Then the thread ends."""

    def done(self) -> int:
        """How many tasks have finished."""

    def cancel(self) -> None: ...


class _ClassicJob(_Job):
    """A job group of a session in this process."""

    def __init__(self, context: SparkContext, name: str, mark: str) -> None:
        self._context, self._name, self._group = context, name, mark

    @contextmanager
    def known(self) -> Iterator[None]:
        self._context.setJobGroup(self._group, self._name, interruptOnCancel=True)
        yield

    def done(self) -> int:
        tracker, done = self._context.statusTracker(), 0
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info else ():
                state = tracker.getStageInfo(int(stage))
                done += state.numCompletedTasks if state else 0
        return done

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._group)


class _ConnectJob(_Job):
    """A tag of operations in a Spark Connect session, whose server reports progress now and then."""

    def __init__(self, spark: SparkSession, mark: str) -> None:
        self._spark, self._tag, self._done = spark, mark, 0

    @contextmanager
    def known(self) -> Iterator[None]:
        thread = threading.get_ident()

        def heard(*, stages: Any, **_: Any) -> None:
            # Called for all operations of the session, in the thread that waits for each.
            if threading.get_ident() == thread:
                self._done = sum(stage.num_completed_tasks for stage in stages)

        handler: Any = heard  # of a type that cannot be imported without gRPC
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


def _job_of(spark: SparkSession, name: str) -> _Job:
    mark = f"cometmq-{uuid.uuid4().hex}"
    # The session of Spark Connect is a class of its own, although PySpark's types say otherwise.
    if isinstance(spark, SparkSession):
        return _ClassicJob(spark.sparkContext, name, mark)
    return _ConnectJob(spark, mark)


def _watched(
    spark: SparkSession,
    action: Callable[[], R],
    job: _Job,
    on_progress: Callable[[int], None],
    on_look: Callable[[], None],
    stop: threading.Event,
) -> R:
    """The action's result. A thread waits for it, another one looks at the job and cancels it. This one can
    be interrupted, and stays out of Py4J: at Ctrl-C PySpark's own handler calls Py4J in the main thread, and
    a call that was under way there would get the answer to the other one."""
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
            last = over.wait(_POLL_S)  # then one more look, for what was done since the one before
            try:
                if not (stop.is_set() or interrupted.is_set()):
                    done[0] = job.done()
                elif not last:
                    job.cancel()  # again until it is over: Spark may not know the job yet
            except Exception as error:
                failures.append(error)

    InheritableThread(target=act, session=spark, daemon=True).start()
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    seen = 0
    try:
        while not ended.done():
            wait([ended], _POLL_S)  # not join: interrupted, it takes a thread that goes on for ended
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
    """The one line of Spark's many that says what happened: a task's own exception, if it raised one."""
    text = str(error)
    raised = _RAISED.findall(text)
    found = raised[-1] if raised else _FAILURE.search(text) or _CALLED.search(text)
    return (found if isinstance(found, str) else found[1] if found else text).strip().partition("\n")[0]
