"""Merging: all rows of all files, in order per queue, in files near the target size, with bounded memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from cometmq.pipeline.table import merging
from cometmq.pipeline.table.bodies import body_columns
from cometmq.pipeline.table.merging import Merge, merge
from cometmq.pipeline.table.partition_writer import PartitionWriter
from cometmq.pipeline.table.task import ARCHIVE_SCHEMA

HOUR_US = 3_600_000_000
Row = tuple[str, int, int]  # broker name, queue, offset


def files(
    root: Path, *contents: list[Row], codec: str = "zstd", body: int = 20, schema: pa.Schema | None = None
) -> list[str]:
    """Write a file of hour 5 for each element of `contents`; return the paths."""
    (root / "staged").mkdir(exist_ok=True)
    paths = []
    for rows in contents:
        writer = PartitionWriter(fs.LocalFileSystem(), str(root), "staged", compression=codec, level=None)
        full = [
            {
                "topic": "t", "broker_name": broker, "queue_id": queue, "queue_offset": offset,
                "store_timestamp": 5 * HOUR_US + offset, "body": random.Random(offset).randbytes(body),
                "properties": [("KEYS", f"k{offset}")],
            }
            for broker, queue, offset in rows
        ]  # fmt: skip
        writer.write(pa.RecordBatch.from_pylist(full, schema or ARCHIVE_SCHEMA))
        writer.close()
        for file in writer.files:
            (root / file["path"]).parent.mkdir(parents=True, exist_ok=True)
            (root / file["staged"]).rename(root / file["path"])
            paths.append(file["path"])
    return paths


def merged(
    root: Path, paths: list[str], target_bytes: int = 1 << 30
) -> tuple[list[dict[str, Any]], pa.Table]:
    results = merge(Merge(str(root), "staged", "t", tuple(paths), target_bytes))
    return results, pa.concat_tables(pq.read_table(root / file["staged"]) for file in results)


def places(table: pa.Table) -> list[Row]:
    rows = table.select(["broker_name", "queue_id", "queue_offset"]).to_pylist()
    return [(row["broker_name"], row["queue_id"], row["queue_offset"]) for row in rows]


def queues(*names: Row, count: int = 10) -> list[Row]:
    return [(broker, queue, first + number) for broker, queue, first in names for number in range(count)]


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_rows_come_in_order_of_queue_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(merging, "_KEPT_BYTES", kept)
    paths = files(
        tmp_path,
        queues(("b", 0, 10), ("b", 1, 50), ("a", 3, 0)),
        queues(("b", 0, 0), ("a", 3, 10)),
        queues(("b", 0, 20), ("b", 1, 40)),
    )
    before = pa.concat_tables(pq.read_table(tmp_path / path) for path in paths)
    (file,), table = merged(tmp_path, paths)
    assert places(table) == queues(("a", 3, 0), ("b", 0, 0), ("b", 1, 40), count=20)[:20] + queues(
        ("b", 0, 0), count=30
    ) + queues(("b", 1, 40), count=20)
    order = [(name, "ascending") for name in ("broker_name", "queue_id", "queue_offset")]
    assert table.equals(before.sort_by(order))
    assert (file["rows"], file["topic"], file["dt"], file["hour"]) == (70, "t", "1970-01-01", 5)
    assert file["path"].startswith("topic=t/dt=1970-01-01/hour=05/part-")


def test_offsets_that_were_given_out_twice_are_all_there(tmp_path: Path) -> None:
    paths = files(tmp_path, queues(("a", 0, 5)) + queues(("a", 0, 0)), queues(("a", 0, 0)))
    _, table = merged(tmp_path, paths)
    assert sorted(places(table)) == sorted(queues(("a", 0, 0), ("a", 0, 0), ("a", 0, 5)))


def test_a_new_file_begins_at_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.pipeline.table.partition_writer.ROW_GROUP_BYTES", 20_000)
    paths = files(tmp_path, *(queues(("a", 0, 100 * number), count=100) for number in range(10)), body=1000)
    results, table = merged(tmp_path, paths, target_bytes=200_000)
    assert len(results) > 3
    assert all(150_000 < file["bytes"] < 250_000 for file in results[:-1])
    assert places(table) == queues(("a", 0, 0), count=1000)


@pytest.mark.parametrize("codec", ["snappy", "none", "zstd"])
def test_the_codec_is_that_of_the_files(tmp_path: Path, codec: str) -> None:
    paths = files(tmp_path, queues(("a", 0, 0)), queues(("a", 0, 10)), codec=codec)
    (file,), _ = merged(tmp_path, paths)
    column = pq.ParquetFile(tmp_path / file["staged"]).metadata.row_group(0).column(0)
    assert column.compression == {"none": "UNCOMPRESSED"}.get(codec, codec.upper())


def test_columns_that_only_some_files_have_are_null_elsewhere(tmp_path: Path) -> None:
    more = ARCHIVE_SCHEMA.append(pa.field("extra", pa.int64()))
    paths = files(tmp_path, queues(("a", 0, 0))) + files(tmp_path, queues(("a", 0, 10)), schema=more)
    _, table = merged(tmp_path, paths)
    assert table.num_rows == 20
    assert table["extra"].null_count == 20


def test_files_of_bodies_that_got_more_fields_are_merged(tmp_path: Path) -> None:
    kinds = [pa.struct([("id", pa.int32())]), pa.struct([("id", pa.int64()), ("new", pa.list_(pa.string()))])]
    schemas = [pa.schema([*ARCHIVE_SCHEMA, *body_columns(kind)]) for kind in kinds]
    paths = [
        path
        for number, schema in enumerate([*schemas, ARCHIVE_SCHEMA])
        for path in files(tmp_path, queues(("a", 0, 10 * number)), schema=schema)
    ]
    _, table = merged(tmp_path, paths)
    assert table.num_rows == 30
    assert table.schema.field("value").type == kinds[1]


def test_files_whose_columns_do_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    other = ARCHIVE_SCHEMA.append(pa.field("extra", pa.int64()))
    another = ARCHIVE_SCHEMA.append(pa.field("extra", pa.string()))
    paths = [
        *files(tmp_path, queues(("a", 0, 0)), schema=other),
        *files(tmp_path, queues(("a", 0, 10)), schema=another),
    ]
    assert merge(Merge(str(tmp_path), "staged", "t", tuple(paths), 1 << 30)) == []
    assert not list((tmp_path / "staged").iterdir())
