"""Sends above the limits of their topics: over real sockets, with the real clock.

Lower bounds of times have a margin, because the loop reads its clock only once in an iteration. There are no
upper bounds: a busy machine may be late. Tests that count use a clock that stands still.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.broker.rates.conftest import stopped_clock
from tests.broker.transactions.conftest import end, prepare
from tests.kit.brokers import create, records, refused, take
from tests.kit.waiting import until

from cometmq import Message, Producer, SendStatus
from cometmq.broker.rates import throttle
from cometmq.errors import BrokerError
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode, ResponseCode

BATCH = RequestCode.SEND_BATCH_MESSAGE
LIMIT = "+rate.send.messages="


def throttled(cluster):
    return cluster.broker.parts.throttle


async def sent_at_once(peer, numbers, **send):
    """Send messages on one connection without waiting. Return the responses and the duration in seconds."""
    began = time.monotonic()
    answers = await asyncio.gather(*(peer.send(body=b"%d" % number, **send) for number in numbers))
    return answers, time.monotonic() - began


async def test_sends_above_the_limit_are_stored_in_order_at_the_rate(cluster, peer):
    stopped_clock(cluster)
    await create(peer, attributes=LIMIT + "20")
    answers, took_s = await sent_at_once(peer, range(32))
    assert {answer.code for answer in answers} == {0}
    assert took_s >= 0.5  # 20 at once, then 12 at 20 per second
    assert [each.body for each in await take(peer, "Orders", 32)] == [b"%d" % n for n in range(32)]
    assert cluster.broker.parts.rates.delayed_sends == {("Orders", "topic"): 12}
    assert len(cluster.broker.parts.sends.templates) == 0


async def test_other_topics_are_not_held_up_and_keep_their_fast_path(cluster, peer):
    await create(peer, attributes=LIMIT + "1")
    await peer.send()
    waiting = asyncio.create_task(peer.send())
    await until(lambda: throttled(cluster)._lanes)  # noqa: SLF001
    for number in range(50):
        assert (await peer.send("Bills", born_timestamp=1_700_000_000_000 + number,
                                properties={"UNIQ_KEY": f"AC{number:04}"})).code == 0  # fmt: skip
    assert not waiting.done()
    assert len(cluster.broker.parts.sends.templates) == 1
    assert (await waiting).code == 0


async def test_bytes_are_limited_and_a_message_larger_than_the_limit_passes(cluster, peer):
    await create(peer, attributes="+rate.send.bytes=1000")
    began = time.monotonic()
    assert (await peer.send(body=bytes(1_300))).code == 0  # the bucket was full
    assert (await peer.send(body=bytes(100))).code == 0
    assert time.monotonic() - began >= 0.3


async def test_each_message_of_a_batch_counts(cluster, peer):
    await create(peer, attributes=LIMIT + "20")
    batch = encode_batch((0, b"%d" % number, b"") for number in range(10))
    began = time.monotonic()
    for _ in range(3):
        assert (await peer.send(body=batch, code=BATCH, batch=True)).code == 0
    assert time.monotonic() - began >= 0.4
    assert len(await take(peer, "Orders", 30)) == 30


async def test_a_send_that_would_wait_too_long_is_refused_with_a_code_that_all_clients_retry(cluster, peer):
    rates = cluster.broker.parts.rates
    stopped_clock(cluster)
    await create(peer, attributes="+rate.send.bytes=100")
    await peer.send(body=bytes(1_000))
    began = time.monotonic()
    answer = await peer.send(body=bytes(10))
    assert time.monotonic() - began >= throttle.REFUSAL_DELAY_S
    why = "rate limit of topic Orders: 100 bytes per second (rate.send.bytes), retry after 7100 ms"
    refused(answer, ResponseCode.SERVICE_NOT_AVAILABLE, why)
    assert len(records(await peer.pull())) == 1
    assert rates.refused_sends == {("Orders", "topic"): 1}
    await peer.send(body=bytes(10), oneway=True)  # no response, and not stored
    await until(lambda: rates.refused_sends["Orders", "topic"] == 2)
    await create(peer, attributes="-rate.send.bytes")
    assert (await peer.send(body=b"free")).code == 0
    assert [each.body for each in records(await peer.pull(offset=1))] == [b"free"]


async def test_refusals_are_not_delayed_if_too_many_wait(cluster, peer, monkeypatch):
    monkeypatch.setattr(throttle, "MAX_REFUSALS", 0)
    monkeypatch.setattr(throttle, "REFUSAL_DELAY_S", 3_600)
    await create(peer, attributes="+rate.send.bytes=100")
    await peer.send(body=bytes(1_000))
    refused(await peer.send(body=bytes(10)), ResponseCode.SERVICE_NOT_AVAILABLE, "rate limit of topic Orders")


async def test_held_sends_have_a_maximum_size(cluster, peer, monkeypatch):
    monkeypatch.setattr(throttle, "MAX_HELD_BYTES", 3 * throttle.FRAME_BYTES)
    stopped_clock(cluster)
    await create(peer, attributes=LIMIT + "4")
    answers, _ = await sent_at_once(peer, range(11))
    assert sorted(answer.code for answer in answers) == [0] * 6 + [14] * 5
    held = throttled(cluster)
    assert (held._held_bytes, held._lanes, held._refusals) == (0, {}, 0)  # noqa: SLF001


async def test_retries_and_system_topics_are_exempt(start_cluster):
    cluster = await start_cluster(maxTopicSendMessagesPerSecond="4")
    peer = cluster.peer()
    for topic in (RETRY_PREFIX + "G", "RMQ_SYS_TRACE_TOPIC"):
        for _ in range(5):
            assert (await peer.send(topic)).code == 0
    assert not cluster.broker.parts.rates.delayed_sends
    answers, took_s = await sent_at_once(peer, range(6), topic="Any")
    assert {answer.code for answer in answers} == {0}
    assert took_s >= 0.4


async def test_half_messages_count_but_ends_of_transactions_do_not(cluster, peer):
    await create(peer, attributes=LIMIT + "2")
    began = time.monotonic()
    places = [await prepare(peer, b"%d" % number) for number in range(3)]
    assert time.monotonic() - began >= 0.4
    delayed = dict(cluster.broker.parts.rates.delayed_sends)
    stopped_clock(cluster)
    for place in places:
        assert (await end(peer, place)).code == 0
    assert cluster.broker.parts.rates.delayed_sends == delayed != {}
    assert [each.body for each in records(await peer.pull(queue_id=0))] == [b"0", b"1", b"2"]


async def test_a_stop_stores_held_sends(start_cluster):
    cluster = await start_cluster()
    peer = cluster.peer()
    await create(peer, attributes=LIMIT + "1")
    await peer.send()
    sending = [asyncio.create_task(peer.send(body=b"%d" % number)) for number in range(2)]
    await until(lambda: len(throttled(cluster)._heap) == 2)  # noqa: SLF001
    throttled(cluster).stop()
    assert [(await each).code for each in sending] == [0, 0]


async def test_a_limit_of_all_topics_can_be_changed_while_the_broker_runs(cluster, peer):
    parts = cluster.broker.parts
    parts.config.update({"maxTopicSendMessagesPerSecond": "4"})
    parts.sends.configure()
    _, took_s = await sent_at_once(peer, range(6))
    assert took_s >= 0.4


async def test_our_producer_waits_before_it_retries(cluster, peer):
    rates, clock = cluster.broker.parts.rates, stopped_clock(cluster)
    await create(peer, attributes="+rate.send.bytes=1000")
    await peer.send(body=bytes(9_000))
    async with Producer("PG", namesrv=cluster.namesrv_addr) as producer:
        sending = asyncio.create_task(producer.send(Message("Orders", b"x" * 10)))
        await until(lambda: rates.refused_sends)
        clock.advance(60)
        assert (await sending).status is SendStatus.SEND_OK
    assert rates.refused_sends == {("Orders", "topic"): 1}


async def test_our_producer_reports_the_limit_if_its_tries_fail(cluster, peer):
    await create(peer, attributes="+rate.send.bytes=10")
    await peer.send(body=bytes(100_000))
    async with Producer("PG", namesrv=cluster.namesrv_addr) as producer:
        with pytest.raises(BrokerError, match="rate limit of topic Orders: 10 bytes per second"):
            await producer.send(Message("Orders", b"x"))


async def test_a_duplicate_that_was_held_gets_the_first_answer(cluster, peer):
    await create(peer, attributes="+dedup.window.ms=60000,+rate.send.messages=10")
    answers, took_s = await sent_at_once(peer, range(13), properties={"UNIQ_KEY": "AC10"})
    assert took_s >= 0.2
    assert {(answer.code, answer.ext["msgId"]) for answer in answers} == {(0, answers[0].ext["msgId"])}
    assert len(records(await peer.pull())) == 1
