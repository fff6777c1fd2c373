"""Which failures of a send are tried again, and within which time."""

from __future__ import annotations

import pytest

from cometmq.client.producer.retry import RETRY_RESPONSE_CODES, SendAttempts
from cometmq.errors import (
    BrokerError,
    CometError,
    ConnectError,
    MessageIllegal,
    NoRouteError,
    RequestTimeout,
    SendFailed,
)


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
