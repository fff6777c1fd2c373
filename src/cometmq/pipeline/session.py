"""A Spark session set up for this pipeline: UTC, quiet, small. With `local` nobody else can reach it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.resources import files

from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

JVM_FLAGS = "-XX:+UseSerialGC -Xshare:auto -XX:-UsePerfData -Djava.net.preferIPv4Stack=true"
"""One collector thread: a driver that moves Arrow batches makes little garbage."""
QUICK_START = "-XX:TieredStopAtLevel=1"
"""Without the optimising compiler a session needs 4 s of CPU less until its first result; long computations
in the JVM then cost nearly twice as much."""
CONNECT = "sc://"
"""What the address of a Spark Connect server begins with."""


def chosen_master(master: str | None) -> str:
    """The Spark to use: as given, else by SPARK_REMOTE or SPARK_MASTER, else this machine's cores."""
    return master or os.environ.get("SPARK_REMOTE") or os.environ.get("SPARK_MASTER") or "local[*]"


def spark_session(
    app_name: str = "cometmq",
    *,
    master: str | None = None,
    memory: str = "1g",
    conf: Mapping[str, str] | None = None,
    quiet: bool = True,
    quick_start: bool = False,
) -> SparkSession:
    """A session with the `cometmq` format ready.

    master: any Spark master, or `sc://host:port`, a Spark Connect server (by default `chosen_master` says);
    memory: the JVM's heap (Python workers come on top: 150-350 MB for each core); quick_start: for jobs whose
    bytes are worked on in Python, and for short programs; conf overrides all. A Spark Connect server has its
    own JVM, so only settings of the session have an effect there. A session that runs already in this
    process is returned as it is.
    """
    master = chosen_master(master)
    if quiet:  # PySpark raises an error of a query and logs it beside that, with all its Java
        PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True
    builder = SparkSession.builder.appName(app_name)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    }
    if master.startswith(CONNECT):
        builder = builder.remote(master)
    else:
        os.environ.pop("SPARK_REMOTE", None)  # PySpark would prefer it to a master
        builder = builder.master(master)
        settings |= _own_jvm(master, memory, quiet=quiet, quick_start=quick_start)
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _own_jvm(master: str, memory: str, *, quiet: bool, quick_start: bool) -> dict[str, str]:
    """Settings of a driver in a JVM of this process's own."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
        "spark.sql.shuffle.partitions": "8" if master.startswith("local") else "200",
        "spark.driver.extraJavaOptions": f"{JVM_FLAGS} {QUICK_START}" if quick_start else JVM_FLAGS,
    }
    if master.startswith("local"):
        # Workers here need the interpreter that has this package, not the first python3 of the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if quiet:
        log4j = files("cometmq.pipeline").joinpath("log4j2.properties")
        settings["spark.driver.extraJavaOptions"] += f" -Dlog4j2.configurationFile=file:{log4j}"
    return settings
