"""`cometmq send` and `cometmq consume` as a user calls them, against a real cluster."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import BIN, Run, Serve

from cometmq.testing import LocalBroker, local_broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with local_broker(tmp_path_factory.mktemp("cluster")) as broker:
        yield broker


@pytest.fixture(autouse=True)
def namesrv(broker: LocalBroker, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands find the cluster through the environment."""
    monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)


def test_what_is_sent_arrives_with_its_tag_keys_and_properties(run: Run) -> None:
    sent = run(
        "cometmq", "send", "full", "hello", "-t", "T", "-k", "k1", "-k", "k2", "-p", "clerk=a=b", "--json"
    )
    taken = run("cometmq", "consume", "full", "-c", "1", "--timeout", "30", "--json")

    result, message = json.loads(sent.stdout), json.loads(taken.stdout)
    assert result["sendStatus"] == "SEND_OK"
    assert message["msgId"] == result["msgId"]
    assert (message["body"], message["tags"], message["keys"]) == ("hello", "T", ["k1", "k2"])
    assert message["properties"]["clerk"] == "a=b"


def test_lines_of_standard_input_are_messages(run: Run) -> None:
    sent = run("cometmq", "send", "lines", text="one\ntwo\r\n\nfour")
    taken = run("cometmq", "consume", "lines", "-c", "3", "--timeout", "30", "--json")

    assert sent.stdout.startswith("sent 3 messages, 10 bytes in ")
    assert sorted(json.loads(line)["body"] for line in taken.stdout.splitlines()) == ["four", "one", "two"]


def test_thousands_of_lines_are_sent_many_at_once(run: Run) -> None:
    lines = "".join(f"line {number}\n" for number in range(5000))

    sent = run("cometmq", "send", "many", "--json", text=lines)

    ids = {json.loads(line)["msgId"] for line in sent.stdout.splitlines()}
    assert len(ids) == 5000
    assert sent.stderr.startswith("sent 5000 messages, ")


def test_the_count_acknowledges_no_more_than_it_printed(run: Run) -> None:
    run("cometmq", "send", "counted", *"abcdefgh")

    first = run("cometmq", "consume", "counted", "-g", "counters", "-c", "3", "--timeout", "30")
    rest = run("cometmq", "consume", "counted", "-g", "counters", "-c", "5", "--timeout", "30")

    bodies = [line.split()[-1] for out in (first, rest) for line in out.stdout.splitlines()]
    assert len(first.stdout.splitlines()) == 3
    assert first.stderr == ""
    assert sorted(bodies) == list("abcdefgh")


def test_a_reader_that_goes_leaves_the_rest_to_the_group(run: Run) -> None:
    run("cometmq", "send", "headed", "first")
    command = [str(BIN / "cometmq"), "consume", "headed", "-g", "heads"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()

    run("cometmq", "send", "headed", "second")
    _, err = process.communicate(timeout=60)
    rest = run("cometmq", "consume", "headed", "-g", "heads", "-c", "1", "--timeout", "30")

    assert line.split()[-1] == "first"
    assert err == ""
    assert rest.stdout.split()[-1] == "second"


def test_tags_choose_messages(run: Run) -> None:
    for tag in ("A", "B", "C"):
        run("cometmq", "send", "tagged", f"body-{tag}", "-t", tag)

    taken = run("cometmq", "consume", "tagged", "-g", "taggers", "-t", "A || C", "-c", "2", "--timeout", "30")

    assert sorted(line.split()[-1] for line in taken.stdout.splitlines()) == ["body-A", "body-C"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_consumer_that_keeps_its_place(run: Run, serve: Serve, signum: int) -> None:
    topic = f"stopped-{signum}"
    run("cometmq", "send", topic, "before")
    with serve("cometmq", "consume", topic, "-g", topic, ready="before") as consumer:
        assert consumer.stop(signum) == 0
    run("cometmq", "send", topic, "after")

    rest = run("cometmq", "consume", topic, "-g", topic, "-c", "1", "--timeout", "30")

    assert rest.stdout.split()[-1] == "after"
    assert consumer.output.count("\n") == 0


def test_a_topic_that_is_not_there_is_told_while_waiting(run: Run) -> None:
    waited = run("cometmq", "consume", "nobody-wrote-this", "-g", "waiters", "--timeout", "4")

    assert waited.returncode == 1
    assert "nobody-wrote-this" in waited.stderr
    assert "Traceback" not in waited.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("send", "t", "x", "-n", "127.0.0.1:1"), 1, "cannot connect to 127.0.0.1:1"),
        (("send", "bad topic!", "x"), 1, "bad topic!"),
        (("send", "t", "x", "-p", "nothing"), 2, "'nothing' is not NAME=VALUE"),
        (("send", "t", "x", "-d", "19"), 2, "19 is not in the range"),
        (("send",), 2, "Missing argument 'TOPIC'"),
        (("consume", "t", "-c", "0"), 2, "0 is not in the range"),
        (("archive", "-o", "x"), 2, "Give topics or --pattern, not both."),
        (("nonsense",), 2, "No such command 'nonsense'"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    failed = run("cometmq", *arguments)

    assert failed.returncode == code
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr
