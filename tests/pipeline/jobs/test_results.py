"""A job's own directory: its owner, and the error if Spark cannot write to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.s3_server import KEY, S3
from tests.pipeline.store_files import StoreFiles

from cometmq.errors import ConfigError
from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.dedup import dedup
from cometmq.pipeline.jobs.dlq import dlq
from cometmq.pipeline.jobs.results import own_directory
from cometmq.pipeline.jobs.throughput import throughput
from cometmq.pipeline.jobs.trace import trace

Job = Callable[[SparkSession, str, str], object]
JOBS: dict[str, Job] = {
    "audit": lambda spark, source, output: audit(spark, source, output=output),
    "dedup": lambda spark, source, output: dedup(spark, source, output),
    "dlq": lambda spark, source, output: dlq(spark, source, ["g"], output=output),
    "throughput": lambda spark, source, output: throughput(spark, source, output=output),
    "trace": lambda spark, source, output: trace(spark, source, output=output),
}


@pytest.mark.parametrize("job", JOBS)
def test_tables_on_a_store_that_spark_does_not_know_are_refused_at_the_start(
    job: str, s3: S3, at: str, spark: SparkSession, tmp_path: Path
) -> None:
    files = StoreFiles()
    files.add(b"x", "%DLQ%g")
    with pytest.raises(ConfigError, match='No FileSystem for scheme "s3"') as raised:
        JOBS[job](spark, f"store:{files.write(tmp_path / 'store')}", s3.uri(at))
    assert KEY not in str(raised.value)
    assert raised.value.value == f"s3://bucket/{at}"


def test_a_file_uri_is_written_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles()
    files.add(b"x")
    output = f"file://{tmp_path}/t"
    assert throughput(spark, f"store:{files.write(tmp_path / 'store')}", output=output).output == output
    assert spark.read.parquet(f"{tmp_path}/t/topics").count() == 1


def test_a_mark_is_whole_and_what_a_kill_leaves_of_one_is_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, seen = os.link, []

    def watched(source: str, target: str) -> None:
        seen.extend(os.listdir(tmp_path / "new"))
        assert json.loads(Path(source).read_bytes()) == {"job": "dedup"}
        link(source, target)

    monkeypatch.setattr(os, "link", watched)
    new = tmp_path / "new"
    own_directory(str(new), "dedup")
    assert len(seen) == 1
    (new / "_cometmq_job.json").rename(new / seen[0])
    assert own_directory(str(new), "dedup") == str(new)
    (new / "_cometmq_job.json").unlink()
    (new / "mine.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match="a new directory"):
        own_directory(str(new), "dedup")
