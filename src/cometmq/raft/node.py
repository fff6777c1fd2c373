"""A member of a raft group: what it does at each event. No sockets, clocks or files in here."""

from __future__ import annotations

from collections.abc import Callable

from cometmq.raft.messages import AnyMessage, Effects, HardState, LogView, RaftOptions


class RaftNode:
    """One member of a group.

    The shell calls `tick` at the beginning of each turn of its loop, hands over what happened, and takes
    `effects` once at the end. All calls are quick and do no I/O.

    me, group: own id, and the group's name. log: what the log holds now, all of it durable. state: as it was
    saved last; its members entries are those found in the log, the first one what the group started with.
    between: a whole number between two, both included (`random.Random(seed).randint`). committed: what was
    reported as committed before the restart, if known.
    """

    def __init__(
        self,
        me: str,
        group: str,
        log: LogView,
        state: HardState,
        between: Callable[[int, int], int],
        options: RaftOptions | None = None,
        committed: int | None = None,
    ) -> None:
        raise NotImplementedError

    # -- events

    def tick(self, now_ms: int) -> None:
        """The time is `now_ms`, on a clock of the shell's. A step back or a pause does no harm."""
        raise NotImplementedError

    def receive(self, message: AnyMessage) -> None:
        """A member said something. RaftMessageError for what no member of this group would say; nothing has
        changed then."""
        raise NotImplementedError

    def propose(self, count: int) -> int:
        """`count` new entries follow the last one, of the current term; returns the index of the first.

        They are written when `effects` says Proposed, in order with other changes. RaftRefused when this
        member does not lead, has not yet committed the first entry of its term, hands its leadership over,
        or has too many proposals outstanding.
        """
        raise NotImplementedError

    def persisted(self, index: int, term: int) -> None:
        """The log is durable (as the flush mode promises) up to the entry `index` of `term`.

        A sync that began before a Truncate or Reset says nothing about entries behind the cut: the shell
        reports it with an index before the cut, or not at all.
        """
        raise NotImplementedError

    def state_saved(self, state: HardState) -> None:
        """What `effects` asked to save is durable."""
        raise NotImplementedError

    def disk_failed(self, last: int, reason: str) -> None:
        """The disk did not take what it was given: the log ends at `last`. A leader steps down, and hands
        over to the member that has most; until `disk_works` this member neither leads nor takes entries."""
        raise NotImplementedError

    def disk_works(self) -> None:
        """The disk takes writes again."""
        raise NotImplementedError

    def begins_at(self, first: int) -> None:
        """Retention has deleted the entries before `first`, which were committed."""
        raise NotImplementedError

    # -- what operators ask. RaftRefused says why not.

    def transfer(self, to: str) -> None:
        """Hand the leadership over to a voter, once it has all entries. Given up after an election
        time-out."""
        raise NotImplementedError

    def add_learner(self, member: str) -> None:
        """Let a member receive the log. As for all changes: one at a time, and none before the leader has
        committed an entry of its own term (docs/reference/raft.md, Membership)."""
        raise NotImplementedError

    def promote(self, member: str) -> None:
        """Give a learner that has caught up a vote."""
        raise NotImplementedError

    def remove(self, member: str) -> None:
        """Take a member out, voter or learner. A leader that removes itself steps down once that is
        committed."""
        raise NotImplementedError

    # -- what is to do

    def effects(self) -> Effects:
        """What is to do after the events of this turn."""
        raise NotImplementedError

    def due_ms(self) -> int:
        """The latest time at which `tick` must be called again, on the shell's clock."""
        raise NotImplementedError
