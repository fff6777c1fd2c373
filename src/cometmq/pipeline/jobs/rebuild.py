"""The rebuild job: build the consume queues and the index of a large store from its log, with many tasks.

The existing store is not modified. New directories are built elsewhere and moved into `output` when they are
complete. `cometmq.store.inspect` does the work and divides it into parts. The result equals that of `cometmq
store rebuild`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from pyspark.sql import SparkSession

from cometmq.errors import ConfigError
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.engine import run_units, slots
from cometmq.pipeline.base.job_options import RebuildOptions
from cometmq.pipeline.jobs.results import own_directory
from cometmq.pipeline.table.objects import shown
from cometmq.store.inspect import IndexMade, QueuesMade, RebuildParts, plan_rebuild, verify

_JOB = "rebuild"
_INDEX = -1  # the unit of work that builds the index; the other units build queues
_MOST = 50  # maximum findings in the summary
U = TypeVar("U")
R = TypeVar("R")


class RebuildSummary(msgspec.Struct):
    """The result of a rebuild.

    Attributes:
        not_served: Records that were put into no queue, for example because their offset does not fit the
            queue.
        hidden: Records of deleted topics.
        errors: Errors that `verify` found in the result and the log. None if the check was disabled.
        warnings: Warnings of `verify`. None if the check was disabled.
    """

    root: str
    output: str
    segments: int = 0
    records: int = 0
    queues: int = 0
    units: int = 0
    index_files: int = 0
    index_entries: int = 0
    not_served: int = 0
    hidden: int = 0
    errors: int | None = None
    warnings: int | None = None
    findings: list[str] = []
    seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether each record of an existing topic is in a queue, and `verify` (if run) found no errors."""
        return not (self.not_served or self.errors)


@job(RebuildOptions)
def rebuild(spark: SparkSession, given: RebuildOptions) -> RebuildSummary:
    """Make the consume queues and the index of a store from its log.

    Each task reads one file of the log; then each task makes some of the queues. A job that was killed starts
    from the beginning and produces the same files.

    Returns:
        The counts of the result, and the findings of the verification.

    Raises:
        ConfigError: An argument is invalid.
        StoreError: A broker is using the store, or the store has light message queues (LMQ), or segments that
            are in an object store only.
        JobFailed: A Spark job failed.
        JobStopped: `stop` was set.
    """
    began = time.monotonic()
    output, on_progress, commit_log_dir = given.output, given.on_progress, given.commit_log_dir
    if "://" in output:
        raise ConfigError("output", shown(output), "a directory that all machines mount")
    tasks = 4 * slots(spark)
    parts = plan_rebuild(given.root, output, tasks, config=given.config, commit_log_dir=commit_log_dir)
    own_directory(output, _JOB)
    done, total = 0, 1 + len(parts.segments) + 1 + parts.parts

    def run(name: str, work: Callable[[U], R], units: Sequence[U]) -> list[R]:
        nonlocal done
        before = done
        report = None if on_progress is None else lambda more: on_progress(before + more, total)
        results = run_units(spark, f"{_JOB}: {name}", work, units, on_progress=report, stop=given.stop)
        done += len(units)
        return results

    run("old queues", partial(_look, parts), [0])
    taken = run("segments", parts.read_segment, parts.segments)
    made = run("queues and index", partial(_make, parts), [_INDEX, *range(parts.parts)])
    queues = [each for each in made if isinstance(each, QueuesMade)]
    (index,) = [each for each in made if isinstance(each, IndexMade)]
    parts.put_in_place(queues)
    found = [each.findings for each in taken] + [each.findings for each in queues]
    problems = {f"{each.path} at {each.offset}: {each.problem}" for some in found for each in some}
    summary = RebuildSummary(
        root=parts.root,
        output=parts.output,
        segments=len(parts.segments),
        records=sum(each.records for each in taken),
        queues=sum(each.queues for each in queues),
        units=sum(each.units for each in queues),
        index_files=index.files,
        index_entries=index.entries,
        not_served=sum(each.not_served for each in queues),
        hidden=sum(each.hidden for each in taken),
        findings=sorted(problems)[:_MOST],
        seconds=time.monotonic() - began,
    )
    if given.check:
        report = verify(parts.output, config=parts.config, commit_log_dir=parts.commit_log_dir)
        summary.errors, summary.warnings = report.errors, report.warnings
        summary.verify_seconds = time.monotonic() - began - summary.seconds
    return summary


def _look(parts: RebuildParts, _unit: int) -> None:
    parts.collect_evidence()


def _make(parts: RebuildParts, unit: int) -> QueuesMade | IndexMade:
    return parts.make_index() if unit == _INDEX else parts.make_queues(unit)
