"""A member whose log is suspect: the conditions under which it votes again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from tests.raft.solo import ELECTION_MS, Solo, append, ask, has

from cometmq.errors import RaftRefused
from cometmq.raft import (
    AppendRequest,
    AppendResponse,
    HardState,
    Members,
    MembersEntry,
    VoteRequest,
    VoteResponse,
)

RUN = 1  # the run number that Solo uses


def votes(solo: Solo, request: VoteRequest) -> bool:
    (answer,) = [said for said in solo.step(request) if isinstance(said, VoteResponse)]
    return answer.granted


def tells(
    sender: str, term: int, *, run: int = RUN, blank: bool = False, granted: bool = False
) -> VoteResponse:
    return VoteResponse(
        group="g", sender=sender, to="n0", term=term, run=run, granted=granted, pre=True, blank=blank
    )


def test_a_damaged_log_has_no_vote_until_it_is_whole_again() -> None:
    solo = Solo([1], term=2, suspect=True)

    assert not votes(solo, ask("n1", 3, (5, 2)))
    assert solo.step(ms=5 * ELECTION_MS) == []
    (answer,) = solo.step(append("n1", 3, (0, 1), last=1))  # the leader does not know of the loss yet
    assert isinstance(answer, AppendResponse)
    assert (answer.match, answer.written, answer.run) == (-1, 0, RUN)
    solo.step(append("n1", 3, (0, 1), 1, 1, last=4, run=RUN))
    assert solo.node.effects().state is None
    (answer,) = solo.step(append("n1", 3, (2, 1), 3, 3, last=5, run=RUN))
    assert isinstance(answer, AppendResponse)
    assert (answer.match, answer.run) == (4, 0)
    assert votes(solo, ask("n2", 4, (9, 3), transfer=True))


def test_a_group_begins_when_all_of_its_members_have_nothing() -> None:
    solo = Solo(suspect=True, forgot=True)

    asked = [(m.to, m.term, m.run, m.pre) for m in solo.step() if isinstance(m, VoteRequest)]
    assert asked == [("n1", 0, RUN, True), ("n2", 0, RUN, True)]
    solo.step(tells("n1", 0, blank=True), tells("n2", 0, blank=True, run=7), ms=200)
    assert not votes(solo, ask("n1", 0, (-1, -1), pre=True))  # n2's response was to an earlier run
    assert {m.to for m in solo.step(ms=200)} == {"n2"}
    solo.step(tells("n2", 0, blank=True), ms=200)
    assert votes(solo, ask("n1", 1, (0, 0)))


def test_who_has_nothing_says_so_and_who_has_voted_has_something() -> None:
    question = msgspec.structs.replace(ask("n1", 0, pre=True), run=9)

    (answer,) = Solo().step(question)
    assert (answer.blank, answer.run) == (True, 9)  # type: ignore[union-attr]
    for solo in (Solo(term=1), Solo([1])):
        (answer,) = solo.step(question)
        assert (answer.blank, answer.term) == (False, 1)  # type: ignore[union-attr]


def lost(*, answers: Sequence[VoteResponse], settled: bool = True) -> Solo:
    """Create a member that lost its disk and has received it again from n1, the leader of term 4."""
    solo = Solo(suspect=True, forgot=True)
    solo.step(append("n1", 4, (-1, -1), 4, 4, last=1))
    solo.step(append("n1", 4, (1, 4), last=1, run=RUN))
    if settled:
        solo.node.tables_copied(4)
    solo.step(*answers, ms=200)
    solo.step(ms=1)
    return solo


@pytest.mark.parametrize(
    ("answers", "settled", "whole"),
    [
        ([tells("n1", 4), tells("n2", 3)], True, True),
        ([tells("n1", 4), tells("n2", 4, granted=True)], True, True),
        ([tells("n1", 4)], True, False),
        ([tells("n1", 4), tells("n2", 4, run=2)], True, False),
        ([tells("n1", 4), tells("n2", 5)], True, False),  # its entries come from a deposed leader
        ([tells("n1", 4), tells("n2", 4)], False, False),
    ],
)
def test_a_lost_disk_counts_again_when_all_others_have_told_their_terms(
    answers: list[VoteResponse], settled: bool, whole: bool
) -> None:
    solo = lost(answers=answers, settled=settled)

    said = solo.step(append("n1", 4, (1, 4), 4, last=2, run=RUN)) if solo.node.term == 4 else []
    assert [m.match for m in said if isinstance(m, AppendResponse)] == ([2 if whole else -1] if said else [])
    assert votes(solo, ask("n2", 6, (5, 4), transfer=True)) == whole


def test_a_lost_disk_has_voted_for_the_leader_that_filled_it() -> None:
    solo = lost(answers=[tells("n1", 4), tells("n2", 4)])

    solo.step(ms=2 * ELECTION_MS)
    assert not votes(solo, ask("n2", 4, (5, 4)))
    assert votes(solo, ask("n1", 4, (5, 4)))


def test_who_is_being_removed_or_learns_is_asked_too() -> None:
    before = Members(frozenset(("n0", "n1", "n2", "n3")), frozenset(("n4",)))
    solo = Solo(members=before, suspect=True, forgot=True)
    less = MembersEntry(1, 4, before.without("n3"))

    solo.step(append("n1", 4, (-1, -1), 4, 4, last=1, commit=0, members=(less,)))
    assert {m.to for m in solo.step(ms=200) if isinstance(m, VoteRequest)} == {"n1", "n2", "n3", "n4"}
    solo.step(append("n1", 4, (1, 4), last=1, commit=1, run=RUN))
    assert {m.to for m in solo.step(ms=200) if isinstance(m, VoteRequest)} == {"n1", "n2", "n4"}


def test_a_suspect_member_neither_gets_a_vote_nor_must_others_leave_its_group() -> None:
    solo = Solo([1], members=Members(frozenset(("n0", "n1", "n2")), frozenset(("n3",))))
    solo.lead()
    solo.step(has("n1", 2, 1), has("n2", 2, 1))
    suspect = [msgspec.structs.replace(has(name, 2, -1, 1), run=5) for name in ("n2", "n3")]
    said = solo.step(*suspect, ms=300)

    assert {m.to: m.run for m in said if isinstance(m, AppendRequest)} == {"n1": 0, "n2": 5, "n3": 5}
    with pytest.raises(RaftRefused, match="n3 has not recovered its log yet"):
        solo.node.promote("n3")
    with pytest.raises(RaftRefused, match="without n1 no majority"):
        solo.node.remove("n1")
    solo.node.remove("n2")


def test_a_term_that_is_on_the_disk_later_than_its_entries_is_the_logs_and_its_vote_is_given() -> None:
    solo = Solo([1, 3], term=1, vote="n1")

    state = solo.node.effects().state
    assert state == HardState(3, "n0", solo.disk.state.members)
    solo.node.state_saved(state)
    assert not votes(solo, ask("n2", 3, (5, 3)))
    assert votes(solo, ask("n2", 4, (5, 3)))
