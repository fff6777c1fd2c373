"""The other commands of mqadmin: ours on Apache's servers, and Apache's beside ours on our servers.

Each pair of outputs is compared line by line, if both print any; addresses of clients, ports and times are
masked. Two commands are not compared: Apache's startMonitoring prints nothing (it writes a log once a minute,
forever), and getAclConfig of 4.9.7 prints secrets (4.9.8 has neither the command nor its request 54).
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.broker.access.test_files import write
from tests.interop import apache
from tests.interop.apache import ApacheCluster
from tests.interop.jars import SERVER_VERSIONS
from tests.interop.mqadmin import AdminShell
from tests.kit.waiting import wait_until
from tests.long_form import long_form

from cometmq.admin import Admin, AllQueuesOnly, OffsetWay, Reset
from cometmq.admin.commands import mqadmin
from cometmq.cli.top import top
from cometmq.client import ConsumeFromWhere, Producer, PushConsumer, PushOptions
from cometmq.message import Message, MessageExt
from cometmq.testing import LocalBroker, local_broker

GROUP, TOPIC = "told", "telling"


def our_mqadmin(namesrv: str, *arguments: str) -> str:
    """Run our command in this process, since there are many, and return its output."""
    done = CliRunner().invoke(mqadmin, [arguments[0], "-n", namesrv, *arguments[1:]])
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.stdout


def wait_until_it_counts(namesrv: str, addr: str) -> None:
    """Wait until Apache's broker has statistics, which it lacks in its first second."""
    end = time.monotonic() + 30
    while CliRunner().invoke(mqadmin, ["brokerStatus", "-n", namesrv, "-b", addr]).exit_code:
        assert time.monotonic() < end
        time.sleep(0.2)


class Members:
    """A consumer group and a producer group that run in this process while the context is entered."""

    def __init__(self, namesrv: str, topic: str = TOPIC) -> None:
        self.bodies: list[bytes] = []
        self.came = asyncio.Condition()
        options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        self.consumer = PushConsumer(GROUP, self.take, topic, namesrv=namesrv, options=options)
        self.producer = Producer(f"{GROUP}-producers", namesrv=namesrv)

    async def take(self, messages: list[MessageExt]) -> None:
        async with self.came:
            self.bodies += [bytes(message.body) for message in messages]
            self.came.notify_all()

    async def wait_for(self, count: int) -> None:
        async with self.came, asyncio.timeout(60):
            await self.came.wait_for(lambda: len(self.bodies) >= count)


def prepare(namesrv: str, broker_name: str) -> None:
    """Create a topic with three messages in queue 0, and a group with settings."""
    our_mqadmin(namesrv, "updateTopic", "-c", "DefaultCluster", "-t", TOPIC, "-r", "2", "-w", "2")
    our_mqadmin(namesrv, "updateSubGroup", "-c", "DefaultCluster", "-g", GROUP)
    place = ("-t", TOPIC, "-b", broker_name, "-i", "0", "-c", "T")
    for number in range(3):
        our_mqadmin(namesrv, "sendMessage", *place, "-p", str(number))


