"""Rates of the Spark pipeline, beside the archive job.

One broker of ours in a separate process and Spark on `local[2]` share the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.turns import Figures, Options, in_turns, median, ratio, table
from cometmq.pipeline.base.options import write_options
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.session import spark_session
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.sink.sending import Sender
from cometmq.testing import StandaloneProcess

MESSAGES = 300_000
SIZE = 1024  # bytes per body
TOPIC = "Benchmark"
SMALL = "queue_id int, queue_offset bigint, store_timestamp timestamp"


def run(options: Options) -> str:
    """Return messages per second of each way to read them, and of the sink's sender."""
    count = 10_000 if options.short else MESSAGES
    with StandaloneProcess(options.data / "store") as cluster:
        sent_s = fill(cluster.namesrv, count)
        spark = spark_session("benchmark", master="local[2]")
        try:
            wanted = jobs(spark, cluster.namesrv, options.data)

            def measure(name: str, number: int) -> Figures:
                began = time.perf_counter()
                wanted[name](number)
                return {"rate": count / (time.perf_counter() - began)}

            found = in_turns("pipeline", wanted, options.turns, measure)
        finally:
            spark.stop()
    first = next(iter(found.values()))
    lines = [
        [name, f"{median(turns, 'rate'):,.0f}", ratio(first, turns, "rate")] for name, turns in found.items()
    ]
    lines.append(["sender of the sink, one process", f"{count / sent_s:,.0f}", ""])
    return table(["Work", "messages/s", "of the archive job's rate"], lines)


def fill(namesrv: str, count: int) -> float:
    """Send the messages with the sink's sender in this process; return the seconds."""
    began = time.perf_counter()
    with Sender(write_options({"namesrv": namesrv, "topic": TOPIC})) as sender:
        for number in range(count):
            body = f"{number}:".encode().ljust(SIZE, b"%d" % (number % 7))
            properties = f"UNIQ_KEY\x01{number:032X}\x02KEYS\x01k{number}\x02TAGS\x01t{number % 5}".encode()
            sender.send(RowMessage(TOPIC, body, properties, 0, 0, None))
        sender.flush()
    return time.perf_counter() - began


def jobs(spark: SparkSession, namesrv: str, home: Path) -> dict[str, Callable[[int], object]]:
    """Return the measured work by name."""

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
