"""A single node with hand-made messages, tested step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.raft.cluster import Disk

from cometmq.raft import (
    AnyMessage,
    Append,
    AppendOwn,
    AppendRequest,
    AppendResponse,
    Effects,
    HardState,
    Members,
    MembersEntry,
    Proposed,
    RaftNode,
    RaftOptions,
    Reset,
    Truncate,
    VoteRequest,
    VoteResponse,
)  # fmt: skip

ELECTION_MS = 1_000
Maker = Callable[..., RaftNode]


class Solo:
    """The member n0 of a group of n0 to n2 (or as in `members`), with entries of these terms in its log.

    Its disk is fast: data that `step` writes or saves is durable immediately, unless `slow` is set.
    """

    def __init__(
        self,
        terms: Sequence[int] = (),
        term: int | None = None,
        vote: str = "",
        members: Members | None = None,
        suspect: bool = False,
        forgot: bool = False,
        first: int = 0,
        committed: int | None = None,
        make: Maker = RaftNode,
    ) -> None:
        members = members or Members(frozenset(("n0", "n1", "n2")))
        term = max(terms, default=0) if term is None else term
        state = HardState(term, vote, (MembersEntry(-1, -1, members),), suspect, forgot)
        self.disk = Disk(state, first, [(each, None) for each in terms])
        self.node = make(
            *("n0", "g", self.disk, state, lambda low, high: low, RaftOptions(election_ms=ELECTION_MS)),
            committed=committed,
        )
        self.now = 0
        self.slow = False
        self.seen = Effects()
        self.reasons: list[str] = []  # reasons why it stopped leading
        self.node.tick(0)

    @property
    def terms(self) -> list[int]:
        return [term for term, _ in self.disk.log]

    def step(self, *messages: AnyMessage, ms: int = 0) -> list[AnyMessage]:
        """Advance the time, receive messages, and return the messages that the node sends."""
        self.now += ms
        self.node.tick(self.now)
        for message in messages:
            self.node.receive(message)
        return self.turn()

    def turn(self) -> list[AnyMessage]:
        said: list[AnyMessage] = []
        for _ in range(4):
            effects = self.seen = self.node.effects()
            for change in effects.log:
                self.write(change)
            if effects.role is not None and effects.role.reason:
                self.reasons.append(effects.role.reason)
            if not self.slow:
                if effects.state is not None:
                    self.node.state_saved(effects.state)
                if self.disk.log:
                    self.node.persisted(self.disk.last, self.disk.term_of(self.disk.last))
            said += self.node.messages()
        return said

    def write(self, change: Any) -> None:
        match change:
            case Truncate():
                del self.disk.log[change.first - self.disk.first :]
            case Reset():
                self.disk.begin(change.first, [])
            case AppendOwn():
                self.disk.log.append((change.term, change.members))
            case Append() | Proposed():
                assert change.first == self.disk.last + 1
                self.disk.log += [(change.term, None)] * change.count

    def stand(self) -> list[AnyMessage]:
        """Let the election timeout pass and grant two pre-votes, so that the member is a candidate."""
        self.step(ms=ELECTION_MS)
        return self.step(*(yes(voter, self.node.term + 1, pre=True) for voter in ("n1", "n2")))

    def lead(self) -> list[AnyMessage]:
        self.stand()
        return self.step(yes("n1", self.node.term))


def yes(sender: str, term: int, pre: bool = False) -> VoteResponse:
    return VoteResponse(group="g", sender=sender, to="n0", term=term, granted=True, pre=pre)


def ask(sender: str, term: int, last: tuple[int, int] = (-1, -1), **more: bool) -> VoteRequest:
    """Build a vote request; `last` is index and term of the candidate's last entry."""
    return VoteRequest(
        group="g", sender=sender, to="n0", term=term, last_index=last[0], last_term=last[1], **more
    )


def append(
    sender: str, term: int, prev: tuple[int, int], *entries: int, commit: int = -1, **more: Any
) -> AppendRequest:
    """Build an append request; `entries` are the terms of its entries."""
    fields = {
        "prev_index": prev[0],
        "prev_term": prev[1],
        "count": len(entries),
        "entries_term": entries[0] if entries else 0,
        "last": prev[0] + len(entries),
        "commit": commit,
        "payload": [(each, None) for each in entries],
    }
    return AppendRequest(group="g", sender=sender, to="n0", term=term, **(fields | more))


def has(sender: str, term: int, match: int, written: int | None = None) -> AppendResponse:
    written = match if written is None else written
    return AppendResponse(group="g", sender=sender, to="n0", term=term, match=match, written=written)
