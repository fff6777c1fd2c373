"""An archive job while a process that it needs is killed: this run or the next one writes the same table."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic
from tests.ports import free_port

from cometmq.pipeline.jobs.archive import ArchiveProgress, archive
from cometmq.testing import ServerProcess

BIN = Path(sys.executable).parent
MESSAGES, BATCH = 3000, 500


class Servers:
    """A name server and a broker as processes on fixed ports that can be killed and restarted."""

    def __init__(self, root: Path) -> None:
        port, conf = free_port(), root / "broker.conf"
        self.namesrv = f"127.0.0.1:{port}"
        settings = {
            "brokerIP1": "127.0.0.1", "listenPort": free_port(), "namesrvAddr": self.namesrv,
            "storePathRootDir": root / "store", "mappedFileSizeCommitLog": 1 << 24,
            "mappedFileSizeConsumeQueue": 20 * 3000, "maxHashSlotNum": 1000, "maxIndexNum": 4000,
        }  # fmt: skip
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        names = root / "namesrv.conf"
        names.write_text(f"listenPort={port}\nbindAddress=127.0.0.1\n")
        self._commands = {"namesrv": ["mqnamesrv", "-c", str(names)], "broker": ["mqbroker", "-c", str(conf)]}
        self._running: dict[str, ServerProcess] = {}
        for name in self._commands:
            self.start(name)

    def start(self, name: str) -> None:
        program, *arguments = self._commands[name]
        self._running[name] = ServerProcess([str(BIN / program), *arguments], "boot success")
        self._running[name].wait_ready()

    def kill(self, name: str) -> None:
        self._running[name].kill()

    def close(self) -> None:
        for server in self._running.values():
            server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


@pytest.fixture
def filled(servers: Servers, request: pytest.FixtureRequest) -> Topic:
    topic = Topic(f"T{request.node.name[5:40]}", servers.namesrv)
    topic.send(MESSAGES)
    return topic


def archived(output: str) -> Counter[str]:
    """Count the bodies that any Parquet reader finds in the directory."""
    table = pyarrow.dataset.dataset(output, partitioning="hive").to_table(columns=["body"])
    return Counter(body.as_py().decode() for body in table["body"])


def in_third_batch(do: Callable[[], None]) -> Callable[[ArchiveProgress], None]:
    """Return a progress callback that calls `do` once, in an early batch."""
    done: list[int] = []

    def show(progress: ArchiveProgress) -> None:
        if progress.batch == 3 and not done:
            done.append(progress.batch)
            do()

    return show


def workers() -> list[psutil.Process]:
    """Return the Python workers of this process's Spark session: its JVM starts a process that forks them."""
    return [
        worker
        for jvm in psutil.Process().children()
        if jvm.name() == "java"
        for daemon in jvm.children()
        for worker in daemon.children()
    ]


def test_a_broker_killed_meanwhile_is_waited_for(
    spark: SparkSession, servers: Servers, filled: Topic, output: str
) -> None:
    back = threading.Timer(1.0, servers.start, ["broker"])

    def restart() -> None:
        servers.kill("broker")
        back.start()

    summary = archive(
        spark, filled.namesrv, [filled.name], output, batch_records=BATCH, on_progress=in_third_batch(restart)
    )
    back.join()
    assert (summary.records, summary.complete) == (MESSAGES, True)
    assert archived(output) == Counter(filled.sent)


def test_a_name_server_killed_meanwhile_is_not_missed(
    spark: SparkSession, servers: Servers, filled: Topic, output: str
) -> None:
    summary = archive(
        spark, filled.namesrv, [filled.name], output, batch_records=BATCH,
        on_progress=in_third_batch(lambda: servers.kill("namesrv")),
    )  # fmt: skip
    servers.start("namesrv")
    assert (summary.records, summary.complete) == (MESSAGES, True)
    assert archived(output) == Counter(filled.sent)


def test_python_workers_killed_meanwhile_are_replaced(spark: SparkSession, topic: Topic, output: str) -> None:
    topic.send(MESSAGES)
    killed: list[int] = []

    def kill() -> None:
        for worker in workers():
            worker.kill()
            killed.append(worker.pid)

    summary = archive(
        spark, topic.namesrv, [topic.name], output, batch_records=BATCH, on_progress=in_third_batch(kill)
    )
    assert killed
    assert (summary.records, summary.complete) == (MESSAGES, True)
    assert archived(output) == Counter(topic.sent)


def test_a_disk_that_is_full_while_files_are_published(
    spark: SparkSession, topic: Topic, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.send(MESSAGES)
    links: list[str] = []
    link = os.link

    def full(source: str, target: str) -> None:
        links.append(target)
        if len(links) == 4:
            raise OSError(errno.ENOSPC, "No space left on device", target)
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        with pytest.raises(OSError, match="No space left on device"):
            archive(spark, topic.namesrv, [topic.name], output, batch_records=BATCH)
    before = archived(output)
    assert 0 < before.total() < MESSAGES
    again = archive(spark, topic.namesrv, [topic.name], output)
    assert before.total() + again.records == MESSAGES
    assert archived(output) == Counter(topic.sent)


@pytest.mark.slow("starts Spark for a job to interrupt")
def test_a_second_interrupt_ends_the_job_at_once(spark: SparkSession, topic: Topic, output: str) -> None:
    topic.send(MESSAGES)
    arguments: list[Any] = [topic.name, "-o", output, "-n", topic.namesrv, "--master", "local[1]"]
    command = [str(BIN / "cometmq"), "archive", *arguments, "--batch-records", "20"]
    job = ServerProcess(command, "")
    try:
        wait_until("some commits", lambda: len(list(Path(output).glob("_cometmq/commits/*"))) > 3)
        os.kill(job.pid, signal.SIGINT)
        job.wait_line("finishing the current batch", 30)
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(30) in (0, 130)  # 0 if the batch was completed before the signal
    finally:
        job.kill()
    before = archived(output)
    assert 0 < before.total() < MESSAGES
    again = archive(spark, topic.namesrv, [topic.name], output)
    assert archived(output) == Counter(topic.sent)
    assert again.records < MESSAGES
