"""A store directory read without a broker: one core to Arrow, and Spark beside the same rows as Parquet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from benchmarks.processes import cpu_seconds
from benchmarks.turns import Figures, Options, in_turns, median, ratio, table
from cometmq.pipeline.base.options import StoreOptions
from cometmq.pipeline.session import spark_session
from cometmq.pipeline.stored.plan import plan_slices
from cometmq.pipeline.stored.source import read_slice
from cometmq.protocol.record.arrow import COLUMNS, arrow_schema
from cometmq.store import MessageStore, StoreConfig

MESSAGES = 1_000_000
SIZE = 100  # bytes per body
NOW_MS = 1_700_000_000_000
USUAL = (
    "topic", "queue_id", "queue_offset", "msg_id", "tags", "keys", "body", "born_timestamp",
    "store_timestamp",
)  # fmt: skip
SMALL = ("queue_id", "queue_offset", "store_timestamp")
SCHEMA = (
    "topic string, queue_id int, queue_offset bigint, msg_id string, tags string, keys string, body binary, "
    "born_timestamp timestamp, store_timestamp timestamp"
)
FIGURES = ("rate", "core")  # records per second, and per CPU second of all processes
TO_ARROW = {
    "all columns": tuple(COLUMNS),
    "nine columns": USUAL,
    "body only": ("body",),
    "three small": SMALL,
}


def run(options: Options) -> str:
    """Return records per second: to Arrow on one core, and through Spark."""
    count = 20_000 if options.short else MESSAGES
    root, copies = options.data / "offline", options.data / "parquet"
    if not root.exists():
        fill(root, count)
    given = StoreOptions((str(root),))
    if not copies.exists():
        to_parquet(given, copies)

    def rates(began: float, cpu: float) -> Figures:
        used = max(cpu_seconds(os.getpid()) - cpu, 0.01)
        return {"rate": count / (time.perf_counter() - began), "core": count / used}

    def one_core(name: str, _turn: int) -> Figures:
        began, cpu = time.perf_counter(), cpu_seconds(os.getpid())
        schema = arrow_schema(TO_ARROW[name])
        parts = plan_slices(given)
        rows = sum(batch.num_rows for part in parts for batch in read_slice(part, schema, given))
        assert rows == count
        return rates(began, cpu)

    found = in_turns("to Arrow", TO_ARROW, options.turns, one_core)
    lines = [
        [f"one core to Arrow, {name}", *(f"{median(turns, figure):,.0f}" for figure in FIGURES), "", ""]
        for name, turns in found.items()
    ]
    spark = spark_session("benchmark", master="local[2]")
    try:
        spark.dataSource.register(ParquetFiles)
        ways: dict[str, Callable[[], DataFrame]] = {
            "Parquet by pyarrow": lambda: spark.read.format("parquet-files").load(str(copies)),
            "cometmq-store": lambda: spark.read.format("cometmq-store").schema(SCHEMA).load(str(root)),
        }

        def through_spark(name: str, _turn: int) -> Figures:
            began, cpu = time.perf_counter(), cpu_seconds(os.getpid())
            ways[name]().agg(F.sum(F.length("body")), F.max("store_timestamp")).collect()
            return rates(began, cpu)

        found = in_turns("through Spark", ways, options.turns, through_spark)
    finally:
        spark.stop()
    base = found["Parquet by pyarrow"]
    lines += [
        [
            f"Spark, nine columns, {name}",
            *(f"{median(turns, figure):,.0f}" for figure in FIGURES),
            *(ratio(base, turns, figure) for figure in FIGURES),
        ]
        for name, turns in found.items()
    ]
    return table(["Work", "records/s", "for a second of CPU", "beside Parquet", "for its CPU"], lines)


def fill(root: Path, count: int) -> None:
    """Store messages like a broker, in 64 MiB files and eight queues."""
    config = StoreConfig(store_path_root_dir=str(root), mapped_file_size_commit_log=64 << 20)
    store = MessageStore.open(config)
    for number in range(count):
        properties = b"UNIQ_KEY\x01%032X\x02KEYS\x01k%d\x02TAGS\x01t%d" % (number, number, number % 5)
        body = (b"%d:" % number).ljust(SIZE, b"%d" % (number % 7))
        host = b"\x7f\0\0\1\0\0\xc3\x50"
        store.appender.append(
            "Benchmark", number % 8, body, properties, born_timestamp_ms=NOW_MS, born_host=host
        )
        if number % 100 == 99:
            store.commit()
    store.commit()
    store.close()


def to_parquet(given: StoreOptions, directory: Path) -> None:
    """Write the same rows as Parquet, a file per slice, with pyarrow's default compression."""
    directory.mkdir()
    schema = arrow_schema(USUAL)
    for number, part in enumerate(plan_slices(given)):
        with pq.ParquetWriter(directory / f"{number}.parquet", schema) as writer:
            for batch in read_slice(part, schema, given):
                writer.write_batch(batch)


@dataclass(frozen=True)
class ParquetFile(InputPartition):
    """The input partition of one task: a file."""

    path: str


class ParquetFiles(DataSource):
    """Parquet files as a Python data source, like the store's, so that only the reader differs."""

    @classmethod
    def name(cls) -> str:
        return "parquet-files"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return ParquetReader(self.options["path"])


class ParquetReader(DataSourceReader):
    """A reader with one task per file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def partitions(self) -> Sequence[InputPartition]:
        return [ParquetFile(str(path)) for path in sorted(Path(self._path).iterdir())]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, ParquetFile):
            yield from pq.ParquetFile(partition.path).iter_batches(10_000)
