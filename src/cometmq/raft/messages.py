"""What members of a raft group say to each other, what they keep, and what a node asks of its shell.

An entry is known by its index (from 0 on, as DLedger counts) and term. NO_INDEX and NO_TERM stand for the
place before the first entry of a group.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import msgspec

from cometmq.errors import ConfigError, RaftMessageError
from cometmq.raft.members import MOST_CHANGES, MOST_MEMBERS, MembersEntry

NO_INDEX = -1
NO_TERM = -1
# No cluster gets there; what says so is damaged or hostile. An index unit lies at 32 times its index.
MOST_TERM = 1 << 62
MOST_INDEX = 1 << 56
# Of the numbers that suspect members draw. 0 is none.
MOST_RUN = (1 << 53) - 1
# Entries of one AppendRequest.
MOST_ENTRIES = 4_096
LONGEST_ID = 255


class Role(enum.Enum):
    """What a member is just now. A pre-candidate asks who would vote for it, without a new term."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class RaftOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a node behaves. Times are in ms.

    heartbeat_ms: a leader says something to each member at least this often. election_ms: a follower waits
    between this and twice this for its leader before it stands for election; a leader steps down when it has
    heard no majority for this long. frame_entries: most entries of one AppendRequest; frames: most requests
    to one follower that are not answered yet; outstanding: most proposed entries that are not committed
    yet. caught_up: a learner may be promoted when it lacks at most this many entries.
    """

    heartbeat_ms: int = 200
    election_ms: int = 1_000
    frame_entries: int = 1_024
    frames: int = 32
    outstanding: int = 10_000
    caught_up: int = 1_000

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_ms <= self.election_ms:
            raise ConfigError("election_ms", str(self.election_ms), f"at least twice {self.heartbeat_ms}")
        if not 0 < self.frame_entries <= MOST_ENTRIES:
            raise ConfigError("frame_entries", str(self.frame_entries), f"1 to {MOST_ENTRIES}")


class LogView(Protocol):
    """What a node must know of the log that its shell keeps. It reads `first`, `last` and `term_of` when it
    is made, and keeps account of its own from then on."""

    @property
    def first(self) -> int:
        """Index of the first entry; of the first one to come, if there is none."""

    @property
    def last(self) -> int:
        """Index of the last entry, `first` - 1 if there is none."""

    def term_of(self, index: int) -> int:
        """Term of an entry between `first` and `last`. Terms never fall from entry to entry."""

    def fit(self, first: int, stop: int) -> int:
        """The end (exclusive) of the entries from `first` on that one frame may carry: above `first`, at most
        `stop`."""


class HardState(msgspec.Struct, frozen=True):
    """What a member must keep beside its log, synced.

    members: all members entries of the log that are known here, oldest first. suspect: the log may have lost
    entries that were acknowledged (it was found damaged, not only torn, or empty); such a member has no vote,
    and acknowledges nothing, until a leader has given it all that it may have had. forgot: it has lost its
    term and vote, too.
    """

    term: int = 0
    vote: str = ""
    members: tuple[MembersEntry, ...] = ()
    suspect: bool = False
    forgot: bool = False


# -- messages


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What every message between members says: the group, who sends it to whom, and the sender's term.

    run: the number that a suspect member has drawn at its start, in what it says and in what it is answered;
    0 for none.
    """

    group: str
    sender: str
    to: str
    term: int
    run: int = 0


class VoteRequest(Message, frozen=True, kw_only=True):
    """A candidate asks for a vote in `term`. last_index, last_term: the last entry of its log.

    pre: it only asks who would vote for it, and has not raised its term to `term` yet. transfer: the leader
    has asked it to stand, so voters do not wait until they miss the leader.
    """

    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


class VoteResponse(Message, frozen=True, kw_only=True):
    """granted: with the term that was asked for; refused: with the voter's own. blank: the voter has neither
    entries nor a term."""

    granted: bool
    pre: bool = False
    blank: bool = False


class AppendRequest(Message, frozen=True, kw_only=True):
    """The leader of `term` hands over entries, or none (which is its heart-beat).

    prev_index, prev_term: the entry before them. prev_term is NO_TERM where the leader's log begins: a
    follower whose log does not join there starts anew. count entries follow, all of entries_term. last: the
    end of the leader's log; commit: what the leader knows to be committed. members: the members entries
    among them, and where the log begins also those in force there. payload: the bytes of the entries, put
    there by the shell.
    """

    prev_index: int
    prev_term: int
    count: int = 0
    entries_term: int = 0
    last: int
    commit: int
    members: tuple[MembersEntry, ...] = ()
    payload: Any = None


