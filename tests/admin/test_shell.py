"""RocketMQ's habits of `mqadmin`, and the exit codes that Apache's lacks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.admin.conftest import Shell

COMMANDS = [
    *("updateTopic", "deleteTopic", "purgeTopic", "topicList", "topicRoute", "topicStatus", "clusterList"),
    *("brokerStatus", "consumerProgress", "queryMsgById", "queryMsgByKey", "queryMsgByUniqueKey"),
    *("sendMessage", "consumeMessage"),
]


def test_without_arguments_all_commands_are_listed(mq: Shell) -> None:
    listed = mq.plain()

    assert listed.code == 0
    assert listed.lines[0] == "The most commonly used mqadmin commands are:"
    assert [line.split()[0] for line in listed.lines[1:-2]] == COMMANDS
    assert listed.lines[-1] == "See 'mqadmin help <command>' for more information on a specific command."


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_shows_its_options(mq: Shell, command: str) -> None:
    by_word, by_option = mq.plain("help", command), mq.plain(command, "-h")

    assert by_word.code == by_option.code == 0
    assert by_word.out == by_option.out
    assert "-n, --namesrvAddr" in by_word.out


@pytest.mark.parametrize("name", ["topiclist", "TOPICLIST", "TopicList"])
def test_command_names_compare_without_regard_to_case(mq: Shell, name: str) -> None:
    assert "TBW102" in mq.ok(name).lines


@pytest.mark.parametrize(
    "arguments", [("-n", "{ns}"), ("-n{ns}",), ("--namesrvAddr", "{ns}"), ("--namesrvAddr={ns}",)]
)
def test_options_are_taken_in_every_spelling(mq: Shell, arguments: tuple[str, ...]) -> None:
    given = [word.format(ns=mq.broker.namesrv) for word in arguments]

    assert mq.plain("topicList", *given).code == 0


def test_the_environment_names_the_name_server(mq: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", f"127.0.0.1:1;{mq.broker.namesrv}")

    assert mq.plain("topicList").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("topiList",), "The sub command topiList not exist. Did you mean topicList?"),
        (("help", "nonsense"), "The sub command nonsense not exist."),
        (("topicRoute",), "Missing option '-t'"),
        (("topicRoute", "-t", "x", "-z"), "No such option"),
        (("updateTopic", "-t", "x"), "Missing option: -b/--brokerAddr or -c/--clusterName."),
        (("updateTopic", "-t", "x", "-b", "a:1", "-c", "c"), "not both"),
        (("updateTopic", "-t", "x", "-b", "a:1", "-p", "7"), "'7' is not one of"),
        (("updateTopic", "-t", "x", "-b", "a:1", "-r", "many"), "not a valid integer"),
        (("topicList", "-n", "nowhere"), "host:port"),
        (("topicList", "-n", "127.0.0.1:1"), "cannot connect to 127.0.0.1:1"),
        (("brokerStatus", "-b", "127.0.0.1:1"), "cannot connect to 127.0.0.1:1"),
    ],
)
def test_a_failure_is_told_without_a_traceback_and_ends_with_1(
    mq: Shell, arguments: tuple[str, ...], words: str
) -> None:
    failed = mq.plain(*arguments)

    assert failed.code == 1
    assert words in failed.err
    assert "Traceback" not in failed.err


def test_a_reader_that_has_seen_enough_is_no_error(mq: Shell) -> None:
    command = [
        sys.executable,
        "-c",
        "from cometmq.cli import mqadmin; mqadmin()",
        "topicList",
        "-n",
        mq.broker.namesrv,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)

    assert err == b""
