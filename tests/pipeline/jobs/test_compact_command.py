"""`cometmq pipeline compact` with a real Spark."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.pipeline.jobs.conftest import RunJob

from cometmq.cli.pipeline.writing import compact
from cometmq.cli.pipeline.writing import report_compact as report
from cometmq.pipeline.jobs.compaction import CompactSummary
from cometmq.pipeline.jobs.compaction import compact as run_compact
from cometmq.pipeline.table.directory import ArchiveTable
from cometmq.pipeline.table.partition_writer import PartitionWriter
from cometmq.pipeline.table.task import ARCHIVE_SCHEMA


def archive_of(output: Path, batches: int) -> None:
    """Create an archive of one hour with a file of one message for each batch."""
    table = ArchiveTable(str(output))
    table.prepare()
    for batch in range(batches):
        writer = PartitionWriter(
            table.filesystem, table.root, table.staging(batch), compression="zstd", level=None
        )
        row = {"topic": "t", "broker_name": "b", "queue_id": 0, "queue_offset": batch, "store_timestamp": 0}
        writer.write(pa.RecordBatch.from_pylist([row], ARCHIVE_SCHEMA))
        writer.close()
        facts = {"time": "2026-11-23T00:00:00.000+00:00", "offsets": {}, "ranges": [], "quarantine": []}
        table.commit(facts | {"batch": batch, "files": writer.files})
    table.close()


def test_small_files_become_one_and_what_is_no_archive_is_named(run_job: RunJob, tmp_path: Path) -> None:
    archive_of(tmp_path / "archive", 3)
    done = run_job("compact", str(tmp_path / "archive"), "--json")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["files_before"], summary["files_after"]) == (0, 3, 1)
    (path,) = (tmp_path / "archive").glob("topic=*/**/*.parquet")
    assert pq.read_table(path)["queue_offset"].to_pylist() == [0, 1, 2]
    failed = run_job("compact", str(tmp_path / "nothing"))
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].endswith("/nothing: contains no archived messages yet")


def test_the_command_and_the_function_agree_on_what_is_usual() -> None:
    usual = {name: item.default for name, item in signature(run_compact).parameters.items()}
    given = compact.make_context("compact", ["/a"]).params
    shared = {"target_bytes", "older_than_s", "retention_s"}
    assert {name: given[name] for name in shared} == {name: usual[name] for name in shared}


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        (CompactSummary("/a"), "nothing to merge in /a\n"),
        (
            CompactSummary("/a", "delta", deleted=2),
            "/a is a table of format delta, which is merged by optimize.compact of deltalake, never here\n"
            "deleted 2 files that are not part of the table\n",
        ),
        (
            CompactSummary("/a", "parquet", 1, 7, 5, 1, 500, 200, 3, 1.5),
            "merged 5 files (500 bytes) to 1 file (200 bytes) with 7 messages in 1.50 s in /a\n"
            "deleted 3 files that are not part of the table\n",
        ),
    ],
)
def test_what_it_says(capsys: pytest.CaptureFixture[str], summary: CompactSummary, says: str) -> None:
    report(summary)
    assert capsys.readouterr().out == says
