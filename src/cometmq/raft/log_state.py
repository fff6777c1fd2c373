"""The state of a node's log: its first and last entry, the terms, and what is durable and committed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec

from cometmq.errors import RaftMessageError
from cometmq.raft.members import MembersHistory
from cometmq.raft.messages import (
    NO_TERM,
    Append,
    AppendRequest,
    HardState,
    LogChange,
    LogView,
    Reset,
    Truncate,
)


class LogState:
    """The entries of a log, stored as ranges of equal terms. A longer log does not make operations slower.

    Attributes:
        first, last: The indexes of the first and the last entry, as in `LogView`.
        durable: The index of the last durable entry.
        commit: The index of the last committed entry. It may be greater than `durable`.
        history: The member lists in the log.
    """

    __slots__ = ("_starts", "_terms", "commit", "durable", "first", "history", "last")

    def __init__(self, log: LogView, state: HardState, committed: int | None) -> None:
        self.first = log.first
        self.last = self.durable = log.last
        self._starts: list[int] = []
        self._terms: list[int] = []
        index = log.first
        while index <= log.last:
            term = log.term_of(index)
            self._starts.append(index)
            self._terms.append(term)
            index += bisect_right(range(index, log.last + 1), term, key=log.term_of)
        self.commit = self.first - 1 if committed is None else min(max(committed, self.first - 1), self.last)
        self.history = MembersHistory(
            each for each in state.members if each.index < self.first or self.term_of(each.index) == each.term
        )

    def corrected(self, state: HardState, me: str) -> HardState:
        """Return `state`, with its term raised to the term of the last entry if that is greater.

        The saved term can be less than the term of the last entry, because Apache's broker does not sync the
        term. The member's vote in the greater term is then unknown. So the result has a vote for `me`, the
        member itself, which prevents a second vote in that term.
        """
        if state.term >= self.last_term:
            return state
        return msgspec.structs.replace(state, term=self.last_term, vote=me)

    @property
    def visible(self) -> int:
        """The index of the last entry that is both committed and durable on this member."""
        return min(self.commit, self.durable)

    @property
    def last_term(self) -> int:
        return self._terms[-1] if self._terms else NO_TERM

    def term_of(self, index: int) -> int:
        """Return the term of an entry, or NO_TERM if the log does not hold it."""
        if not self.first <= index <= self.last:
            return NO_TERM
        return self._terms[bisect_right(self._starts, index) - 1]

    def end_of_term(self, index: int) -> int:
        """Return the index after the last entry that has the same term as the entry `index`."""
        at = bisect_right(self._starts, index)
        return self._starts[at] if at < len(self._starts) else self.last + 1

    def first_mismatch(self, first: int, last: int, term: int) -> int | None:
        """Return the first of the entries `first` to `last`, all in the log, of another term, or None."""
        if first > last:
            return None
        if self.term_of(first) != term:
            return first
        stop = self.end_of_term(first)
        return stop if stop <= last else None

    def last_at_most(self, index: int, term: int) -> int:
        """Return the last entry up to `index` whose term is at most `term`, or `first` - 1."""
        index = min(index, self.last)
        newer = bisect_right(self._terms, term)  # Index of the first range with a term above `term`
        if newer < len(self._starts):
            index = min(index, self._starts[newer] - 1)
        return max(index, self.first - 1)

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Return whether a log that ends with this entry can get a vote (docs/reference/raft.md, Votes)."""
        return (last_term, last_index) >= (self.last_term, self.last)

    def append(self, count: int, term: int) -> None:
        if term != self.last_term:
            self._starts.append(self.last + 1)
            self._terms.append(term)
        self.last += count

    def cut(self, first: int) -> None:
        kept = bisect_left(self._starts, first)
        del self._starts[kept:], self._terms[kept:]
        self.last = first - 1
        self.durable = min(self.durable, self.last)
        self.commit = min(self.commit, self.last)
        self.history.cut(first)

    def reset(self, request: AppendRequest) -> None:
        """Start an empty log at the first entry of the leader's log: no member stores earlier entries."""
        self._starts.clear()
        self._terms.clear()
        self.first = request.prev_index + 1
        self.last = self.durable = self.commit = request.prev_index
        self.history.restart(request.members[0] if request.members else self.history.newest)

    def trim_before(self, first: int) -> None:
        """Remove the entries before `first` from the log state. The log must hold the entry `first`."""
        gone = bisect_right(self._starts, first) - 1
        del self._starts[:gone], self._terms[:gone]
        self._starts[0] = self.first = first
        self.history.forget_before(first)

    def persisted(self, index: int, term: int) -> bool:
        """Record that entries up to `index` are durable. Return whether `durable` has changed."""
        if index <= self.durable or term == NO_TERM or self.term_of(index) != term:
            return False
        self.durable = index
        return True


class Following:
    """Applies a leader's entries to a follower's log, and tracks how far both logs are equal.

    Attributes:
        agreed: The last entry up to which both logs are known to be equal, durable or not.
    """

    def __init__(self, log_state: LogState) -> None:
        self._log_state = log_state
        self.agreed = log_state.commit

    def check_request(self, request: AppendRequest) -> None:
        """Raise RaftMessageError if a request contradicts committed entries. No correct leader sends one."""
        log_state, prev = self._log_state, request.prev_index
        if NO_TERM != request.prev_term != log_state.term_of(prev) != NO_TERM and prev <= log_state.commit:
            raise RaftMessageError("prev_term", request.prev_term, f"entry {prev} is committed with another")
        first, last = max(prev + 1, log_state.first), min(prev + request.count, log_state.commit)
        mismatch = log_state.first_mismatch(first, last, request.entries_term)
        if mismatch is not None:
            problem = f"entry {mismatch} is committed with another"
            raise RaftMessageError("entries_term", request.entries_term, problem)

    def apply(self, request: AppendRequest) -> list[LogChange] | None:
        """Add a request's entries to the log state, and return the changes that the caller must write.

        Return None if this log does not hold the entry before the request's first one.
        """
        log_state, prev = self._log_state, request.prev_index
        if prev <= log_state.commit or NO_TERM != log_state.term_of(prev) == request.prev_term:
            return self._replace([], request)
        if request.prev_term != NO_TERM or not request.count:
            return None  # The logs cannot be compared at this entry, so the leader must send an earlier one
        if log_state.term_of(prev + 1) == request.entries_term:
            return self._replace([], request)
        log_state.reset(request)
        self.agreed = prev
        return self._replace([Reset(log_state.first)], request)

    def _replace(self, changes: list[LogChange], request: AppendRequest) -> list[LogChange]:
        log_state = self._log_state
        start, end = request.prev_index + 1, request.prev_index + request.count
        mismatch = log_state.first_mismatch(
            max(start, log_state.commit + 1), min(end, log_state.last), request.entries_term
        )
        if mismatch is not None:
            changes.append(Truncate(mismatch))
            self.cut(mismatch)
        first = log_state.last + 1
        if end >= first:
            count = end - first + 1
            log_state.append(count, request.entries_term)
            for entry in request.members:
                if entry.index >= first:
                    log_state.history.add(entry)
            changes.append(Append(first, count, request.entries_term, first - start, request.payload))
        self.agreed = max(self.agreed, end)
        log_state.commit = max(log_state.commit, min(request.commit, end))
        return changes

    def cut(self, first: int) -> None:
        self._log_state.cut(first)
        self.agreed = min(self.agreed, first - 1)
