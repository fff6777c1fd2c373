"""`cometmq timers`, and `cometmq send` with a delivery time, as a user runs them."""

from __future__ import annotations

import json
import time

import pytest
from tests.cli.conftest import Run

from cometmq.protocol.timers import RecallHandle

pytestmark = pytest.mark.usefixtures("namesrv")


def test_what_waits_is_listed_shown_and_taken_back(run: Run) -> None:
    begun = time.time() * 1000
    for body, delay in (("later", "2h"), ("soon", "10m")):
        sent = run("cometmq", "send", "timed", body, "--delay", delay, "-k", f"key-{body}", "--json")
        assert sent.returncode == 0, sent.stderr
    handle = json.loads(sent.stdout)["recallHandle"]

    listed = run("cometmq", "timers", "list", "-t", "timed", "--json")
    soon, later = (json.loads(line) for line in listed.stdout.splitlines())
    assert (soon["message"]["body"], later["message"]["body"]) == ("soon", "later")
    assert (soon["destination"], soon["recallHandle"]) == ("timed", handle)
    assert 600_000 <= soon["deliverAt"] - begun < 620_000

    shown = run("cometmq", "timers", "show", "key-later")
    assert shown.stdout.count("\n") == 1
    assert "keys=key-later" in shown.stdout
    assert shown.stderr == "1 message\n"

    planned = run("cometmq", "timers", "cancel", handle, "--dry-run")
    assert planned.stdout.startswith(
        f"would cancel message {RecallHandle.decode(handle).unique_key} for topic timed at "
    )
    assert "soon" in run("cometmq", "timers", "list", "-t", "timed").stdout
    assert run("cometmq", "timers", "cancel", handle).returncode == 0
    assert "soon" not in run("cometmq", "timers", "list", "-t", "timed").stdout
    gone = run("cometmq", "timers", "show", "key-soon")
    assert gone.returncode == 1
    assert "no waiting message has the key or id key-soon" in gone.stderr


def test_what_waits_at_a_delay_level_is_listed_and_cannot_be_taken_back(run: Run) -> None:
    begun = time.time() * 1000
    assert run("cometmq", "send", "levels", "x", "-d", "16", "-k", "key-level").returncode == 0
    (listed,) = run("cometmq", "timers", "list", "-t", "levels", "--json").stdout.splitlines()
    found = json.loads(listed)
    assert (found["destination"], found["delayLevel"], found.get("recallHandle")) == ("levels", 16, None)
    assert 1_800_000 <= found["deliverAt"] - begun < 1_820_000
    shown = run("cometmq", "timers", "show", "key-level")
    assert " level=16 " in shown.stdout
    assert "recall=" not in shown.stdout
    assert "have no handle and cannot" in run("cometmq", "timers", "cancel", "-h").stdout


def test_more_messages_with_a_key_than_are_looked_at(run: Run) -> None:
    many = "\n".join(f"body {number}" for number in range(70))
    sent = run("cometmq", "send", "many", "--delay", "2h", "-k", "same", text=many)
    assert sent.returncode == 0, sent.stderr
    shown = run("cometmq", "timers", "show", "same")
    assert shown.stdout.count("\n") == 64
    assert "there may be more: a broker examines the newest 64" in shown.stderr
    assert "there may be more" not in run("cometmq", "timers", "show", "none").stderr


def test_a_time_of_day(run: Run) -> None:
    at = time.localtime(time.time() + 3_600)
    sent = run("cometmq", "send", "dated", "x", "--at", time.strftime("%Y-%m-%d#%H:%M:%S:000", at))
    assert " recall " in sent.stdout, sent.stderr
    handle = RecallHandle.decode(sent.stdout.split()[-1])
    assert handle.deliver_ms == (time.mktime(at) - 1) * 1_000 + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["send", "t", "x", "--delay", "soon"], "'soon' is not a time span"),
        (["send", "t", "x", "--at", "noon"], "'noon' is neither ms since 1970 nor"),
        (["send", "t", "x", "--delay", "1s", "-d", "3"], "Give one of --delay-level, --delay and --at."),
        (["send", "t", "x", "--delay", "41d"], "max delay 3456000000ms"),
        (["timers", "cancel", "nonsense"], "recall handle is invalid"),
    ],
)
def test_what_cannot_be(run: Run, arguments: list[str], words: str) -> None:
    done = run("cometmq", *arguments)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
