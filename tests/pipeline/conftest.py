"""Fixtures: one cluster and one Spark session for all tests of the pipeline; each test has its own topics."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.fake_servers import MINUTES, FakeCluster, fake_cluster
from tests.pipeline.feeding import Topic
from tests.pipeline.s3_server import S3, s3_server
from tests.pipeline.spark_servers import connect_server, connect_session

from cometmq.pipeline.live import cluster
from cometmq.pipeline.session import spark_session
from cometmq.standalone import Standalone


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A real name server and broker on free ports."""
    standalone = Standalone(tmp_path_factory.mktemp("cluster"), namesrv_port=0, broker_port=0)
    with standalone.run_in_thread():
        yield standalone


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session `local[2,3]`: two slots, and tasks may fail twice.

    Spark interprets its plans: most of them run once and are small, so compiling them takes a tenth of the
    time of these tests. The sessions of the examples and commands compile theirs.
    """
    scratch = tmp_path_factory.mktemp("spark")
    session = spark_session(
        "tests",
        master="local[2,3]",
        memory="512m",
        quick_start=True,
        conf={
            "spark.local.dir": str(scratch / "local"),
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def connect_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Spark Connect server with two slots."""
    with connect_server(tmp_path_factory.mktemp("connect"), "local[2,3]") as address:
        yield address


@pytest.fixture(scope="session")
def connected(connect_address: str) -> Iterator[SparkSession]:
    """A Spark Connect session beside the classic session of this process."""
    with connect_session(connect_address) as session:
        yield session


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A scripted name server and broker with one message per minute."""
    monkeypatch.setattr(cluster, "_SHRUNK_S", 0.0)
    with fake_cluster() as made:
        made.stored_ms = list(MINUTES)
        yield made


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def at(request: pytest.FixtureRequest) -> str:
    """A path in the object store that only this test uses."""
    return f"{request.function.__name__}-{next(_numbers)}"


_numbers = itertools.count()


@pytest.fixture
def topic(broker: Standalone) -> Topic:
    """A topic that its first message creates."""
    return Topic(f"T{os.getpid()}_{next(_numbers)}", broker.namesrv_addr)


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "archive")
