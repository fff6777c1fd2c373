"""Who belongs to a group, and which entry of the log said so."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from cometmq.errors import RaftRefused

# Voters and learners of a group together.
MOST_MEMBERS = 31
# Members entries in one log. Each is one change that an operator made.
MOST_CHANGES = 1_000


class Members(msgspec.Struct, frozen=True):
    """The members of a group, by id. Learners receive the log and have no vote. A member that is to join a
    group starts with none, and learns them from the leader."""

    voters: frozenset[str] = frozenset()
    learners: frozenset[str] = frozenset()

    def has_quorum(self, of: Collection[str]) -> bool:
        """Whether more than half of the voters are among `of`."""
        return len(self.voters.intersection(of)) > len(self.voters) // 2

    @property
    def everybody(self) -> frozenset[str]:
        return self.voters | self.learners

    # The members after a change. RaftRefused for one that cannot be.

    def with_learner(self, member: str) -> Members:
        if not member or member in self.everybody:
            raise RaftRefused(f"{member} is a member already")
        if len(self.everybody) >= MOST_MEMBERS:
            raise RaftRefused(f"a group has at most {MOST_MEMBERS} members")
        return Members(self.voters, self.learners | {member})

    def with_voter(self, member: str) -> Members:
        if member not in self.learners:
            raise RaftRefused(f"{member} is not a learner")
        return Members(self.voters | {member}, self.learners - {member})

    def without(self, member: str) -> Members:
        if member not in self.everybody:
            raise RaftRefused(f"{member} is not a member")
        if self.voters == {member}:
            raise RaftRefused(f"{member} is the last voter")
        return Members(self.voters - {member}, self.learners - {member})


class MembersEntry(msgspec.Struct, frozen=True):
    """The members as of an entry of the log. They are in force from its append on, committed or not.

    index: -1 for the members that a group starts with, whose term is -1 too.
    """

    index: int
    term: int
    members: Members


class MembersHistory:
    """The members entries of a log, in order. It is never empty: the first says who the members were at the
    beginning of the log."""

    def __init__(self, entries: Iterable[MembersEntry]) -> None:
        self._entries = list(entries) or [MembersEntry(-1, -1, Members())]

    @property
    def entries(self) -> tuple[MembersEntry, ...]:
        return tuple(self._entries)

    @property
    def newest(self) -> MembersEntry:
        return self._entries[-1]

    @property
    def full(self) -> bool:
        return len(self._entries) >= MOST_CHANGES

    def at(self, index: int) -> MembersEntry:
        """The members in force at an entry."""
        return next((each for each in reversed(self._entries) if each.index <= index), self._entries[0])

    def since(self, index: int) -> list[Members]:
        """Those in force at an entry, and all behind it."""
        return [self.at(index).members, *(each.members for each in self._entries if each.index > index)]

    def between(self, first: int, last: int) -> tuple[MembersEntry, ...]:
        """The members entries among the entries `first` to `last`."""
        if self.newest.index < first:
            return ()
        return tuple(each for each in self._entries if first <= each.index <= last)

    def add(self, entry: MembersEntry) -> None:
        self._entries.append(entry)

    def restart(self, entry: MembersEntry) -> None:
        self._entries = [entry]

    def cut(self, first: int) -> None:
        """Forget the entries from `first` on."""
        self._entries = [each for each in self._entries if each.index < first] or self._entries[:1]

    def forget_before(self, first: int) -> None:
        """The log begins at `first` now."""
        in_force = self.at(first - 1)
        self._entries = [in_force, *(each for each in self._entries if each.index > in_force.index)]
