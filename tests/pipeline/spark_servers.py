"""Spark's own servers as processes on 127.0.0.1: a standalone cluster and a Spark Connect server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from cometmq.pipeline.session import JVM_FLAGS, QUICK_START
from cometmq.testing import ServerProcess

HOME = Path(pyspark.__file__).parent
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
WORKERS = 2
JVM = f"{JVM_FLAGS} {QUICK_START}"


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment of servers and clients: loopback, this interpreter, files only in `scratch`."""
    return {
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(scratch),
        "SPARK_DAEMON_MEMORY": "512m",
        "SPARK_DAEMON_JAVA_OPTS": JVM,
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
        "PYSPARK_PYTHON": sys.executable,
    }


@contextmanager
def standalone_cluster(scratch: Path) -> Iterator[str]:
    """Run a master and two workers with one slot each; yield the master's address."""
    ports = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with ExitStack() as stack:
        program = ["org.apache.spark.deploy.master.Master", *ports]
        master = SparkServer("spark-class", program, "at spark://", scratch)
        found = re.search(r"spark://127\.0\.0\.1:\d+", stack.enter_context(master).wait_ready())
        assert found is not None
        slot = ["--cores", "1", "--memory", "1g", "--work-dir", str(scratch / "work")]
        program = ["org.apache.spark.deploy.worker.Worker", *ports, *slot, found[0]]
        for _ in range(WORKERS):
            stack.enter_context(SparkServer("spark-class", program, "registered with", scratch))
        yield found[0]


@contextmanager
def connect_server(scratch: Path, master: str) -> Iterator[str]:
    """Run a Spark Connect server on a master; yield its address."""
    settings = LOOPBACK | {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.progress.reportInterval": "200ms",
        "spark.driver.extraJavaOptions": JVM,
        "spark.executor.extraJavaOptions": JVM,
        "spark.executor.memory": "512m",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
    }
    arguments = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "--master", master]
    for key, value in settings.items():
        arguments += ["--conf", f"{key}={value}"]
    server = SparkServer("spark-submit", arguments, "Spark Connect server started at", scratch)
    with server:
        found = re.search(r"started at: \S+:(\d+)", server.wait_ready())
        assert found is not None
        yield f"sc://127.0.0.1:{found[1]}"


@contextmanager
def connect_session(address: str) -> Iterator[SparkSession]:
    """Open a Spark Connect session beside the classic session of this process, if there is one."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession  # takes a second

    session: Any = ConnectSession.builder.remote(address).create()
    yield session
    session.stop()


class SparkServer(ServerProcess):
    """A server program of PySpark. The process becomes a JVM, which starts slowly."""

    def __init__(self, program: str, arguments: Sequence[str], ready: str, scratch: Path) -> None:
        super().__init__([str(HOME / "bin" / program), *arguments], ready, environment(scratch))

    def wait_ready(self, timeout_s: float = 120.0) -> str:
        return super().wait_ready(timeout_s)
