"""A first run: a cluster, a real data set through it, and an archive of it that Spark reads back.

1. `tpchgen-cli` makes the orders of the TPC-H benchmark.
2. A standalone cluster (name server and broker) starts as a process of its own.
3. Each order becomes a business event and is sent to the topic `orders`: its key is the order key, its tag
   the order status, its user properties priority and clerk, its body JSON.
4. The Spark archive job writes the topic to Parquet.
5. Spark sums up the events it finds there; the sums must be those of the source data, to the cent.
6. A page with all of that, `report.html`, is written beside the archive.

Run it with `make run`, or `python examples/first_run.py --scale 1 --data /tmp/first-run`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession, functions
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cometmq import Message, Producer, ProducerOptions
from cometmq.pipeline.base.report import Report
from cometmq.pipeline.jobs.archive import ArchiveProgress, archive
from cometmq.pipeline.session import spark_session
from cometmq.testing import StandaloneProcess

TITLE, TOPIC = "CometMQ first run", "orders"
SEND_AT_ONCE = 256
ROWS_AT_ONCE = 8192
DEFAULT_DATA = Path(__file__).parents[1] / "data" / "first-run"
RIGHT, WRONG = "the archive holds every event exactly", "THE ARCHIVE IS NOT WHAT WAS SENT"
# Prices are decimals, written as JSON numbers digit by digit: no cent is lost on the way.
to_json = msgspec.json.Encoder(decimal_format="number").encode
console = Console()


@dataclass(slots=True)
class Stage:
    """What one stage did and how long it took; sizes are of bodies, those of `archive` of stored records."""

    name: str
    messages: int = 0
    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / max(self.seconds, 1e-9)


Totals = dict[str, tuple[int, Decimal]]
"""Tag -> (events, sum of their prices). The tag of an order is its status."""


def main() -> int:
    """Run all stages. Returns 0 if Spark's sums are those of the source, 1 if not."""
    options = parse_arguments(__doc__, 0.1, "1.5 million orders", DEFAULT_DATA)
    check_java()
    data = prepare_directory(options.data)
    began = time.monotonic()
    with progress_display() as progress:
        source = make_source(progress, data, "orders", options.scale)
        with StandaloneProcess(data / "store") as cluster:
            sent = asyncio.run(send_orders(progress, cluster.namesrv, source))
            spark = start_spark(progress)
            try:
                archived = archive_topic(progress, spark, cluster.namesrv, TOPIC, data)
                summed, found = sum_up(progress, spark, data, "o_totalprice")
            finally:
                spark.stop()
        expected = totals_of_source(source, "o_orderstatus", "o_totalprice")
    stages = [sent, archived, summed]
    report(TITLE, stages, expected, found, data, time.monotonic() - began)
    page = page_of(TITLE, stages, found == expected)
    write_page(page, data)
    return 0 if found == expected else 1


def progress_display() -> Progress:
    """Bars while it works; silent where nobody watches."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def parse_arguments(description: str | None, scale: float, events: str, data: Path) -> argparse.Namespace:
    """Options of a run. events: what scale 1 means; data: the default directory."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    scales = f"TPC-H scale factor (default {scale:g}); 1 is {events}"
    parser.add_argument("--scale", type=float, default=scale, help=scales)
    where = f"an empty or new directory (default {data}, emptied first)"
    parser.add_argument("--data", type=Path, default=None, help=where)
    options = parser.parse_args()
    if not 0 < options.scale <= 1000:
        parser.error("--scale must be above 0 and at most 1000")
    return options


def check_java() -> None:
    """Spark needs it: said now, and not when Spark starts, a minute from here."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java", path=os.path.join(home, "bin") if home else None) is None:
        sys.exit("Java 17 or newer is needed for Spark: install it, or set JAVA_HOME")


def prepare_directory(chosen: Path | None, default: Path = DEFAULT_DATA) -> Path:
    """The run's directory, empty. Only the default one is emptied; any other must be so already."""
    data = (chosen or default).resolve()
    if chosen is None:
        shutil.rmtree(data, ignore_errors=True)
    elif data.exists() and any(data.iterdir()):
        raise SystemExit(f"first_run: {data} is not empty")
    data.mkdir(parents=True, exist_ok=True)
    return data


