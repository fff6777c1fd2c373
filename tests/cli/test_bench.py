"""`cometmq bench` as a user runs it, and what it counts."""

from __future__ import annotations

import json

import click
import pytest
from tests.cli.conftest import Run

from cometmq.cli.bench import Figures
from cometmq.errors import BrokerError
from cometmq.testing import LocalBroker


def facts_of(run: Run, *arguments: str) -> dict[str, object]:
    done = run("cometmq", "bench", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


@pytest.mark.usefixtures("namesrv")
def test_what_was_sent_is_consumed_by_a_group_that_is_gone_afterwards(run: Run) -> None:
    sent = facts_of(run, "send", "benched", "--seconds", "0.3", "--size", "100", "--in-flight", "8")
    assert sent["messages"] > 8
    assert sent["bytes"] == 100 * sent["messages"]
    assert (sent["failed"], sent["lost"], sent["skipped"]) == (0, 0, 0)
    latency = sent["latencyMs"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]

    for _ in range(2):  # a new group each time
        consumed = facts_of(run, "consume", "benched", "--seconds", "120")
        assert consumed["messages"] == sent["messages"] + 1  # the first send creates the topic
        assert consumed["seconds"] < 120
    assert "cometmq-bench-" not in run("mqadmin", "consumerProgress").stdout


@pytest.mark.usefixtures("namesrv")
def test_latency_is_measured_from_the_time_of_the_send_to_the_listener(run: Run) -> None:
    done = run(
        "cometmq", "bench", "latency", "benched-too", "--seconds", "0.5", "--rate", "60", "--size", "16"
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("received 30 messages in ")
    assert second.startswith("latency: p50 ")


def test_a_cluster_that_is_not_there_fails_with_one_line(run: Run) -> None:
    for work in ("send", "consume", "latency"):
        done = run("cometmq", "bench", work, "benched", "-n", "127.0.0.1:1")
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("cometmq: ")
        assert done.stderr.count("\n") == 1


def test_a_topic_without_messages_has_nothing_to_consume(run: Run, broker: LocalBroker) -> None:
    made = run("mqadmin", "updateTopic", "-n", broker.namesrv, "-c", "DefaultCluster", "-t", "empty")
    assert made.returncode == 0, made.stderr
    done = run("cometmq", "bench", "consume", "empty", "-n", broker.namesrv)
    assert done.returncode == 1
    assert done.stderr == "cometmq: no message was consumed\n"


def test_percentiles_are_right_to_one_percent() -> None:
    figures = Figures()
    for number in range(1, 1001):
        figures.took(number / 1000)
    wanted = {"p50": 500, "p99": 990, "p99.9": 999, "max": 1000}
    assert figures.latency_ms() == {name: pytest.approx(value, rel=0.0101) for name, value in wanted.items()}
    assert Figures().latency_ms() == {}


def test_failures_are_shown_with_the_last_reason(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures()
    figures.fail(BrokerError(2, "busy\x1b[2J", "127.0.0.1:1"))
    with pytest.raises(click.ClickException, match=r"no message was sent: .*busy"):
        figures.show("sent", False)
    figures.add(2, 2048)
    figures.seconds, figures.lost, figures.skipped = 2.0, 1, 3
    figures.show("sent", False)
    out, err = capsys.readouterr()
    assert out == "sent 2 messages in 2.00 s (1/s, 0.0 MiB/s)\n"
    failed, lost, skipped = err.splitlines()
    assert failed.startswith("1 send failed, the last one: ")
    assert "\x1b" not in failed
    assert lost == "1 message did not arrive"
    assert skipped.startswith("3 sends skipped")
