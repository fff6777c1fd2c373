"""checkMsgSendRT, sendMsgStatus, clusterRT."""

from __future__ import annotations

import re

from tests.admin.conftest import Shell

from cometmq.admin.commands.measuring import mean_without_first
from cometmq.admin.values import SendTime


def test_sends_to_a_topic_are_measured_queue_by_queue(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "measured", "-r", "2", "-w", "2")

    lines = mq.ok("checkMsgSendRT", "-t", "measured", "-a", "4", "-s", "10").lines
    found = mq.ok("checkMsgSendRT", "-t", "measured", "-a", "2", "--json").json

    assert lines[0].split() == ["#Broker", "Name", "#QID", "#Send", "Result", "#RT"]
    assert [line.split()[:3] for line in lines[1:5]] == [
        [mq.broker.broker_name, str(number % 2), "true"] for number in range(4)
    ]
    assert lines[5].startswith("Avg RT: ")
    assert [each["result"] for each in found["sends"]] == ["SEND_OK"] * 2


def test_the_average_of_nothing_is_no_number(mq: Shell) -> None:
    alone = ("-a", "1")
    words = ("--rounds", "1", "-i", "0.1")

    assert mq.ok("checkMsgSendRT", "-t", "measured", *alone).lines[-1] == "Avg RT: -"
    assert mq.ok("checkMsgSendRT", "-t", "measured", *alone, "--json").json["averageMillis"] is None
    assert mq.ok("clusterRT", *alone, *words).lines[1].split()[2] == "-"
    assert mq.ok("clusterRT", *alone, *words, "-p", "true").lines[0].endswith("|-")


def test_sends_to_a_broker_are_measured(mq: Shell) -> None:
    lines = mq.ok("sendMsgStatus", "-b", mq.broker.broker_name, "-c", "3").lines

    assert len(lines) == 3
    form = (
        r"rt=\d+ms, SendResult=SendResult \[sendStatus=SEND_OK, msgId=[0-9A-F]{32}, "
        r"offsetMsgId=[0-9A-F]{32}, "
        r"messageQueue=MessageQueue \[topic=(\S+), brokerName=\1, queueId=\d+\], queueOffset=\d+\]"
    )
    assert all(re.fullmatch(form, line) for line in lines)


def test_sends_to_all_brokers_are_measured(mq: Shell) -> None:
    lines = mq.ok("clusterRT", "-a", "3", "--rounds", "2", "-i", "0.1").lines
    log = mq.ok("clusterRT", "-a", "2", "--rounds", "1", "-p", "true", "-m", "attic").lines

    assert lines[0].split() == ["#Cluster", "Name", "#Broker", "Name", "#RT", "#successCount", "#failCount"]
    assert [line.split()[:2] + line.split()[3:] for line in lines[1:]] == [
        ["DefaultCluster", mq.broker.broker_name, "3", "0"]
    ] * 2
    assert log[0].split("|")[1:4] == ["attic", "DefaultCluster", mq.broker.broker_name]


def test_a_topic_that_may_not_be_written_is_a_failure(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "read-only", "-p", "4")

    failed = mq.run("checkMsgSendRT", "-t", "read-only", "-a", "1")

    assert (failed.code, "no message was sent" in failed.err) == (1, True)


def test_the_average_counts_no_failed_send(mq: Shell) -> None:
    failed = mq.run("checkMsgSendRT", "-t", "bad topic!", "-a", "3")
    as_json = mq.run("checkMsgSendRT", "-t", "bad topic!", "-a", "3", "--json")

    assert [line.split()[-2] for line in failed.lines[1:4]] == ["false"] * 3
    assert failed.lines[-1] == "Avg RT: -"
    assert as_json.json["averageMillis"] is None


def test_the_average_is_that_of_the_successful_sends() -> None:
    times = [(True, 500.0), (True, 4.0), (False, 0.01), (True, 6.0)]
    rows = [SendTime(broker_name="b", queue_id=0, sent=sent, result="", millis=ms) for sent, ms in times]
    assert mean_without_first(rows) == 5.0


def test_a_topic_that_is_not_there_yet_is_made(mq: Shell) -> None:
    lines = mq.ok("checkMsgSendRT", "-t", "measured-first", "-a", "2").lines

    assert [line.split()[2] for line in lines[1:3]] == ["true", "true"]
