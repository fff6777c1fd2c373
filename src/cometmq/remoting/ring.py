"""Sends to many sockets in one system call, by Linux's io_uring.

With one request in flight on each of many connections, a tick has one answer for each of them. What a system
call for each costs is not the call: it wakes a thread of some client, and on a busy machine that thread may
take the core from us as the call returns. With all answers in one call that happens once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import weakref

Bytes = bytes | bytearray | memoryview

ENTRIES = 256  # sends of one system call, at most

# Names, numbers and layouts of linux/io_uring.h. The two calls have the same numbers on all processors that
# Python has wheels for. Where numbers begin with their high byte the flag below is refused: there is no ring.
IO_URING_SETUP = 425
IO_URING_ENTER = 426
IORING_SETUP_SUBMIT_ALL = 1 << 7  # an entry that fails does not hold up those behind it; since Linux 5.18
IORING_ENTER_GETEVENTS = 1 << 0
IORING_OFF_SQES = 0x10000000
IORING_OP_SEND = 26
MSG_DONTWAIT = 0x40
MSG_NOSIGNAL = 0x4000
# struct io_uring_params: sizes of both rings, flags, and the offsets of what lies in their mapping.
_PARAMS = struct.Struct("<3I28x10I10I")
# struct io_uring_sqe: opcode, fd, addr, len, msg_flags, user_data; and what of it differs between sends.
_ENTRY = struct.Struct("<B3xi8xQIIQ24x")
_FD_AT = 4
_pack_fd_addr_len = struct.Struct("<i8xQI").pack_into
# struct io_uring_cqe, in words of 4 bytes: user_data (2), res, flags.
_EVENT_WORDS = 4
_USER_DATA = 0
_RES = 2

_UINT32 = 0xFFFFFFFF


class SendRing:
    """Sends that never wait: what a socket does not take at once stays with the caller.

    One thread may use it. It takes three file descriptors (each mapping keeps one), which are closed when the
    object goes.
    """

    def __init__(self) -> None:
        """Raises OSError if there is no io_uring here, or none for us (many containers)."""
        if sys.platform != "linux":
            raise OSError("io_uring is a part of Linux")
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        params = ctypes.create_string_buffer(_PARAMS.size)
        _PARAMS.pack_into(params, 0, 0, 0, IORING_SETUP_SUBMIT_ALL, *[0] * 20)
        fd = self._syscall(IO_URING_SETUP, ENTRIES, params)
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"io_uring_setup: {os.strerror(code)}")
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        _, events, _, *offsets = _PARAMS.unpack(params.raw)
        sq_tail, array = offsets[1], offsets[6]
        cq_head, cq_tail, cqes = offsets[10], offsets[11], offsets[15]
        # Both rings lie in one mapping on every Linux that knows the flag above.
        rings = memoryview(mmap.mmap(fd, max(array + 4 * ENTRIES, cqes + 4 * _EVENT_WORDS * events)))
        self._words = rings.cast("I")
        self._signed = rings.cast("i")
        self._sq_tail, self._cq_head, self._cq_tail = sq_tail // 4, cq_head // 4, cq_tail // 4
        self._cqes = cqes // 4
        self._events = events
        self._entries = mmap.mmap(fd, ENTRIES * _ENTRY.size, offset=IORING_OFF_SQES)
        self._tail = 0
        for slot in range(ENTRIES):
            self._words[array // 4 + slot] = slot
            fixed = (IORING_OP_SEND, -1, 0, 0, MSG_DONTWAIT | MSG_NOSIGNAL, slot)
            _ENTRY.pack_into(self._entries, slot * _ENTRY.size, *fixed)

    def send(self, fds: list[int], lots: list[Bytes]) -> list[tuple[int, int]]:
        """Send lots[i] to the socket fds[i]; at most ENTRIES of them, each socket once.

        Returns (i, how many bytes of lots[i] were taken) where that is not all of them, be it that the socket
        takes no more now or never again. Once this has raised anything, as a signal's handler may, the ring
        must not be used any more.
        """
        data = b"".join(lots)
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        entries = self._entries
        first = tail = self._tail
        sizes = list(map(len, lots))
        for fd, size in zip(fds, sizes, strict=True):
            _pack_fd_addr_len(entries, tail % ENTRIES * _ENTRY.size + _FD_AT, fd, address, size)
            address += size
            tail += 1
        words = self._words
        words[self._sq_tail] = tail & _UINT32
        count = self._enter(len(sizes), len(sizes))
        # Entries that the system did not take (it has no memory, for instance) are ours again.
        words[self._sq_tail] = self._tail = (first + count) & _UINT32
        head = words[self._cq_head]
        while (words[self._cq_tail] - head) & _UINT32 < count:  # a signal came, and `data` is still in use
            self._enter(0, count)
        results = self._column(_RES, head, count)
        all_taken = sum(results) == len(data)
        slots = self._column(_USER_DATA, head, count) if not all_taken else []
        words[self._cq_head] = (head + count) & _UINT32
        if all_taken:
            return []
        taken = [0] * len(sizes)
        for slot, result in zip(slots, results, strict=True):
            taken[(slot - first) % ENTRIES] = max(result, 0)
        return [(at, took) for at, (took, size) in enumerate(zip(taken, sizes, strict=True)) if took != size]

    def _enter(self, submit: int, complete: int) -> int:
        """Hand entries over and wait for events; returns how many entries the system took, 0 on an error."""
        took: int = self._syscall(IO_URING_ENTER, self._fd, submit, complete, IORING_ENTER_GETEVENTS, None, 0)
        return max(took, 0)

    def _column(self, word: int, head: int, count: int) -> list[int]:
        """One word of each of `count` events from number `head` on."""
        first = head % self._events
        here = min(count, self._events - first)
        at = self._cqes + word
        signed = self._signed
        column = signed[
            at + _EVENT_WORDS * first : at + _EVENT_WORDS * (first + here) : _EVENT_WORDS
        ].tolist()
        if here < count:
            column += signed[at : at + _EVENT_WORDS * (count - here) : _EVENT_WORDS].tolist()
        return column
