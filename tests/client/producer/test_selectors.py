from __future__ import annotations

import pytest

from cometmq.client.producer.selectors import RoundRobin, select_by_hash
from cometmq.message import Message, MessageQueue

A = [MessageQueue("T", "a", i) for i in range(2)]
B = [MessageQueue("T", "b", i) for i in range(2)]
MESSAGE = Message("T", b"x")


def test_round_robin_visits_every_queue_in_turn() -> None:
    robin = RoundRobin(start=-1)
    assert [robin.select(A + B) for _ in range(8)] == (A + B) * 2


def test_after_a_failure_another_broker_is_taken() -> None:
    for start in range(4):
        assert RoundRobin(start).select(A + B, failed="a") in B
        assert RoundRobin(start).select(A + B, failed="b") in A


def test_the_only_broker_is_taken_again() -> None:
    robin = RoundRobin(0)
    assert {robin.select(A, failed="a") for _ in range(4)} == set(A)


def test_slow_brokers_are_left_out_while_others_are_there() -> None:
    robin = RoundRobin(0)
    assert {robin.select(A + B, slow={"a"}) for _ in range(4)} == set(B)
    assert {robin.select(A, slow={"a"}) for _ in range(4)} == set(A)
    assert robin.select(A + B, failed="a", slow={"a", "b"}) in B  # better slow than failed


def test_the_counter_wraps_without_becoming_negative() -> None:
    robin = RoundRobin(0x7FFFFFFE)
    assert [robin.select(A) for _ in range(4)] == [A[1], A[0], A[1], A[0]]


@pytest.mark.parametrize(
    ("argument", "java_hash"),
    [
        (7, 7),
        (-7, -7),
        (True, 1231),
        (False, 1237),
        (1 << 32, 1),
        ("", 0),
        ("a", 97),
        ("TagA", 2598919),
        ("aaaaaaa", -1236860927),
    ],
)
def test_hash_selection_follows_java(argument: object, java_hash: int) -> None:
    queues = [MessageQueue("T", "a", i) for i in range(7)]
    assert select_by_hash(queues, MESSAGE, argument).queue_id == abs(java_hash) % 7
