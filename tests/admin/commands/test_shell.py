"""Conventions of RocketMQ's `mqadmin`, and exit codes that Apache's tool lacks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from tests.admin.conftest import Shell

from cometmq.admin.commands import mqadmin

LATER = [
    "haStatus",
    "resetMasterFlushOffset",
    "addBroker",
    "removeBroker",
    "updateTopicList",
    "updateSubGroupList",
    "setConsumeMode",
    *("getBrokerLiteInfo", "getParentTopicInfo", "getLiteTopicInfo"),
    *("getLiteClientInfo", "getLiteGroupInfo", "triggerLiteDispatch"),
]
OURS = ["purgeTopic", "resumeCheckHalfMessage"]
COMMANDS = list(mqadmin.commands)[1:]
CHANGING = re.compile("add|clean|clone|delete|remove|reset|resume|set|skip|update|wipe")


def test_every_command_of_apaches_is_there() -> None:
    apaches = {line.split()[0] for line in OPTIONS.strip().splitlines()}
    assert len(apaches) == 56
    assert {*apaches, *LATER, *OURS} <= set(COMMANDS)


def options_of(command: str) -> dict[str, click.Option]:
    """Return the options of a command by each of their names."""
    params = mqadmin.commands[command].params
    return {name: each for each in params if isinstance(each, click.Option) for name in each.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_all_commands_take(command: str) -> None:
    assert {"-n", "--namesrvAddr", "--json", "--raw"} <= options_of(command).keys()
    assert ("--dry-run" in options_of(command)) == bool(CHANGING.match(command))
    assert all(each.help for name, each in options_of(command).items() if name != "--help")


# The options of 4.9.8 and the additional ones of 5.x, as short/long; * marks required options. Long names
# with a blank, which Apache's commands cannot parse, are listed without it.
OPTIONS = """
addWritePerm -b/--brokerName*
allocateMQ -t/--topic* -i/--ipList*
brokerConsumeStats -b/--brokerAddr* -t/--timeoutMillis -l/--level -o/--order
brokerStatus -b/--brokerAddr -c/--clusterName
checkMsgSendRT -t/--topic* -a/--amount -s/--size
cleanExpiredCQ -b/--brokerAddr -c/--cluster
cleanUnusedTopic -b/--brokerAddr -c/--cluster
cloneGroupOffset -s/--srcGroup* -d/--destGroup* -t/--topic* -o/--offline
clusterAclConfigVersion -b/--brokerAddr -c/--clusterName
clusterList -m/--moreStats -i/--interval -c/--clusterName
clusterRT -a/--amount -s/--size -c/--cluster -p/--printLog -m/--machineRoom -i/--interval
consumeMessage -t/--topic* -b/--brokerName -i/--queueId -o/--offset -g/--consumerGroup -s/--beginTimestamp -e/--endTimestamp -c/--MessageNumber
consumerConnection -g/--consumerGroup* -b/--brokerAddr
consumerProgress -g/--groupName -s/--showClientIP -t/--topicName -c/--cluster
consumerStatus -g/--consumerGroup* -i/--clientId -b/--brokerAddr -s/--jstack
deleteAclConfig -b/--brokerAddr -c/--clusterName -a/--accessKey*
deleteExpiredCommitLog -b/--brokerAddr -c/--cluster
deleteKvConfig -s/--namespace* -k/--key*
deleteSubGroup -b/--brokerAddr -c/--clusterName -g/--groupName* -r/--removeOffset
deleteTopic -t/--topic* -c/--clusterName*
exportConfigs -c/--clusterName* -f/--filePath
exportMetadata -c/--clusterName -b/--brokerAddr -f/--filePath -t/--topic -g/--subscriptionGroup -s/--specialTopic
exportMetrics -c/--clusterName* -f/--filePath
getBrokerConfig -b/--brokerAddr -c/--clusterName
getConsumerConfig -g/--groupName*
getNamesrvConfig
printMsg -t/--topic* -c/--charsetName -s/--subExpression -b/--beginTimestamp -e/--endTimestamp -d/--printBody
printMsgByQueue -t/--topic* -a/--brokerName* -i/--queueId* -c/--charsetName -s/--subExpression -b/--beginTimestamp -e/--endTimestamp -p/--printMsg -d/--printBody -f/--calculate
producer -b/--broker*
producerConnection -g/--producerGroup* -t/--topic*
queryCq -t/--topic* -q/--queue* -i/--index* -c/--count -b/--broker -g/--consumer
queryMsgById -i/--msgId* -g/--consumerGroup -d/--clientId -s/--sendMessage -u/--unitName -t/--topic -f/--bodyFormat -c/--cluster
queryMsgByKey -t/--topic* -k/--msgKey* -b/--beginTimestamp -e/--endTimestamp -m/--maxNum -c/--cluster
queryMsgByOffset -t/--topic* -b/--brokerName* -i/--queueId* -o/--offset* -f/--bodyFormat
queryMsgByUniqueKey -i/--msgId* -g/--consumerGroup -d/--clientId -t/--topic* -a/--showAll -c/--cluster
queryMsgTraceById -i/--msgId* -t/--traceTopic -b/--beginTimestamp -e/--endTimestamp -c/--maxNum
resetOffsetByTime -g/--group* -t/--topic* -s/--timestamp* -f/--force -c/--cplus -b/--broker -q/--queue -o/--offset
sendMessage -t/--topic* -p/--body* -k/--key -c/--tags -b/--broker -i/--qid -m/--msgTraceEnable
sendMsgStatus -b/--brokerName* -s/--messageSize -c/--count
skipAccumulatedMessage -g/--group* -t/--topic* -f/--force -c/--cluster
startMonitoring
statsAll -a/--activeTopic -t/--topic
topicClusterList -t/--topic*
topicList -c/--clusterModel
topicRoute -t/--topic* -l/--list
topicStatus -t/--topic* -c/--cluster
updateAclConfig -b/--brokerAddr -c/--clusterName -a/--accessKey* -s/--secretKey* -w/--whiteRemoteAddress -i/--defaultTopicPerm -u/--defaultGroupPerm -t/--topicPerms -g/--groupPerms -m/--admin
updateBrokerConfig -b/--brokerAddr -c/--clusterName -a/--updateAllBroker -k/--key* -v/--value*
updateGlobalWhiteAddr -b/--brokerAddr -c/--clusterName -g/--globalWhiteRemoteAddresses* -p/--aclFileFullPath
updateKvConfig -s/--namespace* -k/--key* -v/--value*
updateNamesrvConfig -k/--key* -v/--value*
updateOrderConf -t/--topic* -v/--orderConf -m/--method*
updateSubGroup -b/--brokerAddr -c/--clusterName -g/--groupName* -s/--consumeEnable -m/--consumeFromMinEnable -d/--consumeBroadcastEnable -o/--consumeMessageOrderly -q/--retryQueueNums -r/--retryMaxTimes -i/--brokerId -w/--whichBrokerWhenConsumeSlowly -a/--notifyConsumerIdsChanged
updateTopic -b/--brokerAddr -c/--clusterName -t/--topic* -r/--readQueueNums -w/--writeQueueNums -p/--perm -o/--order -u/--unit -s/--hasUnitSub -a/--attributes
updateTopicPerm -b/--brokerAddr -c/--clusterName -t/--topic* -p/--perm*
wipeWritePerm -b/--brokerName*
"""  # noqa: E501


@pytest.mark.parametrize("line", OPTIONS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_options_of_a_command_are_apaches(line: str) -> None:
    command, *wanted = line.split()
    found = {
        f"{each.opts[0]}/{each.opts[1]}" + "*" * each.required
        for each in options_of(command).values()
        if len(each.opts) == 2 and "-n" not in each.opts
    }
    assert found == set(wanted)


def test_without_arguments_all_commands_are_listed(mq: Shell) -> None:
    listed = mq.plain()

    assert listed.code == 0
    assert listed.lines[2] == "The most commonly used mqadmin commands are:"
    assert [line.split()[0] for line in listed.lines if line.startswith("   ")] == COMMANDS
    assert "See 'mqadmin help <command>' for more information on a specific command." in listed.lines


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
        (("topicRoute", "--topicc", "x"), "Did you mean '--topic'?"),
        (("getBrokerConfig",), "Missing option: -b/--brokerAddr or -c/--clusterName."),
        (("resetOffsetByTime", "-g", "g", "-t", "t", "-s", "tomorrow"), "'tomorrow' is not a time"),
        (("resetOffsetByTime", "-g", "g", "-t", "t", "-s", "now", "-q", "1"), "needs -b"),
        (("updateOrderConf", "-t", "t", "-m", "put"), "please set orderConf with option -v."),
        (("updateTopic", "-t", "x"), "Missing option: -b/--brokerAddr or -c/--clusterName."),
        (("updateTopic", "-t", "x", "-b", "a:1", "-c", "c"), "not both"),
        (("updateTopic", "-t", "x", "-b", "a:1", "-p", "7"), "'7' is not one of"),
        (("updateTopic", "-t", "x", "-b", "a:1", "-r", "many"), "not a valid integer"),
        (("topicList", "-n", "nowhere"), "host:port"),
        (("topicList", "-n", "127.0.0.1:1"), "cannot connect to 127.0.0.1:1: Connection refused (is"),
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
        """Return the single line of JSON that a failing command prints to standard error."""
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


@pytest.mark.parametrize(
    ("shell", "words", "wanted"),
    [
        ("bash", "mqadmin resetoff", "plain,resetOffsetByTime"),
        ("zsh", "mqadmin QUERYMSGBYO", "queryMsgByOffset"),
        ("fish", "mqadmin topicRoute --top", "--topic"),
    ],
)
def test_completion_knows_commands_in_any_case_and_their_options(shell: str, words: str, wanted: str) -> None:
    env = {**os.environ, "_MQADMIN_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    env["COMP_CWORD"] = words.split()[-1] if shell == "fish" else str(len(words.split()) - 1)
    command = [sys.executable, "-c", "from cometmq.cli import mqadmin; mqadmin()"]

    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)

    assert wanted in shown.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_by_what_the_page_says(tmp_path: Path) -> None:
    """A real shell loads the completion function and calls it."""
    for name, entry in (("mqadmin", "mqadmin"), ("cometmq", "main")):
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\nfrom cometmq.cli import {entry}\n{entry}()\n")
        program.chmod(0o755)
    page = (Path(__file__).parents[3] / "docs" / "admin.md").read_text()
    (line,) = [
        each for each in page.splitlines() if each.startswith('eval "$(cometmq completion bash mqadmin')
    ]
    script = f"""{line}
        words=$(complete -p mqadmin) || exit 1
        function=${{words##*-F }}
        COMP_LINE="mqadmin topicRoute --top" COMP_POINT=24
        ${{function% mqadmin}} mqadmin
        echo "${{COMPREPLY[@]}}"
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": ":".join(sys.path)}

    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )

    assert (done.stdout, done.stderr) == ("--topic\n", "")


# -- docs/admin.md has every command, with a valid example


PAGE = (Path(__file__).parents[3] / "docs" / "admin.md").read_text()
ROWS = re.findall(r"^\| (\w+) \| .* \| `mqadmin (.+)` \|$", PAGE, re.MULTILINE)


def test_every_command_is_on_the_page_once() -> None:
    assert sorted(name for name, _ in ROWS) == sorted({*mqadmin.commands} - {"help"})


@pytest.mark.parametrize(("command", "example"), ROWS, ids=[name for name, _ in ROWS])
def test_an_example_can_be_given(command: str, example: str) -> None:
    name, *words = shlex.split(example.replace(r"\|", "|"))

    assert name == command
    with mqadmin.commands[name].make_context(name, words) as context:
        assert context.args == []


def test_commands_with_a_dry_run_are_named() -> None:
    sentence = PAGE[PAGE.index("takes `--dry-run`") : PAGE.index("purgeTopic only shows")]

    assert "|".join(re.findall(r"`(\w+)…`", sentence)) == CHANGING.pattern


TOPIC_FILE, GROUP_FILE = '[{"topicName":"dry-2"}]', '[{"groupName":"dry-2"}]'
DRY_RUNS = (
    "updateTopic -b {addr} -t dry-2 -o true",
    "updateTopicList -c DefaultCluster -f {topics}",
    "updateTopicPerm -b {addr} -t dry -p 4",
    "deleteTopic -c DefaultCluster -t dry",
    "updateOrderConf -t dry -m put -v broker-a:2",
    "updateSubGroup -c DefaultCluster -g dry-2",
    "updateSubGroupList -b {addr} -f {groups}",
    "deleteSubGroup -c DefaultCluster -g dry -r true",
    "setConsumeMode -b {addr} -t dry -g dry -m POP",
    "skipAccumulatedMessage -g dry -t dry --force",
    "updateBrokerConfig -b {addr} -k fileReservedTime -v 24",
    "cleanUnusedTopic",
    "wipeWritePerm -b {name}",
    "addWritePerm -b {name}",
    "updateKvConfig -s DRY -k dry -v dry",
    "deleteKvConfig -s PLACES -k dry",
    "updateNamesrvConfig -k clusterTest -v true",
    "updateAclConfig -b {addr} -a somebody -s a-good-secret",
    "deleteAclConfig -b {addr} -a somebody",
    "updateGlobalWhiteAddr -b {addr} -g 10.0.0.1",
    "resetMasterFlushOffset -b {addr} -o 7",
    "addBroker -c {addr} -b broker.conf",
    "removeBroker -c {addr} -b DefaultCluster:broker-a:0",
    "resumeCheckHalfMessage -i 7F0000010000000000000001ABCDEF00",
)


@pytest.mark.parametrize("words", DRY_RUNS, ids=[words.split()[0] for words in DRY_RUNS])
def test_a_dry_run_names_the_actions_and_changes_nothing(mq: Shell, tmp_path: Path, words: str) -> None:
    files = {"topics": tmp_path / "topics", "groups": tmp_path / "groups"}
    files["topics"].write_text(TOPIC_FILE)
    files["groups"].write_text(GROUP_FILE)
    places = {"addr": mq.broker.broker_addr, "name": mq.broker.broker_name, **files}
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "dry")
    mq.ok("updateSubGroup", "-c", "DefaultCluster", "-g", "dry")
    mq.ok("updateKvConfig", "-s", "PLACES", "-k", "dry", "-v", "here")

    def state() -> list[Any]:
        shown = ("topicRoute -t dry", "getConsumerConfig -g dry --json", "getNamesrvConfig --json")
        config = mq.ok("getBrokerConfig", "-b", mq.broker.broker_addr, "--json").json
        names = {name for name in mq.ok("topicList").lines if "dry" in name}
        absent = mq.run("getConsumerConfig", "-g", "dry-2").code
        return [*(mq.ok(*each.split()).json for each in shown), config, names, absent]

    before = state()
    would = mq.ok(*words.format(**places).split(), "--dry-run")
    as_json = mq.ok(*words.format(**places).split(), "--dry-run", "--json").json

    assert would.lines[-1] == "Nothing was done: this was a dry run."
    assert would.lines[:-1] == [f"would {deed}" for deed in as_json["would"]] != []
    assert state() == before