class TestOursOnApachesServers:
    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_the_commands_of_an_operator(
        self, apache_clusters: Callable[[str], ApacheCluster], version: str, tmp_path: Path
    ) -> None:
        cluster = apache_clusters(version)
        namesrv, addr, name = cluster.namesrv, cluster.broker_addr, cluster.broker.name
        prepare(namesrv, name)

        def run(*arguments: str) -> str:
            return our_mqadmin(namesrv, *arguments)

        assert "brokerName" in run("getBrokerConfig", "-b", addr)
        run("updateBrokerConfig", "-b", addr, "-k", "slaveReadEnable", "-v", "true")
        assert json.loads(run("getBrokerConfig", "-b", addr, "--json"))["slaveReadEnable"] == "true"
        assert json.loads(run("getConsumerConfig", "-g", GROUP, "--json"))[0]["brokerName"] == name
        assert "OK, " in run("wipeWritePerm", "-b", name)
        assert "OK, " in run("addWritePerm", "-b", name)
        run("updateKvConfig", "-s", "N", "-k", "k", "-v", "v")
        run("deleteKvConfig", "-s", "N", "-k", "k")
        assert "orderMessageEnable" in run("getNamesrvConfig")
        run("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "false")
        run("updateTopicPerm", "-b", addr, "-t", TOPIC, "-p", "4")
        run("updateTopicPerm", "-c", "DefaultCluster", "-t", TOPIC, "-p", "6")
        assert run("topicClusterList", "-t", TOPIC).split() == ["DefaultCluster"]
        assert len(json.loads(run("allocateMQ", "-t", TOPIC, "-i", "a,b", "--json"))["result"]["a"]) == 1
        run("updateOrderConf", "-t", TOPIC, "-m", "put", "-v", f"{name}:2")
        assert f"[{name}:2]" in run("updateOrderConf", "-t", TOPIC, "-m", "get")
        run("updateOrderConf", "-t", TOPIC, "-m", "delete")
        assert run("printMsg", "-t", TOPIC).count("MSGID: ") == 3
        assert "Tag: T" in run("printMsgByQueue", "-t", TOPIC, "-a", name, "-i", "0", "-f", "true")
        place = ("-t", TOPIC, "-b", name, "-i", "0", "-o", "1")
        assert json.loads(run("queryMsgByOffset", *place, "--json"))[0]["body"] == "1"
        assert "max: 3, min: 0" in run("queryCq", "-t", TOPIC, "-q", "0", "-i", "0")
        assert TOPIC in run("statsAll", "-t", TOPIC)
        assert run("checkMsgSendRT", "-t", f"{TOPIC}-rt", "-a", "2").count("true") == 2
        for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
            assert run(command, "-b", addr) == "success\n"
        wait_until_it_counts(namesrv, addr)
        for command in ("exportMetadata", "exportConfigs", "exportMetrics"):
            assert "success" in run(command, "-c", "DefaultCluster", "-f", str(tmp_path))
        metadata = json.loads((tmp_path / "metadata.json").read_text())
        assert metadata["topicConfigTable"][TOPIC]["readQueueNums"] == 2

    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_the_commands_about_clients(
        self, apache_clusters: Callable[[str], ApacheCluster], version: str
    ) -> None:
        cluster = apache_clusters(version)
        namesrv, addr, topic = cluster.namesrv, cluster.broker_addr, "watched"
        our_mqadmin(namesrv, "updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "1", "-w", "1")
        our_mqadmin(namesrv, "updateSubGroup", "-c", "DefaultCluster", "-g", GROUP)

        async def scenario() -> None:
            def run(*arguments: str) -> Coroutine[None, None, str]:
                return asyncio.to_thread(our_mqadmin, namesrv, *arguments)

            members = Members(namesrv, topic)
            async with members.consumer, members.producer:
                me = members.consumer.client.client_id
                sent = await members.producer.send(Message(topic, b"x"))
                await members.wait_for(1)
                await members.consumer.persist_offsets()

                view = await asyncio.to_thread(
                    CliRunner().invoke, top, ["-n", namesrv, "--once", "--json", "--rows", "500"]
                )
                shown = json.loads(view.stdout)
                assert (shown["problems"], shown["brokers"][0]["addr"]) == ({}, addr)
                assert {row["name"]: row["lag"] for row in shown["groups"]}[GROUP] == 0
                assert topic in {row["name"] for row in shown["topics"]}

                connected = await run("consumerConnection", "-g", GROUP, "-b", addr)
                assert me in connected
                assert f"{topic} *" in " ".join(connected.split())
                producers = await run("producerConnection", "-g", f"{GROUP}-producers", "-t", topic)
                assert members.producer.client.client_id in producers
                assert topic in (status := await run("consumerStatus", "-g", GROUP))
                assert me in status
                one = json.loads(await run("consumerStatus", "-g", GROUP, "-i", me, "--json"))
                assert one["properties"]["PROP_CLIENT_VERSION"] == "V4_9_7"
                assert topic in one["statusTable"]
                by_id = ("queryMsgById", "-t", topic, "-i", sent.msg_id)
                assert re.search(rf"consumerGroup={GROUP}, trackType=CONSUMED\b", await run(*by_id))
                await run(*by_id, "-g", GROUP, "-d", me)
                await members.wait_for(2)

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        "version",
        [
            "4.9.7",
            pytest.param(
                "5.5.0", marks=long_form("members of 5.x hear of it when their pulls end, after 15 s")
            ),
        ],
    )
    def test_a_group_is_moved_while_it_runs_and_when_it_is_stopped(
        self, apache_clusters: Callable[[str], ApacheCluster], version: str
    ) -> None:
        cluster = apache_clusters(version)
        namesrv, addr = cluster.namesrv, cluster.broker_addr
        topic = "moved"
        our_mqadmin(namesrv, "updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "2", "-w", "2")
        our_mqadmin(namesrv, "updateSubGroup", "-c", "DefaultCluster", "-g", GROUP)
        for body in ("a", "b"):
            our_mqadmin(namesrv, "sendMessage", "-t", topic, "-p", body, "-b", cluster.broker.name, "-i", "0")

        async def scenario() -> None:
            members = Members(namesrv, topic)
            async with Admin(namesrv) as admin:
                async with members.consumer, members.producer:
                    await members.wait_for(2)
                    await members.consumer.persist_offsets()
                    connected = await admin.consumer_connection(GROUP, addr)
                    assert connected.connection_set[0].language == "PYTHON"
                    done = await admin.reset_offset(Reset(group=GROUP, topic=topic, at_ms=0))
                    assert {(each.way, each.problem) for each in done} == {(OffsetWay.MEMBERS, "")}
                    await members.wait_for(4)
                    alone = Reset(group=GROUP, topic=topic, broker_addr=addr, queue_id=0, offset=1)
                    if version == "4.9.7":
                        with pytest.raises(AllQueuesOnly):
                            await admin.plan_reset(alone)
                    else:
                        assert [each.rollback_offset for each in await admin.plan_reset(alone)] == [1]
                done = await admin.reset_offset(Reset(group=GROUP, topic=topic, at_ms=0))
                assert {(each.way, each.problem) for each in done} == {(OffsetWay.STORED, "")}
                assert [each.seen for each in done] == [0, 0]
                done = await admin.reset_offset(Reset(group=GROUP, topic=topic))
                assert [each.seen for each in done] == [2, 0]

        asyncio.run(scenario())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with local_broker(tmp_path_factory.mktemp("comet")) as broker:
        prepare(broker.namesrv, broker.broker_name)
        yield broker


@pytest.fixture(scope="module")
def members(broker: LocalBroker) -> Iterator[None]:
    """Run a member of the group and a producer in a separate process."""
    code = (
        "import asyncio, sys\n"
        "from tests.interop.test_mqadmin_commands import Members, TOPIC\n"
        "from cometmq.message import Message\n"
        "async def main():\n"
        "    members = Members(sys.argv[1])\n"
        "    async with members.consumer, members.producer:\n"
        "        await members.wait_for(3)\n"
        "        await members.consumer.persist_offsets()\n"
        "        await members.producer.send(Message(TOPIC + '-other', b'x'))\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, broker.namesrv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    process.communicate("", timeout=30)


def steady(text: str) -> list[str]:
    """Return the lines without blanks and times, sorted, since tables of Java have no order.

    Producers that Java's clients create internally are left out.
    """
    masked = re.sub(r"\d{4}-\d\d-\d\d[ #]\d\d:\d\d:\d\d(,\d+)?", "TIME", text)
    masked = masked.replace("  (no effect here)", "")
    masked = re.sub(
        r"(lastUpdateTimestamp=|systemTimeMillis *: |Mills *: |rt=)\d+|(runtime *: ).*", r"\1\2N", masked
    )
    masked = re.sub(r"\d+\.\d+|(?<=sgId=)[0-9A-F]{32}|(?<=queueOffset=)\d+", "N", masked)
    lines = [" ".join(line.split()) for line in masked.splitlines()]
    return sorted(line for line in lines if line and "CLIENT_INNER_PRODUCER" not in line)


@pytest.fixture(params=SERVER_VERSIONS)
def apaches(
    request: pytest.FixtureRequest, admin_shells: Callable[[str], AdminShell], broker: LocalBroker
) -> AdminShell:
    shell = admin_shells(request.param)
    shell.run("topicList", "-n", broker.namesrv)
    return shell


# {addr} and {name} are the broker's; {path} is a directory.
ALIKE = [
    "consumerConnection -g told -b {addr}",
    "producerConnection -g told-producers -t telling-other",
    "getConsumerConfig -g told",
    "brokerConsumeStats -b {addr}",
    "wipeWritePerm -b {name}",
    "addWritePerm -b {name}",
    "getBrokerConfig -b {addr}",
    "updateBrokerConfig -b {addr} -k slaveReadEnable -v false",
    "statsAll -t telling",
    "queryCq -t telling -q 0 -i 1 -c 2",
    "printMsgByQueue -t telling -a {name} -i 0 -f true",
    "consumerConnection -g told",
    "producer -b {addr}",
    "topicClusterList -t telling",
    "allocateMQ -t telling -i a,b",
    "updateKvConfig -s N -k k -v v",
    "deleteKvConfig -s N -k k",
    "updateOrderConf -t telling -m put -v {name}:2",
    "updateOrderConf -t telling -m get",
    "updateOrderConf -t telling -m delete",
    "getNamesrvConfig",
    "updateNamesrvConfig -k orderMessageEnable -v false",
    "getBrokerConfig -c DefaultCluster",
    "updateBrokerConfig -c DefaultCluster -k slaveReadEnable -v false",
    "updateSubGroup -b {addr} -g other -r 3",
    "deleteSubGroup -b {addr} -g other",
    "cleanExpiredCQ -b {addr}",
    "cleanUnusedTopic -c DefaultCluster",
    "deleteExpiredCommitLog",
    "cloneGroupOffset -s told -d copy -t telling",
    "exportConfigs -c DefaultCluster -f {path}",
    "exportMetadata -c DefaultCluster -f {path}",
    "exportMetadata -b {addr} -t -f {path}",
    "exportMetrics -c DefaultCluster -f {path}",
    "topicList -c",
    "topicStatus -t telling",
    "topicRoute -t telling -l",
    "clusterList -m",
    "consumerProgress -g told",
    "consumerProgress -g told -s true",
    "statsAll",
    "statsAll -a",
    "sendMsgStatus -b {name} -c 2",
    "updateTopic -b {addr} -t other -r 2 -w 2",
]
# Additional or different lines of 5.5.0's tool, as patterns.
ONLY_5 = {
    "getConsumerConfig -g told": r"(attributes|consume(Mess|Time)\w+|group(Retry|Sys)\w+|subscription\w+) =",
    "consumerProgress -g told": r"#Topic|telling |Consume |Diff ",
    "consumerProgress -g told -s true": r"#Topic|telling |Consume |Diff ",
    "topicStatus -t telling": r"Topic Put TPS: N",
    "updateSubGroup -b {addr} -g other -r 3": r"SubscriptionGroupConfig",
    "updateTopic -b {addr} -t other -r 2 -w 2": r"TopicConfig ",
    "sendMsgStatus -b {name} -c 2": r"rt=N",
}


class TestApachesBesideOurs:
    @pytest.mark.usefixtures("members")
    @pytest.mark.parametrize("command", ALIKE)
    def test_a_command_prints_the_same(
        self,
        broker: LocalBroker,
        apaches: AdminShell,
        command: str,
        tmp_path: Path,
    ) -> None:
        words = command.format(addr=broker.broker_addr, name=broker.broker_name, path=tmp_path).split()

        theirs = apaches.run(*words, "-n", broker.namesrv)
        ours = our_mqadmin(broker.namesrv, *words)

        assert "Exception" not in theirs
        told = [steady(ours), steady(theirs)]
        if apaches.version == "5.5.0" and command in ONLY_5:
            told = [[line for line in lines if not re.match(ONLY_5[command], line)] for lines in told]
        if command.startswith("statsAll"):
            # Where nothing was counted, our rate is a dash. Apache's tool prints 0.00.
            told[0] = [line.replace(" - ", " N ") for line in told[0]]
        assert told[0] == told[1]

    @pytest.mark.usefixtures("members")
    def test_columns_of_our_own_stand_behind_apaches(
        self, broker: LocalBroker, admin_shells: Callable[[str], AdminShell]
    ) -> None:
        shell = admin_shells("4.9.7")
        for words, more in (("clusterList", 2), ("consumerStatus -g told", 0)):
            theirs = [line.split() for line in shell.run(*words.split(), "-n", broker.namesrv).splitlines()]
            ours = [line.split() for line in our_mqadmin(broker.namesrv, *words.split()).splitlines()]
            theirs, ours = (
                [line for line in lines if line[:1] and line[0][:3] in ("#Cl", "Def", "#In", "1")]
                for lines in (theirs, ours)
            )
            assert len(ours) == len(theirs) > 0
            for one, other in zip(ours, theirs, strict=True):
                assert one[:3] == other[:3]
                assert len(one) >= len(other) if not more else len(one) == len(other) + more

    def test_the_keys_of_a_brokers_status_are_the_same(
        self, broker: LocalBroker, apaches: AdminShell
    ) -> None:
        words = ("brokerStatus", "-c", "DefaultCluster")
        theirs = steady(apaches.run(*words, "-n", broker.namesrv))
        ours = steady(our_mqadmin(broker.namesrv, *words))
        assert [line.split()[:2] for line in ours] == [line.split()[:2] for line in theirs]

    @pytest.mark.usefixtures("members")
    def test_5x_sees_nothing_under_way_that_is_not(
        self, broker: LocalBroker, admin_shells: Callable[[str], AdminShell]
    ) -> None:
        shell = admin_shells("5.5.0")
        shown = shell.run("consumerProgress", "-g", GROUP, "-n", broker.namesrv)
        assert re.search(r"Consume Inflight Total: 0\b", shown), shown

    @pytest.mark.usefixtures("members")
    def test_now_is_the_end_of_the_queues_for_5x(
        self, broker: LocalBroker, admin_shells: Callable[[str], AdminShell]
    ) -> None:
        shell = admin_shells("5.5.0")
        words = ("resetOffsetByTime", "-g", GROUP, "-t", TOPIC, "-s", "now", "-n", broker.namesrv)
        our_mqadmin(broker.namesrv, *words[:-2])  # commits an offset of every queue for the group
        ends = json.loads(our_mqadmin(broker.namesrv, "topicStatus", "-t", TOPIC, "--json"))
        shown = [line.split() for line in shell.run(*words).splitlines()]
        for queue in ends:
            place = [broker.broker_name, str(queue["queueId"]), str(queue["maxOffset"])]
            assert place in [line[:3] for line in shown], shown

    @pytest.mark.parametrize(
        "words",
        [
            ("printMsg",),
            ("printMsgByQueue", "-a", "{name}", "-i", "0", "-p", "true", "-d", "true"),
            ("consumeMessage", "-b", "{name}", "-i", "0"),
        ],
    )
    def test_messages_are_printed_alike(
        self, broker: LocalBroker, apaches: AdminShell, words: tuple[str, ...]
    ) -> None:
        command = [word.format(name=broker.broker_name) for word in (*words, "-t", TOPIC)]

        def facts(text: str) -> list[list[str]]:
            """Return the words of each line, sorted, since Java's properties have no order.

            MIN_OFFSET and MAX_OFFSET are left out: Java's client adds them to pulled messages.
            """
            messages = [line for line in text.splitlines() if "=" in line and "msg finished" not in line]
            lines = [re.split(r"[ ,{}]+", line) for line in messages]
            return sorted(
                sorted(word for word in line if "N_OFFSET" not in word and "X_OFFSET" not in word)
                for line in lines
            )

        ours = facts(our_mqadmin(broker.namesrv, *command))

        assert len(ours) >= 3
        assert ours == facts(apaches.run(*command, "-n", broker.namesrv))

    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_apaches_commands_move_a_group_that_is_stopped(
        self, broker: LocalBroker, admin_shells: Callable[[str], AdminShell], version: str
    ) -> None:
        topic, group = f"stopped-{version.replace('.', '_')}", "stopped"
        our_mqadmin(broker.namesrv, "updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "1", "-w", "1")
        our_mqadmin(broker.namesrv, "updateSubGroup", "-c", "DefaultCluster", "-g", group)
        our_mqadmin(broker.namesrv, "sendMessage", "-t", topic, "-p", "x")

        our_mqadmin(broker.namesrv, "resetOffsetByTime", "-g", group, "-t", topic, "-s", "now")

        words = ("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0", "-n", broker.namesrv)
        shown = [line.split() for line in admin_shells(version).run(*words).splitlines()]

        assert [broker.broker_name, "0", "1", "1", "0", "0"] in shown

    @pytest.mark.usefixtures("members")
    def test_a_group_that_runs_is_moved_alike(self, broker: LocalBroker, apaches: AdminShell) -> None:
        words = ("resetOffsetByTime", "-g", GROUP, "-t", TOPIC)
        our_mqadmin(broker.namesrv, *words, "-s", "now")  # commits an offset of every queue for the group
        for when in ("0", "now"):
            ours = our_mqadmin(broker.namesrv, *words, "-s", when)
            theirs = apaches.run(*words, "-s", when, "-n", broker.namesrv)
            told = [steady(text) for text in (ours, theirs)]
            if apaches.version == "5.5.0":  # its first line differs, and it does not accept -1 as "now"
                told = [[line for line in lines if "timestamp(string)" not in line] for lines in told]
            assert told[0] == told[1]

    def test_messages_are_sent_and_measured_alike(self, broker: LocalBroker, apaches: AdminShell) -> None:
        topic = f"sent-{apaches.version.replace('.', '_')}"
        for words in (
            ("sendMessage", "-p", "x", "-c", "A", "-k", "K", "-b", broker.broker_name, "-i", "1"),
            ("checkMsgSendRT", "-a", "3", "-s", "10"),
        ):
            our_mqadmin(broker.namesrv, "updateTopic", "-c", "DefaultCluster", "-t", topic)
            ours = our_mqadmin(broker.namesrv, *words, "-t", topic)
            theirs = apaches.run(*words, "-t", topic, "-n", broker.namesrv)
            told = [
                [re.sub(r"[0-9A-F]{32}$|(?<=true )\d+$", "N", line) for line in steady(text)]
                for text in (ours, theirs)
            ]
            assert told[0] == told[1]

    def test_the_trace_of_a_message_is_shown_alike(self, broker: LocalBroker, apaches: AdminShell) -> None:
        words = ("-t", "traced", "-p", "x", "-m", "true", "--json")
        msg_id = json.loads(our_mqadmin(broker.namesrv, "sendMessage", *words))["msgId"]
        words = ("queryMsgTraceById", "-i", msg_id)

        def traced() -> str:
            return CliRunner().invoke(mqadmin, [words[0], "-n", broker.namesrv, *words[1:]]).stdout

        wait_until("the trace", lambda: "Pub" in traced())
        assert steady(traced()) == steady(apaches.run(*words, "-n", broker.namesrv))

    def test_a_topic_is_deleted_alike(self, broker: LocalBroker, apaches: AdminShell) -> None:
        words, told = ("-c", "DefaultCluster", "-t", "gone"), []
        for delete in (our_mqadmin, lambda namesrv, *rest: apaches.run(*rest, "-n", namesrv)):
            our_mqadmin(broker.namesrv, "updateTopic", *words)
            told.append(steady(delete(broker.namesrv, "deleteTopic", *words)))
            assert "gone" not in our_mqadmin(broker.namesrv, "topicList").split()
        assert told[0] == told[1]

    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_a_round_of_sends_to_each_cluster_is_measured_alike(
        self, broker: LocalBroker, tmp_path: Path, version: str
    ) -> None:
        """Apache's command never ends, so it is stopped after its first round."""
        words = ("clusterRT", "-a", "2", "-s", "10", "-c", "DefaultCluster")
        ours = steady(our_mqadmin(broker.namesrv, *words, "--rounds", "1"))
        theirs = apache.mqadmin_until(version, tmp_path, "DefaultCluster", *words, "-n", broker.namesrv)
        assert ours == steady(theirs)


ACCOUNTS = """
globalWhiteRemoteAddresses: [127.0.0.1]
accounts:
- {accessKey: adminer, secretKey: secret-of-adminer, admin: true}
"""
ACL_ALIKE = [
    "updateAclConfig -b {addr} -a somebody -s a-good-secret -i DENY -u SUB -t T=PUB,U=SUB -g g=SUB -m false",
    "updateAclConfig -c DefaultCluster -a somebody -s a-good-secret",
    "updateGlobalWhiteAddr -b {addr} -g 127.0.0.1,10.9.9.9",
    "updateGlobalWhiteAddr -c DefaultCluster -g 127.0.0.1",
    "clusterAclConfigVersion -c DefaultCluster",
    "clusterAclConfigVersion -b {addr}",
    "deleteAclConfig -b {addr} -a somebody",
    "deleteAclConfig -c DefaultCluster -a somebody",
]


def test_the_commands_about_accounts_print_the_same(
    admin_shells: Callable[[str], AdminShell], tmp_path: Path
) -> None:
    """4.9.7 has these commands, and 5.5.0 does not.

    Apache's tool prints an account as a Java object's address.
    """
    write(tmp_path / "conf" / "plain_acl.yml", ACCOUNTS)
    shell = admin_shells("4.9.7")
    with local_broker(tmp_path / "data", {"aclEnable": "true", "rocketmqHome": str(tmp_path)}) as broker:
        for command in ACL_ALIKE:
            words = command.format(addr=broker.broker_addr).split()
            account = ("updateAclConfig", "-b", broker.broker_addr, "-a", "somebody", "-s", "a-good-secret")
            told = []
            for run in (our_mqadmin, lambda namesrv, *rest: shell.run(*rest, "-n", namesrv)):
                if words[0] == "deleteAclConfig":
                    our_mqadmin(broker.namesrv, *account)
                lines = steady(run(broker.namesrv, *words))
                told.append([line for line in lines if "PlainAccessConfig" not in line])
            assert told[0] == told[1] != [], command
