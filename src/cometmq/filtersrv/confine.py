"""What a worker may still do once it is confined: compute, and read and write the pipes that it has.

The kernel enforces it (seccomp, Linux): every system call but those of `CALLS` fails with EPERM, for the rest
of the process, whatever code runs in it. Nothing here relies on Python refusing anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys

MEMORY = 256 << 20
"""Bytes of address space of a worker, the interpreter included, which takes some 30 MiB of it."""

# Name -> number on x86_64 and on aarch64 (the kernel's syscall tables).
CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigreturn": (15, 139),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "exit": (60, 93),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
# Machine -> (the kernel's number of it, its column above).
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
# Instructions of the kernel's filter language, and what a filter may return.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
_CALL_AT, _MACHINE_AT = 0, 4  # offsets in what a filter is given


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def supported() -> bool:
    """Whether this machine's kernel is one that `confine` knows."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def confine(parent: int) -> None:
    """Confine this process for good, and let it die with process `parent`. Raises OSError, then it is not
    confined and must run nothing."""
    if not supported():
        raise OSError(errno.ENOSYS, f"no confinement is known for {sys.platform} on {platform.machine()}")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))
    program = filter_program(*MACHINES[platform.machine()])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError(errno.ESRCH, "the filter server is gone")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    given = _Program(len(program) // 8, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(given))


def filter_program(machine: int, column: int) -> bytes:
    """The kernel's filter: another machine's call (32-bit) kills, a call of CALLS passes, others fail."""
    numbers = [numbers[column] for numbers in CALLS.values()]
    steps = [(_LOAD, 0, 0, _MACHINE_AT), (_JUMP_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL)]
    steps.append((_LOAD, 0, 0, _CALL_AT))
    # From each comparison to the last instruction, over those that are left and the refusal.
    steps += [(_JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _prctl(option: int, value: int, third: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if libc.prctl(option, value, third, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")
