"""Every job over one topic, as a program. Arguments: Spark's master, name servers, topic, root, group.

The topic is archived in `root`/archive, and the group has dead letters of it. Prints what the summaries say,
as JSON. A process uses a classic Spark session or Spark Connect, not both: PySpark's functions make columns
of one kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.compaction import compact
from cometmq.pipeline.jobs.dedup import dedup
from cometmq.pipeline.jobs.dlq import dlq, redrive
from cometmq.pipeline.jobs.lag import lag
from cometmq.pipeline.jobs.replay import replay
from cometmq.pipeline.jobs.throughput import throughput
from cometmq.pipeline.jobs.trace import trace
from cometmq.pipeline.session import spark_session

PASSING = {"target", "seconds", "output", "state", "into", "id", "sampled_ms", "run"}


@dataclass
class Place:
    """Where the messages are, and new names for what jobs make of them."""

    master: str
    namesrv: str
    topic: str
    root: str
    group: str

    @property
    def archive(self) -> str:
        return f"{self.root}/archive"

    def new(self, job: str) -> str:
        """What a job makes."""
        return f"{self.root}/{self.mark}-{job}"

    @property
    def mark(self) -> str:
        return self.master.partition(":")[0].partition("[")[0]


JOBS: dict[str, Callable[[SparkSession, Place], Any]] = {
    "archive": lambda spark, at: archive(spark, at.namesrv, [at.topic], at.new("archive"), batch_records=100),
    "audit": lambda spark, at: audit(spark, at.archive, window_s=1, delay_s=0, output=at.new("audit")),
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
    "trace": lambda spark, at: trace(spark, at.archive, topic=at.topic, output=at.new("trace")),
    "compact": lambda spark, at: compact(spark, at.archive),
}


def facts(summary: Any) -> Any:
    """What a summary says that does not change from run to run."""

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
