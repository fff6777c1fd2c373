"""The example programs, as a user runs them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cometmq.testing import LocalBroker

EXAMPLES = Path(__file__).parents[2] / "examples"
SENT = 1 + 1000 + 3 + 10 + 1 + 1


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=60
    )


def consumed(name: str, local: LocalBroker) -> tuple[list[str], str]:
    """The lines of a consumer's program about all messages, and what it says at its end."""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), local.namesrv], stdout=subprocess.PIPE, text=True
    ) as consumer:
        watchdog = threading.Timer(60, consumer.kill)
        watchdog.start()
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline() for _ in range(SENT)]
        consumer.send_signal(signal.SIGINT)
        rest = consumer.stdout.read()
        assert consumer.wait(30) == 0
        watchdog.cancel()
    return lines, rest


def steps_of(lines: list[str]) -> list[str]:
    """The steps of the one order that examples/send.py sends in order."""
    return [line.split(": ")[1].strip() for line in lines if re.search(r": (created|paid|shipped)$", line)]


def test_orders_are_sent_consumed_and_read_again(local: LocalBroker) -> None:
    sent = run("send.py", local.namesrv)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout.startswith("SEND_OK: ")
    assert "1000 sent side by side" in sent.stdout

    lines, rest = consumed("consume.py", local)
    assert rest == f"{SENT} consumed, 0 failed\n"
    assert sorted(steps_of(lines)) == ["created", "paid", "shipped"]
    assert any("remind me" in line for line in lines)

    lines, _ = consumed("consume_in_order.py", local)
    assert steps_of(lines) == ["created", "paid", "shipped"]

    read = run("pull.py", local.namesrv, "Orders")
    assert read.returncode == 0, read.stderr
    assert sum(int(count) for count in re.findall(r": (\d+) messages", read.stdout)) == SENT


def test_orders_are_announced_if_they_are_in_the_database(local: LocalBroker) -> None:
    done = run("transactions.py", local.namesrv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "order for 30: COMMIT", "order for -1: ROLLBACK", "order for 12: COMMIT",
    ]  # fmt: skip
    read = run("pull.py", local.namesrv, "Announced")
    assert sum(int(count) for count in re.findall(r": (\d+) messages", read.stdout)) == 2


@pytest.mark.parametrize("name", ["send.py", "pull.py", "transactions.py"])
def test_without_a_cluster_an_example_says_what_is_missing(name: str) -> None:
    failed = run(name, "127.0.0.1:1")
    assert failed.returncode == 1
    assert "127.0.0.1:1 answered 'cannot connect to 127.0.0.1:1: Connection refused'" in failed.stderr
    assert "cometmq standalone" in failed.stderr
    assert "Traceback" not in failed.stderr
