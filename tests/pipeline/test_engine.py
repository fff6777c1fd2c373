"""Units of work on any Spark: results, typed errors, repeated tasks, progress and cancellation."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from operator import neg
from pathlib import Path
from typing import Any

import pytest
from py4j.clientserver import ClientServerConnection
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until

from cometmq.errors import ConfigError
from cometmq.pipeline.base.engine import run_action, run_units, slots
from cometmq.pipeline.base.errors import JobFailed, JobStopped

pytestmark = pytest.mark.foreign("Spark")


@pytest.fixture(params=["classic", "connect"])
def session(request: pytest.FixtureRequest) -> SparkSession:
    """A classic or Spark Connect session with two slots whose tasks may fail twice."""
    chosen: SparkSession = request.getfixturevalue("spark" if request.param == "classic" else "connected")
    return chosen


def test_each_unit_is_a_task_and_the_results_are_in_the_order_of_the_units(session: SparkSession) -> None:
    def where(number: int) -> tuple[int, int]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return number, context.partitionId()

    assert run_units(session, "places", where, [30, 10, 20]) == [(30, 0), (10, 1), (20, 2)]


def test_without_units_there_is_no_job(session: SparkSession) -> None:
    assert run_units(session, "nothing", neg, []) == []


def test_the_slots_are_known(session: SparkSession) -> None:
    assert slots(session) == 2


def test_the_first_typed_error_is_raised_and_not_tried_again(session: SparkSession, tmp_path: Path) -> None:
    tries = str(tmp_path / "tries")

    def fail(number: int) -> int:
        with open(tries, "a") as file:
            print(number, file=file)
        if number:
            raise ConfigError("unit", str(number), "zero")
        return number

    with pytest.raises(ConfigError) as caught:
        run_units(session, "typed", fail, [0, 1, 2])
    assert (caught.value.key, caught.value.value) == ("unit", "1")
    assert sorted(Path(tries).read_text().split()) == ["0", "1", "2"]


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_task_that_breaks_is_run_again(session: SparkSession, tmp_path: Path, how: str) -> None:
    marker = str(tmp_path / "broken")

    def break_once(number: int) -> int:
        if number == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            if how == "dies":
                os._exit(13)
            raise OSError(5, "Input/output error")
        return -number

    assert run_units(session, "breaking", break_once, range(3)) == [0, -1, -2]
    assert os.path.exists(marker)


@pytest.mark.parametrize(
    ("work", "problem"),
    [(lambda _: 1 // 0, "ZeroDivisionError: "), (lambda _: os._exit(13), "Python worker exited")],
    ids=["raises", "dies"],
)
def test_a_task_that_always_breaks_is_a_job_that_failed(
    session: SparkSession, work: Callable[[int], Any], problem: str
) -> None:
    with pytest.raises(JobFailed) as caught:
        run_units(session, "hopeless", work, [1])
    assert str(caught.value).startswith("hopeless failed: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_finished_tasks_are_reported(session: SparkSession, tmp_path: Path) -> None:
    seen: list[int] = []
    ended = str(tmp_path / "ended")

    def wait(number: int) -> int:
        while number and not os.path.exists(ended):
            time.sleep(0.05)
        return number

    def report(done: int) -> None:
        seen.append(done)
        open(ended, "w").close()

    # The second task waits until the end of the first task has been reported.
    assert run_units(session, "watched", wait, [0, 1], on_progress=report) == [0, 1]
    assert seen[0] == 1


class Endless:
    """Work that runs until its worker is killed, and creates a file when it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def wait_started(self) -> None:
        wait_until("a task", lambda: any(self.directory.glob("started-*")))

    def work(self) -> Callable[[int], None]:
        place = str(self.directory)

        def forever(number: int) -> None:
            open(f"{place}/started-{number}", "w").close()
            while True:
                time.sleep(0.05)

        return forever


def test_a_stop_cancels_what_runs(session: SparkSession, tmp_path: Path) -> None:
    endless, stop = Endless(tmp_path), threading.Event()

    def ask() -> None:
        endless.wait_started()
        stop.set()

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(JobStopped, match="endless was stopped"):
        run_units(session, "endless", endless.work(), range(4), stop=stop)
    asking.join()
    assert run_units(session, "the next", neg, range(3)) == [0, -1, -2]


def test_a_job_that_was_stopped_before_it_began_does_not_begin(session: SparkSession) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(JobStopped):
        run_units(session, "late", neg, [1], stop=stop)


def test_ctrl_c_cancels_what_runs(session: SparkSession, tmp_path: Path) -> None:
    endless = Endless(tmp_path)

    def interrupt() -> None:
        endless.wait_started()
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        run_units(session, "endless", endless.work(), range(2))
    interrupting.join()
    assert run_units(session, "the next", neg, range(3)) == [0, -1, -2]


class Struck:
    """A socket on which SIGINT arrives once, between a request and its response."""

    def __init__(self, connection: ClientServerConnection) -> None:
        self.connection, self.real = connection, connection.socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def sendall(self, data: bytes) -> None:
        self.connection.socket = self.real
        self.real.sendall(data)
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_the_middle_of_a_question_to_spark_is_ctrl_c(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless, struck, ask = Endless(tmp_path), [], ClientServerConnection.send_command

    def send(self: ClientServerConnection, command: str) -> Any:
        if not struck and "getJobIdsForGroup" in command:
            struck.append(command)
            self.socket = Struck(self)
        return ask(self, command)

    monkeypatch.setattr(ClientServerConnection, "send_command", send)
    with pytest.raises(KeyboardInterrupt):
        run_units(spark, "endless", endless.work(), range(2))
    assert struck
    assert run_units(spark, "the next", neg, range(3)) == [0, -1, -2]


def test_what_spark_refuses_is_said_in_its_own_words(spark: SparkSession) -> None:
    with pytest.raises(JobFailed, match='No FileSystem for scheme "nosuch"') as raised:
        run_action(spark, "job", lambda: spark.range(1).write.parquet("nosuch://bucket/a"))
    assert "calling o" not in str(raised.value)
