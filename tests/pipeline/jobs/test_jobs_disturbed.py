"""Jobs that send messages or write files while a process is killed: this run or the next one completes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until
from tests.long_form import LONG, long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.test_dlq import copies, die
from tests.pipeline.store_files import StoreFiles
from tests.pipeline.test_archive_disturbed import Servers
from tests.pipeline.test_jobs_killed import kill, start_job, wait_for_progress
from tests.store.inspect.test_rebuild_parts import made_of
from tests.store.kit import small
from tests.store.planted import build

from cometmq.pipeline.jobs.dlq import redrive
from cometmq.pipeline.jobs.inputs import messages
from cometmq.pipeline.jobs.rebuild import rebuild
from cometmq.pipeline.jobs.replay.replay import replay

LETTERS = 120


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


@long_form("kills a JVM")
@pytest.mark.parametrize("with_children", [False, True])
def test_a_redrive_that_is_killed_goes_on(
    with_children: bool, topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    group, source = f"g{topic.name}", f"live:{topic.namesrv}"
    die(topic, group, *((b"%d" % number, {}) for number in range(LETTERS)))
    retries = Topic(f"%RETRY%{group}", topic.namesrv)
    given: dict[str, Any] = {
        "source": source, "namesrv": topic.namesrv, "groups": [group], "where": "true",
        "output": str(tmp_path / "dlq"),
    }  # fmt: skip
    with start_job("redrive", rate=20, **given) as process:
        wait_until("a third is sent", lambda: copies(retries) >= 20)
        kill(process, with_children)
    before = copies(retries)
    assert before < LETTERS
    summary = redrive(spark, **given)
    assert (summary.skipped, summary.resent, summary.complete) == (before, LETTERS - before, True)
    sent = Counter(bytes(row.body) for row in messages(spark, source, [retries.name]).collect())
    assert sent == Counter(b"%d" % number for number in range(LETTERS)), "each once"
    rows = spark.read.parquet(f"{tmp_path}/dlq/redriven")
    assert rows.count() == LETTERS, "of the killed run nothing is in the table"


@long_form("kills a JVM")
def test_a_rebuild_that_is_killed_begins_again(spark: SparkSession, tmp_path: Path) -> None:
    root, output = tmp_path / "root", tmp_path / "new"
    build(root)
    for steps in (1, 3) if LONG else (3,):
        with start_job("rebuild", root=str(root), output=str(output)) as process:
            wait_for_progress(process, steps)
            kill(process, with_children=bool(steps % 2))
    summary = rebuild(spark, str(root), str(output), config=small(root))
    assert (summary.errors, summary.complete, summary.findings) == (0, True, [])
    assert made_of(output) == made_of(root)


def once_sent(do: Callable[[], None]) -> Callable[[int, int | None], None]:
    """Return a progress callback that calls `do` once, when the first messages are sent."""
    done: list[int] = []

    def show(sent: int, _total: int | None) -> None:
        if sent and not done:
            done.append(sent)
            do()

    return show


@pytest.mark.slow("a job waits for a broker that starts again")
def test_a_broker_that_is_away_is_waited_for(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    files = StoreFiles(segment=1 << 20)
    for number in range(2000):
        files.add(b"%d" % number, topic="T", queue_id=number % 4)
    source = f"store:{files.write(tmp_path / 'store')}"
    target, back = Topic("Away", servers.namesrv), threading.Timer(1.0, servers.start, ["broker"])

    def restart() -> None:
        servers.kill("broker")
        back.start()

    summary = replay(
        spark, source, servers.namesrv, into=target.name, state=str(tmp_path / "state"), rate=500.0,
        on_progress=once_sent(restart),
    )  # fmt: skip
    back.join()
    assert (summary.messages, summary.left, summary.complete) == (2000, 0, True)
    rows = messages(spark, f"live:{servers.namesrv}", [target.name]).collect()
    unique = {row.msg_id: bytes(row.body) for row in rows}
    assert Counter(unique.values()) == Counter(b"%d" % number for number in range(2000))
