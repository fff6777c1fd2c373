"""An invalid name in any ext field or body of a request has no effect."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.faults.good_requests import BROKER_REQUESTS
from tests.kit.brokers import records

from cometmq.broker.base.names import FIELDS, check_group, check_topic
from cometmq.errors import CommandError
from cometmq.protocol import headers
from cometmq.protocol.codes import RequestCode, is_legal_name
from cometmq.protocol.ext import Header, plan_of
from cometmq.protocol.headers import ConsumerSendMsgBackRequestHeader
from cometmq.protocol.ids import decode_offset_id

ILLEGAL = [
    "x/../Good",
    "x/../../../../evil",
    "x/../../config/topics.json",
    "n\0ul",
    "g\x02REAL_TOPIC\x01SCHEDULE_TOPIC_XXXX\x02REAL_QID\x010",
    "..",
    "a b",
    "t@g",
    "订单",
    "g" * 300,
]


# Names that the broker does not use: the group of a send, the original topic of a message sent back, and all
# names in request 46; also queues that are skipped when other queues are locked.
UNUSED = {(10, "PG"), (310, "PG"), (320, "PG"), (36, "TopicA"), (46, "TopicA"), (46, "CG"),
          (41, "TopicA"), (42, "TopicA")}  # fmt: skip


def with_name(code, what, name):
    """Return a valid request with another topic or group; None if the request has no such name."""
    ext, body, _ = BROKER_REQUESTS[code]
    changed = {key: name if value == what else value for key, value in ext.items()}
    text = body
    if body[:1] == b"{":
        text = json.dumps(_replaced(json.loads(body), what, name)).encode()
    return None if (changed, text) == (ext, body) else (changed, text)


def _replaced(value, what, name):
    if isinstance(value, dict):
        return {key: _replaced(item, what, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, what, name) for item in value]
    return name if value == what else value


def names_in(broker):
    """Return every name in the broker's tables and queues."""
    parts = broker.parts
    locked = {queue.topic for held in parts.locks.groups.values() for queue in held}
    offsets = [part for key in parts.tables.offsets.to_table()["offsetTable"] for part in key.split("@")]
    return {
        *parts.tables.topics.table, *parts.tables.groups.table, *offsets, *parts.consumers.groups,
        *parts.producers.groups, *parts.locks.groups, *locked, *parts.store.queues.topics(),
    }  # fmt: skip


@pytest.mark.parametrize("version", [407, 513])
async def test_no_request_leaves_a_trace_of_an_illegal_name(cluster, peer, tmp_path, version):
    await peer.send("TopicA")
    before = names_in(cluster.broker)
    asked = set()
    for code in BROKER_REQUESTS:
        for what in ("TopicA", "CG", "PG"):
            for name in ILLEGAL:
                request = with_name(code, what, name)
                if request is not None:
                    asked.add(code)
                    ext, body = request
                    answer = await peer.call(code, None, body, ext=ext, version=version)
                    assert answer.code != 0 or (code, what) in UNUSED, (code, what, name)
    assert {36, 34, 35, 38, 41, 42, 200, 202, 207, 208, 222, 14, 15, 17, 29, 30, 31, 32, 300, 321} <= asked
    made = names_in(cluster.broker) - before
    assert made <= {"CG", "PG", "TopicA", "%RETRY%CG"}
    queues = {path.name for path in tmp_path.rglob("consumequeue/*")}
    assert queues <= {"TopicA", "%RETRY%CG", "SCHEDULE_TOPIC_XXXX"}
    assert not [path for word in ("*evil*", "Good") for path in tmp_path.rglob(word)]
    await cluster.restart()
    assert len(records(await cluster.peer().pull("TopicA"))) >= 1


@pytest.mark.parametrize(("check", "longest"), [(check_topic, 127), (check_group, 255)])
def test_a_name_that_is_too_long_is_refused_with_its_length_and_the_limit(check, longest):
    assert check("x" * longest, 407) == "x" * longest
    with pytest.raises(CommandError, match=f"max length {longest}: it has {longest + 3} characters"):
        check("x" * (longest + 3), 407)


