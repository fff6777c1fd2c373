"""What a worker may still do once it is confined: compute, and read and write the socket that it has.

The kernel enforces it (seccomp, by way of libseccomp): every system call but those of `CALLS` fails with
EPERM, for the rest of the process, whatever code runs in it. Nothing here relies on Python refusing anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from cometmq.errors import CometError, Terminal

MEMORY = 256 << 20
"""Bytes of address space of a worker, the interpreter included, which takes some 30 MiB of it."""
CALLS = (
    *("read", "write", "mmap", "mprotect", "munmap", "mremap", "brk", "futex", "clock_gettime"),
    *("getrandom", "rt_sigreturn", "exit_group"),
    *("mmap2", "futex_time64", "clock_gettime64", "sigreturn"),  # of machines with 32 bits only
)


class CannotConfine(CometError, Terminal):
    """Filter classes cannot be confined on this machine, so none may run."""

    problem: str


def confine(parent: int) -> None:
    """Confine this process, a child of process `parent` that has one thread, for good. Raises CannotConfine:
    then it must run nothing."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise CannotConfine(
            f"install cometmq[filter-server] and the system's libseccomp (libseccomp2): {error}"
        ) from error
    if os.getppid() != parent:
        raise CannotConfine("the filter server is gone")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # of all processes the kernel ends this one first when memory is short
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for limit in ("CORE", "FSIZE", "NOFILE", "NPROC"):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (0, 0))
        program = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
        for call in CALLS:
            program.add_rule(pyseccomp.ALLOW, call)
        program.load()
    except OSError as error:
        raise CannotConfine(f"the kernel refuses it: {error}") from error
