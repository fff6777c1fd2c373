"""A large run: all lines of TPC-H's orders as change events, through the whole pipeline; memory stays flat.

1. `tpchgen-cli` makes the table lineitem: 18 million rows at scale 3.
2. A standalone cluster starts as a process of its own.
3. Spark sends each row as a change event to the topic `lines`: the body is JSON, the tag says whether the
   line was returned, events of one order go to one queue in order.
4. The archive job writes the topic to Parquet; its log is asked whether an offset is missing.
5. The audit job looks for messages that are lost, doubled or out of order in the archive.
6. The replay job sends the archive to the topic `lines-replay`, in order.
7. Spark sums up the events it finds there; the sums must be those of the source data, to the cent.

Meanwhile the memory of broker, JVM, Spark's Python workers and this program is measured every second. The
page `report.html` shows it beside the rates. Run it with `make run-large`; 40 GB of disk are needed. A quick
check: `make run-large RUN_ARGS='--scale 0.1'`.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from pyspark.sql import SparkSession
from rich.progress import Progress

from cometmq.pipeline.jobs.archive_query import completeness
from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.replay.replay import replay
from cometmq.testing import StandaloneProcess
from first_run import (
    Stage,
    archive_topic,
    check_java,
    console,
    make_source,
    page_of,
    parse_arguments,
    prepare_directory,
    progress_display,
    report,
    start_spark,
    sum_up,
    totals_of_source,
    write_page,
)

TITLE, TOPIC = "CometMQ large run", "lines"
FLAT_MB = {"broker": 200, "program": 300}
"""What these two may have at any time, whatever the scale. Spark's settings bound the JVM and the workers."""
DEFAULT_DATA = Path(__file__).parents[1] / "data" / "large-run"


class Memory(threading.Thread):
    """Resident memory of all that takes part, every second, and when each stage began."""

    def __init__(self, broker: int) -> None:
        super().__init__(daemon=True)
        self.samples: dict[str, list[tuple[float, float]]] = {}
        self.stages: list[tuple[str, float]] = []
        self._broker, self._began, self._ended = psutil.Process(broker), time.monotonic(), threading.Event()

    def stage(self, name: str) -> None:
        self.stages.append((name, time.monotonic() - self._began))

    def run(self) -> None:
        while not self._ended.wait(1.0):
            now, found = (
                time.monotonic() - self._began,
                dict.fromkeys(("broker", "JVM", "workers", "program"), 0),
            )
            servers = {process.pid for process in (self._broker, *self._broker.children(recursive=True))}
            for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
                try:
                    java = process.name() == "java"
                    kind = "broker" if process.pid in servers else "JVM" if java else "workers"
                    kind = "program" if process.pid == psutil.Process().pid else kind
                    found[kind] += process.memory_info().rss
                except psutil.Error:
                    continue  # it has just ended
            for kind, size in found.items():
                self.samples.setdefault(kind, []).append((now, size / 1e6))

    def end(self) -> None:
        self._ended.set()
        self.join()
        self.stages.append(("", time.monotonic() - self._began))

    def rows(self) -> list[tuple[str, str, float, float, float]]:
        """(stage, process, MB at its begin, MB at its end, the most) for each stage."""
        rows = []
        for (name, start), (_, stop) in zip(self.stages, self.stages[1:], strict=False):
            for kind, samples in self.samples.items():
                inside = [size for at, size in samples if start <= at < stop and size]
                if inside:
                    rows.append((name, kind, inside[0], inside[-1], max(inside)))
        return rows

    def too_much(self) -> list[str]:
        """Who had more than it may have."""
        most = {kind: max(size for _, size in self.samples[kind]) for kind in FLAT_MB}
        return [f"{kind} {size:,.0f} MB" for kind, size in most.items() if size > FLAT_MB[kind]]


