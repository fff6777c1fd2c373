"""The rules by which a member whose log is suspect (may have lost entries) regains its vote.

docs/reference/raft.md (Lost logs and lost disks) explains the rules.
"""

from __future__ import annotations

import msgspec

from cometmq.raft.log_state import LogState
from cometmq.raft.messages import (
    NO_INDEX,
    NO_TERM,
    AppendRequest,
    HardState,
    Outbox,
    VoteRequest,
    VoteResponse,
)


class Contact(msgspec.Struct, frozen=True):
    """A leader's first request in its term that contains this suspect member's incarnation number."""

    term: int
    leader: str
    last: int


class Trust:
    """The evidence that a suspect member has collected since it started.

    Until the evidence is complete, the member has no vote and its log counts for no majority.

    Attributes:
        incarnation: A random number drawn at this start. Other members repeat it in their messages, so that
            responses to an earlier start do not count.
    """

    __slots__ = ("_answers", "_contact", "_me", "_next_request_at", "_tables_term", "incarnation")

    def __init__(self, me: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self._me = me
        self._contact: Contact | None = None
        # For each member that has reported its term: whether that member has no entries and has seen no term.
        self._answers: dict[str, bool] = {}
        self._tables_term = -1  # Term of the leader from which the tables outside the log were copied
        self._next_request_at = 0

    def record_vote_response(self, response: VoteResponse) -> None:
        """Record that a member has reported its term in `response`.

        If the reported term is higher than the caller's term, the caller adopts the reported term before it
        calls `trusted_state`.
        """
        if response.run == self.incarnation:
            self._answers[response.sender] = response.blank

    def record_leader_contact(self, request: AppendRequest) -> None:
        """Record the first request in a leader's term that contains this member's incarnation number."""
        if request.run == self.incarnation and (self._contact is None or self._contact.term < request.term):
            self._contact = Contact(request.term, request.sender, request.last)

    def record_copied_tables(self, term: int) -> None:
        """Record that the tables outside the log were copied from the leader of `term`."""
        self._tables_term = term

    def request_terms(
        self, outbox: Outbox, clock: int, interval_ms: int, state: HardState, log_state: LogState
    ) -> None:
        """Send a pre-vote request for an empty log to each member that has not reported its term.

        This is done only if the member has lost its term, and again after at least `interval_ms`.
        """
        if state.forgot and clock >= self._next_request_at:
            self._next_request_at = clock + interval_ms
            fields = {"term": state.term, "last_index": NO_INDEX, "last_term": NO_TERM}
            for member in sorted(self._unanswered(log_state)):
                outbox.send(VoteRequest, member, pre=True, run=self.incarnation, **fields)

    def _unanswered(self, log_state: LogState) -> set[str]:
        """Return the members that may have received this member's vote and have not reported their term.

        The result includes learners, because a learner may have been promoted, and removed members, because a
        removed member may not have received its removal.
        """
        everyone: set[str] = set()
        for members in log_state.history.since(log_state.commit):
            everyone |= members.all_ids
        return everyone - {self._me} - self._answers.keys()

    def trusted_state(self, state: HardState, log_state: LogState, agreed: int) -> HardState | None:
        """Return the new state with which this member may vote again, or None if it lacks evidence.

        `agreed` is the last entry that is durable in this member's log and known to be equal to the leader's.
        """
        contact = self._contact
        whole = contact is not None and contact.term == state.term and agreed >= contact.last
        if not state.forgot:
            return msgspec.structs.replace(state, suspect=False) if whole else None
        if self._unanswered(log_state):
            return None
        if is_blank(state, log_state) and self._me in log_state.history.newest.members.voters:
            # If every other member reports an empty log and the initial term, the group is new. Then this
            # member's empty log has not lost any entries.
            whole = all(self._answers.values())
        elif self._tables_term != state.term:
            return None
        vote = state.vote or ("" if contact is None else contact.leader)
        return msgspec.structs.replace(state, suspect=False, forgot=False, vote=vote) if whole else None


def is_blank(state: HardState, log_state: LogState) -> bool:
    """Return whether a member holds no entry and has seen no term in which it could have voted."""
    return state.term == 0 and log_state.last < 0
