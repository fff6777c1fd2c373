"""Retries of failed sends: which failures are retried, and within which time."""

from __future__ import annotations

import pytest

from cometmq.client.producer.retry import RETRY_RESPONSE_CODES, SendAttempts
from cometmq.client.producer.selectors import RoundRobin, SlowBrokers, select_by_hash
from cometmq.errors import (
    BrokerError,
    CometError,
    ConnectError,
    MessageIllegal,
    NoRouteError,
    RequestTimeout,
    SendFailed,
)
from cometmq.message import Message, MessageQueue


def attempts(tries: int = 3, per_try_s: float | None = None) -> SendAttempts:
    return SendAttempts(deadline=10.0, tries=tries, retry_codes=RETRY_RESPONSE_CODES, per_try_s=per_try_s)


def broker_error(code: int) -> BrokerError:
    return BrokerError(code, remark="said so", broker_addr="127.0.0.1:10911", topic="T")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectError("a:1", "refused"), True),
        (SendFailed("a:1", 310), True),
        (RequestTimeout("a:1", 310, 3.0), True),
        *((broker_error(code), True) for code in (1, 2, 14, 16, 17, 204, 205, 1500)),
        *((broker_error(code), False) for code in (13, 26, 215)),
        (MessageIllegal("T", "empty"), False),
    ],
    ids=str,
)
def test_what_is_tried_again(error: CometError, again: bool) -> None:
    assert attempts().failed("a", error, now=0.0) is again


def test_tries_are_counted() -> None:
    tries = attempts(tries=3)
    assert [tries.failed(name, broker_error(1), now=0.0) for name in "aba"] == [True, True, False]
    assert [broker for broker, _ in tries.outcomes] == ["a", "b", "a"]


def test_a_spent_budget_ends_the_tries() -> None:
    assert not attempts().failed("a", broker_error(1), now=10.0)


def test_a_try_gets_what_is_left() -> None:
    assert attempts().timeout_s(now=4.0) == 6.0
    assert attempts().timeout_s(now=12.0) == 0.0


def test_a_limit_per_try_holds_for_all_but_the_last() -> None:
    tries = attempts(tries=2, per_try_s=1.0)
    assert tries.timeout_s(now=0.0) == 1.0
    tries.failed("a", broker_error(1), now=1.0)
    assert tries.timeout_s(now=1.0) == 9.0


def test_a_route_without_a_master_is_waited_for_only_after_a_refusal_for_a_moment() -> None:
    tries = attempts()
    lost = NoRouteError("T", hint="no master")
    assert (tries.pause_s(lost, now=0.0), tries.route_pause_s) == (0.0, 0.0)
    tries.failed("a", broker_error(14), now=0.0)
    assert tries.pause_s(broker_error(14), now=0.0) > 0
    tries.failed("a", lost, now=0.4)
    assert (tries.pause_s(lost, now=0.4), tries.route_pause_s > 0) == (0.0, True)


# -- How long slow brokers are left alone


@pytest.mark.parametrize(
    ("took_s", "avoided_s"),
    [(0.04, 0), (0.5, 0), (0.55, 2), (1.7, 2), (1.8, 5), (3.0, 6), (5.0, 10), (14.9, 10), (15.0, 30)],
)
def test_a_slow_broker_is_left_alone_by_how_slow_it_was(took_s: float, avoided_s: float) -> None:
    slow = SlowBrokers()
    slow.note("a", took_s, now=100.0)
    if avoided_s:
        assert slow.avoided(100.0 + avoided_s - 0.01) == {"a"}
    assert slow.avoided(100.0 + avoided_s) == set()


def test_a_failure_counts_as_ten_seconds() -> None:
    slow = SlowBrokers()
    slow.note("a", 0.0, now=0.0, failed=True)
    slow.note("b", 0.6, now=0.0)
    assert (slow.avoided(1.9), slow.avoided(2.0), slow.avoided(10.0)) == ({"a", "b"}, {"a"}, set())


def test_a_quick_answer_does_not_shorten_the_time() -> None:
    slow = SlowBrokers()
    slow.note("a", 20.0, now=0.0)
    slow.note("a", 0.01, now=1.0)
    slow.note("a", 0.6, now=1.0)
    assert slow.avoided(29.0) == {"a"}


def test_the_table_is_bounded() -> None:
    slow = SlowBrokers()
    for number in range(10_500):
        slow.note(f"b{number}", 20.0, now=0.0)
    assert len(slow.avoided(0.0)) == 10_000
    slow.note("new", 20.0, now=31.0)  # the earlier entries have expired
    assert slow.avoided(31.0) == {"new"}


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
    assert robin.select(A + B, failed="a", slow={"a", "b"}) in B  # a slow broker is better than a failed one


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
