"""Filter classes in Python that Apache's 4.9 push consumer uploads to our filter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver, Json, body_of, message
from tests.interop.processes import wait_until
from tests.interop.space import Space, assert_exactly_once

EVEN = "class Even:\n    def match(self, message):\n        return int(message.body) % 2 == 0\n"


class FilteringCluster:
    """A name server and a broker with two filter servers."""

    def __init__(self, servers: CometNamesrv, broker: CometBroker) -> None:
        self.namesrv = f"127.0.0.1:{servers.port}"
        self.broker_addr = f"127.0.0.1:{broker.port}"


@pytest.fixture(scope="module")
def filtering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FilteringCluster]:
    servers = CometNamesrv(tmp_path_factory.mktemp("namesrv"))
    directory, namesrv = tmp_path_factory.mktemp("filtering"), f"127.0.0.1:{servers.port}"
    broker = CometBroker(directory, namesrv, settings={"filterServerNums": "2"})
    yield FilteringCluster(servers, broker)
    broker.stop()
    servers.stop()


@pytest.fixture
def room(java_clients: Callable[[str], Driver], filtering: FilteringCluster) -> Iterator[Space]:
    space = Space(java_clients("4.9.8"), filtering)
    yield space
    space.close()


def numbers(space: Space, *wanted: int) -> list[bytes]:
    sent = [b"%d" % number for number in wanted]
    space.java.send(space.producer(), [message(space.topic, body) for body in sent], "async")
    return sent


def test_the_4_9_client_uploads_its_source_and_gets_what_the_class_takes(room: Space) -> None:
    even = numbers(room, *range(0, 40, 2))
    numbers(room, *range(1, 40, 2))
    consumer = room.push(expression="Even", filterSource=EVEN, failTimes=1, failDelayLevel=1)
    room.java.wait_delivered(consumer, 40)  # twice, as each fails once and comes from the retry topic
    numbers(room, 41)
    even += numbers(room, 42)
    got = room.java.wait_delivered(consumer, 42)
    for failed in (True, False):
        assert_exactly_once([each for each in got if each["failed"] is failed], even)


def test_java_source_is_refused_and_brings_nothing_until_there_is_a_class(room: Space) -> None:
    even = numbers(room, 0, 1, 2)[::2]
    java = "package a; public class Even implements MessageFilter { }"
    consumer = room.push(expression="a.Even", filterSource=java)
    other = room.push(expression="Even", filterSource=EVEN)
    wait_until("both", lambda: len(_delivered(room, consumer, other)) >= 2)
    assert sorted(body_of(each) for each in _delivered(room, consumer, other)) == even


def _delivered(space: Space, *consumers: str) -> list[Json]:
    return [each for consumer in consumers for each in space.java.delivered(consumer)]
