"""Messages with a delivery time: Apache's clients on our broker, and a store used by both brokers in turn."""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.driver import Driver, JavaError, body_of, message
from tests.interop.processes import side_by_side
from tests.interop.space import Cluster, Space
from tests.kit.waiting import wait_until
from tests.long_form import long_form

CHECK_POINT, METRICS = 60, 61
Broker = ApacheBroker | CometBroker


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
def space_4(java_clients: Callable[[str], Driver], cluster: Cluster) -> Iterator[Space]:
    room = Space(java_clients("4.9.8"), cluster)
    yield room
    room.close()


@pytest.fixture
def space_5(java_clients: Callable[[str], Driver], cluster: Cluster) -> Iterator[Space]:
    room = Space(java_clients("5.5.0"), cluster)
    yield room
    room.close()


@pytest.mark.parametrize("setter", ["setDelayTimeMs", "setDelayTimeSec", "setDeliverTimeMs"])
def test_a_time_set_by_the_5x_client(space_5: Space, setter: str) -> None:
    space, producer = space_5, space_5.producer()
    begun = now_ms()
    value = {"setDelayTimeMs": 2_000, "setDelayTimeSec": 2, "setDeliverTimeMs": begun + 2_000}[setter]
    (result,) = space.java.send(producer, [message(space.topic, b"later", **{setter: value})])
    assert result["status"] == "SEND_OK"
    assert result["recallHandle"]
    (came,) = space.java.wait_delivered(space.push(), 1)
    assert body_of(came) == b"later"
    assert begun + 2_000 <= came["storeTimestamp"] < begun + 5_000


def test_a_message_taken_back_by_the_5x_client(space_5: Space) -> None:
    space, producer = space_5, space_5.producer()
    results = space.java.send(
        producer, [message(space.topic, body, setDelayTimeMs=3_000) for body in (b"gone", b"stays")]
    )
    handle = results[0]["recallHandle"]
    recalled = space.java.call("recall", name=producer, topic=space.topic, handle=handle)
    assert recalled == results[0]["msgId"]
    consumer = space.push()
    space.java.wait_delivered(consumer, 1)
    time.sleep(1.5)  # both would have been delivered within this time
    assert [body_of(each) for each in space.java.delivered(consumer)] == [b"stays"]


def test_too_long_a_delay_is_refused_with_the_limit(space_5: Space) -> None:
    space, producer = space_5, space_5.producer()
    with pytest.raises(JavaError, match="max delay 3456000000ms") as refused:
        space.java.send(producer, [message(space.topic, b"never", setDelayTimeSec=41 * 86_400)])
    assert refused.value.code == 13


