"""Differing subscriptions of a group's members are detected at their heartbeats and logged once."""

from __future__ import annotations

import tracemalloc

import pytest

from cometmq.broker.groups import client_requests, subscriptions
from cometmq.broker.groups.clients import ConsumerGroup, ConsumerTable
from cometmq.broker.groups.subscriptions import MAX_EXPRESSION_LENGTH, ExpressionError, tag_codes
from cometmq.logs import LogLimiter
from cometmq.protocol.bodies import ConsumerConnection, SubscriptionData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import ConsumerGroupRequestHeader
from cometmq.protocol.properties.values import java_hash

PULLS = "CONSUME_ACTIVELY"


@pytest.fixture
def said(caplog):
    """Return a function that returns the warnings logged so far."""
    return lambda: [line for line in caplog.messages if line.startswith("members of group G have different ")]


async def test_a_difference_is_said_once_with_who_says_what(cluster, said):
    first, second, third = cluster.peer(), cluster.peer(), cluster.peer()
    for _ in range(3):
        await first.heartbeat("c1", topics={"Orders": "a"})
        await second.heartbeat("c2", topics={"Orders": "a"})
    assert said() == []
    for version in range(3):
        await third.heartbeat("c3", topics={"Orders": "b"}, sub_version=version)
        await first.heartbeat("c1", topics={"Orders": "a"}, sub_version=version)
    assert said() == [
        "members of group G have different subscriptions of topic Orders, so messages can be missed: "
        "a (c1 and 1 more), b (c3)"
    ]
    await third.heartbeat("c3", topics={"Orders": "c"})
    await third.heartbeat("c3", topics={"Orders": "b"})
    assert [line.rpartition(", ")[2] for line in said()] == ["b (c3)", "c (c3)"]


async def test_a_topic_that_only_some_subscribe_is_a_difference(cluster, said):
    await cluster.peer().heartbeat("c1", topics={"Orders": "*"})
    await cluster.peer().heartbeat("c2", topics={"Orders": "*", "Bills": "*"})
    assert said() == [
        "members of group G have different subscriptions of topic Bills, so messages can be missed: "
        "* (c2), not subscribed (c1)"
    ]


async def test_members_that_consume_in_different_ways_differ(cluster, said):
    first, second, third = cluster.peer(), cluster.peer(), cluster.peer()
    for _ in range(2):
        await first.heartbeat("c1")
        await second.heartbeat("c2", message_model="BROADCASTING")
        await third.heartbeat("c3", consume_from_where="CONSUME_FROM_FIRST_OFFSET")
        await cluster.peer().heartbeat("c4", consume_type=PULLS, message_model="BROADCASTING")
    assert said() == [
        "members of group G have different values of messageModel: CLUSTERING (c1), BROADCASTING (c2)",
        "members of group G have different values of consumeFromWhere: "
        "CONSUME_FROM_LAST_OFFSET (c1 and 1 more), CONSUME_FROM_FIRST_OFFSET (c3)",
    ]
    header = ConsumerGroupRequestHeader(consumer_group="G")
    answer = await first.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
    found = ConsumerConnection.decode(answer.body)
    assert found.retry_max_times == 16
    assert {each.client_id: (each.settings or {}).get("messageModel") for each in found.connection_set} == {
        "c1": "CLUSTERING", "c2": "BROADCASTING", "c3": "CLUSTERING", "c4": None,
    }  # fmt: skip


async def test_a_member_that_comes_again_on_a_new_connection_is_not_at_odds_with_itself(cluster, said):
    await cluster.peer().heartbeat("c1", topics={"Orders": "a"})
    await cluster.peer().heartbeat("c1", topics={"Orders": "b"})
    assert said() == []


async def test_pull_consumers_may_differ(cluster, said):
    await cluster.peer().heartbeat("c1", topics={"Orders": "a"}, consume_type=PULLS)
    await cluster.peer().heartbeat("c2", topics={"Orders": "b"}, consume_type=PULLS)
    assert said() == []


async def test_what_each_member_subscribes_is_told_to_tools(cluster):
    first, second = cluster.peer(), cluster.peer()
    await first.heartbeat("c1", topics={"Orders": "b || a", "Bills": "*"})
    await second.heartbeat("c2", topics={"Orders": "*"}, consume_type=PULLS)
    header = ConsumerGroupRequestHeader(consumer_group="G")
    answer = await first.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
    found = ConsumerConnection.decode(answer.body).connection_set
    assert {each.client_id: each.subscriptions for each in found} == {
        "c1": {"Orders": "a || b", "Bills": "*"},
        "c2": None,
    }


