"""The limits for the cost of one connection. Sizes are in bytes, times in seconds."""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024
HANDLER_BYTES = 64 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one side's connections. The defaults are RocketMQ's where it has such a limit.

    Attributes:
        max_frame: The size of a frame, including its length word (RocketMQ's
        `com.rocketmq.remoting.frameMaxLength`).
        frames_per_callback: The frames of one connection that are handled before other connections are
        served.
        callback_s: The time after which other connections are served, even after fewer frames.
        write_high, write_low: The unsent bytes at which reading from the peer stops and starts again.
        write_evict: The unsent bytes at which the connection is aborted. Responses to parked pulls still
        accumulate after reading has stopped.
        write_total: The unsent bytes of all connections of a loop: 64 of the largest frames. Above it, the
        connection that has not received for the longest time is aborted.
        write_stall_s: The time after which a peer that receives none of its responses is aborted.
        idle_s: The time without reads and writes after which a connection is closed, as Apache's sides do.
        frame_grace_s, frame_rate: The time that a frame may take, and the bytes that must have arrived for
        each further second. A body of 4 MiB passes at 26 KiB/s.
        partial_total: The buffered bytes of incomplete frames of all connections of a loop: 16 of the largest
        frames.
        handlers: The requests of one connection that are processed outside its read (asynchronous handlers,
        reads from disk). Each HANDLER_BYTES of a body count as one more. Above it, no more requests of the
            connection are read until some are done. RocketMQ's clients have one connection for all threads.
        handshake_s, handshakes: The time that a TLS handshake may take, and the number of concurrent
        handshakes of a server.
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