@pytest.mark.parametrize("name", ["TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
def test_a_user_property_of_the_4_9_client(space_4: Space, name: str) -> None:
    space, producer = space_4, space_4.producer()
    begun = now_ms()
    value = {"TIMER_DELAY_MS": 2_000, "TIMER_DELAY_SEC": 2, "TIMER_DELIVER_MS": begun + 2_000}[name]
    space.java.send(producer, [message(space.topic, b"later", properties={name: str(value)})])
    (came,) = space.java.wait_delivered(space.push(), 1)
    assert begun + 2_000 <= came["storeTimestamp"] < begun + 5_000


# -- one store, two brokers


class Feed(store_input.Feeder):
    """A sender of timer messages over one connection, which gets every value of a message."""

    def timed(self, body: bytes, key: str, deliver_ms: int) -> None:
        properties = [("UNIQ_KEY", key), ("TIMER_DELIVER_MS", str(deliver_ms)), ("n", key)]
        self.send("Timed", 0, body, properties)


@pytest.fixture
def start(names: str) -> Iterator[Callable[[str, Path], Broker]]:
    running: list[Broker] = []

    def broker(kind: str, directory: Path) -> Broker:
        if kind == "apache":
            settings = {**store_input.TINY, "recallMessageEnable": "true"}
            running.append(ApacheBroker("5.5.0", directory, names, settings=settings))
        else:
            running.append(CometBroker(directory, names, settings=store_input.TINY))
        return running[-1]

    yield broker
    for each in running:
        if each.process.running:
            each.kill()


def served(port: int) -> list[tuple[bytes, dict[str, str]]]:
    return [
        (record.body, dict(each.split("\x01", 1) for each in record.properties if each))
        for record in store_input.served(port, "Timed", 0)
    ]


@long_form("waits 40 s twice")
def test_either_broker_delivers_what_the_other_was_given(
    start: Callable[[str, Path], Broker], tmp_path: Path
) -> None:
    both = [("ours", "apache"), ("apache", "ours")]
    side_by_side(lambda *case: hand_over(*case, start, tmp_path / case[0]), both)


def hand_over(writer: str, reader: str, start: Callable[[str, Path], Broker], place: Path) -> None:
    broker = start(writer, place)
    at = now_ms()
    with wire.Connection(broker.port) as connection:
        feed = Feed(connection)
        feed.update_topic("Timed", 1)
        feed.timed(b"early", "K0", at + 1_500)
        for number in range(5):
            feed.timed(b"late %d" % number, f"L{number}", at + 40_000)
    wait_until("the first message", lambda: len(served(broker.port)) == 1)
    assert broker.stop() in (0, 143)
    other = start(reader, place)
    bodies = lambda: Counter(body for body, _ in served(other.port))  # noqa: E731
    wait_until("the others", lambda: len(bodies()) == 6, 90)
    assert now_ms() >= at + 40_000
    # Our broker recognizes Apache's deliveries; Apache's broker reads again from the oldest waiting message.
    assert bodies() == Counter([b"early", *(b"late %d" % number for number in range(5))])
    other.stop()


@long_form("waits for two brokers of Apache's")
def test_what_is_stored_of_a_delivered_message_and_counted_of_others_is_what_apache_says(
    start: Callable[[str, Path], Broker], tmp_path: Path
) -> None:
    stored = {}
    begun = now_ms()
    for kind in ("ours", "apache"):
        broker = start(kind, tmp_path / kind)
        with wire.Connection(broker.port) as connection:
            feed = Feed(connection)
            feed.update_topic("Timed", 1)
            feed.timed(b"body", "K0", now_ms() + 1_500)
            feed.timed(b"waits", "K1", now_ms() + 600_000)

            def read_ms(connection: wire.Connection = connection) -> int:
                header, body = connection.call(CHECK_POINT)
                assert (header["code"], len(body)) == (0, 56)
                return int(struct.unpack(">7q", body)[0])

            # Apache's broker begins one week in the past and catches up.
            wait_until("the time of reading", lambda ask=read_ms: ask() > now_ms() - 60_000)
        wait_until("the message", lambda port=broker.port: len(served(port)) == 1)  # type: ignore[misc]
        ((_, properties),) = served(broker.port)
        stored[kind] = properties
        with wire.Connection(broker.port) as connection:

            def counted(connection: wire.Connection = connection) -> Any:
                return json.loads(connection.call(METRICS)[1])

            wait_until("one that waits", lambda ask=counted: ask()["timingCount"]["Timed"]["count"] == 1)
            metrics, sent = counted(), now_ms()
            assert begun < metrics["timingCount"]["Timed"]["timeStamp"] <= metrics["dataVersion"]["timestamp"]
            assert metrics["dataVersion"]["timestamp"] < sent
            assert counted() == metrics  # times of changes, not of queries
        broker.stop()
    of_every_send = {"MSG_REGION", "TRACE_ON"}  # 5.x also stores the properties that it returns to producers
    assert stored["ours"].keys() == stored["apache"].keys() - of_every_send
    same = ("REAL_TOPIC", "REAL_QID", "UNIQ_KEY", "n", "CLUSTER")
    for name in same:
        assert stored["ours"].get(name) == stored["apache"].get(name)
