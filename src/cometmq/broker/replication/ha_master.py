"""What a master sends to its slaves, what their reports are worth, and how many a write waits for.

A function of time and events, without I/O: the shell (ha_server.py, or a simulation) tells it of connections,
reports and bytes that were taken, calls `turn` at the end of each tick in which something happened and every
LOOK_S, and does what `turn` returns (docs/reference/storage.md, HA port, Waiting for slaves).

Beyond Apache's master: a report counts only if the master can have sent it, the first one too, so a slave
that is ahead of its master never makes a wait pass; an empty slave gets the whole log, not the last segment;
with SYNC_FLUSH only what is on the device is sent, so a power failure never leaves a slave ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

LOOK_S = 0.5
"""`turn` is called this often at least: heart-beats and silence are noticed by it."""
SEND_BYTES = 1 << 20
"""The most bytes of the log that one Send names. A slave that is behind gets one after the other."""
NOWHERE = 1 << 62
"""A position that no log reaches."""


class HaRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that decide. haSendHeartbeatInterval, haHousekeepingInterval in seconds."""

    sync_master: bool = False
    in_sync_replicas: int = 1
    min_in_sync_replicas: int = 1
    auto_in_sync_replicas: bool = False
    slave_fallbehind_max: int = 256 << 20
    beat_s: float = 5.0
    silence_s: float = 20.0


class LogState(NamedTuple):
    """The master's log: first position and end of what was written, and of that what may be sent."""

    first: int
    sendable: int
    end: int
    segment_size: int


class Send(NamedTuple):
    """Send log bytes [position, position + size), which lie in one segment, to a slave; then call `taken`."""

    slave: int
    position: int
    size: int


class Beat(NamedTuple):
    """Send a heart-beat."""

    slave: int
    position: int


class Close(NamedTuple):
    """Close a slave's connection. It is forgotten already."""

    slave: int
    reason: str


Effect = Send | Beat | Close


@dataclass(eq=False, slots=True)
class Slave:
    """One connection. first: its first report; acked: the newest that counts; sent: what it has or will get
    next. -1 before the first report."""

    host: str
    heard_at: float
    sent_at: float
    reported: int | None = None
    first: int = -1
    acked: int = -1
    sent: int = -1
    busy: bool = False  # bytes are on their way into the connection, or it takes no more


class HaMaster:
    """The slaves of a master, by a number that the shell gives each connection."""

    def __init__(self, rules: HaRules) -> None:
        self.rules = rules
        self.slaves: dict[int, Slave] = {}

    # -- events

    def opened(self, now: float, slave: int, host: str) -> None:
        """A connection has come from this address."""
        self.slaves[slave] = Slave(host, now, now)

    def closed(self, slave: int) -> None:
        """A connection is over."""
        self.slaves.pop(slave, None)

    def reported(self, now: float, slave: int, position: int) -> None:
        """A slave says that it has everything before this position."""
        known = self.slaves.get(slave)
        if known is not None:
            known.heard_at = now
            known.reported = position

    def taken(self, now: float, slave: int) -> None:
        """The connection has room for more, after a Send."""
        known = self.slaves.get(slave)
        if known is not None:
            known.sent_at = now
            known.busy = False

    def turn(self, now: float, log: LogState) -> list[Effect]:
        """What is to be done now."""
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
        """How many slaves a write that ends there waits for; None: there are not so many that keep up."""
        rules = self.rules
        if not rules.sync_master:
            return 0
        near = self.near(end)
        wanted = max(2, rules.in_sync_replicas) - 1
        if rules.auto_in_sync_replicas:
            wanted = max(min(wanted, near), rules.min_in_sync_replicas - 1)
        return wanted if wanted <= near else None

    def near(self, end: int) -> int:
        """How many slaves are less than haSlaveFallbehindMax behind."""
        most = self.rules.slave_fallbehind_max
        return sum(slave.acked >= 0 and end - slave.acked < most for slave in self.slaves.values())

    def copies(self, position: int) -> int:
        """How many slaves have the log up to `position`.

        Nothing in the protocol names a slave. A connection that got bytes before `position` is one. Those
        that had them when they came count once for each address that is not counted yet: a slave that comes
        back before its old connection is noticed to be dead is not two.
        """
        got, had = [], set()
        for slave in self.slaves.values():
            if slave.first < position <= slave.acked:
                got.append(slave.host)
            elif position <= slave.acked:
                had.add(slave.host)
        return len(got) + len(had.difference(got))

    @property
    def acked(self) -> int:
        """The highest position that a slave has; -1 without one."""
        return max((slave.acked for slave in self.slaves.values()), default=-1)

    @property
    def wanted_from(self) -> int:
        """From where on slaves still want the log; NOWHERE without any."""
        return min((slave.acked for slave in self.slaves.values() if slave.acked >= 0), default=NOWHERE)

    # -- deciding

    def _judge(self, slave: Slave, log: LogState) -> str:
        """Take over a report; why it cannot be true, or be served, "" if it can."""
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
        if 0 < position < log.first:
            return f"its log ends at {position}, and this master's begins at {log.first} only"
        slave.first = slave.acked = position
        slave.sent = position or log.first
        return ""

    def _silent(self, now: float, slave: Slave) -> str:
        silent_s = now - slave.heard_at
        return f"it was silent for {silent_s:.0f} s" if silent_s >= self.rules.silence_s else ""

    def _next(self, now: float, number: int, slave: Slave, log: LogState) -> Effect | None:
        start = slave.sent
        if start < log.sendable:
            segment_end = start - start % log.segment_size + log.segment_size
            size = min(log.sendable - start, segment_end - start, SEND_BYTES)
            slave.sent += size
            slave.busy = True
            slave.sent_at = now
            return Send(number, start, size)
        if now - slave.sent_at >= self.rules.beat_s:
            slave.sent_at = now
            return Beat(number, start)
        return None
