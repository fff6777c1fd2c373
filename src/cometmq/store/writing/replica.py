"""The log of a slave: bytes of its master's log, at the same positions.

They come as they lie in the master's segments, cut anywhere. What is written ends with a whole record that
was checked, or with the end of a segment; the beginning of a record waits in memory for its rest. So whatever
is on the disk can be served, and recovery finds nothing there that an ordinary log would not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from cometmq import logs
from cometmq.errors import StoreError, Terminal
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.layout import (
    BLANK_MAGIC,
    BLANK_SIZE,
    MAGIC_V1,
    MAGIC_V2,
    MIN_SIZE,
    START,
)
from cometmq.protocol.record.many import LONGEST_RUN, SHORTEST_RUN, Run, valid_run
from cometmq.protocol.record.one import Facts, record_facts
from cometmq.store.base.disk import Buffer
from cometmq.store.base.flags import Flag, RunningFlags
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.writing.record_dispatch import Arrivals

log = logs.logger(__name__)

_PIECE = 1 << 20  # bytes that go into the tick's buffer together


class ReplicaMismatch(StoreError, Terminal):
    """Bytes of the master's log for another position than the one where this log goes on."""

    def __init__(self, own_end: int, position: int) -> None:
        super().__init__(f"the log goes on at {own_end}, the master sends what begins at {position}")
        self.args = (own_end, position)
        self.own_end = own_end
        self.position = position


class ReplicaDamaged(StoreError, Terminal):
    """What the master has sent for a log position is neither a record nor the end of a segment."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(f"the master's log at {position}: {problem}")
        self.args = (position, problem)
        self.position = position


class ReplicaCommit(msgspec.Struct, gc=False):
    """Outcome of one tick. `end`: that of the log. `visible`: how many messages became so; `arrivals`: those
    in watched queues. `error`: what is behind `end` was not written, and is forgotten."""

    end: int
    visible: int = 0
    arrivals: Arrivals = []
    error: StoreRefused | ReplicaDamaged | None = None


class ReplicaLog:
    """Takes what a master sends. Loop thread only.

    Bounded by whoever appends: a tick holds what came in it, and of a record that has not come as a whole, at
    most what its segment has room for.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        flusher: LogFlusher,
        flags: RunningFlags,
        written: Callable[[Sequence[Run]], tuple[int, Arrivals]],
    ) -> None:
        """written: makes written records visible, now or with their flush; returns how many, and arrivals."""
        self._log = commit_log
        self._flusher = flusher
        self._flags = flags
        self._written = written
        self._chunks: list[bytes] = []
        self._waiting = 0  # bytes in them
        self._wanted = 0  # with less nothing can be done
        self._whole = 0  # bytes of whole records in what was looked at last
        self._damage: ReplicaDamaged | None = None

    @property
    def empty(self) -> bool:
        """Whether the log holds no record: then it begins where the master says."""
        return self._log.end == self._log.min_position

    @property
    def end(self) -> int:
        """End of what was written: where the master is to go on after a new connection. 0 if there is no
        record: the master then chooses a segment."""
        return 0 if self.empty else self._log.end

    @property
    def next(self) -> int:
        """Log position of the bytes to be appended next."""
        return self._log.end + self._waiting

    @property
    def safe(self) -> int:
        """What a slave tells its master to have: up to `end`; with SYNC_FLUSH what is on the device."""
        if self._flusher.config.sync_flush:
            return min(self._flusher.flushed, self.end)
        return self.end

    def append(self, position: int, data: Buffer) -> None:
        """Take bytes of the master's log into this tick. They are copied.

        `position` is `next`; if the log is `empty`, also the beginning of any segment. Raises ReplicaMismatch
        otherwise, OSError."""
        if position != self.next:
            if not self.empty or self._waiting or position < 0 or position % self._log.segment_size:
                raise ReplicaMismatch(self.next, position)
            self._log.begin_at(position)
            self._flusher.flushed = position  # nothing lies in front of it
        self._chunks.append(bytes(data))
        self._waiting += len(data)

    def forget(self) -> None:
        """Drop what is not written: the connection is closed. The master will send it again."""
        self._chunks.clear()
        self._waiting = self._wanted = 0

    def commit(self) -> ReplicaCommit:
        """Write the whole records that came since the last call, and dispatch them."""
        done = ReplicaCommit(self._log.end)
        if self._waiting < max(self._wanted, 1):
            return done
        if self._flags.reasons.keys() - {Flag.DISK_FULL}:  # a full disk says so itself
            why = f"the store takes no messages: {self._flags.why()}"
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
        done.end = self._log.end
        return done

    def _commit_part(self, data: bytes, at: int, done: ReplicaCommit) -> int:
        """Write and dispatch the whole records from data[at:] that lie in one segment. Returns their length,
        that of the blank record included; 0 if there is nothing to be done without more bytes."""
        size = self._log.segment_size
        start = self._log.end
        stop = start - start % size + size
        part = data if at == 0 and len(data) <= stop - start else data[at : at + stop - start]
        self._damage = None
        self._wanted = 0
        runs = list(self._runs(part, start, stop))
        done.error = self._damage
        length = self._whole
        if not length:
            return 0
        try:
            for piece_at in range(0, length, _PIECE):
                with memoryview(part)[piece_at : min(piece_at + _PIECE, length)] as piece:
                    self._log.claim(len(piece), 0)
                    self._log.put(piece)
            self._log.write_tick()
        except OSError as failure:
            log.error("what the master sent could not be written: %s", failure)
            why = f"the commit log could not be written: {failure.strerror}"
            done.error = StoreRefused(ResponseCode.SYSTEM_ERROR, why)
            return 0
        visible, arrivals = self._written(runs)
        done.visible += visible
        done.arrivals += arrivals
        return length

    def _runs(self, data: bytes, start: int, stop: int) -> Iterator[Run]:
        """The whole records in `data`, which is log position `start` on in a segment that ends at `stop`.

        Afterwards `_whole` is their length, that of a whole blank record included; `_wanted` the bytes from
        there on that are needed to go on; or `_damage` says why nothing can."""
        at = self._whole = 0
        few: list[Facts] = []
        while at < len(data):
            run = valid_run(data, at, start + at, LONGEST_RUN) if not few else None
            if run is not None:
                yield run
                at = self._whole = run.end - start
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
            if len(few) == SHORTEST_RUN:
                yield Run.of(few)
                few = []
        else:
            problem = ""
        if few:
            yield Run.of(few)
        if problem:
            self._damage = ReplicaDamaged(start + at, problem)


def _item(data: bytes, at: int, room: int) -> tuple[int, str]:
    """(length of the record at data[at:], or bytes that tell it; why there is none). room: to the segment's
    end."""
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
