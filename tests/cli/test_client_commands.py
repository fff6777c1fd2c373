"""`cometmq send` and `cometmq consume` as a user runs them, with a real cluster."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from tests.cli.conftest import BIN, Run, Serve

from cometmq.testing import LocalBroker

pytestmark = pytest.mark.usefixtures("namesrv")


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


def test_without_a_group_each_topic_has_its_own(run: Run, broker: LocalBroker) -> None:
    for topic in ("one-of-two", "two-of-two"):
        run("cometmq", "send", topic, topic)
        taken = run("cometmq", "consume", topic, "-c", "1", "--timeout", "30")
        assert taken.stdout.split()[-1] == topic

    groups = json.loads(run("mqadmin", "consumerProgress", "--json").stdout)
    assert {"cometmq-cli-one-of-two", "cometmq-cli-two-of-two"} <= {row["group"] for row in groups}


class TestFromLast:
    """CONSUME_FROM_LAST_OFFSET begins at the first message of a new topic; `--from last` does not."""

    def test_a_new_group_gets_only_what_comes_later(self, run: Run, serve: Serve) -> None:
        run("cometmq", "send", "young", "before")
        words = ("cometmq", "consume", "young", "-g", "lasts", "--from", "last")
        skipped = run(*words, "--timeout", "1")
        run("cometmq", "send", "young", "after")
        taken = run(*words, "-c", "1", "--timeout", "30")

        assert (skipped.returncode, skipped.stdout) == (0, "")
        assert taken.stdout.split()[-1] == "after"

    def test_a_group_that_has_read_goes_on_where_it_stopped(self, run: Run) -> None:
        run("cometmq", "send", "known", *"abc")
        words = ("cometmq", "consume", "known", "-g", "goers", "--timeout", "30")
        first = run(*words, "-c", "1")
        rest = run(*words, "--from", "last", "-c", "2")

        bodies = [line.split()[-1] for out in (first, rest) for line in out.stdout.splitlines()]
        assert sorted(bodies) == list("abc")

    def test_all_messages_of_a_topic_that_does_not_exist_yet_come_later(self, run: Run, serve: Serve) -> None:
        words = ("consume", "unborn", "-g", "unborn", "--from", "last", "-c", "1")
        with serve("cometmq", *words, ready="waiting: unborn") as consumer:
            run("cometmq", "send", "unborn", "first")
            assert consumer.wait(60) == 0

        assert any(line.endswith("  first") for line in consumer.output.splitlines())


def test_what_keeps_a_consumer_waiting_is_told_once_and_as_the_reason_of_its_end(run: Run) -> None:
    ended = run("cometmq", "consume", "absent", "--timeout", "4")

    starts = [line.split(": ")[:2] for line in ended.stderr.splitlines()]
    assert starts == [["waiting", "absent"], ["cometmq", "no message was received"]]
    assert ended.returncode == 1


def test_both_ids_of_a_sent_message_are_told_and_find_it(run: Run) -> None:
    words = run("cometmq", "send", "ids", "x").stdout.rstrip(")\n").split()

    for msg_id in (words[1], words[-1]):
        (found,) = json.loads(run("mqadmin", "queryMsgById", "-i", msg_id, "--json").stdout)
        assert (found["msgId"], found["offsetMsgId"]) == (words[1], words[-1])


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


@pytest.mark.parametrize("command", ["consume", "tail"])
def test_without_a_name_server_the_topic_is_named_that_was_asked_for(run: Run, command: str) -> None:
    failed = run("cometmq", command, "t", "-n", "127.0.0.1:1")

    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("cometmq: no route to topic t: cannot connect to 127.0.0.1:1: ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("send", "t", "x", "-n", "127.0.0.1:1"), 1, "cannot connect to 127.0.0.1:1"),
        (("send", "bad topic!", "x"), 1, "bad topic!"),
        (("consume", "bad topic!"), 1, "the topic name 'bad topic!'"),
        (("tail", "bad topic!"), 1, "the topic name 'bad topic!'"),
        (
            ("tail", "t", "--from", "yesterday"),
            2,
            "is not a valid time. Valid forms: now, first, 10m",
        ),
        (("tail", "t", "--from", "5w"), 2, "'5w' is not a valid time"),
        (("tail", "t", "--from", str(2**63)), 2, "is not a valid time"),
        (("send", "t", "x", "-p", "nothing"), 2, "'nothing' is not NAME=VALUE"),
        (("send", "t", "x", "-d", "19"), 2, "19 is not in the range"),
        (("send",), 2, "Missing argument 'TOPIC'"),
        (("consume", "t", "-c", "0"), 2, "0 is not in the range"),
        (("archive", "-o", "x"), 2, "Give the topics to archive, or --pattern."),
        (("archive", "t", "--pattern", "t", "-o", "x"), 2, "Give topics or --pattern, not both."),
        (("nonsense",), 2, "No such command 'nonsense'"),
    ],
)
def test_failures_are_a_line_and_an_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    failed = run("cometmq", *arguments)

    assert failed.returncode == code
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr
