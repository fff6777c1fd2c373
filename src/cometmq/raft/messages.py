"""The messages between members of a raft group, their saved state, and the effects that a node requests.

An entry is identified by its index (from 0, as in DLedger) and its term. NO_INDEX and NO_TERM stand for the
position before the first entry of a group. The names of message classes and fields are part of the wire
format.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from cometmq.errors import ConfigError, RaftMessageError
from cometmq.raft.members import MAX_MEMBERS, MAX_MEMBERS_ENTRIES, MembersEntry

NO_INDEX = -1
NO_TERM = -1
# No cluster reaches MAX_TERM or MAX_INDEX, so a message with a greater value is damaged or hostile. MAX_INDEX
# keeps offsets in the index file within 63 bits, because the unit of an entry begins at 32 times the index of
# the entry.
MAX_TERM = 1 << 62
MAX_INDEX = 1 << 56
# The largest incarnation number that a suspect member draws at random. The number 0 means "not suspect".
MAX_INCARNATION = (1 << 53) - 1
MAX_ENTRIES_PER_REQUEST = 4_096
MAX_ID_LENGTH = 255
# Maximum number of messages that wait until the state is saved. Further messages are dropped: the protocol
# tolerates lost messages.
MAX_WAITING_MESSAGES = 4 * MAX_MEMBERS


class Role(enum.Enum):
    """The role of a member. A pre-candidate requests votes without starting a new term."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class RaftOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The timing and limits of a node.

    Attributes:
        heartbeat_ms: The maximum interval between two requests of a leader to the same member, in ms.
        election_ms: The election timeout, in ms. A follower that receives nothing from a leader for a random
            time of one to two timeouts requests votes. A leader steps down if no majority has responded for
            one timeout.
        frame_entries: The maximum number of entries in one AppendRequest.
        frames: The maximum number of unanswered requests to one follower.
        outstanding: The maximum number of proposed entries that are not committed yet.
        caught_up: The maximum number of missing entries with which a learner may be promoted.

    Raises:
        ConfigError: A value is out of range.
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
        if not 0 < self.frame_entries <= MAX_ENTRIES_PER_REQUEST:
            raise ConfigError("frame_entries", str(self.frame_entries), f"1 to {MAX_ENTRIES_PER_REQUEST}")


class LogView(Protocol):
    """The stored log of a member, as a node reads it.

    The node reads `first`, `last` and `term_of` once, when it is constructed, and then maintains its own
    `LogState`.
    """

    @property
    def first(self) -> int:
        """The index of the first entry. In an empty log, the index of the next entry to be written."""

    @property
    def last(self) -> int:
        """The index of the last entry, or `first` - 1 if the log is empty."""

    def term_of(self, index: int) -> int:
        """Return the term of an entry between `first` and `last`. Terms never decrease."""

    def fit(self, first: int, stop: int) -> int:
        """Return the index after the last entry that fits into one request that begins with `first`.

        The result is at most `stop`. It is greater than `first`, because a request can always hold one entry.
        """


class HardState(msgspec.Struct, frozen=True):
    """The state that a member saves and syncs beside its log.

    Attributes:
        term, vote: The current term, and the member that this member voted for in that term ("" for none).
        members: All known member lists of the log, oldest first.
        suspect: The log may have lost acknowledged entries: it was found damaged (not only torn) or empty.
            The member has no vote and acknowledges nothing until a leader has sent it all entries that it may
            have had.
        forgot: The member has also lost its term and vote.
    """

    term: int = 0
    vote: str = ""
    members: tuple[MembersEntry, ...] = ()
    suspect: bool = False
    forgot: bool = False


# -- messages


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The fields of every message between members.

    Attributes:
        group: The group's name.
        sender, to: The ids of the sending and the receiving member.
        term: The sender's term.
        run: In messages of a suspect member and in the responses to them, the incarnation number of that
            member; otherwise 0.
    """

    group: str
    sender: str
    to: str
    term: int
    run: int = 0


class VoteRequest(Message, frozen=True, kw_only=True):
    """A candidate's request for a vote in `term`.

    Attributes:
        last_index, last_term: The last entry of the candidate's log.
        pre: Whether this is a pre-vote: the candidate has not started `term` yet.
        transfer: Whether the leader has requested this election. Voters then ignore that they had contact
            with the leader recently.
    """

    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


class VoteResponse(Message, frozen=True, kw_only=True):
    """The response to a VoteRequest.

    If the vote is granted, `term` is the requested term, else the voter's own term.

    Attributes:
        granted, pre: Whether the vote is granted; whether it is a pre-vote.
        blank: Whether the voter has no entries and has seen no term.
    """

    granted: bool
    pre: bool = False
    blank: bool = False


class AppendRequest(Message, frozen=True, kw_only=True):
    """Entries from the leader of `term`. A request without entries is a heartbeat.

    Attributes:
        prev_index, prev_term: The entry before the first one sent. prev_term is NO_TERM if
            this request begins with the first entry of the leader's log. A follower whose log lacks that
            entry then discards its log and starts an empty one.
        count, entries_term: The number of entries, and the term that all of them have.
        last: The last entry of the leader's log.
        commit: The last entry that the leader has committed.
        members: The member lists among the entries. If the request begins with the first entry of the
            leader's log, the list in force before that entry comes first.
        payload: The bytes of the entries, added by the caller.
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
    """A follower's response to an AppendRequest.

    Attributes:
        match: The last entry that equals the leader's entry and is as durable as the flush mode promises. A
            suspect member sends NO_INDEX.
        written: The last entry that equals the leader's entry, durable or not.
        rejected: Whether the follower lacks the entry `prev_index` of the request.
        prev_index: The field `prev_index` of the request.
        hint_index, hint_term: If `rejected`, the follower's last entry that may equal the leader's.
        full: Whether the follower's disk is nearly full.
    """

    match: int
    written: int
    rejected: bool = False
    prev_index: int = NO_INDEX
    hint_index: int = NO_INDEX
    hint_term: int = NO_TERM
    full: bool = False


class TransferRequest(Message, frozen=True, kw_only=True):
    """The leader's request to an up-to-date member to start an election immediately."""


AnyMessage = VoteRequest | VoteResponse | AppendRequest | AppendResponse | TransferRequest


class Outbox:
    """The unsent messages of one member."""

    def __init__(self, group: str, me: str) -> None:
        self._group = group
        self._me = me
        self._waiting: list[AnyMessage] = []

    def send(self, kind: Callable[..., AnyMessage], to: str, **fields: Any) -> None:
        """Queue a message of the class `kind` for another member."""
        self.add([kind(group=self._group, sender=self._me, to=to, **fields)])

    def add(self, messages: Iterable[AnyMessage]) -> None:
        """Queue messages, and drop those that exceed `MAX_WAITING_MESSAGES`."""
        for message in messages:
            if len(self._waiting) < MAX_WAITING_MESSAGES:
                self._waiting.append(message)

    def take(self) -> list[AnyMessage]:
        """Remove and return all queued messages."""
        taken, self._waiting = self._waiting, []
        return taken


# -- effects


class Truncate(msgspec.Struct, frozen=True):
    """An instruction to remove the entry `first` and all later ones, none of which is committed."""

    first: int


class Reset(msgspec.Struct, frozen=True):
    """An instruction to remove the whole log. The next entry written is `first`.

    The log cannot be continued, because the leader has already deleted the entries that would follow it.
    """

    first: int


class Append(msgspec.Struct, frozen=True):
    """An instruction to write `count` entries of this term. The first of them has the index `first`.

    The entries are in `payload`, after `skip` entries that the log already holds.
    """

    first: int
    count: int
    term: int
    skip: int
    payload: Any


class Proposed(msgspec.Struct, frozen=True):
    """An instruction to write the next `count` entries that the caller proposed, from index `first` on."""

    first: int
    count: int
    term: int


class AppendOwn(msgspec.Struct, frozen=True):
    """An instruction to write an entry that the node created.

    Attributes:
        index, term: The index and term of the entry.
        members: The entry's member list. None stands for the empty entry with which a leader begins its term.
    """

    index: int
    term: int
    members: MembersEntry | None


LogChange = Proposed | Append | AppendOwn | Truncate | Reset


class RoleChange(msgspec.Struct, frozen=True):
    """A change of this member's role, term or leader.

    Attributes:
        role, term: The new role and term.
        leader: The leader's id, "" if it is unknown.
        reason: Why the member no longer leads; "" if it did not lead before.
    """

    role: Role
    term: int
    leader: str
    reason: str = ""


class Effects(msgspec.Struct):
    """The work that a node requests from its caller at the end of an event-loop iteration.

    The caller does the work in the order of the fields, and then calls `RaftNode.messages`.

    Attributes:
        log: Changes of the log, in order. The caller calls `persisted` when they are durable.
        state: The state to save and sync, after which the caller calls `state_saved`. The node holds back all
            messages until then.
        committed: The last entry that is committed and durable on this member, if it has changed since the
            previous call.
        role: The new role, if it changed.
    """

    log: list[LogChange] = []
    state: HardState | None = None
    committed: int | None = None
    role: RoleChange | None = None


# -- checks of received messages


def check_message(message: AnyMessage) -> None:
    """Raise RaftMessageError, which names the field, for a message that no member would send."""
    for name in ("group", "sender", "to"):
        if not 0 < len(getattr(message, name)) <= MAX_ID_LENGTH:
            raise RaftMessageError(name, getattr(message, name), f"expected 1 to {MAX_ID_LENGTH} characters")
    require_range("term", message.term, 0, MAX_TERM)
    require_range("run", message.run, 0, MAX_INCARNATION)
    match message:
        case VoteRequest():
            require_range("last_index", message.last_index, NO_INDEX, MAX_INDEX)
            require_range("last_term", message.last_term, NO_TERM, message.term)
        case AppendRequest():
            check_append_request(message)
        case AppendResponse():
            require_range("written", message.written, NO_INDEX, MAX_INDEX)
            require_range("match", message.match, NO_INDEX, message.written)
            require_range("prev_index", message.prev_index, NO_INDEX, MAX_INDEX)
            require_range("hint_index", message.hint_index, NO_INDEX, MAX_INDEX)
            require_range("hint_term", message.hint_term, NO_TERM, message.term)
        case _:
            pass


def check_append_request(request: AppendRequest) -> None:
    require_range("prev_index", request.prev_index, NO_INDEX, MAX_INDEX)
    require_range("prev_term", request.prev_term, NO_TERM, request.term)
    require_range("count", request.count, 0, MAX_ENTRIES_PER_REQUEST)
    if request.count:
        require_range("entries_term", request.entries_term, max(request.prev_term, 0), request.term)
    end = request.prev_index + request.count
    require_range("last", request.last, end, MAX_INDEX)
    require_range("commit", request.commit, NO_INDEX, request.last)
    require_range("number of members entries", len(request.members), 0, MAX_MEMBERS_ENTRIES)
    index = NO_INDEX - 1
    for entry in request.members:
        at_begin = request.prev_term == NO_TERM and index < NO_INDEX
        low = max(index + 1, NO_INDEX if at_begin else request.prev_index + 1)
        require_range("index of members", entry.index, low, end)
        require_range("term of members", entry.term, NO_TERM, request.term)
        require_range("number of members", len(entry.members.all_ids), 0, MAX_MEMBERS)
        longest = max(map(len, entry.members.all_ids), default=1)
        require_range("length of a member's name", longest, 1, MAX_ID_LENGTH)
        index = entry.index


def require_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RaftMessageError(field, value, f"expected {low} to {high}")
