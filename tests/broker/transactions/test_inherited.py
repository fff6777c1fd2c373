"""A broker takes over transactions that were begun before its start, by itself or by Apache's broker."""

from __future__ import annotations

import time

import pytest
from tests.broker.transactions.conftest import (
    HALF,
    MANUAL,
    OP,
    Place,
    asked,
    bodies,
    check_round,
    end,
    prepare,
    stored,
)
from tests.kit.brokers import refused, store_raw
from tests.kit.waiting import until

from cometmq.broker.transactions.inherited import MAX_FILLERS
from cometmq.protocol.properties.values import encode_properties

TAG_D = b"TAGS\x01d"


@pytest.fixture
async def cluster(start_cluster):
    return await start_cluster(**MANUAL)


def put_half(cluster, body=b"half", offset=0, **properties):
    """Store a half message in the form that Apache's broker writes, at the given queue offset."""
    known = {"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "K", "REAL_TOPIC": "Orders", "REAL_QID": "0"}
    parts = cluster.broker.parts
    message = parts.store.appender.append(
        HALF, 0, body, encode_properties({**known, **properties}),
        born_timestamp_ms=time.time_ns() // 1_000_000, born_host=bytes(8),
    )  # fmt: skip
    parts.writer.appended()
    assert message.queue_offset == offset
    return Place(offset, message.physical_offset)


async def restarted(cluster):
    """Restart the broker and connect a producer of the group for it to check."""
    cluster.broker.parts.tables.topics.ensure(HALF, 1)
    cluster.broker.parts.tables.topics.ensure(OP, 1)
    await cluster.restart()
    peer = cluster.peer()
    await peer.heartbeat(group=None, producers=("PG",))
    return peer


async def test_what_was_open_is_open_and_what_had_ended_has_ended(cluster):
    peer = cluster.peer()
    ended, still_open = await prepare(peer, b"ended"), await prepare(peer, b"open")
    await end(peer, ended)
    peer = await restarted(cluster)
    refused(await end(peer, ended), 1, "has ended")
    assert (await end(peer, still_open)).code == 0
    assert await bodies(peer) == [b"ended", b"open"]


async def test_an_end_that_names_an_older_copy_waits_for_the_check(cluster):
    peer = cluster.peer()
    first = await prepare(peer)
    await check_round(cluster)
    peer = await restarted(cluster)
    refused(await end(peer, first), 1, "has ended")
    await check_round(cluster)
    _, copy, _ = await asked(peer)
    assert (await end(peer, first)).code == 0
    refused(await end(peer, copy, check=True), 1, "has ended")
    assert await bodies(peer) == [b"half"]


@pytest.mark.parametrize("body", [b"1,2,", b"2,1", b"1,2"])
async def test_ops_of_apaches_5x_broker_name_several(cluster, body):
    for offset in range(4):
        put_half(cluster, b"%d" % offset, offset, UNIQ_KEY=f"K{offset}")
    store_raw(cluster, OP, TAG_D, body)
    store_raw(cluster, OP, b"TAGS\x01x", b"3")  # not a tag that closes half messages
    await until(lambda: cluster.broker.parts.store.max_offset(OP, 0) == 2)
    peer = await restarted(cluster)
    await check_round(cluster)
    assert [(await asked(peer))[0].body for _ in range(2)] == [b"0", b"3"]


async def test_a_commit_without_its_op_is_found(cluster):
    place = put_half(cluster, b"filler", UNIQ_KEY="other")
    place = put_half(cluster, offset=1)
    committed = encode_properties({"UNIQ_KEY": "K", "PGROUP": "PG"})
    cluster.broker.parts.tables.topics.ensure("Orders", 4)
    store_raw(cluster, "Orders", committed, b"half", sys_flag=8, prepared_transaction_offset=place.position)
    peer = await restarted(cluster)
    refused(await end(peer, place, key="K"), 1, "has ended")
    await check_round(cluster)
    assert (await asked(peer))[0].body == b"filler"
    assert await bodies(peer) == [b"half"]
    assert (await bodies(peer, OP))[0] == b"1"


async def test_of_two_copies_the_later_one_counts(cluster):
    old = put_half(cluster)
    put_half(cluster, b"half", 1, TRANSACTION_CHECK_TIMES="1")
    peer = await restarted(cluster)
    await check_round(cluster)
    _, copy, _ = await asked(peer)
    assert len(await bodies(peer, HALF)) == 3
    refused(await end(peer, old), 1, "has ended")
    assert (await end(peer, copy, check=True)).code == 0
    assert await bodies(peer) == [b"half"]


async def test_a_message_that_was_sent_twice_is_two_transactions(cluster):
    put_half(cluster)
    put_half(cluster, b"half", 1)
    peer = await restarted(cluster)
    await check_round(cluster)
    for _ in range(2):
        _, copy, _ = await asked(peer)
        assert (await end(peer, copy, check=True)).code == 0
    assert await bodies(peer) == [b"half"] * 2


async def test_an_op_whose_twin_is_lost_closes_nothing(cluster):
    place = put_half(cluster)
    store_raw(cluster, OP, TAG_D, b"0", prepared_transaction_offset=place.position + 1)
    peer = await restarted(cluster)
    assert (await end(peer, place)).code == 0
    assert await bodies(peer) == [b"half"]


async def test_the_offset_of_a_lost_half_message_is_used_up(cluster):
    store_raw(cluster, OP, TAG_D, b"2")
    peer = await restarted(cluster)
    place = await prepare(peer)
    assert place.offset == 3
    await check_round(cluster)
    assert (await asked(peer))[0].body == b"half"
    peer = await restarted(cluster)
    assert (await end(peer, place)).code == 1  # a copy has replaced it
    await check_round(cluster)
    assert (await asked(peer))[0].body == b"half"


async def test_an_op_that_names_nonsense_costs_nothing(cluster):
    store_raw(cluster, OP, TAG_D, b"%d" % (2 * MAX_FILLERS))
    peer = await restarted(cluster)
    assert (await prepare(peer)).offset == 0


async def test_halves_of_nobody_are_closed(cluster):
    put_half(cluster, PGROUP="")
    peer = await restarted(cluster)
    await check_round(cluster)
    assert await bodies(peer, OP) == [b"0"]
    assert len(await stored(peer, HALF)) == 1