def test_every_name_of_a_header_is_known_as_one():
    """A header field whose name is that of a topic or group is checked, also in future requests."""
    lookups = {"defaultTopic", "originTopic", "topicList", "filterGroups", "topicFilterType", "topicSysFlag",
               "groupSysFlag", "groupSeq", "maxGroupNum", "defaultTopicQueueNums", "defaultTopicPerm",
               "defaultGroupPerm", "topicPerms", "groupPerms"}  # fmt: skip
    for module in (headers, headers.admin):
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Header) and "Request" in cls.__name__:
                for _, field, _, _ in plan_of(cls):
                    if "topic" in field.lower() or "group" in field.lower():
                        assert field in FIELDS or field in lookups, (cls, field)


class TestGroupsWithLongNames:
    """Apache's clients allow 255 characters. A retry topic has at most 127, 7 more than its group's name."""

    GROUP = "g" * 255

    async def test_they_consume_and_have_no_retry_topic(self, cluster, peer):
        sent = await peer.send()
        topics = {"Orders": "*", f"%RETRY%{self.GROUP}": "*"}
        assert (await peer.heartbeat(group=self.GROUP, topics=topics)).code == 0
        assert len(records(await peer.pull(group=self.GROUP))) == 1
        offset = decode_offset_id(sent.ext["msgId"]).physical_offset
        header = ConsumerSendMsgBackRequestHeader(offset=offset, group=self.GROUP, delay_level=0)
        answer = await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        assert (answer.code, "255 characters" in answer.remark, "too long" in answer.remark) == (
            1,
            True,
            True,
        )
        assert (await peer.send(f"%RETRY%{self.GROUP}")).code == 1
        assert all(is_legal_name(name, 127) for name in cluster.broker.parts.tables.topics.table)
        delayed = cluster.broker.parts.store.max_offset("SCHEDULE_TOPIC_XXXX", 2)
        assert delayed == 0

    async def test_the_longest_that_has_one(self, cluster, peer):
        sent = await peer.send()
        offset = decode_offset_id(sent.ext["msgId"]).physical_offset
        header = ConsumerSendMsgBackRequestHeader(offset=offset, group="g" * 120, delay_level=-1)
        assert (await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)).code == 0
        assert len(records(await peer.pull("%DLQ%" + "g" * 120))) == 1


async def test_a_heartbeat_with_one_illegal_name_counts_for_nothing(cluster, peer):
    for topics, group, producers in (
        ({"Orders": "*"}, "G", ("good", "b/d")),
        ({"Orders": "*", "a b": "*"}, "G", ("good",)),
        ({"Orders": "*"}, "b/d", ("good",)),
    ):
        assert (await peer.heartbeat(group=group, topics=topics, producers=producers)).code == 1
    parts = cluster.broker.parts
    assert not parts.consumers.groups
    assert not parts.producers.groups


async def test_tables_with_illegal_names_are_read_without_them(cluster, peer, tmp_path, caplog):
    await peer.send()
    await cluster.close_peers()
    await cluster.standalone.stop()
    (topics,) = tmp_path.rglob("config/topics.json")
    good = {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    for name, table, entry in (
        ("topics.json", "topicConfigTable", good),
        ("subscriptionGroup.json", "subscriptionGroupTable", {"consumeEnable": True}),
        ("consumerOffset.json", "offsetTable", {"0": 1}),
    ):
        path = topics.parent / name
        content = json.loads(path.read_text())
        for bad in ("../../evil", "a b"):
            key = f"Orders@{bad}" if table == "offsetTable" else bad
            content.setdefault(table, {})[key] = {**entry, "topicName": bad, "groupName": bad}
            if table == "offsetTable":
                content[table] |= {key: entry, f"{bad}@G": entry, "Orders@G": entry}
        await asyncio.to_thread(path.write_text, json.dumps(content))
    await cluster.standalone.start()
    assert {name for name in names_in(cluster.broker) if not is_legal_name(name, 255)} == set()
    assert cluster.broker.parts.tables.offsets.query("G", "Orders", 0) == 1
    for kind in ("topics with", "groups with", "offsets with"):
        assert sum(f"{kind} invalid names are ignored" in record.message for record in caplog.records) == 1
    assert len(records(await cluster.peer().pull())) == 1
