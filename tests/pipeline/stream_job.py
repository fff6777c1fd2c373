"""A stream to Parquet files as a program that a test kills.

Arguments: namesrv, output, topic, batch records.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from cometmq.pipeline.session import spark_session


def run(spark: SparkSession, namesrv: str, output: str, topic: str, batch_records: str) -> None:
    """Process the available messages and print a line for each batch."""
    source = spark.readStream.format("cometmq").options(
        namesrv=namesrv, topic=topic, startingOffsets="earliest", maxOffsetsPerTrigger=batch_records
    )
    writer = source.load().writeStream.format("parquet").option("checkpointLocation", f"{output}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"{output}/table")
    told = -1
    while not query.awaitTermination(0.02):
        progress = query.lastProgress
        if progress is not None and progress.batchId != told:
            told = progress.batchId
            print("progress", told, progress.numInputRows, flush=True)


if __name__ == "__main__":
    session = spark_session("stream", master="local[2]", memory="512m", quick_start=True)
    run(session, *sys.argv[1:])
    session.stop()
