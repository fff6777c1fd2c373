"""The decisions of a slave: when it connects to its master, what it reports, and when it stops.

The decisions depend only on the time and the events that are passed in; there is no I/O. The caller
(ha_client.py, or a simulation) reports events. It calls `turn` at the end of each event-loop tick with such
an event, and at least every TURN_INTERVAL_S, and carries out the effects that `turn` returns
(docs/reference/storage.md, HA port).

Before each connection, the slave compares its last record with the master's record at the same position, and
the ends of both logs (`find_divergence`), because the protocol of the HA port does not check contents. If the
logs diverge, the slave does not replicate until one of the logs has changed; it repeats the comparison every
COMPARE_INTERVAL_S.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication.ha_master import HEADER
from cometmq.errors import ProtocolError

RETRY_INTERVAL_S = 1.0
"""The time, in seconds, from a lost connection or a failed attempt to the next attempt.

Apache's slave waits 5 s. A restarted SYNC_MASTER answers SLAVE_NOT_AVAILABLE for as long.
"""
COMPARE_INTERVAL_S = 30.0
"""The time, in seconds, from a comparison that found a divergence to the next comparison."""


class Phase(Enum):
    """The phases of a slave's replication."""

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
    """The end of a slave's log, and the position and the bytes of its last record (None if unknown)."""

    end: int
    position: int
    record: bytes | None


class MasterLog(NamedTuple):
    """The begin and end of a master's log, and its record at the position of the slave's last record."""

    first: int
    end: int
    record: bytes | None


class Compare(NamedTuple):
    """Compare the log with the master's. Then call `HaSlave.compared` or, after a failure, `HaSlave.lost`."""

    addr: str


class Connect(NamedTuple):
    """Connect to the master's HA port. Then call `HaSlave.connected` or, after a failure, `HaSlave.lost`."""

    ha_addr: str


class Report(NamedTuple):
    """Report to the master that the slave has the log up to `position`."""

    position: int


class Disconnect(NamedTuple):
    """Close the connection, or cancel the attempt to connect. `HaSlave.lost` need not be called."""


Effect = Compare | Connect | Report | Disconnect


