"""Pulls of groups that have a rate limit."""

from __future__ import annotations

import asyncio
import time

from tests.broker.rates.conftest import limit_group, stopped_clock
from tests.kit.brokers import create, records, running, take
from tests.kit.waiting import until
from tests.store.cold_disk import ColdDisk

from cometmq.broker.rates.rate_limits import Amount
from cometmq.protocol.codes import ResponseCode

RETRY = ResponseCode.PULL_RETRY_IMMEDIATELY


async def test_a_group_receives_messages_at_its_rate(cluster, peer):
    await limit_group(peer, messages=20)
    await peer.send_numbers(35)
    began = time.monotonic()
    found = await take(peer, "Orders", 35, group="G")
    assert time.monotonic() - began >= 0.6
    assert [each.body for each in found] == [b"%d" % number for number in range(35)]
    assert cluster.broker.parts.rates.delayed_receives["G", "group"] >= 1


async def test_other_groups_are_not_held_up(cluster, peer):
    await limit_group(peer, messages=1)
    await peer.send_numbers(3)
    assert len(records(await peer.pull())) == 1
    waiting = asyncio.create_task(peer.pull(offset=1, hold_ms=15_000))
    assert len(records(await peer.pull(group="Other"))) == 3
    assert not waiting.done()
    assert [each.body for each in records(await waiting)] == [b"1"]


async def test_bytes_are_limited_and_a_message_larger_than_the_limit_is_delivered(cluster, peer):
    await limit_group(peer, bytes=1_000)
    for _ in range(2):
        await peer.send(body=bytes(2_000))
    began = time.monotonic()
    assert len(records(await peer.pull(max_msg_bytes=100))) == 1
    assert len(records(await peer.pull(offset=1, hold_ms=15_000))) == 1
    assert time.monotonic() - began >= 0.9


async def test_at_the_end_of_its_wait_a_pull_is_told_to_pull_again_and_not_that_there_is_nothing(
    cluster, peer
):
    await limit_group(peer, bytes=10)
    await peer.send_numbers(2)
    assert len(records(await peer.pull(max_msg_nums=1))) == 1  # in debt for several seconds
    for hold_ms in (100, 0):
        began = time.monotonic()
        answer = await peer.pull(offset=1, hold_ms=hold_ms)
        assert time.monotonic() - began >= 0.05
        assert (answer.code, answer.ext["nextBeginOffset"], answer.ext["maxOffset"]) == (RETRY, "1", "2")
    parked = cluster.broker.parts.pulls.long_poll
    assert len(parked) == 0


async def test_a_group_without_tokens_still_waits_for_new_messages(cluster, peer):
    """A pull that has waited for tokens, and then finds nothing, waits for a message."""
    await limit_group(peer, messages=5)
    await peer.send_numbers(5)
    assert len(records(await peer.pull())) == 5
    waiting = asyncio.create_task(peer.pull(offset=5, hold_ms=60_000))
    await until(lambda: ("Orders", 0) in cluster.broker.parts.pulls.long_poll.queues)
    await peer.send(body=b"new")
    assert [each.body for each in records(await waiting)] == [b"new"]


async def test_the_members_of_a_group_share_its_rate(cluster):
    clock = stopped_clock(cluster)
    peers = [cluster.peer() for _ in range(3)]
    await limit_group(peers[0], messages=20)
    await create(peers[0], read=3, write=3)
    for queue_id in range(3):
        for _ in range(30):
            await peers[0].send(queue_id=queue_id)
    assert len(records(await peers[0].pull(queue_id=0))) == 20  # all tokens
    got: list[int] = []

    async def consume(number):
        offset = 0
        while True:
            answer = await peers[number].pull(queue_id=number, offset=offset, hold_ms=60_000)
            offset += len(records(answer))
            got.append(number)

    members = [asyncio.create_task(consume(number)) for number in range(3)]
    await until(lambda: len(cluster.broker.parts.pulls.long_poll) == 3)
    for step in range(1, 13):
        clock.advance(0.0505)  # one token
        await until(lambda step=step: len(got) == step)
    assert min(map(got.count, range(3))) >= 2
    for each in members:
        each.cancel()


async def test_pulls_that_wait_for_the_disk_do_not_share_tokens(tmp_path):
    async with running(tmp_path) as (_, peer):
        await create(peer, read=16, write=16)
        for queue_id in range(16):
            for _ in range(8):
                await peer.send(queue_id=queue_id)
    disk = ColdDisk()
    async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (broker, peer):
        await limit_group(peer, messages=16)
        rates = broker.parts.rates
        now_ms = rates.now_ms()
        rates.now_ms = lambda: now_ms  # No token is added
        disk.cold = True
        disk.go_on.clear()
        pulls = [asyncio.create_task(peer.pull(queue_id=n, hold_ms=1)) for n in range(16)]
        await until(lambda: sum(each.done() for each in pulls) == 14)
        disk.go_on.set()
        answers = await asyncio.gather(*pulls)
        assert sum(len(records(answer)) for answer in answers if answer.code == 0) == 16
        (limit,) = rates.of_receive("G", "")
        assert limit.left(Amount(99, 0), now_ms).messages == 0


async def test_a_pull_beyond_the_limits_of_parked_pulls_is_answered_soon(start_cluster):
    cluster = await start_cluster(maxHeldPullsPerConnection="1", shortPollingTimeMills="50")
    peer = cluster.peer()
    await limit_group(peer, bytes=1)
    await peer.send_numbers(2)
    await peer.pull(max_msg_nums=1)
    first = asyncio.create_task(peer.pull(offset=1, hold_ms=1_000))
    await until(lambda: len(cluster.broker.parts.pulls.long_poll))
    answer = await peer.pull(offset=1, hold_ms=60_000)
    assert answer.code == RETRY
    assert (await first).code == RETRY


async def test_browsing_tools_are_not_limited(start_cluster):
    cluster = await start_cluster(maxGroupReceiveMessagesPerSecond="1")
    peer = cluster.peer()
    await peer.send_numbers(9)
    for _ in range(3):
        assert len(records(await peer.pull(group="TOOLS_CONSUMER"))) == 9


async def test_an_invalid_limit_of_a_group_is_refused(peer):
    answer = await peer.set_group(b'{"groupName":"G","attributes":{"+rate.receive.messages":"fast"}}')
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert "rate.receive.messages" in answer.remark
    assert "a whole number per second" in answer.remark


async def test_an_invalid_limit_of_a_topic_is_refused(peer):
    answer = await create(peer, attributes="+rate.send.bytes=-5")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "rate.send.bytes" in answer.remark
    assert (await create(peer, attributes="+rate.send.bytes=0")).code == 0


async def test_a_stop_answers_pulls_that_wait_for_tokens(cluster, peer):
    await limit_group(peer, bytes=1)
    await peer.send_numbers(2)
    await peer.pull(max_msg_nums=1)
    waiting = asyncio.create_task(peer.pull(offset=1, hold_ms=60_000))
    await until(lambda: len(cluster.broker.parts.pulls.long_poll))
    await cluster.broker.parts.pulls.stop()
    assert (await waiting).code == RETRY
