"""The archive job on this machine, through Spark Connect, and on a cluster of workers: the same table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.spark_servers import (
    WORKERS,
    connect_server,
    connect_session,
    environment,
    standalone_cluster,
)

from cometmq.pipeline.base.engine import run_units
from cometmq.pipeline.jobs.archive import archive

RECORDS = 60_000  # enough for several tasks


def table(output: Path) -> pa.Table:
    """Return all rows and columns, including those from directory names, in queue order."""
    rows = pyarrow.dataset.dataset(output, partitioning="hive").to_table()
    return rows.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])


def run_command(topic: Topic, output: Path, *arguments: str, **env: str) -> int:
    """Run `cometmq archive` in a separate process; return the number of messages."""
    command = [sys.executable, "-m", "cometmq", "archive", topic.name, "-n", topic.namesrv, "-o", str(output)]
    done = subprocess.run(
        [*command, "--json", *arguments], env=os.environ | env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["records"])


@pytest.mark.slow("starts a cluster of Spark")
def test_an_archive_through_spark_connect_is_the_same(
    spark: SparkSession, connect_address: str, topic: Topic, tmp_path: Path
) -> None:
    topic.send(1000)
    archive(spark, topic.namesrv, [topic.name], str(tmp_path / "here"))
    # The server has Java; this process needs none.
    remote = {"SPARK_REMOTE": connect_address, "JAVA_HOME": str(tmp_path / "no-java")}
    assert run_command(topic, tmp_path / "connect", "--batch-records", "400", **remote) == 1000
    assert table(tmp_path / "here").equals(table(tmp_path / "connect"))


@pytest.mark.slow("starts a cluster of Spark")
@pytest.mark.timeout(900)
@long_form("seven JVMs")
def test_an_archive_on_a_cluster_is_the_same(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(RECORDS)
    archive(spark, topic.namesrv, [topic.name], str(tmp_path / "here"))

    def place(_: int) -> str:
        time.sleep(0.5)
        return os.getcwd()  # the executor's directory differs from the driver's

    with standalone_cluster(tmp_path / "scratch") as master:
        env = environment(tmp_path / "scratch")
        assert (
            run_command(topic, tmp_path / "cluster", "--master", master, "--memory", "512m", **env) == RECORDS
        )
        with connect_server(tmp_path / "scratch", master) as address, connect_session(address) as session:
            places = run_units(session, "places", place, range(4 * WORKERS))
            archive(session, topic.namesrv, [topic.name], str(tmp_path / "connect"))
    assert len(set(places)) == WORKERS
    for name in ("cluster", "connect"):
        assert table(tmp_path / name).equals(table(tmp_path / "here")), name
