"""Filter classes in Python, uploaded by Apache's 4.9 push consumer to our filter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Driver, body_of, message
from tests.interop.space import Space, assert_exactly_once
from tests.kit.waiting import wait_until

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
    room.java.wait_delivered(consumer, 40)  # each message fails once and comes again from the retry topic
    numbers(room, 41)
    even += numbers(room, 42)
    got = room.java.wait_delivered(consumer, 42)
    for failed in (True, False):
        assert_exactly_once([each for each in got if each["failed"] is failed], even)


def test_java_source_is_refused_and_5_5_uploads_nothing_but_uses_what_another_member_has_uploaded(
    room: Space, java_clients: Callable[[str], Driver]
) -> None:
    even = numbers(room, *range(0, 20, 2))
    numbers(room, *range(1, 20, 2))
    five = java_clients("5.5.0")
    source = "package a; public class Even implements MessageFilter { }"
    members = [
        (room.java, room.push(expression="a.Even", filterSource=source)),
        (five, room.push(java=five, expression="Even", filterSource=EVEN)),
    ]

    def got() -> set[bytes]:
        return {body_of(each) for java, member in members for each in java.delivered(member)}

    assert got() == set()
    members.append((room.java, room.push(expression="Even", filterSource=EVEN)))
    wait_until("what the class takes", lambda: got() >= set(even))
    assert got() == set(even)
    assert five.delivered(members[1][1])
