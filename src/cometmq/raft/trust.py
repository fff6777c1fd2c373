"""When a member whose log is suspect counts again (docs/reference/raft.md, Lost logs and lost disks)."""

from __future__ import annotations

import msgspec

from cometmq.raft.account import LogAccount
from cometmq.raft.messages import NO_INDEX, NO_TERM, AppendRequest, HardState, VoteRequest, VoteResponse
from cometmq.raft.outbox import Outbox


class Contact(msgspec.Struct, frozen=True):
    """The first word of a leader to this run of a member. last: the end of its log then."""

    term: int
    leader: str
    last: int


class Trust:
    """What a suspect member has learnt since it was started. Until that is enough it has no vote, and what it
    has of the log counts for nobody.

    run: a number drawn at random at this start. Others send it back, so that nothing counts that was said
    before.
    """

    __slots__ = ("_answers", "_ask_at", "_contact", "_me", "_settled", "run")

    def __init__(self, me: str, run: int) -> None:
        self.run = run
        self._me = me
        self._contact: Contact | None = None
        self._answers: dict[str, bool] = {}  # who has told its term -> whether it has nothing itself
        self._settled = -1  # the term whose leader's tables are here
        self._ask_at = 0

    def told(self, response: VoteResponse) -> None:
        """A member has told its term. It is to be taken over before `regained` is asked."""
        if response.run == self.run:
            self._answers[response.sender] = response.blank

    def contacted(self, request: AppendRequest) -> None:
        """The leader of the term has spoken."""
        if request.run == self.run and (self._contact is None or self._contact.term < request.term):
            self._contact = Contact(request.term, request.sender, request.last)

    def settled(self, term: int) -> None:
        """What is in no log was copied from the leader of this term."""
        self._settled = term

    def ask(self, outbox: Outbox, clock: int, every_ms: int, state: HardState, account: LogAccount) -> None:
        """Ask for the terms that are missing, now and then: whether they would vote for an empty log."""
        if state.forgot and clock >= self._ask_at:
            self._ask_at = clock + every_ms
            question = {"term": state.term, "last_index": NO_INDEX, "last_term": NO_TERM, "run": self.run}
            for member in sorted(self._missing(account)):
                outbox.say(VoteRequest, member, pre=True, **question)

    def _missing(self, account: LogAccount) -> set[str]:
        """Who may have a vote of this member, and has not told its term. A learner may be a voter soon, and
        who is being removed may not know it yet."""
        everybody: set[str] = set()
        for members in account.history.since(account.commit):
            everybody |= members.everybody
        return everybody - {self._me} - self._answers.keys()

    def regained(self, state: HardState, account: LogAccount, agreed: int) -> HardState | None:
        """What is to be kept from now on, if the member counts again. agreed: up to here the log is the
        leader's, and durable."""
        contact = self._contact
        whole = contact is not None and contact.term == state.term and agreed >= contact.last
        if not state.forgot:
            return msgspec.structs.replace(state, suspect=False) if whole else None
        if self._missing(account):
            return None
        if is_blank(state, account) and self._me in account.history.newest.members.voters:
            whole = all(self._answers.values())  # the group begins
        elif self._settled != state.term:
            return None
        vote = state.vote or ("" if contact is None else contact.leader)
        return msgspec.structs.replace(state, suspect=False, forgot=False, vote=vote) if whole else None


def is_blank(state: HardState, account: LogAccount) -> bool:
    """Whether a member has nothing: no entry, and no term in which it could have voted."""
    return state.term == 0 and account.last < 0
