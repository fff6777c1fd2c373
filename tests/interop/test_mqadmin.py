"""Our mqadmin on Apache's servers, and Apache's beside ours on our servers, with equal output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.interop.apache import ApacheCluster
from tests.interop.jars import SERVER_VERSIONS
from tests.interop.mqadmin import AdminShell

from cometmq.testing import LocalBroker, local_broker

OURS = Path(sys.executable).parent / "mqadmin"
APACHES_VERSION = "4.9.7"


def our_mqadmin(namesrv: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(OURS), arguments[0], "-n", namesrv, *arguments[1:]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_columns(text: str) -> list[list[str]]:
    """Return the words of each line without blank lines, as a script parses them."""
    return [line.split() for line in text.splitlines() if line.strip()]


class TestOursOnApachesServers:
    """A new user's first operations, in their usual order."""

    @pytest.mark.slow("Apache's servers start")
    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_the_life_of_a_topic(self, apache_clusters: Callable[[str], ApacheCluster], version: str) -> None:
        cluster = apache_clusters(version)
        topic = "mqadmin-on-apache"

        def run(*arguments: str) -> str:
            return our_mqadmin(cluster.namesrv, *arguments)

        made = run("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "2", "-w", "2")
        assert made.startswith(f"create topic to {cluster.broker_addr} success.\n")
        assert topic in run("topicList").splitlines()
        route = json.loads(run("topicRoute", "-t", topic))
        assert route["queueDatas"][0]["writeQueueNums"] == 2

        place = ("-b", cluster.broker.name, "-i", "1")
        sent = json.loads(
            run("sendMessage", "-t", topic, "-p", "bödy", "-k", "k1", "-c", "T", *place, "--json")
        )
        assert (sent["sendStatus"], sent["queueOffset"]) == ("SEND_OK", 0)
        status = json.loads(run("topicStatus", "-t", topic, "--json"))
        assert [(row["queueId"], row["maxOffset"]) for row in status] == [(0, 0), (1, 1)]

        for found in (
            run("queryMsgById", "-i", sent["offsetMsgId"], "--json"),
            run("queryMsgById", "-i", sent["msgId"], "--json"),
            run("queryMsgByUniqueKey", "-t", topic, "-i", sent["msgId"], "--json"),
            run("queryMsgByKey", "-t", topic, "-k", "k1", "--json"),
        ):
            (message,) = json.loads(found)
            assert (message["body"], message["tags"], message["keys"]) == ("bödy", "T", ["k1"])
        assert json.loads(run("consumeMessage", "-t", topic, "--json"))["msgId"] == sent["msgId"]

        brokers = json.loads(run("clusterList", "--json"))
        assert brokers[0]["brokerName"] == cluster.broker.name
        assert brokers[0]["problem"] == ""
        assert "bootTimestamp" in run("brokerStatus", "-b", cluster.broker_addr)

        run("deleteTopic", "-t", topic, "-c", "DefaultCluster")
        assert topic not in run("topicList").splitlines()

    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_the_progress_of_a_group(
        self, apache_clusters: Callable[[str], ApacheCluster], version: str
    ) -> None:
        cluster = apache_clusters(version)
        our_mqadmin(cluster.namesrv, "sendMessage", "-t", "mqadmin-progress", "-p", "x")
        consumed = subprocess.run(
            [str(OURS.with_name("cometmq")), "consume", "mqadmin-progress", "-n", cluster.namesrv,
             "-g", "mqadmin-group", "-c", "1", "--timeout", "30"],
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip
        assert consumed.returncode == 0, consumed.stderr

        progress = json.loads(
            our_mqadmin(cluster.namesrv, "consumerProgress", "-g", "mqadmin-group", "--json")
        )

        rows = [row for row in progress["queues"] if row["topic"] == "mqadmin-progress"]
        assert sum(row["consumerOffset"] for row in rows) == 1
        assert sum(row["brokerOffset"] for row in rows) == 1

    @pytest.mark.parametrize("version", SERVER_VERSIONS)
    def test_a_topic_is_watched_and_a_new_group_begins_at_its_end(
        self, apache_clusters: Callable[[str], ApacheCluster], version: str
    ) -> None:
        namesrv = apache_clusters(version).namesrv

        def comet(*arguments: str) -> list[str]:
            command = [str(OURS.with_name("cometmq")), *arguments, "-n", namesrv]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return [line.split()[-1] for line in done.stdout.splitlines()]

        comet("send", "young", "before")
        as_group = ("consume", "young", "-g", "lasts", "--from", "last")
        assert comet(*as_group, "--timeout", "3") == []
        comet("send", "young", "after")

        assert comet(*as_group, "-c", "1", "--timeout", "30") == ["after"]
        assert sorted(comet("tail", "young", "--from", "first", "-c", "2")) == ["after", "before"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """Run our servers, with a topic, messages and a group that has consumed some."""
    with local_broker(tmp_path_factory.mktemp("comet")) as broker:
        namesrv = broker.namesrv
        our_mqadmin(namesrv, "updateTopic", "-c", "DefaultCluster", "-t", "compared", "-r", "2", "-w", "2")
        place = ("-b", broker.broker_name, "-i", "0")
        for number in range(3):
            our_mqadmin(
                namesrv, "sendMessage", "-t", "compared", "-p", f"{number}", "-k", "k", "-c", "T", *place
            )
        comet = str(OURS.with_name("cometmq"))
        done = subprocess.run(
            [comet, "consume", "compared", "-n", namesrv, "-g", "comparers", "-c", "2", "--timeout", "30"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        yield broker


@pytest.fixture
def apaches(admin_shells: Callable[[str], AdminShell]) -> AdminShell:
    """Apache's mqadmin in one JVM."""
    return admin_shells(APACHES_VERSION)


Both = Callable[..., "tuple[list[list[str]], list[list[str]]]"]


@pytest.fixture
def both(broker: LocalBroker, apaches: AdminShell) -> Both:
    """Return a function that runs a command of Apache's tool and of ours and returns both outputs."""

    def run(*arguments: str) -> tuple[list[list[str]], list[list[str]]]:
        theirs = apaches.run(*arguments, "-n", broker.namesrv)
        return as_columns(theirs), as_columns(our_mqadmin(broker.namesrv, *arguments))

    return run


class TestApachesBesideOurs:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("topicRoute", "-t", "compared", "-l"),
            ("topicStatus", "-t", "compared"),
            ("queryMsgByKey", "-t", "compared", "-k", "k"),
            ("consumerProgress", "-g", "comparers"),
        ],
    )
    def test_the_listings_are_equal(self, both: Both, arguments: tuple[str, ...]) -> None:
        theirs, ours = both(*arguments)

        # The rate decreases between the two calls.
        steady = [[line for line in lines if "TPS:" not in line] for lines in (theirs, ours)]
        assert steady[0] == steady[1]
        assert len(ours) == len(theirs) > 1

    def test_the_topics_are_equal(self, both: Both) -> None:
        theirs, ours = both("topicList")

        assert sorted(ours) == sorted(theirs)

    def test_the_keys_of_a_brokers_status_are_equal(self, both: Both, broker: LocalBroker) -> None:
        theirs, ours = both("brokerStatus", "-b", broker.broker_addr)

        assert [line[0] for line in ours] == [line[0] for line in theirs]

    def test_the_cluster_has_the_same_columns(self, both: Both) -> None:
        theirs, ours = both("clusterList")

        assert ours[0] == [*theirs[0], "#Role", "#Behind"]
        assert ours[1][:5] == theirs[1][:5]
        assert ours[1][len(theirs[1]) :] == ["ASYNC_MASTER", "-"]

    def test_the_replication_of_a_master_is_shown_alike(
        self, broker: LocalBroker, admin_shells: Callable[[str], AdminShell]
    ) -> None:
        shell, arguments = admin_shells("5.5.0"), ("haStatus", "-b", broker.broker_addr)
        theirs = as_columns(shell.run(*arguments, "-n", broker.namesrv))

        # The first command also logs that there is no file of access keys.
        shown = [line for line in theirs if line[0].startswith("#")]
        assert len(shown) == 5
        assert as_columns(our_mqadmin(broker.namesrv, *arguments)) == shown
        assert "no broker container" in shell.run("addBroker", "-c", broker.broker_addr, "-b", "/x.conf")

    def test_the_details_of_a_message_are_equal(self, both: Both, broker: LocalBroker) -> None:
        hits = our_mqadmin(broker.namesrv, "queryMsgByKey", "-t", "compared", "-k", "k", "--json")
        message = json.loads(hits)[0]

        theirs, ours = both("queryMsgById", "-i", message["offsetMsgId"])

        def facts(lines: list[list[str]]) -> dict[str, list[str]]:
            """Return the words of each property by name, without the path of the body."""
            pairs = (" ".join(line).split(": ", 1) for line in lines if ": " in " ".join(line))
            found = {name: sorted(re.split(r", |[{}]", text)) for name, text in pairs}
            del found["Message Body Path"]
            return found

        assert facts(ours) == facts(theirs)
        tracks = [line for line in ours if line[0] == "MessageTrack"]
        assert tracks == [line for line in theirs if line[0] == "MessageTrack"]
        assert "trackType=NOT_ONLINE," in tracks[0]
