"""A Spark session set up for this pipeline: UTC, quiet, small, reachable from this machine only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.resources import files

from pyspark.sql import SparkSession

JVM_FLAGS = (
    "-XX:+UseSerialGC "  # one collector thread: a driver that moves Arrow batches makes little garbage
    "-XX:TieredStopAtLevel=1 "  # start-up counts more than peak speed: the bytes are worked on in Python
    "-Xshare:auto -XX:-UsePerfData -Djava.net.preferIPv4Stack=true"
)


def spark_session(
    app_name: str = "cometmq",
    *,
    master: str | None = None,
    memory: str = "1g",
    conf: Mapping[str, str] | None = None,
    quiet: bool = True,
) -> SparkSession:
    """A session with the `cometmq` format ready. `master` is any Spark master (SPARK_MASTER in the
    environment, then `local[*]`); `memory` is the JVM's heap (Python workers come on top: 150-350 MB for each
    core); `conf` overrides all.

    A session that runs already in this process is returned as it is.
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
        "spark.driver.extraJavaOptions": JVM_FLAGS,
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
