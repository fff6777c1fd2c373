"""Spark sessions for the pipeline: in UTC, with little log output and little memory.

A session with the master `local` does not accept connections from other machines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.resources import files

from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

JVM_FLAGS = "-XX:+UseSerialGC -Xshare:auto -XX:-UsePerfData -Djava.net.preferIPv4Stack=true"
"""JVM options. One collector thread suffices, as a driver that moves Arrow batches makes little garbage."""
QUICK_START = "-XX:TieredStopAtLevel=1"
"""JVM options for short programs: 4 s of CPU time less, but long computations take twice as long."""
CONNECT = "sc://"
"""Prefix of the address of a Spark Connect server."""


def chosen_master(master: str | None) -> str:
    """Return the given master, else SPARK_REMOTE, else SPARK_MASTER, else all cores of this machine."""
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
    """Create a Spark session with the `cometmq` format.

    A session that already runs in this process is returned unchanged. A Spark Connect server has its own JVM,
    so only settings of the session have an effect there.

    Args:
        app_name: Name of the application.
        master: A Spark master, or "sc://host:port" for a Spark Connect server. None: SPARK_REMOTE or
            SPARK_MASTER, else all cores of this machine.
        memory: Heap size of the JVM, such as "1g". Python workers need another 150 to 350 MB per core.
        conf: Settings that override all others.
        quiet: Whether Spark's own log output is reduced.
        quick_start: Whether the JVM starts faster without its optimising compiler, for short programs and for
            jobs that process bytes in Python.

    Returns:
        The session.
    """
    master = chosen_master(master)
    if quiet:  # By default, PySpark also logs each query error that it raises, with the Java stack trace
        PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True
    builder = SparkSession.builder.appName(app_name)
    settings = {"spark.sql.session.timeZone": "UTC", "spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}
    if master.startswith(CONNECT):
        builder = builder.remote(master)
    else:
        os.environ.pop("SPARK_REMOTE", None)  # PySpark would use this variable instead of `master`
        builder = builder.master(master)
        settings |= _own_jvm(master, memory, quiet=quiet, quick_start=quick_start)
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _own_jvm(master: str, memory: str, *, quiet: bool, quick_start: bool) -> dict[str, str]:
    """Return the settings of a driver whose JVM belongs to this process."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
        "spark.sql.shuffle.partitions": "8" if master.startswith("local") else "200",
        "spark.driver.extraJavaOptions": f"{JVM_FLAGS} {QUICK_START}" if quick_start else JVM_FLAGS,
    }
    if master.startswith("local"):
        # Workers need the interpreter in which this package is installed, not the first python3 in the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    if quiet:
        log4j = files("cometmq.pipeline").joinpath("log4j2.properties")
        settings["spark.driver.extraJavaOptions"] += f" -Dlog4j2.configurationFile=file:{log4j}"
    return settings
