"""`cometmq.testing` as users run it: fixtures that pytest finds, and servers as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cometmq.client import SyncProducer
from cometmq.errors import CometError
from cometmq.message import Message, SendStatus
from cometmq.testing import ProcessFailed, ServerProcess, StandaloneProcess, local_broker

NO_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:asyncio")
USERS_TEST = """
from cometmq.client import SyncProducer
from cometmq.message import Message

def test_sends(cometmq_broker):
    with SyncProducer("g", namesrv=cometmq_broker.namesrv) as producer:
        assert producer.send(Message("t", b"x")).queue_offset == 0

def test_sees_nothing_of_the_other_test(cometmq_broker):
    with SyncProducer("g", namesrv=cometmq_broker.namesrv) as producer:
        assert producer.send(Message("t", b"x")).queue_offset == 0

def test_starts_two(start_cometmq_broker):
    first, second = start_cometmq_broker(), start_cometmq_broker({"autoCreateTopicEnable": "false"})
    assert first.namesrv != second.namesrv

def test_sends_without_sockets(cometmq_test_broker):
    with SyncProducer("g", namesrv=cometmq_test_broker.namesrv) as producer:
        producer.send(Message("t", b"x"))
    assert [message.body for message in cometmq_test_broker.messages("t")] == [b"x"]

def test_sends_though_the_connection_is_cut(cometmq_faults):
    from cometmq.testing import Fault, Kind
    with SyncProducer("g", namesrv=cometmq_faults.namesrv) as producer:
        producer.send(Message("t", b"x"))
        cometmq_faults.inflict(Fault(kind=Kind.CUT))
        producer.send(Message("t", b"y"))
"""


def run_pytest(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_users.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *NO_PLUGINS, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("conftest", ["", 'pytest_plugins = ["cometmq.testing.plugin"]\n'])
def test_users_tests_have_a_broker(tmp_path: Path, conftest: str) -> None:
    (tmp_path / "conftest.py").write_text(conftest)
    done = run_pytest(tmp_path, USERS_TEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


NOTES_BROKERS = """
import os

def note(broker):
    with open("brokers.txt", "a") as file:
        file.write(f"{os.getpid()} {broker.namesrv}\\n")

class TestA:
    def test_one(self, cometmq_broker): note(cometmq_broker)
    def test_two(self, cometmq_broker): note(cometmq_broker)

class TestB:
    def test_one(self, cometmq_broker): note(cometmq_broker)
"""


def brokers_used(folder: Path, scope: str, *options: str) -> list[tuple[str, ...]]:
    """Run these tests in two files. Return the process and the broker of each test."""
    (folder / "pytest.ini").write_text(f"[pytest]\ncometmq_broker_scope = {scope}\n")
    (folder / "test_more.py").write_text(NOTES_BROKERS)
    done = run_pytest(folder, NOTES_BROKERS, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return [tuple(line.split()) for line in (folder / "brokers.txt").read_text().splitlines()]


@pytest.mark.parametrize(("scope", "brokers"), [("class", 4), ("module", 2), ("package", 1)])
def test_tests_share_a_broker_in_its_scope(tmp_path: Path, scope: str, brokers: int) -> None:
    used = brokers_used(tmp_path, scope)
    assert (len(used), len(set(used))) == (6, brokers)


def test_each_worker_of_xdist_has_a_broker_of_its_own(tmp_path: Path) -> None:
    used = brokers_used(tmp_path, "session", "-n", "2", "--dist", "loadfile")
    processes, brokers = zip(*set(used), strict=True)
    assert (len(used), len(set(processes)), len(set(brokers))) == (6, 2, 2)


def test_an_unknown_scope_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ncometmq_broker_scope = test\n")
    done = run_pytest(tmp_path, "def test_one(cometmq_broker): pass")
    assert done.returncode != 0
    assert "cometmq_broker_scope is 'test', not one of function, class" in done.stdout + done.stderr


def test_a_run_without_the_fixtures_loads_nothing_else(tmp_path: Path) -> None:
    test = """
import sys

def test_one():
    loaded = {name for name in sys.modules if name.partition(".")[0] == "cometmq"}
    assert loaded == {"cometmq", "cometmq.testing", "cometmq.testing.plugin"}
"""
    done = run_pytest(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broker_starts_and_stops_in_milliseconds(tmp_path: Path) -> None:
    with local_broker(tmp_path / "warm-up"):
        pass
    took: list[float] = []
    for number in range(5):
        began = time.perf_counter()
        with local_broker(tmp_path / str(number)):
            took.append(time.perf_counter() - began)

    # It takes about 15 ms on an idle machine; the best of five runs is near that even on a busy one.
    assert min(took) < 0.25


def test_settings_are_the_brokers_own(tmp_path: Path) -> None:
    settings = {"autoCreateTopicEnable": "false"}
    with (
        local_broker(tmp_path, settings) as broker,
        SyncProducer("g", namesrv=broker.namesrv) as producer,
        pytest.raises(CometError) as raised,
    ):
        producer.send(Message("not-there", b"x"))

    assert "not-there" in str(raised.value)


def test_what_was_sent_survives_a_restart_on_the_same_directory(tmp_path: Path) -> None:
    offsets = []
    for _ in range(2):
        with local_broker(tmp_path) as broker, SyncProducer("g", namesrv=broker.namesrv) as producer:
            queue = producer.queues("kept")[0]
            offsets.append(producer.send(Message("kept", b"x"), queue=queue).queue_offset)

    assert offsets == [0, 1]


def test_a_cluster_process_survives_kill_9_with_what_it_acknowledged(tmp_path: Path) -> None:
    with StandaloneProcess(tmp_path / "data") as cluster:
        with SyncProducer("g", namesrv=cluster.namesrv) as producer:
            assert producer.send(Message("kept", b"x")).status is SendStatus.SEND_OK
        cluster.kill()
        assert cluster.process.returncode == -signal.SIGKILL
    with StandaloneProcess(tmp_path / "data") as again, SyncProducer("g", namesrv=again.namesrv) as producer:
        queues = producer.queues("kept")
        sent = [producer.send(Message("kept", b"y"), queue=queue).queue_offset for queue in queues]

    assert sorted(sent) == [0] * (len(queues) - 1) + [1]


def test_a_server_that_does_not_come_up_is_an_error_with_its_output() -> None:
    command = [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"]
    with pytest.raises(ProcessFailed) as raised, ServerProcess(command, "ready"):
        pass

    assert "ended" in raised.value.what
    assert raised.value.output == "no luck"


def test_a_server_that_stays_silent_is_given_up_and_killed() -> None:
    process = ServerProcess([sys.executable, "-c", "import signal; signal.pause()"], "ready")

    with pytest.raises(ProcessFailed) as raised:
        process.wait_ready(0.2)
    process.kill()

    assert "not ready after 0.2 s" in raised.value.what
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
