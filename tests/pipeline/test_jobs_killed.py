"""Jobs as processes that SIGKILL ends midway and that are started again: each message is processed once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.stream_job import run as run_stream

from cometmq.pipeline.jobs.archive import archive

ROOT = Path(__file__).parents[2]
CYCLES = int(os.environ.get("COMETMQ_ARCHIVE_KILLS", "2"))
RECORDS = 20_000 * CYCLES  # so many that a late kill hits a job halfway


def start(
    topic: Topic, output: str, batch_records: int, program: str = "archive_job.py", *more: str
) -> subprocess.Popen[str]:
    job = Path(__file__).with_name(program)
    return subprocess.Popen(
        [sys.executable, str(job), topic.namesrv, output, topic.name, str(batch_records), *more],
        stdout=subprocess.PIPE,
        text=True,
    )


def start_job(name: str, **given: Any) -> subprocess.Popen[str]:
    """Start one of the jobs with these arguments."""
    command = [sys.executable, "-m", "tests.pipeline.jobs.one_job", name, json.dumps(given)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the job's process, its JVM and its Python workers."""
    own = psutil.Process(process.pid)
    return [own, *own.children(recursive=True)]


def kill(process: subprocess.Popen[str], with_children: bool) -> None:
    """Kill the driver alone (JVM and workers run until they notice), or all processes together."""
    members = family(process)
    for member in members if with_children else members[:1]:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    process.wait(30)
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive, "what the job started did not end after it was killed"


def wait_for_progress(process: subprocess.Popen[str], steps: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        steps -= line.startswith("progress")
        if steps <= 0:
            return
    pytest.fail("the job ended before it could be killed")


def numbers(output: str) -> Counter[int]:
    """Count the message numbers that any Parquet reader finds in the directory."""
    if not list(Path(output).glob("topic=*/**/*.parquet")):
        return Counter()
    table = pyarrow.dataset.dataset(output, partitioning="hive").to_table(columns=["body"])
    return Counter(int(body.as_py().split(b":")[0]) for body in table["body"])


@pytest.mark.slow("starts Spark for each kill")
def test_a_job_killed_anywhere_has_each_message_once(topic: Topic, output: str, spark: SparkSession) -> None:
    topic.send(RECORDS)
    random.seed(3)
    committed = 0
    for cycle in range(CYCLES):
        with start(topic, output, batch_records=2500) as process:
            wait_for_progress(process, random.randint(2, 5))
            time.sleep(random.uniform(0, 0.3))  # the kill hits a pull, write, commit or rename
            kill(process, with_children=bool(cycle % 2))
        seen = numbers(output)
        assert not seen or max(seen.values()) == 1
        commits = len(list(Path(output).glob("_cometmq/commits/*.json")))
        assert commits > committed, "each run gets further before it is killed"
        committed = commits
    # The second run uses the tests' Spark session, because another JVM would start slowly.
    summary = archive(spark, topic.namesrv, [topic.name], output)
    assert 0 < summary.records < RECORDS, "it went on where the killed ones stopped"
    assert numbers(output) == Counter(range(RECORDS))


@pytest.mark.slow("starts Spark for each kill")
@long_form("kills a JVM again and again")
def test_a_stream_into_files_killed_and_restarted(topic: Topic, output: str, spark: SparkSession) -> None:
    topic.send(RECORDS // 8)
    with start(topic, output, 600, "stream_job.py") as process:
        wait_for_progress(process, random.randint(2, 4))
        time.sleep(random.uniform(0, 0.3))
        kill(process, with_children=True)
    run_stream(spark, topic.namesrv, output, topic.name, "5000")
    bodies = spark.read.parquet(f"{output}/table").select("body").collect()
    assert Counter(int(bytes(row.body).split(b":")[0]) for row in bodies) == Counter(range(RECORDS // 8))


@pytest.fixture(autouse=True)
def spark_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "scratch"))