def find_divergence(own: Tail, master: MasterLog) -> str:
    """Return why the master's log cannot continue the slave's log, which is not empty, or ""."""
    if own.end > master.end:
        return f"the slave's log ends at {own.end}, ahead of the master's, which ends at {master.end}"
    if own.end < master.first:
        return (
            f"the slave's log ends at {own.end}, and the master's begins at {master.first} only: the slave "
            "must start with an empty store directory"
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
    """The state of a slave's replication, and the rules for its next step."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self.master: MasterAddress | None = None
        self.phase = Phase.NO_MASTER
        self.problem = ""
        """Why the last connection or attempt ended, or why the slave has stopped; "" while connected."""
        self.master_end = -1
        """The end of the master's log as far as it is known, or -1 before the master has sent anything."""
        self._next_at = 0.0
        self._reported = -1
        self._reported_at = 0.0
        self._heard_at = 0.0
        self._effects: list[Effect] = []

    # -- events

    def follow(self, now: float, master: MasterAddress) -> None:
        """Follow `master` instead of the last one."""
        if master == self.master:
            return
        if self.phase in (Phase.COMPARING, Phase.CONNECTING, Phase.FOLLOWING):
            self._effects.append(Disconnect())
        self.master = master
        self.phase = Phase.PAUSING
        self._next_at = now

    def compared(self, now: float, divergence: str) -> None:
        """Handle the result of a comparison. `divergence` is what `find_divergence` returned."""
        if self.phase is not Phase.COMPARING:
            return
        if divergence:
            self._stop(now, divergence)
        elif self.master is not None:
            self.phase = Phase.CONNECTING
            self._effects.append(Connect(self.master.ha_addr))

    def report_divergence(self, now: float, why: str) -> None:
        """Stop the slave, because the master's log no longer matches the slave's log."""
        if self.phase in (Phase.CONNECTING, Phase.FOLLOWING):
            self._effects.append(Disconnect())
        if self.phase in (Phase.PAUSING, Phase.CONNECTING, Phase.FOLLOWING):
            self._stop(now, why)

    def _stop(self, now: float, why: str) -> None:
        self.problem = why
        self.phase = Phase.STOPPED
        self._next_at = now + COMPARE_INTERVAL_S

    def connected(self, now: float) -> None:
        if self.phase is Phase.CONNECTING:
            self.phase = Phase.FOLLOWING
            self.problem = ""
            self._reported = -1
            self._heard_at = now
            # The end of the master's log is unknown: this may be another master than in the last connection,
            # or its log may have changed.
            self.master_end = -1

    def lost(self, now: float, reason: str) -> None:
        """Handle a failed comparison of logs, a failed or lost connection, or a failed write to the store."""
        if self.phase in (Phase.COMPARING, Phase.CONNECTING, Phase.FOLLOWING):
            self.problem = reason
            self.phase = Phase.PAUSING
            self._next_at = now + RETRY_INTERVAL_S

    def received(self, now: float, end: int) -> None:
        """Record that log bytes or a heartbeat have arrived: the master's log reaches at least to `end`."""
        self._heard_at = now
        self.master_end = max(self.master_end, end)

    def turn(self, now: float, end: int, safe: int) -> list[Effect]:
        """Return the effects, which the caller must carry out now.

        `end` is the end of the slave's log, and `safe` the position that the slave may report. With
        SYNC_FLUSH, the log is on the disk up to there.
        """
        if self.phase in (Phase.PAUSING, Phase.STOPPED) and now >= self._next_at and self.master is not None:
            self.phase = Phase.COMPARING
            self._effects.append(Compare(self.master.addr))
        elif self.phase is Phase.FOLLOWING:
            if now - self._heard_at >= self._config.ha_housekeeping_interval / 1000:
                self.lost(now, f"the master was silent for {now - self._heard_at:.0f} s")
                self._effects.append(Disconnect())
            else:
                self._report(now, end, safe)
        effects, self._effects = self._effects, []
        return effects

    def _report(self, now: float, end: int, safe: int) -> None:
        """Report the slave's position, if it has changed or a heartbeat is due.

        The first report is sent only once the slave may report its whole log; with SYNC_FLUSH, once its whole
        log is on the disk. The master begins to send at the first reported position. An earlier report would
        make the master send again what the slave already has.
        """
        first, beat_s = self._reported < 0, self._config.ha_send_heartbeat_interval / 1000
        if (safe == end) if first else (safe > self._reported or now - self._reported_at >= beat_s):
            self._reported = safe
            self._reported_at = now
            self._effects.append(Report(safe))


class Pieces:
    """Decodes the frames that a master sends.

    Log bytes are passed on as they arrive, without waiting for complete frames. So the decoder stores at most
    a part of a header.
    """

    def __init__(self) -> None:
        self._header = b""
        self._position = 0
        self._left = 0

    def feed(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield log positions, each with the log bytes (a part of `data`) that begin there.

        For a heartbeat, the log bytes are empty. Raises ProtocolError for a negative size or position.
        """
        at = 0
        while at < len(data):
            if not self._left:
                more = HEADER.size - len(self._header)
                self._header += data[at : at + more]
                at += more
                if len(self._header) < HEADER.size:
                    return
                self._position, self._left = HEADER.unpack(self._header)
                self._header = b""
                if self._position < 0 or self._left < 0:
                    raise ProtocolError(
                        f"the master's frame has an invalid position or size: {self._position}, {self._left}"
                    )
                if not self._left:
                    yield self._position, data[:0]
                continue
            piece = data[at : at + self._left]
            yield self._position, piece
            at += len(piece)
            self._position += len(piece)
            self._left -= len(piece)
