"""What the Spark pipeline does in a second: python -m benchmarks.pipeline [--messages N] [--size BYTES]
[--turns N].

One broker of ours in a process of its own and Spark on `local[2]` share the machine. The rows take turns; the
first turn is dropped (workers start, imports), the median of the others is reported, beside the archive job
of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.pipeline.archive import archive
from cometmq.pipeline.options import write_options
from cometmq.pipeline.rows import Outgoing
from cometmq.pipeline.sending import Sender
from cometmq.pipeline.session import spark_session
from cometmq.testing import StandaloneProcess

TOPIC = "Benchmark"
SMALL = "queue_id int, queue_offset bigint, store_timestamp timestamp"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=1024, help="of a body, in bytes")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cometmq-bench-") as scratch:
        home = Path(scratch)
        with StandaloneProcess(home / "store") as cluster:
            sent_s = fill(cluster.namesrv, options.messages, options.size)
            spark = spark_session("benchmark", master="local[2]")
            try:
                seconds = measure(rows(spark, cluster.namesrv, home), options.turns)
            finally:
                spark.stop()
    report(options.messages, sent_s, seconds)
    return 0


def fill(namesrv: str, count: int, size: int) -> float:
    """Send the messages through the sink's sender in this process; seconds."""
    began = time.perf_counter()
    with Sender(write_options({"namesrv": namesrv, "topic": TOPIC})) as sender:
        for number in range(count):
            body = f"{number}:".encode().ljust(size, b"%d" % (number % 7))
            properties = f"UNIQ_KEY\x01{number:032X}\x02KEYS\x01k{number}\x02TAGS\x01t{number % 5}".encode()
            sender.send(Outgoing(TOPIC, body, properties, 0, 0, None))
        sender.flush()
    return time.perf_counter() - began


def rows(spark: SparkSession, namesrv: str, home: Path) -> dict[str, Callable[[int], object]]:
    """What is measured, by name."""

    def load(schema: str | None = None) -> DataFrame:
        reader = spark.read.format("cometmq").options(namesrv=namesrv, topic=TOPIC)
        return (reader.schema(schema) if schema else reader).load()

    def by_spark(turn: int) -> None:
        frame = (
            load()
            .withColumn("dt", F.to_date("store_timestamp"))
            .withColumn("hour", F.hour("store_timestamp"))
        )
        writer = frame.write.partitionBy("topic", "dt", "hour").option("compression", "zstd")
        writer.parquet(str(home / f"spark-{turn}"))

    return {
        "archive job": lambda turn: archive(spark, namesrv, [TOPIC], str(home / f"archive-{turn}")),
        "source into Spark's Parquet writer": by_spark,
        "source, all columns, sum of lengths": lambda _: load().agg(F.sum(F.length("body"))).collect(),
        "source, body only": lambda _: load("body binary").agg(F.sum(F.length("body"))).collect(),
        "source, three small columns": lambda _: load(SMALL).agg(F.max("store_timestamp")).collect(),
    }


def measure(wanted: dict[str, Callable[[int], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each row in each turn but the first."""
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    for turn in range(turns):
        for name, run in wanted.items():
            began = time.perf_counter()
            run(turn)
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] or values for name, values in seconds.items()}


def report(count: int, sent_s: float, seconds: dict[str, list[float]]) -> None:
    first = next(iter(seconds.values()))
    lines = ["| Work | messages/s | of the archive job's rate |", "| --- | --- | --- |"]
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(first, values, strict=True))
        lines.append(f"| {name} | {count / statistics.median(values):,.0f} | {ratio:.2f} |")
    lines.append(f"| sender of the sink, one process | {count / sent_s:,.0f} | |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
