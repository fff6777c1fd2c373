"""Messages that cannot be rows of the archive's table are set aside and do not block the others."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from pyspark.sql import SparkSession
from tests.pipeline.fake_servers import QUEUE, TOPIC, fake_cluster

from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.base.options import PullOptions
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import completeness
from cometmq.pipeline.table import task as archive_task
from cometmq.pipeline.table.partition_writer import Partition
from cometmq.pipeline.table.task import ArchiveTask, Quarantine, run_task
from cometmq.protocol.record.arrow import BadRecord


def test_only_some_of_many_bad_records_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_task, "_QUARANTINE_BYTES", 50_000)
    quarantine = Quarantine(fs.LocalFileSystem(), str(tmp_path), "staged", 7)
    (tmp_path / "staged").mkdir()
    for offset in range(100):
        quarantine.add(
            MessageQueue("t", "b", 3), BadRecord(0, "crc", "as it is", 3, offset, None, bytes(9_000))
        )
    (file,) = quarantine.close()
    written = pq.ParquetFile(tmp_path / file["staged"])
    assert written.metadata.num_row_groups == 20
    assert file["rows"] == 100
    assert written.read()["queue_offset"].to_pylist() == list(range(100))
    assert file["bytes"] == (tmp_path / file["staged"]).stat().st_size


def test_without_bad_records_there_is_no_file(tmp_path: Path) -> None:
    assert Quarantine(fs.LocalFileSystem(), str(tmp_path), "staged", 7).close() == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("hour", "directory"),
    [
        (0, "topic=t/dt=1970-01-01/hour=00"),
        (-1, "topic=t/dt=1969-12-31/hour=23"),
        (-62_135_596_800 // 3600, "topic=t/dt=0001-01-01/hour=00"),
        (253_402_300_799 // 3600, "topic=t/dt=9999-12-31/hour=23"),
    ],
)
def test_every_time_that_is_one_has_a_directory(hour: int, directory: str) -> None:
    assert Partition("t", hour).directory == directory


YEAR_300_000_MS = 300_000 * 31_556_952_000 - 62_167_219_200_000


@pytest.mark.slow("the first Spark jobs of a session, which are slow")
@pytest.mark.parametrize(
    ("fields", "stage"),
    [
        ({"store_timestamp_ms": YEAR_300_000_MS}, "time"),
        ({"store_timestamp_ms": 2**62}, "time"),
        ({"store_timestamp_ms": -(2**63)}, "time"),
        ({"born_timestamp_ms": YEAR_300_000_MS}, "time"),
        ({"born_timestamp_ms": -(2**62)}, "time"),
        ({"queue_id": 7}, "queue"),
        ({"queue_id": -1}, "queue"),
        ({"topic": "Another"}, "queue"),
    ],
)
def test_a_record_that_cannot_be_is_set_aside_and_the_archive_goes_on(
    spark: SparkSession, output: str, fields: dict[str, Any], stage: str
) -> None:
    with fake_cluster() as fake:
        fake.stored_ms = [1_000_000] * 5
        record = fake.record
        fake.record = lambda offset: record(offset, **(fields if offset == 2 else {}))
        first = archive(spark, fake.addr, [TOPIC], output)
        fake.stored_ms += [2_000_000] * 3
        second = archive(spark, fake.addr, [TOPIC], output)
    assert (first.records, first.bad, second.records, second.bad) == (4, 1, 3, 0)
    rows = spark.read.parquet(output).select("queue_offset").collect()
    assert sorted(row.queue_offset for row in rows) == [0, 1, 3, 4, 5, 6, 7]
    (bad,) = spark.read.parquet(f"{output}/_cometmq/quarantine").collect()
    assert (bad.topic, bad.queue_id, bad.queue_offset, bad.stage) == (TOPIC, 0, 2, stage)
    assert sum(row.missing for row in completeness(spark, output).collect()) == 1


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (errno.ENOSPC, pytest.raises(ArchiveError, match=r"^/.*: not committed: No space left on device$")),
        (errno.EIO, pytest.raises(OSError, match="output error")),
    ],
)
def test_a_full_disk_is_said_in_a_line_and_other_faults_are_for_spark_to_try_again(
    monkeypatch: pytest.MonkeyPatch, output: str, code: int, raised: AbstractContextManager[Any]
) -> None:
    class Disk(fs.LocalFileSystem):
        def open_output_stream(self, *_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(archive_task, "open_filesystem", lambda _: (Disk(), output))
    with fake_cluster() as fake:
        fake.stored_ms = [1_000_000] * 5
        task = ArchiveTask(
            batch=0, ranges=[QueueRange(QUEUE, 0, 5)], addresses={}, namesrv=(fake.addr,), output=output,
            staging="s", compression="zstd", compression_level=None, pull=PullOptions(timeout_ms=1000),
        )  # fmt: skip
        with raised:
            run_task(task)
