"""Questions to an archive, answered by Spark from its log: what is in it, and is anything missing."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.window import Window

from cometmq.pipeline.table.directory import COMMIT_NAME

_RANGE = (
    "topic string, broker_name string, queue_id int, start bigint, `end` bigint, records bigint, bad bigint, "
    "lost bigint, bytes bigint, first_store_ms bigint, last_store_ms bigint, replaces bigint"
)
_QUEUE = ("topic", "broker_name", "queue_id")
_FILE = "path string, topic string, dt string, hour int, rows bigint, bytes bigint"


def _commits(spark: SparkSession, output: str) -> DataFrame:
    schema = (
        "batch bigint, run string, time string, seconds double, "
        f"ranges array<struct<{_RANGE}>>, files array<struct<{_FILE}>>"
    )
    reader = spark.read.schema(schema).option("pathGlobFilter", COMMIT_NAME)
    return reader.json(f"{output.rstrip('/')}/_cometmq/commits")


def manifest(spark: SparkSession, output: str) -> DataFrame:
    """One row for each committed range: offsets `start` <= o < `end` of a queue, and how many became rows
    (records), were set aside (bad) or were gone from the broker (lost).

    An empty range with `replaces` says that the queue began anew, and up to which offset the old one had been
    read. `life` counts these: offsets of different lives are different messages."""
    so_far = Window.partitionBy(*_QUEUE).orderBy("batch")
    return (
        _commits(spark, output)
        .select("batch", "run", "time", F.explode("ranges").alias("r"))
        .select("batch", "run", "time", "r.*")
        .withColumn("life", F.count("replaces").over(so_far))
    )


def files(spark: SparkSession, output: str) -> DataFrame:
    """One row for each file of the table; `path` is relative to the archive."""
    return _commits(spark, output).select("batch", F.explode("files").alias("f")).select("batch", "f.*")


def batches(spark: SparkSession, output: str) -> DataFrame:
    """One row for each batch that added messages: when it was committed (s since 1970), how long it took, how
    many records and bytes (as the brokers store them) it brought."""
    ranges = _commits(spark, output).select("batch", "time", "seconds", F.explode("ranges").alias("r"))
    return (
        ranges.groupBy("batch", F.to_timestamp("time").cast("double").alias("epoch_s"), "seconds")
        .agg(F.sum("r.records").alias("records"), F.sum("r.bytes").alias("bytes"))
        .filter("records > 0")
        .orderBy("batch")
    )


def completeness(spark: SparkSession, output: str) -> DataFrame:
    """One row for each life of a queue (manifest): its range, its records, and what is wrong with it.

    gaps, overlaps: places where a range does not begin where the one before it ended; missing: offsets of the
    ranges that are no rows of the table. All three are 0 when each message is in the table once.
    """
    queue = [*_QUEUE, "life"]
    before = F.lag("end").over(Window.partitionBy(*queue).orderBy("start", "end"))
    ranges = manifest(spark, output).filter("start < end").withColumn("before", before)
    return (
        ranges.groupBy(*queue)
        .agg(
            F.min("start").alias("start"),
            F.max("end").alias("end"),
            F.sum("records").alias("records"),
            F.sum((F.col("start") > F.col("before")).cast("int")).alias("gap_count"),
            F.sum((F.col("start") < F.col("before")).cast("int")).alias("overlap_count"),
            F.sum(F.col("end") - F.col("start") - F.col("records")).alias("missing"),
        )
        .select(
            *queue,
            "start",
            "end",
            "records",
            F.coalesce("gap_count", F.lit(0)).alias("gaps"),
            F.coalesce("overlap_count", F.lit(0)).alias("overlaps"),
            "missing",
        )
        .orderBy(*queue)
    )


def archived(spark: SparkSession, output: str) -> DataFrame:
    """The table as of the last commit: exactly its files, whatever a running job moves around."""
    base = output.rstrip("/")
    paths = [f"{base}/{row.path}" for row in files(spark, output).select("path").collect()]
    if not paths:
        raise FileNotFoundError(f"{output} holds no archived messages yet")
    return spark.read.option("basePath", base).parquet(*paths)
