"""The log of a slave: the bytes of its master's log at the same positions.

The bytes arrive in the order of the master's log, in pieces that may end anywhere. The written part always
ends with a complete, checked record, or at the end of a segment; an incomplete record waits in memory. So
everything on the disk can be served, and recovery finds an ordinary log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from cometmq import logs
from cometmq.errors import StoreError, Terminal
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.layout import BLANK_MAGIC, BLANK_SIZE, MAGIC_V1, MAGIC_V2, MIN_SIZE, START
from cometmq.protocol.record.many import MAX_BATCH_RECORDS, MIN_GROUP_RECORDS, RecordGroup, valid_group
from cometmq.protocol.record.one import Facts, record_facts
from cometmq.store.base.disk import Buffer
from cometmq.store.base.refusal import Flag, RunningFlags, StoreRefused
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.writing.record_dispatch import Arrivals

log = logs.logger(__name__)

_PIECE = 1 << 20  # Maximum number of bytes that are added to the log's write buffer at a time


class ReplicaMismatch(StoreError, Terminal):
    """Raised if received bytes do not begin at the position where the log continues."""

    def __init__(self, own_end: int, position: int) -> None:
        super().__init__(f"the log continues at {own_end}, but the master sends data from {position}")
        self.args = (own_end, position)
        self.own_end = own_end
        self.position = position


class ReplicaDamaged(StoreError, Terminal):
    """Raised if received bytes are neither a record nor the end of a segment."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(f"the master's log at {position}: {problem}")
        self.args = (position, problem)
        self.position = position


class ReplicaCommit(msgspec.Struct, gc=False):
    """The outcome of one commit: the end of the log, and otherwise what a `Commit` of the store contains.

    `error` is why the bytes after `end` were dropped, or None.
    """

    end: int
    visible: int = 0
    arrivals: Arrivals = []
    error: StoreRefused | ReplicaDamaged | None = None


