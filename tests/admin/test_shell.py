"""RocketMQ's habits of `mqadmin`, and the exit codes that Apache's lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from tests.admin.conftest import Shell

COMMANDS = [
    *("updateTopic", "deleteTopic", "purgeTopic", "topicList", "topicRoute", "topicStatus", "clusterList"),
    *("brokerStatus", "consumerProgress", "consumerStatus", "queryMsgById", "queryMsgByKey"),
    *("queryMsgByUniqueKey", "resumeCheckHalfMessage", "queryMsgTraceById", "sendMessage", "consumeMessage"),
    *("updateAclConfig", "deleteAclConfig", "updateGlobalWhiteAddr", "clusterAclConfigVersion"),
    *("haStatus", "resetMasterFlushOffset", "addBroker", "removeBroker"),
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
def test_a_failure_ends_with_1_and_no_traceback(mq: Shell, arguments: tuple[str, ...], words: str) -> None:
    failed = mq.plain(*arguments)

    assert failed.code == 1
    assert words in failed.err
    assert "Traceback" not in failed.err


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_is_told(mq: Shell, option: str) -> None:
    told = mq.plain(option)

    assert (told.code, told.out) == (0, f"mqadmin, version {version('cometmq')}\n")


class TestErrorsAsJson:
    def error(self, mq: Shell, *arguments: str) -> dict[str, Any]:
        """The one line of JSON that a command which fails leaves on standard error."""
        failed = mq.run(*arguments, "--json")
        assert (failed.code, failed.out, failed.err.count("\n")) == (1, "", 1)
        found: dict[str, Any] = json.loads(failed.err)
        assert found.keys() == {"error", "message", "details"}
        return found

    def test_a_typed_error_has_its_facts_beside_its_text(self, mq: Shell) -> None:
        error = self.error(mq, "topicStatus", "-t", "nowhere")

        assert error["error"] == "NoRouteError"
        assert error["details"]["topic"] == "nowhere"
        assert error["message"].startswith("no route to topic nowhere: ")

    def test_a_refusal_names_code_remark_and_address(self, mq: Shell) -> None:
        error = self.error(mq, "brokerStatus", "-b", mq.broker.namesrv)

        assert error["error"] == "BrokerError"
        assert (error["details"]["code"], error["details"]["brokerAddr"]) == (3, mq.broker.namesrv)

    def test_wrong_usage_is_json_as_well(self, mq: Shell) -> None:
        error = self.error(mq, "topicStatus")

        assert (error["error"], error["details"]) == ("MissingParameter", {})
        assert "'-t'" in error["message"]

    def test_a_broker_that_does_not_answer_is_told_in_the_listing(self, mq: Shell) -> None:
        assert mq.ok("clusterList", "--json").err == ""


@pytest.mark.parametrize("command", ["topicList", "clusterList", "topicRoute -t t", "consumerProgress -g g"])
def test_a_broker_in_place_of_a_name_server_is_named_as_what_it_may_be(mq: Shell, command: str) -> None:
    failed = mq.plain(*command.split(), "-n", mq.broker.broker_addr)

    assert failed.code == 1
    assert "server of another kind: by default name servers listen on port 9876" in failed.err
    assert "updateTopic" not in failed.err


def test_a_name_server_in_place_of_a_broker_as_well(mq: Shell) -> None:
    failed = mq.run("brokerStatus", "-b", mq.broker.namesrv)

    assert "server of another kind" in failed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("topicStatus", "-t", "a\udcff"),
        ("updateTopic", "-t", "t", "-c", "DefaultCluster", "-a", "+x=\udcff"),
        ("sendMessage", "-t", "t", "-p", "\udcff"),
        ("nonsense\udcff",),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_with_its_bytes(
    mq: Shell, arguments: tuple[str, ...]
) -> None:
    failed = mq.run(*arguments)

    assert failed.code == 1
    assert "\\udcff" in failed.err
    assert "is not UTF-8 text" in failed.err


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
