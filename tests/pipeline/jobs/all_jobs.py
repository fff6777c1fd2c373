"""Run every job over one topic, as a program.

Arguments: Spark's master, name servers, topic, root, group. The topic is archived in `root`/archive, the
group has dead letters of the topic, `trace_topic` holds traces, and `root`/store is a store. The program
prints the summaries as JSON. It uses either a classic Spark session or Spark Connect: in a process, PySpark's
functions create columns of one kind only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from tests.pipeline.jobs.test_compact_command import archive_of
from tests.store.kit import small

from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.compaction import CompactSummary, compact
from cometmq.pipeline.jobs.dedup import dedup
from cometmq.pipeline.jobs.dlq import dlq, redrive
from cometmq.pipeline.jobs.lag import lag
from cometmq.pipeline.jobs.rebuild import rebuild
from cometmq.pipeline.jobs.replay.replay import replay
from cometmq.pipeline.jobs.run.run import RunSummary, run
from cometmq.pipeline.jobs.throughput import throughput
from cometmq.pipeline.jobs.trace import trace
from cometmq.pipeline.session import spark_session

PASSING = {"target", "seconds", "output", "state", "into", "id", "sampled_ms", "run", "file", "to"}
PASSING |= {"closed_to_ms", "verify_seconds"}
RUN = """\
sources:
  stored: {{format: archive, path: {archive}}}
  live: {{format: cometmq, options: {{namesrv: "{namesrv}", topic: {topic}}}}}
steps:
  both: SELECT tags FROM stored UNION ALL SELECT tags FROM live
  counts: SELECT tags, count(*) AS n FROM both GROUP BY tags
sinks:
  files: {{from: counts, format: parquet, path: {output}}}
"""


@dataclass
class Place:
    """The input of the jobs, and new names for their output."""

    master: str
    namesrv: str
    topic: str
    root: str
    group: str

    @property
    def archive(self) -> str:
        return f"{self.root}/archive"

    def new(self, job: str) -> str:
        """Return the path or topic of a job's output."""
        return f"{self.root}/{self.mark}-{job}"

    @property
    def store(self) -> str:
        return f"{self.root}/store"

    @property
    def trace_topic(self) -> str:
        return f"{self.topic}_traces"

    @property
    def mark(self) -> str:
        return self.master.partition(":")[0].partition("[")[0]


def _compact(spark: SparkSession, at: Place) -> CompactSummary:
    """Compact an archive whose only hour has long ended."""
    archive_of(Path(at.new("compact")), 3)
    return compact(spark, at.new("compact"))


def _run(spark: SparkSession, at: Place) -> RunSummary:
    file = Path(at.new("run.yml"))
    file.write_text(RUN.format(archive=at.archive, namesrv=at.namesrv, topic=at.topic, output=at.new("run")))
    return run(spark, str(file))


JOBS: dict[str, Callable[[SparkSession, Place], Any]] = {
    "archive": lambda spark, at: archive(spark, at.namesrv, [at.topic], at.new("archive"), batch_records=100),
    "audit": lambda spark, at: audit(
        spark,
        at.archive,
        traces=f"live:{at.namesrv}",
        trace_topic=at.trace_topic,
        window_s=1,
        end_ms=time.time_ns() // 1_000_000,
        delay_s=0,
        output=at.new("audit"),
    ),
    "dedup": lambda spark, at: dedup(spark, at.archive, at.new("dedup"), key="tags"),
    "dlq": lambda spark, at: dlq(
        spark, f"live:{at.namesrv}", [at.group], reason="properties['error']", output=at.new("dlq")
    ),
    "redrive": lambda spark, at: redrive(
        spark, f"live:{at.namesrv}", at.namesrv, [at.group], where="true", dry_run=True
    ),
    "lag": lambda spark, at: lag(spark, at.namesrv, [at.group], samples=1, output=at.new("lag")),
    "replay": lambda spark, at: replay(
        spark, at.archive, at.namesrv, state=at.new("replay"), into="{topic}-" + at.mark
    ),
    "throughput": lambda spark, at: throughput(spark, at.archive, output=at.new("throughput")),
    "trace": lambda spark, at: trace(
        spark, f"live:{at.namesrv}", topic=at.trace_topic, output=at.new("trace")
    ),
    "compact": _compact,
    "rebuild": lambda spark, at: rebuild(spark, at.store, at.new("rebuild"), config=small(at.store)),
    "run": _run,
}


def facts(summary: Any) -> Any:
    """Return the fields of a summary that are equal in every run."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(each) for name, each in value.items() if name not in PASSING}
        return [without(each) for each in value] if isinstance(value, list | tuple) else value

    return without(msgspec.to_builtins(summary))


def results(spark: SparkSession, at: Place) -> dict[str, Any]:
    return {name: facts(job(spark, at)) for name, job in JOBS.items()}


def main() -> None:
    at = Place(*sys.argv[1:])
    spark = spark_session("jobs", master=at.master, quick_start=True)
    found = results(spark, at)
    spark.stop()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