def make_source(progress: Progress, data: Path, table: str, scale: float) -> pq.ParquetFile:
    """Have tpchgen-cli write a table of TPC-H; returns the opened Parquet file."""
    task = progress.add_task(f"making TPC-H {table}", total=None)
    tool = shutil.which("tpchgen-cli", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if tool is None:
        raise SystemExit("first_run: tpchgen-cli is missing: pip install 'cometmq[demo]'")
    command = [tool, "parquet", "-s", str(scale), "--tables", table, "-o", str(data / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"first_run: tpchgen-cli failed: {done.stderr.strip()}")
    source = pq.ParquetFile(data / "source" / f"{table}.parquet")
    progress.update(task, total=source.metadata.num_rows, completed=source.metadata.num_rows)
    return source


def events(source: pq.ParquetFile) -> Iterator[list[Message]]:
    """The orders as messages, some thousand at a time."""
    for batch in source.iter_batches(ROWS_AT_ONCE):
        yield [
            Message(
                topic=TOPIC,
                body=to_json(order),
                keys=(str(order["o_orderkey"]),),
                tags=order["o_orderstatus"],
                properties={"priority": order["o_orderpriority"], "clerk": order["o_clerk"]},
            )
            for order in batch.to_pylist()
        ]


async def send_orders(progress: Progress, namesrv: str, source: pq.ParquetFile) -> Stage:
    """Send every order as one message, many of them under way at once."""
    stage = Stage("send")
    task = progress.add_task("sending events", total=source.metadata.num_rows)
    began = time.monotonic()
    # Patience instead of another try: a send that was answered late would be there twice.
    options = ProducerOptions(send_timeout_s=60.0, retry_times=0)
    async with Producer("first-run", namesrv=namesrv, options=options) as producer:
        for messages in events(source):
            await producer.send_many(watched(messages, progress, task), concurrency=SEND_AT_ONCE)
            stage.messages += len(messages)
            stage.size_bytes += sum(len(message.body) for message in messages)
    stage.seconds = time.monotonic() - began
    return stage


def watched(messages: list[Message], progress: Progress, task: TaskID) -> Iterator[Message]:
    """The messages, with the bar moving on as they are taken."""
    for at, message in enumerate(messages, 1):
        yield message
        if at % SEND_AT_ONCE == 0 or at == len(messages):
            progress.advance(task, at % SEND_AT_ONCE or SEND_AT_ONCE)


def start_spark(progress: Progress, *, quick: bool = True) -> SparkSession:
    """A session on this machine's cores, or on the master that SPARK_MASTER names. quick: starts sooner, and
    works slower in the JVM."""
    task = progress.add_task("starting Spark", total=None)
    spark = spark_session("first run", quick_start=quick)
    progress.update(task, total=1, completed=1)
    return spark


def archive_topic(progress: Progress, spark: SparkSession, namesrv: str, topic: str, data: Path) -> Stage:
    """Have Spark write the topic to Parquet."""
    task = progress.add_task("archiving with Spark", total=None)

    def show(at: ArchiveProgress) -> None:
        progress.update(task, completed=at.records, total=at.total)

    summary = archive(spark, namesrv, [topic], str(data / "archive"), on_progress=show)
    if not summary.complete:
        raise SystemExit(f"first_run: {summary.lost} messages lost, {summary.bad} bad")
    return Stage("archive", summary.records, summary.bytes, summary.seconds)


def sum_up(progress: Progress, spark: SparkSession, data: Path, price: str) -> tuple[Stage, Totals]:
    """Events and the sum of a field of their bodies, by tag, computed by Spark from the archive."""
    task = progress.add_task("summing up with Spark", total=None)
    began = time.monotonic()
    events = spark.read.parquet(str(data / "archive"))
    value = functions.from_json(events.body.cast("string"), f"{price} decimal(15,2)")[price]
    rows = (
        events.groupBy(events.tags.alias("tag"))
        .agg(
            functions.countDistinct("keys").alias("events"),
            functions.sum(value).alias("price"),
            functions.count("*").alias("messages"),
            functions.sum(functions.length("body")).alias("size"),
        )
        .collect()
    )
    found = {row.tag: (row.events, row.price) for row in rows}
    stage = Stage("sum up", sum(row.messages for row in rows), sum(row["size"] for row in rows))
    stage.seconds = time.monotonic() - began
    progress.update(task, total=stage.messages, completed=stage.messages)
    return stage, found


def totals_of_source(source: pq.ParquetFile, tag: str, price: str) -> Totals:
    """The same sums from the source, without Spark."""
    totals: Totals = {}
    for batch in source.iter_batches(1_000_000, columns=[tag, price]):
        grouped = pa.Table.from_batches([batch]).group_by(tag).aggregate([([], "count_all"), (price, "sum")])
        for row in grouped.to_pylist():
            count, total = totals.get(row[tag], (0, Decimal(0)))
            totals[row[tag]] = (count + row["count_all"], total + row[f"{price}_sum"])
    return totals


def report(
    title: str, stages: list[Stage], expected: Totals, found: Totals, data: Path, seconds: float
) -> None:
    """What a reader wants to know of the run, in two tables and two lines."""
    caption = "MB of bodies; for archive of whole records"
    table = Table("stage", title=title, caption=caption)
    for name in ("messages", "MB", "seconds", "messages/s", "MB/s"):
        table.add_column(name, justify="right")
    for stage in stages:
        megabytes, took = stage.size_bytes / 1e6, f"{stage.seconds:.2f}"
        rates = (f"{stage.rate:,.0f}", f"{megabytes / max(stage.seconds, 1e-9):,.1f}")
        table.add_row(stage.name, f"{stage.messages:,}", f"{megabytes:,.1f}", took, *rates)
    console.print(table)
    check = Table("tag", "events", "sum of prices by Spark", "in the source", "", title="Checked")
    for column in check.columns[1:4]:
        column.justify = "right"
    for status in sorted(expected.keys() | found.keys()):
        archived, source = found.get(status, (0, Decimal(0))), expected.get(status, (0, Decimal(0)))
        verdict = "equal" if archived == source else f"NOT EQUAL, {source[0]:,} events in the source"
        check.add_row(status, f"{archived[0]:,}", f"{archived[1]:,.2f}", f"{source[1]:,.2f}", verdict)
    console.print(check)
    console.print(f"Parquet: {data / 'archive'}", soft_wrap=True)
    console.print(f"done in {seconds:.1f} s: {RIGHT if found == expected else WRONG}")


def page_of(title: str, stages: list[Stage], right: bool) -> Report:
    """The run as a page that opens in any browser, without a network."""
    page = Report(title)
    page.fact("checked", RIGHT if right else WRONG)
    rows = [(stage.name, stage.messages, stage.size_bytes, stage.seconds, stage.rate) for stage in stages]
    page.table("Stages", ["stage", "messages", "bytes", "seconds", "messages/s"], rows)
    page.bars("Messages a second", {stage.name: stage.rate for stage in stages})
    return page


def write_page(page: Report, data: Path) -> None:
    page.write(str(data / "report.html"))
    console.print(f"Report: {data / 'report.html'}", soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("first_run: stopped")
