"""The limits of a connection, and a limit of how often something may happen."""

from __future__ import annotations

import msgspec

KIB = 1024
MIB = 1024 * KIB


class Http2Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a connection. Sizes are in bytes.

    Attributes:
        max_streams: The maximum number of open streams. Further ones are refused.
        max_frame: The maximum size of a received frame's payload.
        max_header_list: The maximum size of a request's headers, with 32 bytes added for each. A stream with
            more is reset.
        max_header_block, max_header_frames: The maximum size and number of frames of an encoded header block.
            A connection that exceeds one of them ends.
        stream_window, connection_window: The maximum number of bytes that the application has not consumed,
            of one stream and of all.
        max_replies: The maximum number of replies to frames such as PING since the last output was taken.
        early_resets, early_resets_per_s: How many streams may end within EARLY_S after their start by a reset
            of the peer or by its violation of the protocol: at once, and per second on average.
        idle_frames_per_s: The maximum number of frames per second that do nothing for a request: PING,
            SETTINGS, empty DATA, frames of unknown types. A SETTINGS frame that changes the windows of open
            streams counts as more. Clients that measure round-trip times send thousands of PING per second.
    """

    max_streams: int = 1000
    max_frame: int = 16 * KIB
    max_header_list: int = 16 * KIB
    max_header_block: int = 32 * KIB
    max_header_frames: int = 32
    stream_window: int = 1 * MIB
    connection_window: int = 16 * MIB
    max_replies: int = 10_000
    early_resets: int = 2_000
    early_resets_per_s: int = 200
    idle_frames_per_s: int = 10_000


EARLY_S = 1.0
"""The age in seconds up to which the end of a stream counts as early."""


class Allowance:
    """Limits a number of events: `burst` at once, and `per_s` per second on average."""

    __slots__ = ("_burst", "_left", "_per_s", "_since")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst = self._left = burst
        self._per_s = per_s
        self._since = now

    def take(self, now: float, count: float = 1) -> bool:
        """Count events. Returns False if there were too many."""
        self._left = min(self._burst, self._left + (now - self._since) * self._per_s) - count
        self._since = now
        return self._left >= 0
