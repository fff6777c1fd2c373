"""`cometmq bench` as a user runs it, what it counts, and how it ends."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from tests.cli.conftest import Run

from cometmq.cli import bench
from cometmq.cli.bench import Figures
from cometmq.client import Producer, ProducerOptions
from cometmq.client.producer import outgoing
from cometmq.errors import BrokerError
from cometmq.message import Message, SendResult
from cometmq.testing import ClusterProxy, Direction, Fault, Kind, LocalBroker, TestBroker, local_broker

AtSend = Callable[[int, Callable[[], object]], None]
LONG = ("--seconds", "60")  # the test ends the measurement


def invoke(namesrv: str, *arguments: str) -> Result:
    """Run the command in this process, which is faster."""
    return CliRunner().invoke(bench.bench, [*arguments, "-n", namesrv])


def facts_of(namesrv: str, *arguments: str) -> dict[str, Any]:
    done = invoke(namesrv, *arguments, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.fixture
def memory() -> Iterator[TestBroker]:
    with TestBroker() as broker:
        yield broker


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[ClusterProxy]:
    with local_broker(tmp_path) as broker, ClusterProxy(broker.namesrv).run_in_thread() as proxy:
        yield proxy


@pytest.fixture
def at_send(monkeypatch: pytest.MonkeyPatch) -> AtSend:
    """Return a function that arranges for an action to take place before the n-th send."""

    def arrange(number: int, action: Callable[[], object]) -> None:
        plain_send, numbers = Producer.send, itertools.count(1)

        async def send(producer: Producer, message: Message) -> SendResult:
            if next(numbers) == number:
                action()
            return await plain_send(producer, message)

        monkeypatch.setattr(Producer, "send", send)

    return arrange


def inflict(proxy: ClusterProxy, fault: Fault) -> None:
    """Inject a fault into all present and future connections to the broker."""
    for each in proxy.brokers.values():
        each.script = lambda _: [fault]
    proxy.inflict(fault)


def test_what_was_sent_is_consumed_by_a_group_that_is_gone_afterwards(run: Run, broker: LocalBroker) -> None:
    namesrv = broker.namesrv
    sent = facts_of(namesrv, "send", "benched", "--seconds", "0.3", "--size", "100", "--in-flight", "8")
    assert sent["messages"] >= 8
    assert sent["bytes"] == 100 * sent["messages"]
    assert (sent["failed"], sent["lost"], sent["skipped"]) == (0, 0, 0)
    latency = sent["latencyMs"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]

    for _ in range(2):  # a new group for each run
        consumed = facts_of(namesrv, "consume", "benched", *LONG)
        assert consumed["messages"] == sent["messages"] + 1  # the first send creates the topic
        assert 0.002 < consumed["seconds"] < 60  # with the start of the consumer
    assert "cometmq-bench-" not in run("mqadmin", "consumerProgress", "-n", namesrv).stdout


@pytest.mark.usefixtures("namesrv")
def test_latency_is_measured_from_the_time_of_the_send_to_the_listener(run: Run) -> None:
    done = run(
        "cometmq", "bench", "latency", "benched-too", "--seconds", "0.5", "--rate", "60", "--size", "16"
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("received 30 messages in ")
    assert second.startswith("latency: p50 ")


@pytest.mark.parametrize("work", ["send", "consume", "latency"])
def test_a_cluster_that_is_not_there_fails_with_one_line(run: Run, work: str) -> None:
    done = run("cometmq", "bench", work, "benched", "-n", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("cometmq: ")
    assert done.stderr.count("\n") == 1


def test_a_topic_without_messages_has_nothing_to_consume(memory: TestBroker) -> None:
    done = invoke(memory.namesrv, "consume", "TBW102", *LONG)
    assert (done.exit_code, done.output) == (1, "Error: topic TBW102 has no messages\n")


def test_a_batch_is_no_larger_than_a_pull() -> None:
    done = invoke("127.0.0.1:1", "consume", "benched", "--batch", "33")
    assert done.exit_code == 2
    assert "33 is not in the range 1<=x<=32" in done.output


def test_bodies_are_not_compressed(memory: TestBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "compress", lambda *_: b"")
    done = invoke(memory.namesrv, "send", "large", "--seconds", "0.05", "--size", "8192")
    assert done.exit_code == 0
    assert {len(message.body) for message in memory.messages("large")} == {8192}


@pytest.mark.parametrize(
    ("command", "limit"), [(("send", "--in-flight", "5000"), 5000), (("latency",), bench.MAX_IN_FLIGHT)]
)
def test_as_many_messages_are_in_flight_as_the_command_says(
    memory: TestBroker, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], limit: int
) -> None:
    made: list[int] = []
    plain_init = ProducerOptions.__post_init__

    def note(options: ProducerOptions) -> None:
        made.append(options.max_in_flight)
        plain_init(options)

    monkeypatch.setattr(ProducerOptions, "__post_init__", note)
    work, *more = command
    invoke(memory.namesrv, work, "full", "--seconds", "0.01", "--size", "16", *more)
    assert limit in made


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_measurement_with_its_figures(
    memory: TestBroker, at_send: AtSend, signum: int, code: int
) -> None:
    at_send(10, lambda: os.kill(os.getpid(), signum))
    done = invoke(memory.namesrv, "send", "interrupted", *LONG, "--in-flight", "1")
    assert done.exit_code == code
    assert done.stdout.startswith("sent ")


def test_sends_to_a_lost_broker_fail_one_after_a_pause(faulty: ClusterProxy, at_send: AtSend) -> None:
    at_send(5, lambda: inflict(faulty, Fault(kind=Kind.CUT)))
    done = invoke(faulty.namesrv, "send", "cut", "--seconds", "0.5", "--in-flight", "2", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == 1
    assert 1 <= facts["failed"] <= 2 * (0.5 / bench.FAILURE_PAUSE_S + 1)


def test_a_pause_longer_than_the_timeout_of_sends_shows_in_the_latency(
    faulty: ClusterProxy, at_send: AtSend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SEND_TIMEOUT_S", 0.3)
    pause = Fault(kind=Kind.STALL, directions=(Direction.TO_CLIENT,), seconds=0.7)
    at_send(5, lambda: faulty.inflict(pause))
    done = invoke(faulty.namesrv, "latency", "pauses", "--seconds", "0.3", "--rate", "50", "--json")
    facts = json.loads(done.stdout)
    assert (facts["messages"], facts["lost"]) == (15, 0)
    assert facts["failed"] >= 1
    assert facts["latencyMs"]["max"] > 500
    assert done.exit_code == 1


def test_an_interrupt_ends_soon_although_the_broker_hangs(
    faulty: ClusterProxy, at_send: AtSend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CLEAN_UP_S", 0.2)

    def hang() -> None:
        inflict(faulty, Fault(kind=Kind.STALL, seconds=math.inf))
        os.kill(os.getpid(), signal.SIGINT)

    at_send(5, hang)
    began = time.monotonic()
    done = invoke(faulty.namesrv, "latency", "hangs", *LONG)
    assert time.monotonic() - began < 10
    assert done.exit_code == 130
    assert f"To delete both: mqadmin deleteSubGroup -n {faulty.namesrv} -c CLUSTER -g cometmq" in done.stderr


def test_percentiles_are_right_to_one_percent() -> None:
    figures = Figures()
    for number in range(1, 1001):
        figures.add(1, 0, number / 1000)
    wanted = {"p50": 500, "p99": 990, "p99.9": 999, "max": 1000}
    assert figures.latency_ms() == {name: pytest.approx(value, rel=0.0101) for name, value in wanted.items()}
    assert Figures().latency_ms() == {}


def test_failures_are_shown_with_the_last_reason(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures()
    figures.add_failure(BrokerError(2, "busy\x1b[2J", "127.0.0.1:1"))
    with pytest.raises(click.ClickException, match=r"no message was sent: .*busy"):
        figures.print_summary("sent", False)
    figures.add(2000, 2048)
    figures.seconds, figures.lost, figures.skipped = 2.0, 1, 3000
    figures.print_summary("sent", False)
    out, err = capsys.readouterr()
    assert out == "sent 2,000 messages in 2.00 s (1,000/s, 0.0 MiB/s)\n"
    failed, lost, skipped = err.splitlines()
    assert failed.startswith("1 send failed, the last one: ")
    assert "\x1b" not in failed
    assert lost == "1 message had not arrived at the end"
    assert skipped == "3,000 sends skipped: 10,000 messages were in flight"
