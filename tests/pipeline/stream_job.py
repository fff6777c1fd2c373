"""A stream into Parquet files, a program to be killed. Arguments: namesrv, output, topic, batch records."""

from __future__ import annotations

import sys
import threading

from cometmq.pipeline.session import spark_session


def main() -> None:
    namesrv, output, topic, batch_records = sys.argv[1:]
    spark = spark_session("stream", master="local[2]", memory="512m", quick_start=True)
    source = spark.readStream.format("cometmq").options(
        namesrv=namesrv, topic=topic, startingOffsets="earliest", maxOffsetsPerTrigger=batch_records
    )
    writer = source.load().writeStream.format("parquet").option("checkpointLocation", f"{output}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"{output}/table")
    done, told = threading.Event(), -1
    while not done.wait(0.02):
        progress = query.lastProgress
        if progress is not None and progress.batchId != told:
            told = progress.batchId
            print("progress", told, progress.numInputRows, flush=True)
        if not query.isActive:
            done.set()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