@dataclass(eq=False)
class ReplicaLog:
    """Stores the bytes that a master sends. All methods must be called on the loop.

    Memory use is limited by the caller: this object holds the bytes that arrived since the last commit, and
    an incomplete record, up to the end of its segment.
    """

    commit_log: CommitLog
    flusher: LogFlusher
    flags: RunningFlags
    written: Callable[[Sequence[RecordGroup]], tuple[int, Arrivals]]
    """Makes written records visible (see `MessageStore.commit`)."""

    def __post_init__(self) -> None:
        self._chunks: list[bytes] = []
        self._waiting = 0  # number of received bytes that are not written yet
        self._wanted = 0  # Number of bytes after the end of the log that are needed for the next write
        self._whole = 0  # Total size, in bytes, of the complete records that the last `_groups` found
        self._damage: ReplicaDamaged | None = None

    @property
    def empty(self) -> bool:
        """Whether the log holds no record. Then `append` accepts data from the beginning of any segment."""
        return self.commit_log.end == self.commit_log.min_position

    @property
    def end(self) -> int:
        """The end of the written log, where the master continues; 0 if it must select the first segment."""
        return 0 if self.empty else self.commit_log.end

    @property
    def next(self) -> int:
        """The log position at which the next bytes for `append` must begin."""
        return self.commit_log.end + self._waiting

    @property
    def safe(self) -> int:
        """The log position that a slave reports to its master: with SYNC_FLUSH, the end of the synced log."""
        return min(self.flusher.flushed, self.end) if self.flusher.config.sync_flush else self.end

    def append(self, position: int, data: Buffer) -> None:
        """Queue bytes copied from the master's log, to be written by the next commit.

        Raises:
            ReplicaMismatch: `position` is not `next` or, if the log is `empty`, the beginning of any segment.
            OSError: The log cannot begin at `position`.
        """
        if position != self.next:
            if not self.empty or self._waiting or position < 0 or position % self.commit_log.segment_size:
                raise ReplicaMismatch(self.next, position)
            self.commit_log.begin_at(position)
            self.flusher.flushed = position  # No record before `position` exists, so none has to be flushed
        self._chunks.append(bytes(data))
        self._waiting += len(data)

    def forget(self) -> None:
        """Drop unwritten bytes, because the connection is closed. The master will send the bytes again."""
        self._chunks.clear()
        self._waiting = self._wanted = 0

    def commit(self) -> ReplicaCommit:
        """Write the complete records among the queued bytes, and dispatch them."""
        done = ReplicaCommit(self.commit_log.end)
        if self._waiting < max(self._wanted, 1):
            return done
        # The flag DISK_FULL alone does not refuse the bytes: the write raises an error if no space is left.
        if self.flags.reasons.keys() - {Flag.DISK_FULL}:
            why = f"the store accepts no messages: {self.flags.why()}"
            done.error = StoreRefused(ResponseCode.SERVICE_NOT_AVAILABLE, why)
        data = b"".join(self._chunks)
        at = 0
        while done.error is None and at < len(data):
            used = self._commit_part(data, at, done)
            at += used
            if not used or self._wanted:
                break
        self._chunks = [data[at:]] if at < len(data) else []
        self._waiting = len(data) - at
        if done.error is not None:
            self.forget()
        done.end = self.commit_log.end
        return done

    def _commit_part(self, data: bytes, at: int, done: ReplicaCommit) -> int:
        """Write and dispatch the complete records at the beginning of data[at:], up to the segment's end.

        Return the number of bytes written, including a blank record; 0 if the first record is incomplete.
        """
        size = self.commit_log.segment_size
        start = self.commit_log.end
        stop = start - start % size + size
        part = data if at == 0 and len(data) <= stop - start else data[at : at + stop - start]
        self._damage = None
        self._wanted = 0
        groups = list(self._groups(part, start, stop))
        done.error = self._damage
        length = self._whole
        if not length:
            return 0
        try:
            for piece_at in range(0, length, _PIECE):
                with memoryview(part)[piece_at : min(piece_at + _PIECE, length)] as piece:
                    self.commit_log.claim(len(piece), 0)
                    self.commit_log.put(piece)
            self.commit_log.write_tick()
        except OSError as failure:
            log.error("data of the master could not be written: %s", failure)
            why = f"the commit log could not be written: {failure.strerror}"
            done.error = StoreRefused(ResponseCode.SYSTEM_ERROR, why)
            return 0
        visible, arrivals = self.written(groups)
        done.visible += visible
        done.arrivals += arrivals
        return length

    def _groups(self, data: bytes, start: int, stop: int) -> Iterator[RecordGroup]:
        """Yield the complete records at the beginning of `data`, in groups.

        `data` begins at log position `start`; `stop` is the end of the segment. After the iteration, `_whole`
        is the number of bytes in the complete records, including a blank record. If an incomplete record
        follows, `_wanted` is its length. The first 8 bytes of a record contain its length; if even these are
        incomplete, `_wanted` is 8. If invalid data follows, `_damage` describes it.
        """
        at = self._whole = 0
        few: list[Facts] = []
        while at < len(data):
            group = valid_group(data, at, start + at, MAX_BATCH_RECORDS) if not few else None
            if group is not None:
                yield group
                at = self._whole = group.end - start
                continue
            self._wanted, problem = _item(data, at, stop - start - at)
            if problem or self._wanted > len(data) - at:
                break
            if START.unpack_from(data, at)[1] != BLANK_MAGIC:
                facts = record_facts(data, at, start + at)
                if facts is None:
                    problem = "a record whose parts, position or CRC are wrong"
                    break
                few.append(facts)
            at += self._wanted
            self._whole, self._wanted = at, 0
            if len(few) == MIN_GROUP_RECORDS:
                yield RecordGroup.of(few)
                few = []
        else:
            problem = ""
        if few:
            yield RecordGroup.of(few)
        if problem:
            self._damage = ReplicaDamaged(start + at, problem)


def _item(data: bytes, at: int, room: int) -> tuple[int, str]:
    """Return the length of the record at data[at:], and a description of its defect ("" for none).

    The first 8 bytes of a record contain its length. If `data` ends within these bytes, the returned length
    is 8. `room` is the number of bytes from the beginning of the record to the end of the segment.
    """
    if room < BLANK_SIZE:
        return 0, f"{room} bytes are left in the segment, which no blank record closes"
    if len(data) - at < BLANK_SIZE:
        return BLANK_SIZE, ""
    size, magic = START.unpack_from(data, at)
    if magic == BLANK_MAGIC:
        if size != room:
            return 0, f"{size} bytes to the end of the segment, here there are {room}: are they of one size?"
    elif magic not in (MAGIC_V1, MAGIC_V2):
        return 0, f"no record begins there (magic {magic & 0xFFFFFFFF:08X})"
    elif not MIN_SIZE <= size <= room - BLANK_SIZE:
        return 0, f"a record of {size} bytes, where the segment has room for {room - BLANK_SIZE}"
    return size, ""
