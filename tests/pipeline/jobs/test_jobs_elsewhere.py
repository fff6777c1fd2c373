"""The jobs give equal results on this machine, through Spark Connect, and on a cluster of several workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.all_jobs import Place, results
from tests.pipeline.jobs.test_dlq import die
from tests.pipeline.jobs.test_trace import after, before, pub
from tests.pipeline.spark_servers import environment, standalone_cluster
from tests.store.inspect.test_rebuild_parts import made_of
from tests.store.planted import build

from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.inputs import messages

SENT = 401
SLOW = long_form("many JVMs")
PATIENCE_S = 600  # seconds; the jobs need nearly four minutes of CPU, beside other tests
ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(spark: SparkSession, topic: Topic, tmp_path: Path) -> Place:
    topic.send(400)
    topic.send_raw(b"late", sys_flag=0, born_ms=1)
    archive(spark, topic.namesrv, [topic.name], str(tmp_path / "archive"), batch_records=100)
    group = f"g{topic.name}"
    die(topic, group, (b"dead", {"error": "io"}))
    at = Place("local", topic.namesrv, topic.name, str(tmp_path), group)
    build(Path(at.store))
    traces = Topic(at.trace_topic, topic.namesrv)
    now = time.time_ns() // 1_000_000
    for number in range(10):
        name = f"{number:032X}"
        records = pub(name, now, 4) + before(name, now + 9) + after(name, now + 12, 3) + "nonsense"
        traces.send_raw(records.encode(), sys_flag=0)
    return at


def elsewhere(place: Place, master: str, **env: str) -> Any:
    """Run the jobs in a process of its own and return their printed results."""
    arguments = [master, place.namesrv, place.topic, place.root, place.group]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.jobs.all_jobs", *arguments],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tables(spark: SparkSession, place: Place) -> dict[str, list[str]]:
    """Return the rows of everything that the jobs wrote to one place, sorted."""
    found = {}
    for name in ("archive", "audit", "compact", "dedup", "dlq", "run", "throughput", "trace"):
        root = Path(place.new(name))
        one = name in ("archive", "compact", "run")
        for path in [root] if one else [path for path in root.iterdir() if path.is_dir()]:
            table = pyarrow.dataset.dataset(path, partitioning="hive").to_table()
            found[f"{name} {path.name if path != root else ''}"] = sorted(map(repr, table.to_pylist()))
    target = f"{place.topic}-{place.mark}"
    sent = messages(spark, f"live:{place.namesrv}", [target]).orderBy("queue_id", "queue_offset")
    names = ["queue_id", "queue_offset", "tags", "keys", "flag", "body", "properties"]
    rows = [row.asDict() for row in sent.select(*names).collect()]
    for row in rows:
        for name in ("REPLAY_ID", "UNIQ_KEY"):  # these differ between replays
            row["properties"].pop(name)
        row["properties"] = sorted(row["properties"].items())
    found["replay"] = [repr(row) for row in rows]
    return found


def check(found: Any) -> None:
    assert found["replay"]["messages"] == found["throughput"]["messages"] == SENT
    assert (found["dlq"]["messages"], found["dedup"]["messages"]) == (1, SENT)
    assert (found["audit"]["messages"], found["audit"]["late"]) == (SENT, 1)
    assert (found["compact"]["files_before"], found["compact"]["files_after"]) == (3, 1)
    assert found["trace"]["records"] == {"Pub": 10, "SubAfter": 10, "SubBefore": 10}
    assert found["trace"]["bad"] == 10
    assert found["rebuild"]["units"] == 400


@SLOW
@pytest.mark.timeout(PATIENCE_S + 200)
def test_through_spark_connect(spark: SparkSession, connect_address: str, place: Place) -> None:
    same(spark, place, replace(place, master=connect_address), elsewhere(place, connect_address))


@SLOW
@pytest.mark.timeout(PATIENCE_S + 200)
def test_on_a_cluster(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    with standalone_cluster(tmp_path / "scratch") as master:
        there = elsewhere(place, master, **environment(tmp_path / "scratch"))
    same(spark, place, replace(place, master=master), there)


def same(spark: SparkSession, here: Place, there: Place, said: Any) -> None:
    """Check that results and tables of `there` equal those of `here`."""
    expected = json.loads(json.dumps(results(spark, here)))
    assert said == expected
    check(said)
    made, wanted = tables(spark, there), tables(spark, here)
    assert made.keys() == wanted.keys()
    for name, rows in wanted.items():
        assert rows, f"{name} is empty: nothing is compared"
        assert made[name] == rows, name
    assert made_of(Path(there.new("rebuild"))) == made_of(Path(here.store))
    counts = {name: len(rows) for name, rows in wanted.items()}
    # The dead letter was added after the archive.
    assert (counts["archive "], counts["replay"], counts["dlq triage"]) == (SENT + 1, SENT, 1)
