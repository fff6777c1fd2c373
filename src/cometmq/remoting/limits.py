"""Limits of the resources that one connection may use. Sizes are in bytes, times in seconds."""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024
HANDLER_BYTES = 64 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a server's or client's connections.

    If RocketMQ has the same limit, its default is also the default here.

    Attributes:
        max_frame: The maximum size of a frame, including its length word (RocketMQ's
            `com.rocketmq.remoting.frameMaxLength`).
        frames_per_callback: The number of frames of one connection that are handled before other connections
            are served.
        callback_s: The time after which other connections are served even if fewer frames have been handled.
        write_high, write_low: A server stops reading from a peer at `write_high` unsent bytes and starts
            again at `write_low`.
        write_wait: The unsent bytes of a client's connection above which its sends wait, until at most
            `write_low` are unsent.
        write_evict: The unsent bytes at which a server aborts the connection. Their number can still grow
            after reading has stopped, by responses to parked pulls.
        write_total: The maximum unsent bytes of all connections of a server's loop: 64 of the largest frames.
            Above it, the connection whose peer has received nothing for the longest time is aborted.
        write_stall_s: The time after which a connection is aborted if its peer receives none of at least
            `write_high` unsent bytes.
        idle_s: The time without reads and writes after which a connection is closed, as in Apache's broker
            and clients.
        frame_grace_s, frame_rate: A frame may take `frame_grace_s`. If it takes longer, `frame_rate` bytes of
            it must have arrived for each further second. A body of 4 MiB passes at 26 KiB/s.
        partial_total: The maximum size of the buffers for incomplete frames of all connections of a loop: 16
            of the largest frames.
        handlers: The maximum number of requests of one connection that are processed after the read callback
            has returned (by asynchronous handlers, or by reads from disk). Each HANDLER_BYTES of a body count
            as one more request. At the limit, no more requests are read until some are done. The limit is
            high because RocketMQ's clients use one connection for all threads.
        handshake_s, handshakes: The timeout of a TLS handshake, and the maximum number of concurrent
            handshakes of a server. One more ends an older one.
    """

    max_frame: int = 16 * MIB
    frames_per_callback: int = 64
    callback_s: float = 0.01
    write_high: int = 1 * MIB
    write_low: int = 256 * 1024
    write_wait: int = 16 * MIB
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
