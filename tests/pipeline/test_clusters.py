"""The archive on this machine, through Spark Connect and on a cluster of several workers: the same table."""

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
from tests.pipeline.feeding import Topic
from tests.pipeline.spark_servers import (
    WORKERS,
    connect_server,
    connect_session,
    environment,
    standalone_cluster,
)

from cometmq.pipeline.archive import archive
from cometmq.pipeline.engine import run_units

RECORDS = 60_000  # enough for several tasks


def table(output: Path) -> pa.Table:
    """All rows and columns, the names of the directories included, in the order of the queues."""
    rows = pyarrow.dataset.dataset(output, partitioning="hive").to_table()
    return rows.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])


def test_an_archive_through_spark_connect_is_the_same(
    spark: SparkSession, connected: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    topic.send(1000)
    for name, session in (("here", spark), ("connect", connected)):
        seen: list[int] = []
        summary = archive(
            session, topic.namesrv, [topic.name], str(tmp_path / name),
            batch_records=400, on_progress=lambda at, seen=seen: seen.append(at.records),
        )  # fmt: skip
        assert (summary.records, summary.complete, seen[-1]) == (1000, True, 1000)
    assert table(tmp_path / "here").equals(table(tmp_path / "connect"))


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get("COMETMQ_SPARK_CLUSTER"), reason="seven JVMs: COMETMQ_SPARK_CLUSTER=1 starts them"
)
def test_an_archive_on_a_cluster_is_the_same(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(RECORDS)
    archive(spark, topic.namesrv, [topic.name], str(tmp_path / "here"))

    def place(_: int) -> str:
        time.sleep(0.5)
        return os.getcwd()  # an executor has a directory of its own

    with standalone_cluster(tmp_path / "scratch") as master:
        command = [sys.executable, "-m", "cometmq", "archive", topic.name, "-n", topic.namesrv, "--json"]
        done = subprocess.run(
            [*command, "-o", str(tmp_path / "cluster"), "--master", master, "--memory", "512m"],
            env=os.environ | environment(tmp_path / "scratch"), capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["records"] == RECORDS
        with connect_server(tmp_path / "scratch", master) as address, connect_session(address) as session:
            places = run_units(session, "places", place, range(4 * WORKERS))
            archive(session, topic.namesrv, [topic.name], str(tmp_path / "connect"))
    assert len(set(places)) == WORKERS
    for name in ("cluster", "connect"):
        assert table(tmp_path / name).equals(table(tmp_path / "here")), name
