"""The numbers that bound what one connection may cost. Sizes in bytes, times in seconds."""

from __future__ import annotations

import msgspec

MIB = 1024 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one side's connections; the defaults are RocketMQ's where it has such a number.

    max_frame: a whole frame, length word included (RocketMQ's `com.rocketmq.remoting.frameMaxLength`).
    frames_per_callback: frames of one connection handled before the other connections get their turn.
    write_high, write_low: unsent bytes at which reading from the peer stops, and starts again.
    write_evict: unsent bytes at which the connection is cut: replies held back for it (long polls) still
        arrive after reading has stopped.
    write_stall_s: a peer that takes nothing of what waits for it for so long is cut.
    idle_s: neither read nor written for so long: closed, as both Apache's sides do.
    """

    max_frame: int = 16 * MIB
    frames_per_callback: int = 64
    write_high: int = 1 * MIB
    write_low: int = 256 * 1024
    write_evict: int = 64 * MIB
    write_stall_s: float = 30.0
    idle_s: float = 120.0
    connect_timeout_s: float = 3.0
