"""Reactions of a node to each event, rule by rule, and many seeded runs of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.long_form import LONG
from tests.raft import mutants, scripts
from tests.raft.chaos import live
from tests.raft.cluster import Cluster
from tests.raft.solo import ELECTION_MS, Maker, Solo, append, ask, has, yes

from cometmq.errors import CometError, RaftMessageError, RaftRefused
from cometmq.raft import (
    AppendRequest,
    AppendResponse,
    Members,
    RaftNode,
    Reset,
    Role,
    TransferRequest,
    Truncate,
    VoteRequest,
    VoteResponse,
)  # fmt: skip

FIVE = Members(frozenset(f"n{i}" for i in range(5)))


# -- seeded runs


@pytest.mark.parametrize("block", range(400 if LONG else 2))
def test_a_group_survives_what_a_seed_does_to_it(block: int) -> None:
    """A block has 50 seeds. `live(seed)` repeats the run of a seed that failed."""
    for seed in range(block * 50, block * 50 + 50):
        try:
            live(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# -- votes


@pytest.mark.parametrize(
    ("last", "granted"),
    [((1, 2), True), ((5, 1), False), ((0, 2), False), ((2, 2), True), ((0, 3), True), ((-1, -1), False)],
)
def test_a_vote_needs_a_log_that_holds_at_least_as_much(last: tuple[int, int], granted: bool) -> None:
    solo = Solo([1, 2])

    (answer,) = solo.step(ask("n1", 4, last), ms=ELECTION_MS - 1)

    assert answer == VoteResponse(group="g", sender="n0", to="n1", term=4, granted=granted)


def test_a_vote_is_saved_before_it_is_given_and_given_once() -> None:
    solo = Solo([1])
    solo.slow = True

    assert solo.step(ask("n1", 2, (0, 1))) == []
    saved = solo.node.effects().state or solo.disk.state
    assert solo.step(ask("n2", 2, (0, 1))) == []
    for state in (saved, *([solo.seen.state] if solo.seen.state else [])):
        solo.node.state_saved(state)
    solo.slow = False
    again = solo.step(ask("n2", 2, (0, 1)), ask("n1", 2, (0, 1)))

    answers = [(m.to, m.granted) for m in again if isinstance(m, VoteResponse)]
    assert answers[-2:] == [("n2", False), ("n1", True)]


def test_a_restarted_member_remembers_its_vote() -> None:
    solo = Solo([1], term=2, vote="n1")

    said = solo.step(ask("n2", 2, (0, 1)), ask("n1", 2, (0, 1)))

    assert [m.granted for m in said if isinstance(m, VoteResponse)] == [False, True]


@pytest.mark.parametrize("pre", [False, True])
def test_who_hears_its_leader_gives_no_vote(pre: bool) -> None:
    solo = Solo([1])
    solo.step(append("n1", 1, (0, 1)))

    said = solo.step(ask("n2", 2, (5, 1), pre=pre), ms=ELECTION_MS - 1)

    assert solo.node.term == 1
    assert [m.granted for m in said if isinstance(m, VoteResponse)] == [False] * pre


def test_a_vote_for_whom_the_leader_has_asked_to_stand_is_given_at_once() -> None:
    solo = Solo([1])
    solo.step(append("n1", 1, (0, 1)))

    (answer,) = solo.step(ask("n2", 2, (0, 1), transfer=True))

    assert isinstance(answer, VoteResponse)
    assert answer.granted


def test_a_question_before_a_vote_binds_nobody() -> None:
    solo = Solo([1])

    said = solo.step(ask("n1", 2, (0, 1), pre=True), ask("n2", 2, (0, 1), pre=True), ms=ELECTION_MS - 1)

    assert [m.granted for m in said if isinstance(m, VoteResponse)] == [True, True]
    assert (solo.node.term, solo.seen.state) == (1, None)


def test_a_learner_votes_if_asked_and_never_stands() -> None:
    solo = Solo([1], members=Members(frozenset(("n1", "n2")), frozenset(("n0",))))

    (answer,) = solo.step(ask("n1", 2, (0, 1)))
    assert isinstance(answer, VoteResponse)
    assert answer.granted
    assert solo.step(ms=5 * ELECTION_MS) == []


# -- elections


def test_a_candidate_asks_before_it_raises_its_term_and_leads_with_a_majority() -> None:
    solo = Solo([1, 1])

    asked = solo.step(ms=ELECTION_MS)
    assert [(m.to, m.term, m.pre) for m in asked if isinstance(m, VoteRequest)] == [
        ("n1", 2, True),
        ("n2", 2, True),
    ]
    asked = solo.step(yes("n1", 2, pre=True))
    assert [(m.term, m.pre) for m in asked if isinstance(m, VoteRequest)] == [(2, False), (2, False)]
    said = solo.step(yes("n2", 2))

    assert solo.node.role is Role.LEADER
    assert solo.terms == [1, 1, 2]
    assert [(m.prev_index, m.count) for m in said if isinstance(m, AppendRequest)] == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    "vote",
    [
        yes("n9", 2),
        yes("n1", 1),
        yes("n1", 2, pre=True),
        msgspec.structs.replace(yes("n1", 2), granted=False),
    ],
)
def test_only_a_vote_of_a_voter_in_this_term_counts(vote: VoteResponse) -> None:
    solo = Solo([1])
    solo.stand()

    solo.step(vote)

    assert solo.node.role is Role.CANDIDATE


def test_a_single_member_leads_and_commits_alone_once_that_is_durable() -> None:
    solo = Solo([1], members=Members(frozenset(("n0",))))
    solo.slow = True
    solo.step(ms=ELECTION_MS)
    assert solo.node.role is Role.CANDIDATE
    solo.slow = False
    solo.step(ms=ELECTION_MS)

    assert solo.node.ready
    assert solo.node.status().committed == 1


@pytest.mark.parametrize("step", [-3_600_000, 0])
def test_a_clock_that_steps_back_delays_an_election_by_nothing(step: int) -> None:
    solo = Solo([1])
    solo.step(ms=step)

    assert solo.step(ms=ELECTION_MS - 1) == []
    assert solo.step(ms=1) != []


def test_a_leader_that_was_paused_steps_down_before_it_takes_anything() -> None:
    solo = Solo([1])
    solo.lead()
    solo.step(has("n1", 2, 1))
    solo.step(ms=500)

    solo.step(ms=3_600_000)
    solo.step(ms=ELECTION_MS)

    assert solo.node.role is not Role.LEADER
    with pytest.raises(RaftRefused, match="n0 does not lead"):
        solo.node.propose(1)


def test_a_leader_steps_down_when_no_majority_answers() -> None:
    solo = Solo([1], members=FIVE)
    solo.stand()
    solo.step(yes("n2", 2), yes("n3", 2))
    solo.step(has("n1", 2, 1), ms=ELECTION_MS)  # received at the end of the first timeout

    solo.step(ms=ELECTION_MS)

    assert solo.node.role is Role.FOLLOWER
    assert solo.reasons == ["no majority has responded for an election timeout"]


# -- appends


@pytest.mark.parametrize(
    ("own", "request_", "after", "match"),
    [
        ([1], append("n1", 2, (0, 1), 2, 2), [1, 2, 2], 2),
        ([1, 1], append("n1", 2, (0, 1), 2), [1, 2], 1),  # a divergent entry is truncated
        ([1, 1, 1], append("n1", 1, (0, 1), 1), [1, 1, 1], 1),  # an old request truncates nothing
        ([1, 2], append("n1", 3, (0, 1), 2, 2), [1, 2, 2], 2),  # only the last entry is new
        ([], append("n1", 1, (-1, -1), 1), [1], 0),
        ([1, 1], append("n1", 1, (1, 1)), [1, 1], 1),
    ],
)
def test_a_follower_takes_what_it_lacks(
    own: list[int], request_: AppendRequest, after: list[int], match: int
) -> None:
    solo = Solo(own)

    answer = solo.step(request_)[-1]

    assert solo.terms == after
    assert isinstance(answer, AppendResponse)
    assert (answer.match, answer.rejected) == (match, False)


@pytest.mark.parametrize(
    ("own", "prev", "hint"),
    [
        ([1], (5, 2), (0, 1)),
        ([1, 1, 3, 3], (3, 2), (1, 1)),
        ([1, 1, 1], (2, 2), (1, 1)),
        ([], (3, 1), (-1, -1)),
    ],
)
def test_a_follower_without_the_entry_before_says_where_it_may_agree(
    own: list[int], prev: tuple[int, int], hint: tuple[int, int]
) -> None:
    (answer,) = Solo(own).step(append("n1", 4, prev, 4))

    assert isinstance(answer, AppendResponse)
    assert answer.rejected
    assert (answer.hint_index, answer.hint_term) == hint


def test_an_acknowledgement_waits_for_the_sync() -> None:
    solo = Solo([1])
    solo.slow = True

    (before,) = solo.step(append("n1", 1, (0, 1), 1, 1))
    solo.node.persisted(2, 1)
    (after,) = solo.turn()

    assert isinstance(before, AppendResponse)
    assert isinstance(after, AppendResponse)
    assert (before.match, before.written, after.match) == (0, 2, 2)


def test_a_sync_of_an_entry_that_was_cut_counts_for_nothing() -> None:
    solo = Solo([1])
    solo.slow = True
    solo.step(append("n1", 1, (0, 1), 1, 1))
    solo.step(append("n2", 2, (0, 1), 2))

    solo.node.persisted(2, 1)
    solo.node.persisted(1, 1)

    assert solo.node.status().durable == 0


@pytest.mark.parametrize(
    "wrong",
    [
        append("n2", 2, (2, 1), 2),  # a second leader in the same term
        append("n1", 2, (0, 1), 2, 2),  # conflicts with committed entries
        append("n1", 2, (1, 2), 2),
    ],
)
def test_what_contradicts_the_group_is_refused_and_changes_nothing(wrong: AppendRequest) -> None:
    solo = Solo([1, 1, 1])
    solo.step(append("n1", 2, (2, 1), commit=1))

    with pytest.raises(RaftMessageError):
        solo.step(wrong)

    assert solo.terms == [1, 1, 1]


def test_a_log_that_ends_before_the_leaders_begins_starts_anew() -> None:
    solo = Solo([1, 1, 1])
    base = solo.node.status()

    solo.step(append("n1", 4, (9, -1), 4, 4, commit=11))

    assert base.last == 2
    assert (solo.disk.first, solo.terms) == (10, [4, 4])
    assert solo.node.status().committed == 11


def test_a_log_that_reaches_the_leaders_beginning_is_kept() -> None:
    solo = Solo([1, 1, 2], first=8)

    solo.step(append("n1", 3, (9, -1), 2, commit=10))

    assert (solo.disk.first, solo.terms) == (8, [1, 1, 2])
    assert not any(isinstance(each, Reset | Truncate) for each in solo.seen.log)


# -- commits


def test_only_entries_of_the_own_term_are_committed_by_counting() -> None:
    solo = Solo([1, 2], members=FIVE)
    solo.stand()
    solo.step(yes("n2", 3), yes("n3", 3))

    solo.step(has("n1", 3, 1), has("n2", 3, 1), has("n3", 3, 1))
    assert solo.node.status().committed == -1
    solo.step(has("n1", 3, 2), has("n2", 3, 2))
    assert solo.node.status().committed == 2


def test_a_leader_counts_itself_only_up_to_what_is_durable() -> None:
    solo = Solo([1])
    solo.lead()
    solo.step(has("n1", 2, 1))
    solo.slow = True
    first = solo.node.propose(3)
    solo.step(has("n1", 2, first))

    assert solo.node.status().committed == first - 1
    solo.node.persisted(first, 2)
    assert solo.node.status().committed == first


def test_proposals_are_bounded_and_wait_for_a_leader_that_is_ready() -> None:
    solo = Solo([1])
    with pytest.raises(RaftRefused, match="does not lead"):
        solo.node.propose(1)
    solo.lead()
    with pytest.raises(RaftRefused, match="first entry of its term"):
        solo.node.propose(1)
    solo.step(has("n1", 2, 1))
    for count in (0, -1, 10_001):
        with pytest.raises(RaftRefused):
            solo.node.propose(count)
    assert solo.node.propose(10_000) == 2
    with pytest.raises(RaftRefused, match="uncommitted entries is reached: 10001"):
        solo.node.propose(1)


def test_what_is_under_way_to_a_follower_is_bounded() -> None:
    solo = Solo([1])
    solo.lead()
    solo.step(has("n1", 2, 1), has("n2", 2, 1))
    solo.node.propose(9_000)

    said = solo.turn()

    assert len([m for m in said if m.to == "n1" and isinstance(m, AppendRequest) and m.count]) == 32


def test_a_follower_whose_disk_was_wiped_is_filled_again() -> None:
    solo = Solo([1, 1, 1])
    solo.lead()
    solo.step(has("n1", 2, 3), has("n2", 2, 3))
    lost = msgspec.structs.replace(has("n2", 2, -1), rejected=True, prev_index=3)

    said = solo.step(lost)

    assert solo.node.status().peers["n2"].match == -1
    assert [(m.prev_index, m.count) for m in said if isinstance(m, AppendRequest)] == [(-1, 1)]


# -- disk, transfer, members


def test_a_leader_whose_disk_fails_steps_down_and_hands_over() -> None:
    solo = Solo([1])
    solo.lead()
    solo.step(has("n1", 2, 1))
    solo.node.propose(2)
    solo.node.effects()

    solo.node.disk_failed(1, "no space")
    said = solo.turn()

    assert solo.node.role is Role.FOLLOWER
    assert [(type(m), m.to) for m in said] == [(TransferRequest, "n1")]
    assert solo.step(ms=5 * ELECTION_MS) == []
    solo.node.disk_recovered()
    assert solo.step(ms=5 * ELECTION_MS) != []
    with pytest.raises(RaftRefused, match="committed"):
        solo.node.disk_failed(-1, "gone")


def test_what_was_committed_when_the_disk_failed_is_reported_again() -> None:
    solo = Solo([1, 1])
    solo.node.receive(append("n1", 1, (1, 1), commit=1))
    assert solo.node.effects().committed == 1

    solo.node.disk_failed(1, "no space for the term and the vote")
    solo.node.disk_recovered()

    assert solo.node.effects().committed == 1


def test_a_transfer_waits_for_the_last_entry_and_is_given_up_in_time() -> None:
    solo = Solo([1])
    solo.lead()
    solo.step(has("n1", 2, 1), has("n2", 2, 0))

    solo.node.transfer("n2")
    with pytest.raises(RaftRefused, match="is being transferred"):
        solo.node.propose(1)
    with pytest.raises(RaftRefused, match="is being transferred"):
        solo.node.remove("n1")
    said = solo.step(has("n2", 2, 1), has("n1", 2, 1))
    assert [m.to for m in said if isinstance(m, TransferRequest)] == ["n2", "n2"]
    solo.step(ms=ELECTION_MS)
    assert solo.node.propose(1) == 2
    for nobody in ("n0", "n9"):
        with pytest.raises(RaftRefused, match="not one of the other voters"):
            solo.node.transfer(nobody)


def test_members_change_one_at_a_time_learners_first() -> None:
    cluster = Cluster(1)
    cluster.put(9)
    leader = cluster.lead()
    node: Any = leader.node
    assert "not a learner" in cluster.ask(leader, lambda node: node.promote("n3"))
    assert cluster.ask(leader, lambda node: node.add_learner("n3")) == ""
    assert "not committed yet" in cluster.ask(leader, lambda node: node.add_learner("n4"))
    cluster.put()
    assert "lacks" in cluster.ask(leader, lambda node: node.promote("n3"))
    joined = cluster.join("n3")
    assert cluster.run(20_000, until=lambda: joined.disk.last == leader.disk.last)
    cluster.run(1_000)
    assert cluster.ask(leader, lambda node: node.promote("n3")) == ""
    cluster.put()

    assert node.members.voters == {"n0", "n1", "n2", "n3"}
    assert joined.node is not None
    assert joined.node.members == node.members


def test_a_learner_has_no_weight_in_commits() -> None:
    solo = Solo([1], members=Members(frozenset(("n0", "n1", "n2")), frozenset(("n3", "n4"))))
    solo.lead()

    solo.step(has("n3", 2, 1), has("n4", 2, 1))
    assert not solo.node.ready
    solo.step(has("n2", 2, 1))
    assert solo.node.ready


def test_a_removed_leader_steps_down_and_the_removed_disturb_nobody() -> None:
    cluster = Cluster(2)
    cluster.put()
    first = cluster.lead()
    assert cluster.ask(first, lambda node: node.remove(first.name)) == ""
    cluster.run(3_000)
    second = cluster.lead()
    assert second is not first
    assert second.node is not None
    term = second.node.term
    cluster.run(20_000)

    assert cluster.lead() is second
    assert second.node.term == term


def test_the_last_voter_cannot_be_removed() -> None:
    cluster = Cluster(1, 1)
    cluster.put()

    assert "last voter" in cluster.ask(cluster.lead(), lambda node: node.remove("n0"))


def test_a_partial_partition_changes_no_leader() -> None:
    cluster = Cluster(4)
    cluster.put()
    leader = cluster.lead()
    assert leader.node is not None
    term = leader.node.term
    other = next(name for name in cluster.members if name != leader.name)
    cluster.blocked = {(leader.name, other), (other, leader.name)}
    cluster.run(30_000)

    assert (cluster.lead(), leader.node.term) == (leader, term)


def test_retention_keeps_what_is_not_committed() -> None:
    solo = Solo([1, 1, 1], committed=1)

    with pytest.raises(RaftRefused, match="must be kept"):
        solo.node.log_trimmed(2)
    solo.node.log_trimmed(1)
    assert solo.node.status().first == 1


# -- The hard cases with the real node, and with nodes that break a rule, which is detected


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
