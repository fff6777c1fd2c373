"""updateTopic, deleteTopic, topicList, topicRoute, topicStatus on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.admin.conftest import Shell

from cometmq import Message, NoRouteError, Producer
from cometmq.admin import Admin


def test_a_topic_is_made_at_one_broker_and_listed(mq: Shell) -> None:
    made = mq.ok("updateTopic", "-b", mq.broker.broker_addr, "-t", "made-b", "-r", "3", "-w", "2")

    assert made.lines == [
        f"create topic to {mq.broker.broker_addr} success.",
        "TopicConfig [topicName=made-b, readQueueNums=3, writeQueueNums=2, perm=RW-, "
        "topicFilterType=SINGLE_TAG, topicSysFlag=0, order=false]",
    ]
    assert "made-b" in mq.ok("topicList").lines
    assert "made-b" in mq.ok("topicList", "--json").json


def test_a_topic_is_made_at_all_masters_of_a_cluster(mq: Shell) -> None:
    made = mq.ok("updateTopic", "--clusterName", "DefaultCluster", "--topic", "made-c", "--perm", "4")

    assert made.lines[0] == f"create topic to {mq.broker.broker_addr} success."
    route = mq.ok("topicRoute", "-t", "made-c").json
    assert route["queueDatas"][0]["readQueueNums"] == 8
    assert route["queueDatas"][0]["perm"] == 4


def test_an_ordered_topic_notes_its_queues_with_the_name_server(mq: Shell) -> None:
    made = mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "ordered", "-w", "5", "-r", "5", "-o", "true")

    assert f"set cluster orderConf. isOrder=true, orderConf=[{mq.broker.broker_name}:5]" in made.lines
    # The entry of one broker is merged into the value and does not replace it.
    merged = mq.ok("updateTopic", "-b", mq.broker.broker_addr, "-t", "ordered", "-w", "6", "-o", "true")
    assert f"set broker orderConf. isOrder=true, orderConf=[{mq.broker.broker_name}:6]" in merged.lines


async def test_an_ordered_topic_whose_brokers_are_away_is_not_made_at_others(mq: Shell) -> None:
    namesrv = mq.broker.namesrv
    async with Admin(namesrv) as admin, Producer("p", namesrv=namesrv) as producer:
        await admin.client.namesrv.put_kv_config(namesrv, "ORDER_TOPIC_CONFIG", "away", "broker-z:2")
        with pytest.raises(NoRouteError, match=r"broker-z:2\) are missing"):
            await producer.send(Message("away", b"x"))
        assert "away" not in await admin.topics()
        await admin.delete_topic_in_name_servers("away")
        await producer.send(Message("away", b"x"))


def test_the_route_is_json_or_a_table_with_a_total(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "routed", "-r", "4", "-w", "2")

    route = mq.ok("topicRoute", "-t", "routed").json
    table = mq.ok("topicRoute", "-t", "routed", "-l").lines

    assert route["brokerDatas"][0]["brokerAddrs"] == {"0": mq.broker.broker_addr}
    head = ["#ClusterName", "#BrokerName", "#BrokerAddrs", "#ReadQueue", "#WriteQueue", "#Perm"]
    row = ["DefaultCluster", mq.broker.broker_name, f"{{0={mq.broker.broker_addr}}}", "4", "2", "6"]
    assert [line.split() for line in table[:2]] == [head, row]
    assert table[2] == "-" * 158
    assert table[3].split() == ["Total:", "1", "4", "2"]


def test_the_status_shows_each_queue_with_its_offsets(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "counted", "-r", "2", "-w", "2")
    for body in ("a", "b", "c"):
        mq.ok("sendMessage", "-t", "counted", "-p", body, "-b", mq.broker.broker_name, "-i", "1")

    lines = mq.ok("topicStatus", "-t", "counted").lines
    queues = mq.ok("topicStatus", "-t", "counted", "--json").json

    assert lines[0].split("  ")[0] == "#Broker Name"
    assert [line.split()[:4] for line in lines[1:]] == [
        [mq.broker.broker_name, "0", "0", "0"],
        [mq.broker.broker_name, "1", "0", "3"],
    ]
    assert [(queue["queueId"], queue["maxOffset"]) for queue in queues] == [(0, 0), (1, 3)]
    assert queues[1]["lastUpdateTimestamp"] > 0


def test_a_deleted_topic_is_gone_from_broker_and_name_server(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "doomed")

    gone = mq.ok("deleteTopic", "-t", "doomed", "-c", "DefaultCluster")

    assert gone.lines == [
        "delete topic [doomed] from cluster [DefaultCluster] success.",
        "delete topic [doomed] from NameServer success.",
    ]
    assert "doomed" not in mq.ok("topicList").lines
    assert mq.run("topicRoute", "-t", "doomed").code == 1


def test_a_topic_that_is_not_there_is_not_said_to_be_deleted(mq: Shell) -> None:
    failed = mq.run("deleteTopic", "-t", "never-was", "-c", "DefaultCluster")

    assert (failed.code, failed.out) == (1, "")
    assert failed.err == "mqadmin: topic never-was does not exist in cluster DefaultCluster\n"


def test_a_purge_of_one_message_says_so(mq: Shell) -> None:
    mq.ok("sendMessage", "-t", "purged-once", "-p", "x")

    assert mq.ok("purgeTopic", "-t", "purged-once", "--yes").lines[-1] == "1 message purged."


def test_a_route_nobody_has_names_who_was_asked_and_what_helps(mq: Shell) -> None:
    failed = mq.run("topicRoute", "-t", "nowhere")

    assert failed.code == 1
    assert failed.out == ""
    assert failed.err.count("\n") == 1
    for word in ("nowhere", mq.broker.namesrv, "updateTopic"):
        assert word in failed.err


def test_an_unknown_cluster_is_named_with_those_there_are(mq: Shell) -> None:
    failed = mq.run("updateTopic", "-c", "DefaultClustr", "-t", "x")

    assert failed.code == 1
    assert failed.err == "mqadmin: no cluster named DefaultClustr; did you mean DefaultCluster?\n"


def test_a_bad_topic_name_is_refused_with_the_brokers_words(mq: Shell) -> None:
    failed = mq.run("updateTopic", "-c", "DefaultCluster", "-t", "not allowed!")

    assert failed.code == 1
    assert "not allowed!" in failed.err
    assert failed.err.count("\n") == 1


def test_the_cluster_listing_shows_groups_and_hides_retry_topics(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "plain")

    lines = mq.ok("topicList", "-c").lines
    uses = mq.ok("topicList", "-c", "--json").json

    assert lines[0].split("  ")[0] == "#Cluster Name"
    assert ["DefaultCluster", "plain"] in [line.split() for line in lines]
    assert {"clusterName": "DefaultCluster", "topic": "plain", "consumerGroups": []} in uses
    assert not [use for use in uses if use["topic"].startswith("%")]


def test_the_permission_of_a_topic_is_changed_and_nothing_else(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "permitted", "-r", "3", "-w", "2", "-u", "true")
    at = ("-b", mq.broker.broker_addr, "-t", "permitted", "-p")

    changed = mq.ok("updateTopicPerm", *at, "4")

    assert changed.lines == [
        f"update topic perm from 6 to 4 in {mq.broker.broker_addr} success.",
        "TopicConfig [topicName=permitted, readQueueNums=3, writeQueueNums=2, perm=R--, "
        "topicFilterType=SINGLE_TAG, topicSysFlag=1, order=false].",
    ]
    queues = mq.ok("topicRoute", "-t", "permitted").json["queueDatas"][0]
    assert [queues[key] for key in ("perm", "readQueueNums", "writeQueueNums", "topicSysFlag")] == [
        4,
        3,
        2,
        1,
    ]
    again = mq.run("updateTopicPerm", *at, "4")
    assert (again.code, "new perm equals to the old one!" in again.err) == (1, True)
    stranger = mq.run("updateTopicPerm", "-b", "127.0.0.1:1", "-t", "permitted", "-p", "6")
    assert (stranger.code, "no master of the topic named 127.0.0.1:1" in stranger.err) == (1, True)
    by_cluster = mq.ok("updateTopicPerm", "-c", "DefaultCluster", "-t", "permitted", "-p", "6", "--json")
    assert by_cluster.json == [{"brokerAddr": mq.broker.broker_addr, "from": 4, "to": 6}]


def test_the_clusters_of_a_topic(mq: Shell) -> None:
    assert mq.ok("topicClusterList", "-t", "TBW102").lines == ["DefaultCluster"]
    assert mq.run("topicClusterList", "-t", "nowhere").code == 1


def test_an_order_configuration_is_put_got_and_deleted(mq: Shell) -> None:
    words = ("updateOrderConf", "-t", "in-order", "-m")

    failed = mq.run(*words, "put", "-v", "broker-a:2")
    assert (failed.code, "no topic named in-order" in failed.err) == (1, True)
    mq.ok(*words, "put", "-v", "broker-a:2", "--force")
    mq.ok(*words, "delete")
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "in-order")
    told = mq.ok(*words, "put", "-v", "broker-a:2", "--dry-run").lines
    assert told[0] == "would set the order configuration of in-order to broker-a:2"
    assert mq.run(*words, "get").code == 1
    assert mq.ok(*words, "put", "-v", "broker-a:2").lines == [
        "update orderConf success. topic=[in-order], orderConf=[broker-a:2]"
    ]
    assert mq.ok(*words, "get", "--json").json == {"topic": "in-order", "orderConf": "broker-a:2"}
    assert mq.ok(*words, "delete", "--dry-run").lines[0] == (
        "would delete the order configuration of in-order, which is broker-a:2"
    )
    assert mq.ok(*words, "delete").lines == ["delete orderConf success. topic=[in-order]"]
    gone = mq.run(*words, "get")
    assert (gone.code, "topic in-order has no order configuration" in gone.err) == (1, True)


def test_how_queues_would_be_shared(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "shared", "-r", "3", "-w", "3")

    found = mq.ok("allocateMQ", "-t", "shared", "-i", "b, a").json["result"]

    assert {name: [queue["queueId"] for queue in queues] for name, queues in found.items()} == {
        "a": [0, 1],
        "b": [2],
    }


def test_a_deletion_is_only_told_in_a_dry_run(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "spared")
    words = ("deleteTopic", "-c", "DefaultCluster", "-t", "spared")

    would = mq.ok(*words, "--dry-run", "--json").json

    assert would == {
        "dryRun": True,
        "would": [
            f"delete topic spared with its messages at {mq.broker.broker_addr}",
            f"delete the route of topic spared at {mq.broker.namesrv}",
        ],
    }
    assert "spared" in mq.ok("topicList").lines
    assert mq.ok(*words, "--json").json["brokerAddrs"] == [mq.broker.broker_addr]
    assert "spared" not in mq.ok("topicList").lines


def test_topics_and_groups_of_a_file_are_made_together(mq: Shell, tmp_path: Path) -> None:
    topics, groups = tmp_path / "topics.json", tmp_path / "groups.json"
    topics.write_text('[{"topicName":"listed-1","writeQueueNums":3},{"topicName":"listed-2"}]')
    groups.write_text('[{"groupName":"listed-group","retryMaxTimes":2}]')

    made = mq.ok("updateTopicList", "-c", "DefaultCluster", "-f", str(topics))

    addr = mq.broker.broker_addr
    assert made.lines == [f"submit batch of topic config to {addr} success, please check the result later."]
    assert {"listed-1", "listed-2"} <= set(mq.ok("topicList").lines)
    assert len(mq.ok("topicStatus", "-t", "listed-1", "-c", "DefaultCluster", "--json").json) == 3
    made = mq.ok("updateSubGroupList", "-b", addr, "-f", str(groups), "--json")
    assert made.json == {"groups": ["listed-group"], "brokerAddrs": [addr]}
    (found,) = mq.ok("getConsumerConfig", "-g", "listed-group", "--json").json
    assert found["config"]["retryMaxTimes"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "a non-empty JSON list"), ("[]", "non-empty"), ("[{]", "JSON"), ("[7]", "not an object")],
)
def test_a_file_without_a_list_is_an_error(mq: Shell, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "topics.json"
    path.write_text(text)

    failed = mq.run("updateTopicList", "-c", "DefaultCluster", "-f", str(path))

    assert failed.code == 1
    assert str(path) in failed.err
    assert words in failed.err


def test_a_cluster_that_nobody_knows_is_an_error(mq: Shell) -> None:
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "somewhere")

    failed = mq.run("topicStatus", "-t", "somewhere", "-c", "nowhere")

    assert (failed.code, "nowhere" in failed.err) == (1, True)


# -- updateTopic -a and purgeTopic on a real cluster


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
