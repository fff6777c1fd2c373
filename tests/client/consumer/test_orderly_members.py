"""Strict order while members join and leave: the calls of real processes are checked as one history."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.client.orderly_members import Call, check_calls, members_come_and_go
from tests.client.scenarios import PATIENT_BROKER

from cometmq.standalone import Standalone

LIVE_S = 6.0


@pytest.mark.slow("member processes come and go for some seconds")
async def test_no_message_overlaps_or_overtakes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.broker.groups.locks.LOCK_LIVE_MS", int(LIVE_S * 1000))
    async with Standalone(tmp_path, 0, 0, settings=PATIENT_BROKER) as cluster:
        await members_come_and_go(cluster.namesrv_addr, LIVE_S)


def call(member: str, offset: int, began: float, ended: float | None, handled: bool = True) -> Call:
    return Call(member, 0, offset, began, ended, handled)


GOOD = [call("a", 0, 1, 2), call("a", 1, 2, 3, False), call("a", 1, 4, 5), call("b", 2, 6, 7)]

DEAD = [call("dead", 0, 1, 2), call("dead", 1, 2, 3), call("dead", 2, 3, 4)]


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        (GOOD, None),
        ([*GOOD[:3], call("b", 2, 4.5, 7)], "is handled during the call"),
        ([GOOD[0], call("a", 2, 4, 5)], "overtakes"),
        ([*GOOD[:2], call("a", 2, 4, 5)], "overtakes"),
        (GOOD[:3], "0/2 was acknowledged but not handled"),
        ([*GOOD, call("b", 1, 8, 9)], "repeats"),
        ([*GOOD, call("a", 0, 8, 9)], "repeats"),
        ([*GOOD, call("dead", 0, 8, 9), call("b", 0, 10, 11)], "repeats"),
        (
            [GOOD[0], call("a", 1, 2, None), call("b", 1, 4, 5), call("b", 2, 6, 7)],
            "is handled during the call",
        ),
        (
            [GOOD[0], call("dead", 1, 2, None, False), call("b", 0, 5, 6), call("b", 1, 6, 7), GOOD[3]],
            "is handled during the call",
        ),
        # A member that repeats messages of a killed one may release the queue before it has caught up.
        ([*DEAD, call("b", 0, 5, 5.5), call("c", 1, 6, 7), call("c", 2, 7, 8)], None),
        ([*DEAD, call("b", 0, 5, 5.5, False), call("c", 0, 6, 7), call("c", 1, 7, 8)], None),
        ([*DEAD, call("b", 0, 5, 5.5), call("b", 1, 6, 7), call("c", 1, 8, 9)], "repeats"),
        ([*DEAD, call("b", 0, 5, 5.5), call("b", 1, 6, 7), call("c", 0, 8, 9)], "repeats"),
        (
            [
                *(GOOD[0], call("dead", 1, 2, None, False), call("b", 0, 5, 5.5)),
                *(call("b", 1, 5.5, 6), call("b", 2, 6, 7)),
            ],
            None,
        ),
    ],
)
def test_the_checker_finds_what_may_not_be(calls: list[Call], problem: str | None) -> None:
    killed = {"dead": 5.0}
    if problem is None:
        check_calls(calls, killed, [3])
    else:
        with pytest.raises(AssertionError, match=problem):
            check_calls(calls, killed, [3])
