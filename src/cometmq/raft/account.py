"""What a node knows of its log: where it begins and ends, the terms of its entries, what is durable,
committed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec

from cometmq.raft.members import MembersHistory
from cometmq.raft.messages import NO_TERM, AppendRequest, HardState, LogView


class LogAccount:
    """The entries of a log, as runs of equal terms. Nothing here takes longer for a longer log.

    first, last: as in LogView. durable: entries up to here are. commit: entries up to here are the group's
    for good; it may be ahead of `durable`.
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
        """What a member must keep with this log. A term may have come to the disk later than its entries
        (Apache's broker does not sync it): then its vote is lost, and nobody else gets one in it."""
        if state.term >= self.last_term:
            return state
        return msgspec.structs.replace(state, term=self.last_term, vote=me)

    @property
    def visible(self) -> int:
        """Entries up to here are committed, and durable here."""
        return min(self.commit, self.durable)

    @property
    def last_term(self) -> int:
        return self._terms[-1] if self._terms else NO_TERM

    def term_of(self, index: int) -> int:
        """NO_TERM for what is not in the log."""
        if not self.first <= index <= self.last:
            return NO_TERM
        return self._terms[bisect_right(self._starts, index) - 1]

    def run_stop(self, index: int) -> int:
        """Where the entries that have the term of entry `index` end (exclusive)."""
        at = bisect_right(self._starts, index)
        return self._starts[at] if at < len(self._starts) else self.last + 1

    def first_unlike(self, first: int, last: int, term: int) -> int | None:
        """The first of the entries `first` to `last` that has another term. All of them are in the log."""
        if first > last:
            return None
        if self.term_of(first) != term:
            return first
        stop = self.run_stop(first)
        return stop if stop <= last else None

    def last_at_most(self, index: int, term: int) -> int:
        """The last entry up to `index` whose term is at most `term`; `first` - 1 if there is none."""
        index = min(index, self.last)
        runs = bisect_right(self._terms, term)  # so many runs are old enough
        if runs < len(self._starts):
            index = min(index, self._starts[runs] - 1)
        return max(index, self.first - 1)

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Whether a log that ends so holds at least what this one holds (docs/reference/raft.md, Votes)."""
        return (last_term, last_index) >= (self.last_term, self.last)

    def append(self, count: int, term: int) -> None:
        if term != self.last_term:
            self._starts.append(self.last + 1)
            self._terms.append(term)
        self.last += count

    def cut(self, first: int) -> None:
        """Drop the entries from `first` on."""
        runs = bisect_left(self._starts, first)
        del self._starts[runs:], self._terms[runs:]
        self.last = first - 1
        self.durable = min(self.durable, self.last)
        self.commit = min(self.commit, self.last)
        self.history.cut(first)

    def reset(self, request: AppendRequest) -> None:
        """Begin anew where the leader's log begins. What was in front is committed, and nobody has it any
        more."""
        self._starts.clear()
        self._terms.clear()
        self.first = request.prev_index + 1
        self.last = self.durable = self.commit = request.prev_index
        self.history.restart(request.members[0] if request.members else self.history.newest)

    def begins_at(self, first: int) -> None:
        """Forget what is in front of `first`, which is in the log."""
        gone = bisect_right(self._starts, first) - 1
        del self._starts[:gone], self._terms[:gone]
        self._starts[0] = self.first = first
        self.history.forget_before(first)

    def persisted(self, index: int, term: int) -> bool:
        """Whether that is news."""
        if index <= self.durable or term == NO_TERM or self.term_of(index) != term:
            return False
        self.durable = index
        return True