def group(**members: str) -> ConsumerGroup:
    """Build a group; each member's expression for topic T is given by client id."""
    table = ConsumerTable()
    for client_id, text in members.items():
        subscription = SubscriptionData(topic="T", sub_string=text)
        described = ("CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET")
        table.register("G", client_id, (client_id, "JAVA", 407), described, [subscription], 0)
        assert table.subscribes("G", client_id, [subscription])
        assert not table.subscribes("G", client_id, [subscription])
    return table.groups["G"]


def test_the_oldest_is_forgotten_where_too_many_were_said(said, monkeypatch):
    monkeypatch.setattr(client_requests, "MAX_KEPT", 2)
    table = client_requests.Disagreements()
    for other in ("x", "y", "z", "y", "x"):
        table.log_differences("G", group(c1="a", c2=other))
    assert [line[-6] for line in said()] == ["x", "y", "z", "x"]


def test_a_flood_of_differences_does_not_fill_the_log(said):
    table = client_requests.Disagreements()
    for number in range(1_000):
        table.log_differences("G", group(c1="a", c2=f"t{number}"))
    assert 0 < len(said()) <= 100


def test_what_the_log_had_no_room_for_is_said_later_if_it_is_still_so(said, monkeypatch):
    room = [False]
    monkeypatch.setattr(LogLimiter, "allows", lambda self: room[0])
    table = client_requests.Disagreements()
    differing = group(c1="a", c2="b")
    table.log_differences("G", differing)
    table.log_pending({"G": differing})
    assert said() == []
    room[0] = True
    table.log_pending({})
    assert said() == []
    table.log_pending({"G": differing})
    assert said() == []  # no member was online at the last check, so the state is dropped
    room[0] = False
    table.log_differences("G", differing)
    room[0] = True
    for _ in range(2):
        table.log_pending({"G": differing})
    assert len(said()) == 1


async def test_the_broker_looks_again_by_itself(cluster, said, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LogLimiter, "allows", lambda self: False)
        await cluster.peer().heartbeat("c1", topics={"Orders": "a"})
        await cluster.peer().heartbeat("c2", topics={"Orders": "b"})
    assert said() == []
    cluster.broker.parts.clients.expire()
    assert len(said()) == 1


def test_one_round_looks_at_few_groups_and_few_are_kept(said, monkeypatch):
    monkeypatch.setattr(client_requests, "MAX_KEPT", 3)
    monkeypatch.setattr(client_requests, "MAX_REPEATED_CHECKS", 2)
    table = client_requests.Disagreements()
    groups = {f"G have different {number}": group(c1="a", c2="b") for number in range(5)}
    with monkeypatch.context() as patch:
        patch.setattr(LogLimiter, "allows", lambda self: False)
        for name, members in groups.items():
            table.log_differences(name, members)
    for seen in (2, 3, 3):
        table.log_pending(groups)
        assert len(said()) == seen


def test_long_expressions_are_neither_kept_nor_logged_whole(said):
    table = client_requests.Disagreements()
    tracemalloc.start()
    try:
        for number in range(10):
            table.log_differences("G", group(c1="a", c2=f"{number}" + "y" * 200_000))
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(said()) == 10
    assert max(map(len, said())) < 1_000
    assert kept < 1_000_000


# -- Subscription expressions: which tags they let through


class TestSubscriptions:
    @pytest.mark.parametrize("expression", [None, "", "*"])
    def test_what_lets_everything_through(self, expression):
        assert tag_codes(expression) is None

    def test_tags_are_split_and_trimmed(self):
        assert tag_codes("TagA || TagB||  ||TagC") == set(map(java_hash, ("TagA", "TagB", "TagC")))
        assert tag_codes("  ") == frozenset()
        assert tag_codes(" || ") == frozenset()
        with pytest.raises(ExpressionError):
            tag_codes("||")

    def test_an_expression_is_taken_up_to_a_length_and_long_ones_are_not_hoarded(self):
        longest = "tag||" * (MAX_EXPRESSION_LENGTH // 5)
        assert tag_codes(longest) == {java_hash("tag")}
        with pytest.raises(ExpressionError, match=f"at most {MAX_EXPRESSION_LENGTH}"):
            tag_codes(longest + "tag||")
        for number in range(200):
            tag_codes(f"{number}||{longest[:-10]}")
        assert subscriptions.long_codes.cache_info().currsize <= 64
