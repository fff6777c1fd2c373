"""Queue allocation: RocketMQ's strategies, and properties that hold for any numbers of queues and members."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.cluster.namespaces import Namespace
from cometmq.client.group.allocate import (
    AllocateAveragely,
    AllocateAveragelyByCircle,
    AllocateByConfig,
    AllocateByConsistentHash,
    AllocateByMachineRoom,
    AllocateByMachineRoomNearby,
    AllocateStrategy,
    hashing,
    share_of,
)
from cometmq.errors import ConfigError
from cometmq.message import MessageQueue


def queues(count: int, topic: str = "TopicTest", broker: str = "broker-a") -> list[MessageQueue]:
    return [MessageQueue(topic, broker, index) for index in range(count)]


def shares(strategy: AllocateStrategy, count: int, members: list[str]) -> list[list[int]]:
    return [[q.queue_id for q in strategy.allocate(member, queues(count), members)] for member in members]


@pytest.mark.parametrize(
    ("count", "members", "expected"),
    [
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [1], [], []]),
        (5, 1, [[0, 1, 2, 3, 4]]),
        (0, 2, [[], []]),
        (7, 4, [[0, 1], [2, 3], [4, 5], [6]]),
    ],
)
def test_avg_gives_contiguous_runs(count: int, members: int, expected: list[list[int]]) -> None:
    assert shares(AllocateAveragely(), count, [f"c{i}" for i in range(members)]) == expected


def test_avg_by_circle_deals_in_turn() -> None:
    assert shares(AllocateAveragelyByCircle(), 8, ["a", "b", "c"]) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_config_gives_what_was_written_down() -> None:
    mine = tuple(queues(2, broker="broker-z"))
    assert AllocateByConfig(mine).allocate("nobody", queues(8), ["a"]) == list(mine)


def test_machine_room_shares_only_its_rooms() -> None:
    here = queues(5, broker="hz@broker-a")
    there = queues(3, broker="sh@broker-b")
    unnamed = queues(2, broker="broker-c")
    strategy = AllocateByMachineRoom({"hz"})
    everything = sorted(here + there + unnamed)
    assert strategy.allocate("c0", everything, ["c0", "c1"]) == [here[0], here[1], here[4]]
    assert strategy.allocate("c1", everything, ["c0", "c1"]) == [here[2], here[3]]


def _room_of(queue: MessageQueue) -> str:
    return queue.broker_name.partition("@")[0]


def _home_of(client_id: str) -> str:
    return client_id.partition("@")[0]


def nearby(inner: AllocateStrategy | None = None) -> AllocateByMachineRoomNearby:
    return AllocateByMachineRoomNearby(_room_of, _home_of, *([inner] if inner else []))


# The expected results are computed by hand from the rule (docs/reference/client.md, Allocation).
NEARBY = [
    # members, queue count per room, queue ids per member and room
    (["a@1", "a@2"], {"a": 4}, [{"a": [0, 1]}, {"a": [2, 3]}]),
    (["a@1", "a@2", "b@1"], {"a": 3, "b": 2}, [{"a": [0, 1]}, {"a": [2]}, {"b": [0, 1]}]),
    (["a@1", "b@1"], {"a": 2, "b": 2, "c": 5}, [{"a": [0, 1], "c": [0, 1, 2]}, {"b": [0, 1], "c": [3, 4]}]),
    (["a@1", "b@1"], {"c": 1, "d": 1}, [{"c": [0], "d": [0]}, {}]),
    (["a@1", "b@1"], {}, [{}, {}]),
]


@pytest.mark.parametrize(("members", "rooms", "expected"), NEARBY)
def test_queues_stay_in_their_room_while_it_has_a_member(
    members: list[str], rooms: dict[str, int], expected: list[dict[str, list[int]]]
) -> None:
    everything = [queue for room, count in rooms.items() for queue in queues(count, broker=f"{room}@broker")]
    for member, share in zip(members, expected, strict=True):
        mine: dict[str, list[int]] = {}
        for queue in share_of(nearby(), member, everything, members):
            mine.setdefault(_room_of(queue), []).append(queue.queue_id)
        assert mine == share


def test_nearby_shares_within_a_room_as_it_is_told() -> None:
    strategy = nearby(AllocateAveragelyByCircle())
    here = queues(4, broker="a@broker")
    assert [q.queue_id for q in share_of(strategy, "a@2", here, ["a@1", "a@2"])] == [1, 3]
    assert (nearby().name, strategy.name) == ("MACHINE_ROOM_NEARBY-AVG", "MACHINE_ROOM_NEARBY-AVG_BY_CIRCLE")


@pytest.mark.parametrize(("member", "broker"), [("@1", "a@broker"), ("a@1", "@broker")])
def test_a_queue_or_member_without_a_room_is_named(member: str, broker: str) -> None:
    with pytest.raises(ConfigError, match="no machine room for"):
        share_of(nearby(), member, queues(1, broker=broker), [member])


@pytest.mark.parametrize("result", [7, None, ["TopicTest"], ValueError("a bug")])
def test_a_strategy_that_fails_is_named(result: object) -> None:
    class Mine:
        name = "MINE"

        def allocate(
            self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
        ) -> list[MessageQueue]:
            if isinstance(result, Exception):
                raise result
            return result  # type: ignore[return-value]

    with pytest.raises(ConfigError, match="allocate_strategy = 'Mine'"):
        share_of(Mine(), "me", queues(2), ["me"])


def test_consistent_hash_is_the_ring_of_java() -> None:
    members = ["10.0.0.1@100#1", "10.0.0.2@200#2", "10.0.0.3@300#3"]
    owners = [0] * 8
    for number, member in enumerate(members, 1):
        for queue in AllocateByConsistentHash().allocate(member, queues(8), members):
            owners[queue.queue_id] = number
    assert owners == [1, 1, 1, 3, 3, 2, 1, 1]


@pytest.mark.parametrize("in_a_room", [False, True])
def test_consistent_hash_hashes_the_names_of_a_namespace(in_a_room: bool) -> None:
    members = [f"10.0.0.{number}@{number}#1" for number in range(1, 5)]
    space = Namespace("ns")
    plain = AllocateByConsistentHash()
    nearby = AllocateByMachineRoomNearby(lambda queue: "r", lambda member: "r", inner=plain)
    ours = hashing(nearby if in_a_room else plain, space.wrap_queue)
    for member in members:
        javas = plain.allocate(member, [space.wrap_queue(queue) for queue in queues(32)], members)
        assert ours.allocate(member, queues(32), members) == [space.unwrap_queue(queue) for queue in javas]
    assert hashing(AllocateAveragely(), space.wrap_queue) == AllocateAveragely()


ids = st.lists(st.text("abc0123456789.@#", min_size=1, max_size=12), min_size=1, max_size=8, unique=True).map(
    sorted
)


@pytest.mark.parametrize(
    "strategy",
    [
        AllocateAveragely(),
        AllocateAveragelyByCircle(),
        AllocateByConsistentHash(),
        AllocateByMachineRoomNearby(_room_of, lambda member: member[0]),
    ],
    ids=lambda s: s.name,
)
@given(count=st.integers(0, 40), members=ids)
def test_every_queue_has_one_owner(strategy: AllocateStrategy, count: int, members: list[str]) -> None:
    given_out = [q for member in members for q in strategy.allocate(member, queues(count), members)]
    assert sorted(given_out) == queues(count)


@given(count=st.integers(0, 40), members=ids)
def test_avg_shares_differ_by_at_most_one(count: int, members: list[str]) -> None:
    sizes = [len(share) for share in shares(AllocateAveragely(), count, members)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(members=ids, gone=st.integers(0, 7))
def test_consistent_hash_moves_only_the_queues_of_who_left(members: list[str], gone: int) -> None:
    leaver = members[gone % len(members)]
    rest = [member for member in members if member != leaver]
    strategy = AllocateByConsistentHash()
    for member in rest:
        before = set(strategy.allocate(member, queues(32), members))
        assert before <= set(strategy.allocate(member, queues(32), rest))


@pytest.mark.parametrize(
    "strategy",
    [
        AllocateAveragely(),
        AllocateAveragelyByCircle(),
        AllocateByConsistentHash(),
        AllocateByMachineRoom({"r"}),
    ],
)
def test_who_is_not_in_the_list_gets_nothing(strategy: AllocateStrategy) -> None:
    assert strategy.allocate("me", queues(4), ["you"]) == []


def test_share_of_sorts_before_it_shares() -> None:
    shuffled = [
        MessageQueue("T", "b", 1),
        MessageQueue("T", "a", 10),
        MessageQueue("T", "a", 9),
        MessageQueue("T", "b", 0),
    ]
    both = [MessageQueue("T", "a", number) for number in (9, 10)]
    assert share_of(AllocateAveragely(), "x", shuffled, ["y", "x"]) == both
