"""`cometmq archive` with a real Spark: what it writes, where it goes on, how it is stopped."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Run, Serve

from cometmq.testing import local_broker


def bodies(archive: Path) -> list[bytes]:
    return sorted(pq.read_table(archive, columns=["body"])["body"].to_pylist())


def wait_until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_run_adds_what_is_new_until_a_signal_ends_the_last(
    run: Run, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive"
    with local_broker(tmp_path / "cluster") as broker:
        monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)
        monkeypatch.setenv("SPARK_MASTER", "local[1]")
        run("cometmq", "send", "events", "a", "b", "c")
        first = run("cometmq", "archive", "events", "-o", str(archive), "--json")
        run("cometmq", "send", "events", "d")
        arguments = (
            "archive",
            "--pattern",
            "event.*",
            "-o",
            str(archive),
            "--continuous",
            "--interval",
            "0.2",
        )
        commits = archive / "_cometmq" / "commits"
        known = len(list(commits.iterdir()))
        job = serve("cometmq", *arguments)
        try:
            wait_until(lambda: len(list(commits.iterdir())) > known or job.process.poll() is not None)
            assert job.stop(signal.SIGINT, timeout_s=60) == 0
        finally:
            job.kill()

    summary = json.loads(first.stdout)
    assert (first.returncode, summary["records"], summary["lost"], summary["bad"]) == (0, 3, 0, 0)
    assert "archived 1 message (" in job.output
    assert "went on behind batch" in job.output
    assert bodies(archive) == [b"a", b"b", b"c", b"d"]


def test_without_java_it_says_so_at_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))

    failed = run("cometmq", "archive", "events", "-o", str(tmp_path / "archive"))

    assert failed.returncode == 1
    assert failed.stderr.startswith("cometmq: Spark needs Java 17 or newer: JAVA_HOME is ")
    assert failed.stderr.count("\n") == 1
