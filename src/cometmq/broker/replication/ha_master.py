"""The decisions of a master: what it sends to slaves, which reports count, how many slaves a write waits for.

The decisions depend only on the time and the events that are passed in; there is no I/O. The caller
(ha_server.py, or a simulation) reports connections, slaves' positions and completed sends. It calls `turn` at
the end of each event-loop tick with such an event, and at least every TURN_INTERVAL_S, and carries out the
effects that `turn` returns (docs/reference/storage.md, HA port, Waiting for slaves).

Differences from Apache's master:

- A slave's report, even its first one, counts only if the master can have sent the reported bytes. So a slave
  whose log is ahead of the master's log never ends a wait.
- A slave with an empty log receives the whole log, not only the last segment.
- With SYNC_FLUSH, only bytes that are on the disk are sent. So a slave is never ahead of the master after a
  power failure of the master.

The protocol of the HA port (docs/reference/storage.md, HA port): a slave sends only its position, as 8-byte
integers. The master sends frames: a position (8 bytes), a size (4 bytes), and that many bytes of its log. A
frame of size 0 is a heartbeat, with the position of the next log byte that the slave will receive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from cometmq.broker.base.config import BrokerConfig
from cometmq.store import SYNC_MASTER

TURN_INTERVAL_S = 0.5
"""The maximum interval, in seconds, between two calls of `HaMaster.turn`, which also detects timeouts."""
SEND_BYTES = 1 << 20
"""The maximum number of log bytes that one `Send` effect sends to a slave."""
NOWHERE = 1 << 62
"""Stands for a missing log position. It is greater than every real position."""
REPORT = struct.Struct(">q")
HEADER = struct.Struct(">qi")


class LogState(NamedTuple):
    """Positions in the master's log: its begin, the end of the part that may be sent, and its end.

    A slave that has a part of the log can continue at `readable`, which is before `first` if segments are in
    the object store. An empty slave begins at `first`, because its disk may not have room for all of them.
    """

    first: int
    sendable: int
    end: int
    segment_size: int
    readable: int


class Send(NamedTuple):
    """Send `size` bytes of the log, all in one segment, to a slave. Then call `HaMaster.taken`."""

    slave: int
    position: int
    size: int


class Beat(NamedTuple):
    """Send a heartbeat to a slave."""

    slave: int
    position: int


class Close(NamedTuple):
    """Close a slave's connection, which HaMaster has already removed."""

    slave: int
    reason: str


Effect = Send | Beat | Close


class Slave(msgspec.Struct, eq=False):
    """One connection of a slave. Positions are -1 before the first report.

    Attributes:
        first: The first reported position.
        acked: The last reported position that the master has accepted.
        sent: The next position to send.
    """

    host: str
    heard_at: float
    sent_at: float
    reported: int | None = None
    first: int = -1
    acked: int = -1
    sent: int = -1
    busy: bool = False  # Whether a `Send` effect has not been completed yet


