"""An archive job as a separate program that a test kills.

Arguments: namesrv, output, topics, batch records, and a table format unless it is Parquet. Prints a line for
each step of progress, and the summary as JSON at the end.
"""

from __future__ import annotations

import sys
from typing import cast

import msgspec

from cometmq.pipeline.jobs.archive import ArchiveProgress, archive
from cometmq.pipeline.session import spark_session
from cometmq.pipeline.table.formats import TableFormat


def show(progress: ArchiveProgress) -> None:
    print("progress", progress.batch, progress.records, progress.total, flush=True)


def main() -> None:
    namesrv, output, topics, batch_records, *table_format = sys.argv[1:]
    spark = spark_session("archive", master="local[2]", memory="512m", quick_start=True)
    print("ready", flush=True)
    summary = archive(
        spark, namesrv, topics.split(","), output, batch_records=int(batch_records), on_progress=show,
        table_format=cast(TableFormat, (*table_format, "parquet")[0]),
    )  # fmt: skip
    print("summary", msgspec.json.encode(summary).decode(), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
