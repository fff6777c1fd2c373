"""The numbers that bound what one connection may cost. Sizes in bytes, times in seconds."""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024
HANDLER_BYTES = 64 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one side's connections; the defaults are RocketMQ's where it has such a number.

    max_frame: a whole frame, length word included (RocketMQ's `com.rocketmq.remoting.frameMaxLength`).
    frames_per_callback: frames of one connection handled before the other connections get their turn.
    callback_s: when the frames of a callback have taken so long, the others get their turn sooner.
    write_high, write_low: unsent bytes at which reading from the peer stops, and starts again.
    write_evict: unsent bytes at which the connection is cut: replies held back for it (long polls) still
        arrive after reading has stopped.
    write_total: the same of all connections of a loop together: 64 of the largest frames. Beyond it the one
        that has not taken its answers for longest is cut.
    write_stall_s: a peer that takes nothing of what waits for it for so long is cut.
    idle_s: neither read nor written for so long: closed, as both Apache's sides do.
    frame_grace_s, frame_rate: a frame may be under way for so long; from then on as many bytes of it must
        have come for each further second, or the connection is cut. A body of 4 MiB passes at 26 KiB/s.
    partial_total: bytes of the buffers for such frames, of all connections of a loop together: 16 of the
        largest frames.
    handlers: requests of one connection that are worked on outside its read (async handlers, reads of what is
        not in memory); each HANDLER_BYTES of a body count as one more. Beyond that nothing more is read from
        it until some are done. RocketMQ's clients have one connection for all threads.
    handshake_s, handshakes: how long a TLS handshake with a client may take, and how many of a server may be
        under way.
    """

    max_frame: int = 16 * MIB
    frames_per_callback: int = 64
    callback_s: float = 0.01
    write_high: int = 1 * MIB
    write_low: int = 256 * 1024
    write_evict: int = 64 * MIB
    write_total: int = 1024 * MIB
    write_stall_s: float = 30.0
    idle_s: float = 120.0
    frame_grace_s: float = 30.0
    frame_rate: int = 32 * 1024
    partial_total: int = 256 * MIB
    handlers: int = 256
    connect_timeout_s: float = 3.0
    handshake_s: float = 10.0
    handshakes: int = 256