class HaMaster:
    """The slaves of a master. Each connection is identified by a number that the caller has assigned."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._sync_master = config.store.broker_role == SYNC_MASTER  # it changes only at a start
        self.slaves: dict[int, Slave] = {}

    # -- events

    def opened(self, now: float, slave: int, host: str) -> None:
        self.slaves[slave] = Slave(host, now, now)

    def closed(self, slave: int) -> None:
        self.slaves.pop(slave, None)

    def reported(self, now: float, slave: int, position: int) -> None:
        """Record a slave's report that it has stored the log up to `position`."""
        known = self.slaves.get(slave)
        if known is not None:
            known.heard_at = now
            known.reported = position

    def taken(self, now: float, slave: int) -> None:
        """Record that a `Send` effect has been completed, so that more bytes can be sent to the slave."""
        known = self.slaves.get(slave)
        if known is not None:
            known.sent_at = now
            known.busy = False

    def turn(self, now: float, log: LogState) -> list[Effect]:
        """Apply the slaves' reports. Return the effects, which the caller must carry out now."""
        effects: list[Effect] = []
        for number, slave in list(self.slaves.items()):
            reason = self._judge(slave, log) or self._silent(now, slave)
            if reason:
                del self.slaves[number]
                effects.append(Close(number, reason))
            elif slave.acked >= 0 and not slave.busy:
                effect = self._next(now, number, slave, log)
                if effect is not None:
                    effects.append(effect)
        return effects

    # -- what a write waits for

    def needed(self, end: int) -> int | None:
        """Return how many slaves a write up to `end` must wait for, or None if too few slaves keep up."""
        config = self._config
        if not self._sync_master:
            return 0
        near = sum(self.is_near(slave, end) for slave in self.slaves.values())
        wanted = max(2, config.in_sync_replicas) - 1
        if config.enable_auto_in_sync_replicas:
            wanted = max(min(wanted, near), config.min_in_sync_replicas - 1)
        return wanted if wanted <= near else None

    def is_near(self, slave: Slave, end: int) -> bool:
        """Return whether a slave is less than `haSlaveFallbehindMax` bytes behind `end`."""
        return slave.acked >= 0 and end - slave.acked < self._config.ha_slave_fallbehind_max

    def copies(self, position: int) -> int:
        """Return the number of slaves that have the log up to `position`.

        The protocol does not identify slaves, so connections are counted. A connection over which the slave
        has received the bytes before `position` counts. A connection whose slave already had these bytes when
        it connected counts only if no other connection from the same host counts. Otherwise a slave that
        reconnects before the master has noticed the loss of its old connection would count twice.
        """
        got, had = [], set()
        for slave in self.slaves.values():
            if slave.first < position <= slave.acked:
                got.append(slave.host)
            elif position <= slave.acked:
                had.add(slave.host)
        return len(got) + len(had.difference(got))

    @property
    def first_needed_position(self) -> int:
        """The lowest log position that a slave still needs, or `NOWHERE` if there are no slaves."""
        return min((slave.acked for slave in self.slaves.values() if slave.acked >= 0), default=NOWHERE)

    # -- deciding

    def _judge(self, slave: Slave, log: LogState) -> str:
        """Apply a slave's report. Return "" if the report is valid, else why the slave cannot be served."""
        position, slave.reported = slave.reported, None
        if position is None:
            return ""
        if slave.acked < 0:
            return self._begin(slave, position, log)
        if position > slave.sent:
            return f"it reports {position}, and was sent the log up to {slave.sent} only"
        if position < slave.acked:
            return f"it reports {position}, and had {slave.acked} already"
        slave.acked = position
        return ""

    def _begin(self, slave: Slave, position: int, log: LogState) -> str:
        if position < 0:
            return f"it reports {position}, which is no position"
        if position > log.end:
            return f"its log ends at {position}, ahead of this master's, which ends at {log.end}"
        if 0 < position < log.readable:
            return f"its log ends at {position}, and this master's begins at {log.readable} only"
        slave.first = slave.acked = position
        slave.sent = position or log.first
        return ""

    def _silent(self, now: float, slave: Slave) -> str:
        silent_s = now - slave.heard_at
        late = silent_s >= self._config.ha_housekeeping_interval / 1000
        return f"it was silent for {silent_s:.0f} s" if late else ""

    def _next(self, now: float, number: int, slave: Slave, log: LogState) -> Effect | None:
        start = slave.sent
        if start < log.sendable:
            segment_end = start - start % log.segment_size + log.segment_size
            size = min(log.sendable - start, segment_end - start, SEND_BYTES)
            slave.sent += size
            slave.busy = True
            slave.sent_at = now
            return Send(number, start, size)
        if now - slave.sent_at >= self._config.ha_send_heartbeat_interval / 1000:
            slave.sent_at = now
            return Beat(number, start)
        return None


def cut(position: int, data: memoryview, most: int) -> Iterator[bytes | memoryview]:
    """Divide log bytes into frames of at most `most` bytes. Yield the header and the bytes of each."""
    for start in range(0, len(data), most):
        piece = data[start : start + most]
        yield HEADER.pack(position + start, len(piece))
        yield piece


class Reports:
    """Decodes the positions that a slave sends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int | None:
        """Decode received bytes. Return the last complete position in the bytes, or None if there is none."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        self._rest = data[whole:]
        return REPORT.unpack_from(data, whole - REPORT.size)[0] if whole else None
