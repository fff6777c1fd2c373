"""The rebuild job with Spark writes the same bytes as a rebuild in one process, also after a kill."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.store.inspect.test_rebuild_parts import made_of
from tests.store.kit import small
from tests.store.planted import build

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import JobStopped
from cometmq.pipeline.jobs.rebuild import rebuild


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    build(path)
    return path


def test_the_result_equals_the_originals_and_is_verified(
    root: Path, spark: SparkSession, tmp_path: Path
) -> None:
    output, seen = tmp_path / "new", list[tuple[int, int | None]]()
    summary = rebuild(
        spark, str(root), str(output), config=small(root), on_progress=lambda *at: seen.append(at)
    )
    assert made_of(output) == made_of(root)
    assert (summary.records, summary.queues, summary.units, summary.index_entries) == (400, 3, 400, 1200)
    assert (summary.errors, summary.complete, summary.findings) == (0, True, [])
    assert seen
    assert all(total is not None and done <= total for done, total in seen)


def test_a_stopped_job_begins_again(root: Path, spark: SparkSession, tmp_path: Path) -> None:
    output, stop = tmp_path / "new", threading.Event()
    with pytest.raises(JobStopped):
        rebuild(
            spark, str(root), str(output), config=small(root), stop=stop, on_progress=lambda *_: stop.set()
        )
    assert not (output / "consumequeue").exists()
    rebuild(spark, str(root), str(output), config=small(root), check=False)
    assert made_of(output) == made_of(root)


def test_a_directory_with_other_files_is_refused(root: Path, spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="output"):
        rebuild(spark, str(root), str(tmp_path), config=small(root))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match="output"):
        rebuild(spark, str(root), "s3://bucket/new", config=small(root))
