"""A Spark session set up for this pipeline: UTC, quiet, small, reachable from this machine only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.resources import files

from pyspark.sql import SparkSession

JVM_FLAGS = "-XX:+UseSerialGC -Xshare:auto -XX:-UsePerfData -Djava.net.preferIPv4Stack=true"
"""One collector thread: a driver that moves Arrow batches makes little garbage."""
QUICK_START = "-XX:TieredStopAtLevel=1"
"""Without the optimising compiler a session needs 4 s of CPU less until its first result; long computations
in the JVM then cost nearly twice as much."""


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

    master: any Spark master (SPARK_MASTER in the environment, then `local[*]`); memory: the JVM's heap
    (Python workers come on top: 150-350 MB for each core); quick_start: for the archive job, whose bytes are
    worked on in Python, and for short programs; conf overrides all. A session that runs already in this
    process is returned as it is.
    """
    master = master or os.environ.get("SPARK_MASTER") or "local[*]"
    builder = SparkSession.builder.appName(app_name).master(master)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
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
    for key, value in (settings | dict(conf or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
