"""What cannot be a row of the archive's table is set aside, and never in the way of the rest."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from cometmq.message import MessageQueue
from cometmq.pipeline import archive_task
from cometmq.pipeline.archive_task import Quarantine
from cometmq.pipeline.partition_writer import Partition
from cometmq.protocol.columnar import BadRecord


def test_of_many_bad_records_only_some_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