def main() -> int:
    """Run all stages. Returns 0 if nothing is missing and Spark's sums are those of the source, 1 if not."""
    options = parse_arguments(__doc__, 3.0, "6 million lines", DEFAULT_DATA)
    check_java()
    data = prepare_directory(options.data, DEFAULT_DATA)
    began = time.monotonic()
    with progress_display() as progress:
        source = make_source(progress, data, "lineitem", options.scale)
        with StandaloneProcess(data / "store") as cluster:
            memory = Memory(cluster.process.pid)
            memory.start()
            spark = start_spark(progress, quick=False)
            try:
                memory.stage("send")
                sent = send_lines(progress, spark, cluster.namesrv, data, source.metadata.num_rows)
                memory.stage("archive")
                archived = archive_topic(progress, spark, cluster.namesrv, TOPIC, data)
                missing = holes(spark, data)
                memory.stage("audit")
                audited = audit_archive(progress, spark, data)
                memory.stage("replay")
                replayed = replay_archive(progress, spark, cluster.namesrv, data)
                memory.stage("sum up")
                summed, found = sum_up(progress, spark, data, "l_extendedprice")
            finally:
                spark.stop()
                memory.end()
        expected = totals_of_source(source, "l_returnflag", "l_extendedprice")
    sent.size_bytes = summed.size_bytes
    stages = [sent, archived, audited.stage, replayed, summed]
    too_much = memory.too_much()
    right = (
        found == expected
        and not (missing or audited.found or too_much)
        and replayed.messages == sent.messages
    )
    report(TITLE, stages, expected, found, data, time.monotonic() - began)
    page = page_of(TITLE, stages, right)
    page.fact("offsets missing in the archive", missing)
    page.fact("lost, doubled or out of order, says the audit", audited.found)
    page.lines("Resident memory", memory.samples, "MB")
    page.table("Memory by stage, in MB", ["stage", "process", "first", "last", "most"], memory.rows())
    write_page(page, data)
    if missing or audited.found:
        console.print(f"OFFSETS MISSING IN THE ARCHIVE: {missing:,}; FOUND BY THE AUDIT: {audited.found:,}")
    if too_much:
        console.print(f"NOT FLAT IN MEMORY: {', '.join(too_much)}")
    if replayed.messages != sent.messages:
        console.print(f"REPLAYED {replayed.messages:,} OF {sent.messages:,}")
    return 0 if right else 1


def send_lines(progress: Progress, spark: SparkSession, namesrv: str, data: Path, lines: int) -> Stage:
    """Have Spark's tasks send the table: a message for each row, acknowledged by the broker."""
    task = progress.add_task("sending events", total=lines)
    rows = spark.read.parquet(str(data / "source" / "lineitem.parquet")).selectExpr(
        "to_json(struct(*)) AS body",
        "concat(l_orderkey, '-', l_linenumber) AS keys",
        "l_returnflag AS tags",
        "string(l_orderkey) AS sharding_key",
    )
    began = time.monotonic()
    rows.write.format("cometmq").options(namesrv=namesrv, topic=TOPIC).mode("append").save()
    stage = Stage("send", lines, seconds=time.monotonic() - began)
    progress.update(task, completed=lines)
    return stage


class Audited(NamedTuple):
    """The stage, and how many messages are lost, doubled or out of order."""

    stage: Stage
    found: int


def audit_archive(progress: Progress, spark: SparkSession, data: Path) -> Audited:
    """Have the audit job look at the archive."""
    task = progress.add_task("auditing", total=None)
    # The last second stays open: nothing that was stored later shows that it has ended.
    summary = audit(spark, str(data / "archive"), topics=[TOPIC], window_s=1, delay_s=0)
    found = summary.missing + summary.doubled + summary.out_of_order + summary.lost
    progress.update(task, total=summary.messages, completed=summary.messages)
    return Audited(Stage("audit", summary.messages, 0, summary.seconds), found)


def replay_archive(progress: Progress, spark: SparkSession, namesrv: str, data: Path) -> Stage:
    """Send the archive to another topic."""
    task = progress.add_task("replaying", total=None)

    def show(done: int, total: int | None) -> None:
        progress.update(task, completed=done, total=total)

    summary = replay(spark, str(data / "archive"), namesrv, state=str(data / "replay"), on_progress=show)
    return Stage("replay", summary.messages, summary.bytes, summary.seconds)


def holes(spark: SparkSession, data: Path) -> int:
    """Offsets that the archive should hold and does not, by its log."""
    rows = (
        completeness(spark, str(data / "archive")).selectExpr("sum(missing + gaps + overlaps) AS n").collect()
    )
    return int(rows[0].n or 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("large_run: stopped")
