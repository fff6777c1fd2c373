"""The decisions of a slave: when it connects, what it reports, when it stops.

A function of time and events, without I/O: the shell (ha_client.py, or a simulation) reports events, calls
`turn` at the end of each tick with an event and every TURN_INTERVAL_S, and carries out what `turn`
returns (docs/reference/storage.md, HA port).

Before each connection the slave compares its last record with the master's at that position, and the ends of
both logs (`find_divergence`): the protocol of the HA port has no check of contents. Divergent logs stop the
slave until one of them has changed; the slave compares again every COMPARE_INTERVAL_S.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

RETRY_INTERVAL_S = 5.0
"""Interval, in seconds, from a lost connection or a failed attempt to the next attempt."""
COMPARE_INTERVAL_S = 30.0
"""Interval, in seconds, from a divergence to the next comparison."""


class Phase(Enum):
    """The state of a slave."""

    NO_MASTER = "no master is known"
    PAUSING = "waiting for the next attempt"
    COMPARING = "comparing its log with the master's"
    CONNECTING = "connecting"
    FOLLOWING = "following"
    STOPPED = "stopped"


class MasterAddress(NamedTuple):
    """The main address and the HA address of a master, each "host:port"."""

    addr: str
    ha_addr: str


class Tail(NamedTuple):
    """The end of a slave's log, and the position and bytes of its last record; None if that is not known."""

    end: int
    position: int
    record: bytes | None


class MasterLog(NamedTuple):
    """The begin and end of a master's log, and its record at the slave's last position, or None."""

    first: int
    end: int
    record: bytes | None


class Compare(NamedTuple):
    """Request MasterLog from the master. Then call `compared`."""

    addr: str


class Connect(NamedTuple):
    """Connect to the master's HA port. Then call `connected` or `lost`."""

    ha_addr: str


class Report(NamedTuple):
    """Send this position to the master as a report."""

    position: int


class Disconnect(NamedTuple):
    """Close the connection, or cancel the attempt to connect. `lost` need not be called."""

    reason: str


Effect = Compare | Connect | Report | Disconnect


def find_divergence(own: Tail | None, master: MasterLog) -> str:
    """Return why the master's log cannot continue a slave's, with both positions; "" if it can.

    Args:
        own: The end of the slave's log; None for an empty log.
    """
    if own is None:
        return ""
    if own.end > master.end:
        return f"the slave's log ends at {own.end}, ahead of the master's, which ends at {master.end}"
    if own.end < master.first:
        return (
            f"the slave's log ends at {own.end}, and the master's begins at {master.first} only: the slave "
            "must begin anew with an empty directory"
        )
    if own.record is None:
        return ""
    if master.record is None and own.position >= master.first:
        return (
            f"the slave has a record at {own.position}, where the master has none; the slave's log ends at "
            f"{own.end}, the master's at {master.end}"
        )
    if master.record is not None and master.record != own.record:
        return (
            f"the slave's record at {own.position} is not the master's; the slave's log ends at {own.end}, "
            f"the master's at {master.end}"
        )
    return ""


class HaSlave:
    """A slave's side of replication."""

    def __init__(self, beat_s: float = 5.0, silence_s: float = 20.0) -> None:
        """Create the slave. haSendHeartbeatInterval and haHousekeepingInterval are in seconds."""
        self.beat_s = beat_s
        self.silence_s = silence_s
        self.master: MasterAddress | None = None
        self.phase = Phase.NO_MASTER
        self.problem = ""
        """The reason that ended the last connection or attempt, or stops the slave; "" while it follows."""
        self.diverged = False
        """Whether the master's log diverged from this one at the last comparison."""
        self.master_end = -1
        """The known end of the master's log; -1 before its first answer."""
        self._next_at = 0.0
        self._reported = -1
        self._reported_at = 0.0
        self._heard_at = 0.0
        self._effects: list[Effect] = []

    # -- events

    def follow(self, now: float, master: MasterAddress | None) -> None:
        """Follow this master. None: no master is known, and the slave keeps following the last one."""
        if master is None or master == self.master:
            return
        if self.phase in (Phase.COMPARING, Phase.CONNECTING, Phase.FOLLOWING):
            self._effects.append(Disconnect(f"the master is {master.addr} now"))
        self.master = master
        self.phase = Phase.PAUSING
        self._next_at = now

    def compared(self, now: float, divergence: str) -> None:
        """Handle the master's answer. divergence: the result of `find_divergence`."""
        if self.phase is not Phase.COMPARING:
            return
        self.diverged = bool(divergence)
        if divergence:
            self._stop(now, divergence)
        elif self.master is not None:
            self.phase = Phase.CONNECTING
            self._effects.append(Connect(self.master.ha_addr))

    def report_divergence(self, now: float, why: str) -> None:
        """Stop the slave: the log of its current or next master has changed and diverges."""
        if self.phase in (Phase.CONNECTING, Phase.FOLLOWING):
            self._effects.append(Disconnect(why))
        if self.phase in (Phase.PAUSING, Phase.CONNECTING, Phase.FOLLOWING):
            self.diverged = True
            self._stop(now, why)

    def _stop(self, now: float, why: str) -> None:
        self.problem = why
        self.phase = Phase.STOPPED
        self._next_at = now + COMPARE_INTERVAL_S

    def connected(self, now: float) -> None:
        """Record that the connection to the HA port is open."""
        if self.phase is Phase.CONNECTING:
            self.phase = Phase.FOLLOWING
            self.problem = ""
            self._reported = -1
            self._heard_at = now
            self.master_end = -1  # This may be another master, or it may have less than before.

    def lost(self, now: float, reason: str) -> None:
        """Handle a failure: no answer, no connection, a closed connection, or data that cannot be stored."""
        if self.phase in (Phase.COMPARING, Phase.CONNECTING, Phase.FOLLOWING):
            self.problem = reason
            self.phase = Phase.PAUSING
            self._next_at = now + RETRY_INTERVAL_S

    def received(self, now: float, end: int) -> None:
        """Record that log bytes or a heartbeat arrived: the master's log reaches at least to `end`."""
        self._heard_at = now
        self.master_end = max(self.master_end, end)

    def turn(self, now: float, end: int, safe: int) -> list[Effect]:
        """Return the effects that are due now.

        Args:
            end: The end of the slave's log.
            safe: The position that the slave may report. With SYNC_FLUSH the log is on the device up to it.
        """
        if self.phase in (Phase.PAUSING, Phase.STOPPED) and now >= self._next_at and self.master is not None:
            self.phase = Phase.COMPARING
            self._effects.append(Compare(self.master.addr))
        elif self.phase is Phase.FOLLOWING:
            if now - self._heard_at >= self.silence_s:
                reason = f"the master was silent for {now - self._heard_at:.0f} s"
                self.lost(now, reason)
                self._effects.append(Disconnect(reason))
            else:
                self._report(now, end, safe)
        effects, self._effects = self._effects, []
        return effects

    def _report(self, now: float, end: int, safe: int) -> None:
        """Report the position.

        The first report, from which the master continues, waits until all bytes are safe.
        """
        first = self._reported < 0
        if (safe == end) if first else (safe > self._reported or now - self._reported_at >= self.beat_s):
            self._reported = safe
            self._reported_at = now
            self._effects.append(Report(safe))
