"""The hard cases with the real node, and nodes that break a rule: each is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.raft import mutants, scripts
from tests.raft.chaos import live
from tests.raft.solo import Maker

from cometmq.errors import CometError
from cometmq.raft import RaftNode

SCRIPTS = [
    scripts.figure_eight,
    scripts.removed_leader_is_still_needed,
    scripts.same_leader_in_a_later_term,
    scripts.lower_leader_learns_of_a_higher_term,
    scripts.one_change_at_a_time,
    scripts.candidate_without_leader,
    scripts.paused_leader_and_a_lost_disk,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_hard_case(script: Callable[[Maker], None]) -> None:
    script(RaftNode)


def lives(make: Maker) -> None:
    for seed in range(30):
        live(seed, make)


CAUGHT: list[tuple[type[RaftNode], Callable[[Maker], None]]] = [
    (mutants.VotesForShorterLogs, lives),
    (mutants.CountsItselfBeforeSync, lives),
    (mutants.SpeaksBeforeItsStateIsSaved, lives),
    (mutants.AcknowledgesBeforeSync, lives),
    (mutants.StandsWithoutPreVote, lives),
    (mutants.StandsWithoutPreVote, scripts.candidate_without_leader),
    (mutants.CutsWithoutContradiction, lives),
    (mutants.VotesWithADamagedLog, lives),
    (mutants.CommitsOldTermsByCounting, scripts.figure_eight),
    (mutants.ChangesMembersAtAnyTime, scripts.one_change_at_a_time),
    (mutants.TrustsWhatAgreedBefore, scripts.same_leader_in_a_later_term),
    (mutants.DoesNotStandOnceRemoved, scripts.removed_leader_is_still_needed),
    (mutants.TrustsAnyLeaderWithALostDisk, scripts.paused_leader_and_a_lost_disk),
    (mutants.AnswersOlderLeadersNothing, scripts.lower_leader_learns_of_a_higher_term),
]


@pytest.mark.parametrize(("mutant", "by"), CAUGHT, ids=lambda value: value.__name__)
def test_a_broken_rule_is_noticed(mutant: Maker, by: Callable[[Maker], None]) -> None:
    with pytest.raises((AssertionError, CometError)):
        by(mutant)
