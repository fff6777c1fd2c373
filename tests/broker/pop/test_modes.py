"""Consume modes, and the assignment of queues to members by the broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.broker.pop.conftest import V5, set_mode
from tests.kit.brokers import create, refused, table_on_disk

from cometmq.broker.pop.modes import allocate
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
)
from cometmq.protocol.codes import RequestCode


async def assignments(peer, client_id="c1", strategy="AVG", model="CLUSTERING", topic="Orders"):
    body = QueryAssignmentRequestBody(topic, "G", client_id, strategy, model)
    answer = await peer.call(RequestCode.QUERY_ASSIGNMENT, None, body.encode(), version=V5)
    found = QueryAssignmentResponseBody.decode(answer.body).message_queue_assignments
    if found is None:
        return None
    return [(each.message_queue.queue_id, each.mode) for each in found]


async def test_members_share_the_queues_until_the_mode_is_pop(cluster, peer):
    await create(peer)
    await cluster.broker.parts.registrar.registered()
    assert await assignments(peer) is None
    for member in ("c1", "c2"):
        await cluster.peer().heartbeat(member)
    assert await assignments(peer) == [(0, "PULL")]
    assert await assignments(peer, "c2") == [(1, "PULL")]
    assert await assignments(peer, model="BROADCASTING") == [(0, "PULL"), (1, "PULL")]
    assert await assignments(peer, strategy="unknown") is None
    assert await assignments(peer, topic="Unknown") is None
    assert (await set_mode(peer)).code == 0
    for member in ("c1", "c2"):
        assert await assignments(peer, member) == [(-1, "POP")]


async def test_modes_outlive_a_restart_in_apaches_format(cluster, peer):
    await create(peer)
    await set_mode(peer, pop_share_queue_num=8)
    root = Path(cluster.broker.config.store.root)
    entry = {"consumerGroup": "G", "mode": "POP", "popShareQueueNum": 8, "topic": "Orders"}
    table = table_on_disk(root, "messageRequestMode.json")
    assert table == {"messageRequestModeMap": {"Orders": {"G": entry}}}
    await cluster.restart()
    peer = cluster.peer()
    answer = await peer.call(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, version=V5)
    assert json.loads(answer.body)["messageRequestModeMap"]["Orders"]["G"] == entry
    await peer.heartbeat()
    assert await assignments(peer) == [(-1, "POP")]


async def test_bad_modes(peer):
    refused(await set_mode(peer), 17, "topic[Orders] not exist")
    await create(peer)
    refused(await set_mode(peer, topic="%RETRY%G"), 16, "retry topic is not allowed")
    refused(await set_mode(peer, mode="PUSH"), 29, "mode is 'PUSH'")
    refused(await set_mode(peer, consumer_group="a b"), 29, "illegal characters")


QUEUES = [MessageQueue("T", "b", number) for number in range(6)]


@pytest.mark.parametrize(
    ("strategy", "mode", "share", "members", "queues"),
    [
        ("AVG", "PULL", 0, 4, [0, 1]),
        ("AVG_BY_CIRCLE", "PULL", 0, 4, [0, 4]),
        ("AVG", "POP", 0, 4, [-1] * 6),
        ("AVG", "POP", 3, 4, [-1] * 6),
        ("AVG", "POP", 1, 4, [0, 1, 2, 3]),
        ("AVG", "POP", 2, 7, [0]),
    ],
)
def test_shares(strategy, mode, share, members, queues):
    body = QueryAssignmentRequestBody("T", "G", "c0", strategy)
    settings = SetMessageRequestModeRequestBody("T", "G", mode, share)
    found = allocate(body, settings, QUEUES, [f"c{number}" for number in range(members)])
    assert [queue.queue_id for queue in found] == queues
