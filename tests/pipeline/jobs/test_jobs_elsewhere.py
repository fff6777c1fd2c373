"""The jobs through Spark Connect and on a cluster of several workers find what they find here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.all_jobs import Place, results
from tests.pipeline.jobs.test_dlq import die
from tests.pipeline.spark_servers import environment, standalone_cluster

from cometmq.pipeline.jobs.archive import archive

SLOW = long_form("many JVMs")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(spark: SparkSession, topic: Topic, tmp_path: Path) -> Place:
    topic.send(400)
    archive(spark, topic.namesrv, [topic.name], str(tmp_path / "archive"), batch_records=100)
    group = f"g{topic.name}"
    die(topic, group, (b"dead", {"error": "io"}))
    return Place("local", topic.namesrv, topic.name, str(tmp_path), group)


def elsewhere(place: Place, master: str, **env: str) -> Any:
    """What the jobs say in a process of its own."""
    arguments = [master, place.namesrv, place.topic, place.root, place.group]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.jobs.all_jobs", *arguments],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: Any) -> None:
    assert found["replay"]["messages"] == found["throughput"]["messages"] == 400
    assert (found["dlq"]["messages"], found["dedup"]["messages"]) == (1, 400)


@SLOW
def test_through_spark_connect(spark: SparkSession, connect_address: str, place: Place) -> None:
    there = elsewhere(place, connect_address)
    here = results(spark, place)
    for found in (there, here):
        found.pop("compact")  # leaves the hour that is not over alone
    assert there == json.loads(json.dumps(here))
    check(there)


@SLOW
def test_on_a_cluster(place: Place, tmp_path: Path) -> None:
    with standalone_cluster(tmp_path / "scratch") as master:
        check(elsewhere(place, master, **environment(tmp_path / "scratch")))
