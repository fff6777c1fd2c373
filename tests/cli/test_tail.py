"""`cometmq tail` with a real cluster: it prints a topic's messages without a consumer group."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import BIN, Run, Serve
from tests.ports import free_port

from cometmq.testing import ServerProcess, StandaloneProcess
from cometmq.testing.process import NAMESRV

pytestmark = pytest.mark.usefixtures("namesrv")


def bodies(output: str) -> list[str]:
    return [line.split()[-1] for line in output.splitlines()]


def test_it_shows_what_comes_from_now_on(run: Run, serve: Serve) -> None:
    run("cometmq", "send", "followed", "before")
    process = serve("cometmq", "tail", "followed")
    try:
        for _ in range(60):  # until the command is reading
            run("cometmq", "send", "followed", "probe")
            if any(line.endswith(" probe") for line in process.lines):
                break
        run("cometmq", "send", "followed", "last")
        process.wait_line(" last$", 30)
        assert process.stop(signal.SIGINT) == 0
    finally:
        process.kill()

    assert set(bodies(process.output)) == {"probe", "last"}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(run: Run, serve: Serve, signum: int) -> None:
    run("cometmq", "send", f"ended-{signum}", "x")
    with serve("cometmq", "tail", f"ended-{signum}", "--from", "first", ready=" x$") as process:
        assert process.stop(signum) == 0


class TestFrom:
    def test_first_is_all_that_is_there(self, run: Run) -> None:
        run("cometmq", "send", "from-first", *"abcde")

        shown = run("cometmq", "tail", "from-first", "--from", "first", "-c", "5").stdout
        assert sorted(bodies(shown)) == [*"abcde"]

    def test_a_time_leaves_out_what_was_stored_before(self, run: Run) -> None:
        run("cometmq", "send", "from-time", *"abcd")
        between = time.time_ns() // 1_000_000 + 1
        while time.time_ns() // 1_000_000 <= between:
            time.sleep(0.001)
        run("cometmq", "send", "from-time", *"efgh")

        shown = run("cometmq", "tail", "from-time", "--from", str(between), "--timeout", "1")

        assert sorted(bodies(shown.stdout)) == [*"efgh"]

    @pytest.mark.slow("runs six commands")
    @pytest.mark.representative
    def test_a_time_may_be_told_from_now(self, run: Run) -> None:
        run("cometmq", "send", "from-ago", "x")

        for ago in ("30s", "10m", "2h", "1d", "999999999d"):
            assert bodies(run("cometmq", "tail", "from-ago", "--from", ago, "-c", "1").stdout) == ["x"]


@pytest.mark.slow("three commands that wait for a second each")
@pytest.mark.representative
def test_tags_choose_and_properties_are_shown(run: Run) -> None:
    for tag in "AB":
        run("cometmq", "send", "tagged-tail", f"body-{tag}", "-t", tag, "-p", f"clerk=ada\x1b{tag}")
    words = ("cometmq", "tail", "tagged-tail", "--from", "first", "-t", "B", "--timeout", "1")

    (plain,) = run(*words).stdout.splitlines()
    (shown,) = run(*words, "--properties").stdout.splitlines()
    message = json.loads(run(*words, "--json").stdout)

    assert plain.endswith("  body-B")
    assert "clerk" not in plain
    assert "clerk=ada\\x1bB" in shown
    assert shown.isprintable()
    assert message["properties"]["clerk"] == "ada\x1bB"


def test_no_group_is_made_and_no_offset_moves(run: Run) -> None:
    run("cometmq", "send", "ungrouped", *"abc")
    first = run("cometmq", "tail", "ungrouped", "--from", "first", "-c", "3")
    again = run("cometmq", "tail", "ungrouped", "--from", "first", "-c", "3")

    assert sorted(bodies(first.stdout)) == sorted(bodies(again.stdout)) == [*"abc"]
    uses = json.loads(run("mqadmin", "topicList", "-c", "--json").stdout)
    assert [use["consumerGroups"] for use in uses if use["topic"] == "ungrouped"] == [[]]
    groups = json.loads(run("mqadmin", "consumerProgress", "--json").stdout)
    assert not any("ungrouped" in row["group"] for row in groups)


@pytest.mark.slow("the command looks for a new topic every few seconds")
@pytest.mark.representative
def test_a_topic_that_is_not_there_yet_is_waited_for(run: Run, serve: Serve) -> None:
    with serve("cometmq", "tail", "later", "-c", "1", ready="^waiting: no route to topic later") as process:
        run("cometmq", "send", "later", "came")
        assert process.wait(60) == 0

    assert process.lines[-1].endswith("  came")


@pytest.mark.slow("starts two brokers and many commands")
@pytest.mark.representative
def test_queues_and_brokers_that_are_new_are_taken_up(run: Run, serve: Serve, tmp_path: Path) -> None:
    """A topic on one of two brokers gets more queues there, and queues on the other broker."""
    with StandaloneProcess(tmp_path / "two", brokers=2) as cluster:
        namesrv = ("-n", cluster.namesrv)

        def topic_at(broker: str, queues: str) -> None:
            place = ("-b", cluster.brokers[broker], "-t", "grown", "-r", queues, "-w", queues)
            assert run("mqadmin", "updateTopic", *namesrv, *place).returncode == 0

        def send(broker: str, queue: str, body: str) -> None:
            place = ("-t", "grown", "-p", body, "-b", broker, "-i", queue)
            assert run("mqadmin", "sendMessage", *namesrv, *place).returncode == 0

        topic_at("broker-a", "1")
        send("broker-a", "0", "old")
        words = ("tail", "grown", *namesrv, "--from", "first", "-c", "3")
        with serve("cometmq", *words, ready=" old$") as process:
            topic_at("broker-a", "2")
            topic_at("broker-b", "1")
            send("broker-a", "1", "new-queue")
            send("broker-b", "0", "new-broker")
            assert process.wait(60) == 0

    assert sorted(bodies(process.output)) == ["new-broker", "new-queue", "old"]


def test_a_broker_that_went_away_is_told_once_and_read_when_it_is_back(run: Run, tmp_path: Path) -> None:
    """All of the broker's queues fail together, which is one line."""
    port = free_port()
    namesrv, broker = ("-n", f"127.0.0.1:{port}"), ["--broker-port", str(free_port())]
    command = [str(BIN / "cometmq"), "standalone", "--data", str(tmp_path / "away"), *broker]
    command += ["--namesrv-port", str(port)]
    with ServerProcess(command, NAMESRV.pattern):
        run("cometmq", "send", "away", "one", *namesrv)
        tail = ServerProcess(
            [str(BIN / "cometmq"), "tail", "away", *namesrv, "--from", "first", "-c", "2"], " one$"
        )
        tail.wait_ready()
    try:
        tail.wait_line("^waiting: ", 60)
        with ServerProcess(command, NAMESRV.pattern):
            run("cometmq", "send", "away", "two", *namesrv)
            assert tail.wait(60) == 0
    finally:
        tail.kill()

    assert bodies(tail.output)[-1] == "two"
    waiting = [line for line in tail.lines if line.startswith("waiting: ")]
    assert len(waiting) == len(set(waiting))
