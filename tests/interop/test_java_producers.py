"""Apache's Java producers with our servers: every kind of send, and the stored messages."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import pytest
from tests.interop.driver import JavaError, body_of, message
from tests.interop.space import Space, assert_exactly_once

from cometmq.testing import ClusterProxy, Fault, Kind, random_faults

COMPRESSED = 0x701  # after decompression the 5.x client clears bit 0 but keeps the algorithm


def _numbered(space: Space, word: str, count: int) -> list[bytes]:
    return [f"{word}-{number}-{space.topic}".encode() for number in range(count)]


@pytest.mark.representative("4.9.8-sync")
@pytest.mark.parametrize("mode", ["sync", "async", "oneway"])
def test_single_sends_store_each_message_once(space: Space, mode: str) -> None:
    producer, sent = space.producer(), _numbered(space, mode, 60)
    results = space.java.send(producer, [message(space.topic, body, tags="A") for body in sent], mode)
    assert [each["status"] for each in results] == ([] if mode == "oneway" else ["SEND_OK"] * 60)
    consumer = space.push()
    assert_exactly_once(space.java.wait_delivered(consumer, 60), sent)
    stored = space.pull_topic(space.pull(group=space.group + "-pull"))
    assert_exactly_once(stored, sent)
    by_id = {each["msgId"]: each for each in stored}
    for each in results:
        where = by_id[each["msgId"]]
        assert (where["queueId"], where["queueOffset"]) == (each["queueId"], each["queueOffset"])
        assert where["offsetMsgId"] == each["offsetMsgId"]


def test_a_given_queue_gets_its_messages_in_order(space: Space) -> None:
    producer, sent = space.producer(), _numbered(space, "queue", 40)
    space.java.send(producer, [message(space.topic, b"first")])
    batch = [message(space.topic, body) for body in sent]
    results = space.java.send(producer, batch, "queue", queue=space.queue(2))
    assert {each["queueId"] for each in results} == {2}
    first = results[0]["queueOffset"]
    assert [each["queueOffset"] for each in results] == list(range(first, first + 40))
    stored = [body_of(each) for each in space.pull_queue(space.pull(), 2)]
    assert stored[first:] == sent


def test_a_selector_keeps_one_key_on_one_queue(space: Space) -> None:
    producer = space.producer()
    for key in range(4):
        results = space.java.send(
            producer, [message(space.topic, f"{key}:{n}".encode()) for n in range(10)], "selector", select=key
        )
        assert {each["queueId"] for each in results} == {key}
    for key in range(4):
        stored = [body_of(each) for each in space.pull_queue(_puller(space), key)]
        assert stored == [f"{key}:{n}".encode() for n in range(10)]


def test_a_batch_takes_consecutive_places_and_keeps_what_each_message_carries(space: Space) -> None:
    producer = space.producer()
    parts = [
        message(space.topic, b"part %d" % n, tags=f"t{n % 3}", keys=f"k{n}", flag=n, properties={"n": str(n)})
        for n in range(32)
    ]
    space.java.send(producer, [message(space.topic, b"before")], "selector", select=1)
    (result,) = space.java.send(producer, parts, "batch", queue=space.queue(1))
    assert result["status"] == "SEND_OK"
    assert result["queueOffset"] == 1
    ids, places = result["msgId"].split(","), result["offsetMsgId"].split(",")
    assert len(set(ids)) == len(set(places)) == 32
    stored = space.pull_queue(_puller(space), 1)[1:]
    assert [each["queueOffset"] for each in stored] == list(range(1, 33))
    assert [each["msgId"] for each in stored] == ids
    assert [each["offsetMsgId"] for each in stored] == places
    for n, each in enumerate(stored):
        carried = (each["tags"], each["keys"], each["flag"], each["properties"]["n"])
        assert (body_of(each), *carried) == (b"part %d" % n, f"t{n % 3}", f"k{n}", n, str(n))


def test_properties_and_text_of_every_alphabet_arrive_unchanged(space: Space) -> None:
    producer = space.producer()
    own = {"clerk": "Łukasz 王小明", "mark": "-", "equals": "a=b&c", "emoji": "🚀"}
    sent = message(space.topic, "Grüße".encode(), tags="订单", keys="k-é k-ß", flag=7, properties=own)
    (result,) = space.java.send(producer, [sent])
    (stored,) = space.pull_queue(_puller(space), result["queueId"])
    assert (stored["tags"], stored["keys"], stored["flag"]) == ("订单", "k-é k-ß", 7)
    assert {name: stored["properties"][name] for name in own} == own
    assert stored["bornHost"] == "127.0.0.1"


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 300_000, 3_900_000], ids="{}B".format)
def test_bodies_of_every_size_survive_the_clients_compression(space: Space, size: int) -> None:
    producer = space.producer(compressOver=4096)
    half = random.Random(size).randbytes(size // 2)  # half random, half zeros: moderately compressible
    body = half + bytes(size - len(half))
    if size == 0:
        with pytest.raises(JavaError, match="body length is zero"):
            space.java.send(producer, [message(space.topic, body)])
        return
    (result,) = space.java.send(producer, [message(space.topic, body)])
    (stored,) = space.pull_queue(_puller(space), result["queueId"])
    assert body_of(stored) == body
    assert bool(stored["sysFlag"] & COMPRESSED) == (size > 4096)
    assert (stored["storeSize"] < size) == (size > 4096)


def test_a_body_over_the_brokers_limit_is_refused_with_13(space: Space) -> None:
    producer = space.producer(maxSize=16 * 1024 * 1024, compressOver=64 * 1024 * 1024, retries=0)
    with pytest.raises(JavaError) as caught:
        space.java.send(producer, [message(space.topic, bytes(5 * 1024 * 1024))])
    assert caught.value.code == 13


def test_looking_up_by_id_key_and_time(space: Space) -> None:
    producer = space.producer()
    sent = [message(space.topic, b"look %d" % n, keys=f"order-{n} all-{space.topic}") for n in range(10)]
    results = space.java.send(producer, sent, "selector", select=3)
    java = space.java
    for n, each in enumerate(results):
        by_place = java.call("view", name=producer, topic=space.topic, msgId=each["offsetMsgId"])
        by_id = java.call("view", name=producer, topic=space.topic, msgId=each["msgId"])
        assert body_of(by_place) == body_of(by_id) == b"look %d" % n
    (one,) = java.call("query", name=producer, topic=space.topic, key="order-4")
    assert body_of(one) == b"look 4"
    everything = java.call("query", name=producer, topic=space.topic, key=f"all-{space.topic}")
    assert sorted(map(body_of, everything)) == [b"look %d" % n for n in range(10)]
    stored = space.pull_queue(_puller(space), 3)
    bounds = java.call("bounds", name=producer, queue=space.queue(3), timestamp=stored[0]["storeTimestamp"])
    assert (bounds["min"], bounds["max"], bounds["at"]) == (0, 10, 0)
    assert bounds["earliest"] == stored[0]["storeTimestamp"]
    after = java.call(
        "bounds", name=producer, queue=space.queue(3), timestamp=stored[-1]["storeTimestamp"] + 60_000
    )
    # 4.9 returns the offset of the nearest message, and 5.x the offset after the last one.
    assert after["at"] in (9, 10)


def test_a_bad_network_loses_and_invents_nothing(space: Space) -> None:
    """Java's clients use the fault proxies of `cometmq.testing`."""
    sent = _numbered(space, "bad", 30)
    with ClusterProxy(space.cluster.namesrv).run_in_thread() as faulty:
        through = Space(space.java, Through(faulty.namesrv, space.cluster.broker_addr))
        producer = through.producer(timeout=1000, apiMillis=3000)
        consumer = through.push(apiMillis=3000)  # the start must not fail
        space.java.send(producer, [message(through.topic, sent[0])])
        for proxy in faulty.proxies:
            proxy.script = random_faults(space.number, share=0.7)
        sure = {sent[0]}
        for number, body in enumerate(sent[1:]):
            if number % 5 == 0:
                faulty.inflict(Fault(kind=Kind.CUT, after=number * 20))
            with contextlib.suppress(JavaError):
                space.java.send(producer, [message(through.topic, body)])
                sure.add(body)
        faulty.heal()
        got = space.java.wait_delivered(consumer, lambda got: sure <= set(map(body_of, got)))
        through.close()
    assert set(map(body_of, got)) <= set(sent)
    assert len(sure) > 10
    assert faulty.happened[Kind.CUT] > 3


class Through(NamedTuple):
    """A cluster behind proxies."""

    namesrv: str
    broker_addr: str


def test_the_second_port_of_old_clients_answers_too(space: Space) -> None:
    producer = space.producer(vip=True)  # sends to the broker's port minus two
    (result,) = space.java.send(producer, [message(space.topic, b"vip")])
    assert result["status"] == "SEND_OK"


def _puller(space: Space) -> str:
    return space.pull(group=space.group + "-pull")
