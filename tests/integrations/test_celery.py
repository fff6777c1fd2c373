"""Celery's workers as real processes, with CometMQ as their broker and files as their results."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from celery import Celery, chord, group
from celery.result import AsyncResult
from tests.integrations.celery_app import VISIBILITY_S, add, begin, fail_twice, make_app, run, total
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.ports import free_port

from cometmq.standalone import Standalone
from cometmq.testing import ServerProcess, local_broker

PAGE = Path(__file__).parents[2] / "docs" / "celery.md"

WORKER = [sys.executable, "-m", "celery", "-A", "tests.integrations.celery_app", "worker"]

PREFETCHED = 2 * 4
"""The maximum number of unacknowledged messages of a worker with two processes."""


class Worker(ServerProcess):
    """A worker process, with the child processes of its pool."""

    def __init__(self, name: str, *options: str, command: Sequence[str] = WORKER) -> None:
        super().__init__([*command, "-n", f"{name}@test", "-l", "info", *options], f"{name}@test ready")

    def kill(self) -> None:
        children = psutil.Process(self.pid).children(recursive=True)
        super().kill()
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()  # a worker takes seconds to stop
        self._close()


class Site:
    """The application of this process, and the file in which tasks record their runs."""

    def __init__(self, app: Celery, runs: Path) -> None:
        self.app = app
        self.runs = runs
        self.runs.touch()

    def noted(self) -> list[str]:
        return self.runs.read_text().splitlines()

    def ping(self, workers: int) -> dict[str, object]:
        return self.app.control.inspect(timeout=PATIENCE_S, limit=workers).ping() or {}


def value(result: AsyncResult) -> object:
    return result.get(timeout=PATIENCE_S, interval=0.02)


@contextlib.contextmanager
def connected(namesrv: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Configure a name server for this process and for the workers that it starts."""
    (folder / "results").mkdir()
    monkeypatch.setenv("TEST_BROKER", f"cometmq://{namesrv}")
    monkeypatch.setenv("TEST_RESULTS", f"file://{folder}/results")
    monkeypatch.setenv("TEST_RUNS", str(folder / "runs"))
    app = make_app()
    yield Site(app, folder / "runs")
    app.pool.force_close_all()
    app.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with (
        local_broker(tmp_path / "broker") as broker,
        connected(broker.namesrv, tmp_path, monkeypatch) as made,
    ):
        yield made


@pytest.mark.representative
def test_two_workers_run_tasks_of_all_kinds_and_answer_to_inspect(site: Site) -> None:
    with Worker("w1", "-c", "1"), Worker("w2", "-c", "1", "-P", "threads"):
        assert value(add.delay(1, 2)) == 3
        assert value(fail_twice.delay()) == 2
        assert value((add.s(1, 2) | add.s(3)).delay()) == 6
        assert value(group(add.s(i, i) for i in range(8))()) == [2 * i for i in range(8)]
        assert site.ping(2) == {"w1@test": {"ok": "pong"}, "w2@test": {"ok": "pong"}}


@pytest.mark.slow("a chord with results in files waits for a second")
def test_workers_of_any_pool_run_chords_and_countdowns(site: Site) -> None:
    with Worker("w1", "-c", "2", "-Q", "celery,other"), Worker("w2", "-P", "solo"):
        started = [run.apply_async([f"r{each}"], countdown=each) for each in (2, 1)]
        assert value(chord([add.s(i, i) for i in range(5)])(total.s())) == 20
        assert value(add.apply_async([1, 2], queue="other", priority=3)) == 3
        second, first = map(value, started)
        assert first < second  # type: ignore[operator]
        site.app.control.revoke("none")
        assert set(site.ping(2)) == {"w1@test", "w2@test"}


@pytest.mark.slow("Celery's pool needs seconds to stop")
def test_a_worker_ends_its_tasks_after_sigterm_and_returns_the_others(site: Site, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Worker("w1", "-c", "1", "-O", "fair") as first:
        begin.delay("long", str(go))
        wait_until("the long task runs", lambda: site.noted() == ["long begins"])
        results = [run.delay(f"r{each}") for each in range(20)]
        first.process.send_signal(signal.SIGTERM)
        first.wait_line("Warm shutdown", PATIENCE_S)
        with Worker("w2", "-c", "1"):
            late = run.apply_async(["late"], countdown=2 * VISIBILITY_S)
            value(late)  # without renewals, the leases of the first worker would have ended
            go.touch()
            assert first.wait(PATIENCE_S) == 0
            for each in results:
                value(each)
            wait_until("the queue is empty", lambda: site.app.control.purge() == 0)
    names = ["late", *(f"r{each}" for each in range(20))]
    assert Counter(site.noted()) == Counter(["long begins", "long ends", *names])


@pytest.mark.slow("leases end after seconds")
def test_no_task_is_lost_when_a_worker_is_killed_under_load(site: Site) -> None:
    names = [f"r{each}" for each in range(1500)]
    results = [run.delay(each) for each in names]
    with Worker("w1", "-c", "2") as first, Worker("w2", "-c", "2"):
        wait_until("some of them have run", lambda: len(site.noted()) > 100)
        first.kill()
        for each in results:
            value(each)
        wait_until("all are acknowledged", lambda: site.app.control.purge() == 0)
    assert set(site.noted()) == set(names)
    assert len(site.noted()) <= len(names) + 2 * PREFETCHED


@pytest.mark.slow("clients reconnect after seconds")
def test_workers_and_senders_survive_a_restart_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = {"namesrv_port": free_port(), "broker_port": free_port()}
    go = tmp_path / "go"
    servers = contextlib.ExitStack()
    served = servers.enter_context(Standalone(tmp_path / "broker", **ports).run_in_thread())
    with connected(served.namesrv_addr, tmp_path, monkeypatch) as site, Worker("w1", "-c", "2"), servers:
        begin.delay("long", str(go))
        late = run.apply_async(["late"], countdown=4)
        wait_until("the long task runs", lambda: site.noted() == ["long begins"])
        servers.close()
        servers.enter_context(Standalone(tmp_path / "broker", **ports).run_in_thread())
        wait_until("a task runs", lambda: value(add.apply_async([1, 2], retry=True)) == 3)
        go.touch()
        value(late)
        wait_until("the long task is acknowledged", lambda: site.app.control.purge() == 0)
        assert set(site.ping(1)) == {"w1@test"}
        assert sorted(site.noted()) == ["late", "long begins", "long ends"]


@pytest.mark.slow("it starts a worker, too")
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(# shop\.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    command = [sys.executable, "-m", "celery", "-A", "shop", "--workdir", str(tmp_path), "worker", "-c", "1"]
    with local_broker(tmp_path / "broker") as broker:
        (tmp_path / "shop.py").write_text(program.replace("127.0.0.1:9876", broker.namesrv))
        with Worker("w1", command=command):
            done = subprocess.run(
                [sys.executable, "shop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
            )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