class AppendResponse(Message, frozen=True, kw_only=True):
    """match: up to this index the follower has what the leader has, as durably as its flush mode promises
    (NO_INDEX from one that is suspect); written: the same, durable or not.

    rejected: it does not have the entry prev_index of the request; hint_index and hint_term are its last
    entry that may agree with the leader's. full: its disk has little room.
    """

    match: int
    written: int
    rejected: bool = False
    prev_index: int = NO_INDEX
    hint_index: int = NO_INDEX
    hint_term: int = NO_TERM
    full: bool = False


class TransferRequest(Message, frozen=True, kw_only=True):
    """The leader asks a member that has all its entries to stand for election at once."""


AnyMessage = VoteRequest | VoteResponse | AppendRequest | AppendResponse | TransferRequest


# -- effects


class Truncate(msgspec.Struct, frozen=True):
    """Drop the entries from `first` on. None of them was committed."""

    first: int


class Reset(msgspec.Struct, frozen=True):
    """Drop the whole log: it begins anew, with the entry `first` to come. What it held is not the group's any
    more (the leader has deleted its oldest files since)."""

    first: int


class Append(msgspec.Struct, frozen=True):
    """Write `count` entries from `first` on, of this term: those of `payload` behind its first `skip`
    ones."""

    first: int
    count: int
    term: int
    skip: int
    payload: Any


class Proposed(msgspec.Struct, frozen=True):
    """Write the `count` entries from `first` on, of this term, that the shell has proposed."""

    first: int
    count: int
    term: int


class AppendOwn(msgspec.Struct, frozen=True):
    """Write an entry of the node's own: new members, or None for the one with which a leader begins its
    term."""

    index: int
    term: int
    members: MembersEntry | None


LogChange = Proposed | Append | AppendOwn | Truncate | Reset


class RoleChange(msgspec.Struct, frozen=True):
    """What this member is now; leader: whom it follows, "" if it knows none. reason: why it stopped
    leading."""

    role: Role
    term: int
    leader: str
    reason: str = ""


class Effects(msgspec.Struct):
    """What the shell has to do, in the order of the fields; then it takes the node's `messages`.

    log: changes of the log, in this order; `persisted` tells when they are durable. state: to be saved and
    synced, then `state_saved` is called; the node itself holds back all messages until then. committed:
    entries up to here are committed, and durable here. role: set if it changed.
    """

    log: list[LogChange] = []
    state: HardState | None = None
    committed: int | None = None
    role: RoleChange | None = None


# -- what a message may say


def check(message: AnyMessage) -> None:
    """Refuse what no member would send. RaftMessageError names the field."""
    for name in ("group", "sender", "to"):
        if not 0 < len(getattr(message, name)) <= LONGEST_ID:
            raise RaftMessageError(name, getattr(message, name), f"expected 1 to {LONGEST_ID} characters")
    within("term", message.term, 0, MOST_TERM)
    within("run", message.run, 0, MOST_RUN)
    match message:
        case VoteRequest():
            within("last_index", message.last_index, NO_INDEX, MOST_INDEX)
            within("last_term", message.last_term, NO_TERM, message.term)
        case AppendRequest():
            check_append(message)
        case AppendResponse():
            within("written", message.written, NO_INDEX, MOST_INDEX)
            within("match", message.match, NO_INDEX, message.written)
            within("prev_index", message.prev_index, NO_INDEX, MOST_INDEX)
            within("hint_index", message.hint_index, NO_INDEX, MOST_INDEX)
            within("hint_term", message.hint_term, NO_TERM, message.term)
        case _:
            pass


def check_append(request: AppendRequest) -> None:
    within("prev_index", request.prev_index, NO_INDEX, MOST_INDEX)
    within("prev_term", request.prev_term, NO_TERM, request.term)
    within("count", request.count, 0, MOST_ENTRIES)
    if request.count:
        within("entries_term", request.entries_term, max(request.prev_term, 0), request.term)
    end = request.prev_index + request.count
    within("last", request.last, end, MOST_INDEX)
    within("commit", request.commit, NO_INDEX, request.last)
    within("number of members entries", len(request.members), 0, MOST_CHANGES)
    index = NO_INDEX - 1
    for entry in request.members:
        at_begin = request.prev_term == NO_TERM and index < NO_INDEX
        within(
            "index of members",
            entry.index,
            max(index + 1, NO_INDEX if at_begin else request.prev_index + 1),
            end,
        )
        within("term of members", entry.term, NO_TERM, request.term)
        within("number of members", len(entry.members.everybody), 0, MOST_MEMBERS)
        longest = max(map(len, entry.members.everybody), default=1)
        within("length of a member's name", longest, 1, LONGEST_ID)
        index = entry.index


def within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RaftMessageError(field, value, f"expected {low} to {high}")
