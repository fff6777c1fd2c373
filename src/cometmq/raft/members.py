"""The members of a group, and the log entries that change the member list."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from cometmq.errors import RaftRefused

# Maximum number of members of one group, voters and learners together.
MAX_MEMBERS = 31
# Maximum number of member changes in one log. The limit is generous: operators make these changes by hand.
MAX_MEMBERS_ENTRIES = 1_000


class Members(msgspec.Struct, frozen=True):
    """The members of a group, by id.

    Learners receive the log and have no vote. A member that joins an existing group starts with an empty list
    and receives the list from the leader.

    The methods `with_learner`, `with_voter` and `without` return the list after a change. They raise
    RaftRefused for a change that is not possible.
    """

    voters: frozenset[str] = frozenset()
    learners: frozenset[str] = frozenset()

    def has_quorum(self, of: Collection[str]) -> bool:
        """Return whether the ids in `of` include more than half of the voters."""
        return len(self.voters.intersection(of)) > len(self.voters) // 2

    @property
    def all_ids(self) -> frozenset[str]:
        return self.voters | self.learners

    def with_learner(self, member: str) -> Members:
        if not member or member in self.all_ids:
            raise RaftRefused(f"{member} is already a member")
        if len(self.all_ids) >= MAX_MEMBERS:
            raise RaftRefused(f"a group has at most {MAX_MEMBERS} members")
        return Members(self.voters, self.learners | {member})

    def with_voter(self, member: str) -> Members:
        if member not in self.learners:
            raise RaftRefused(f"{member} is not a learner")
        return Members(self.voters | {member}, self.learners - {member})

    def without(self, member: str) -> Members:
        if member not in self.all_ids:
            raise RaftRefused(f"{member} is not a member")
        if self.voters == {member}:
            raise RaftRefused(f"{member} is the last voter")
        return Members(self.voters - {member}, self.learners - {member})


class MembersEntry(msgspec.Struct, frozen=True):
    """A member list as an entry of the log. It takes effect when it is appended, before it is committed.

    Attributes:
        index, term: The index and term of the entry. Both are -1 for the list that a group starts with.
        members: The list.
    """

    index: int
    term: int
    members: Members


class MembersHistory:
    """The member lists of a log, in order.

    There is always at least one list: the first list is in force at the beginning of the log.
    """

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
        return len(self._entries) >= MAX_MEMBERS_ENTRIES

    def at(self, index: int) -> MembersEntry:
        """Return the member list in force at the entry `index`."""
        return next((each for each in reversed(self._entries) if each.index <= index), self._entries[0])

    def since(self, index: int) -> list[Members]:
        """Return the member list in force at the entry `index`, and all later member lists."""
        return [self.at(index).members, *(each.members for each in self._entries if each.index > index)]

    def between(self, first: int, last: int) -> tuple[MembersEntry, ...]:
        """Return the member lists that are stored in the entries `first` to `last`."""
        if self.newest.index < first:
            return ()
        return tuple(each for each in self._entries if first <= each.index <= last)

    def add(self, entry: MembersEntry) -> None:
        self._entries.append(entry)

    def restart(self, entry: MembersEntry) -> None:
        self._entries = [entry]

    def cut(self, first: int) -> None:
        self._entries = [each for each in self._entries if each.index < first] or self._entries[:1]

    def forget_before(self, first: int) -> None:
        """Remove the member lists that a log beginning at the entry `first` does not need."""
        in_force = self.at(first - 1)
        self._entries = [in_force, *(each for each in self._entries if each.index > in_force.index)]
