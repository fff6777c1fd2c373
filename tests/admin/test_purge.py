"""updateTopic -a and purgeTopic on a real cluster."""

from __future__ import annotations

from tests.admin.conftest import Shell


def filled(mq: Shell, topic: str) -> None:
    mq.ok("updateTopic", "-b", mq.broker.broker_addr, "-t", topic, "-r", "1", "-w", "1")
    for _ in range(3):
        mq.ok("sendMessage", "-t", topic, "-p", "hello")


def bounds(mq: Shell, topic: str) -> tuple[int, int]:
    queue = mq.ok("topicStatus", "-t", topic, "--json").json[0]
    return queue["minOffset"], queue["maxOffset"]


def test_a_purge_only_shows_until_it_is_told_yes(mq: Shell) -> None:
    filled(mq, "purged")

    shown = mq.ok("purgeTopic", "-t", "purged")
    assert shown.lines[1].split() == [mq.broker.broker_name, "0", "0", "3", "3", "3"]
    assert shown.lines[-1] == "3 messages would be deleted. Nothing was done; --yes deletes."
    assert bounds(mq, "purged") == (0, 3)

    assert mq.ok("purgetopic", "-t", "purged", "--yes").lines[-1] == "3 messages purged."
    assert bounds(mq, "purged") == (3, 3)


def test_a_purge_by_time_and_queue(mq: Shell) -> None:
    filled(mq, "timed")

    row = {"brokerName": mq.broker.broker_name, "queueId": 0, "minOffset": 0, "maxOffset": 3}
    before = ("purgeTopic", "-t", "timed", "--json", "--before")
    assert mq.ok(*before, "2020-01-01#00:00:00:000").json == [{**row, "purgedTo": 0}]
    assert mq.ok(*before, "4102444800000").json == [{**row, "purgedTo": 3}]
    assert mq.run(*before, "yesterday").code != 0
    assert mq.run("purgeTopic", "-t", "timed", "-q", "7", "--yes").code != 0
    assert mq.run("purgeTopic", "-t", "unknown-to-all", "--yes").code == 1
    assert bounds(mq, "timed") == (0, 3)


def test_attributes_are_set_and_bad_ones_refused_with_the_reason(mq: Shell) -> None:
    made = ("updateTopic", "-b", mq.broker.broker_addr, "-t", "kept", "-a")

    assert mq.ok(*made, "+retention.ms=3600000").code == 0
    refused = mq.run(*made, "+retention.ms=9999999999999")
    assert refused.code == 1
    assert "retention.ms" in refused.err
    assert "fileReservedTime" in refused.err
