"""The confinement of a worker process: it can only compute and use the socket that it already has.

The kernel enforces the confinement with seccomp (libseccomp): until the process ends, every system call that
is not in `ALLOWED_CALLS` fails with EPERM. No part of it depends on restrictions within Python.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from cometmq.errors import CometError, Terminal

MAX_MEMORY_BYTES = 256 << 20
"""The maximum size of a worker's address space, in bytes. The interpreter itself takes about 30 MiB."""
ALLOWED_CALLS = (
    *("read", "write", "mmap", "mprotect", "munmap", "mremap", "brk", "futex", "clock_gettime"),
    *("getrandom", "rt_sigreturn", "exit_group"),
    *("mmap2", "futex_time64", "clock_gettime64", "sigreturn"),  # system calls of 32-bit machines
)


class CannotConfine(CometError, Terminal):
    """This machine cannot confine filter classes, so no class may run on it."""

    problem: str


def confine(parent: int) -> None:
    """Confine the current process, which must have only one thread, permanently.

    Raises CannotConfine if that fails, also if its parent is not `parent`: the filter server has ended.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise CannotConfine(
            f"install cometmq[filter-server] and the system's libseccomp (libseccomp2): {error}"
        ) from error
    if os.getppid() != parent:
        raise CannotConfine("the filter server has ended")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory is short, the kernel kills a worker before other processes
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        for limit in ("CORE", "FSIZE", "NOFILE", "NPROC"):
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (0, 0))
        program = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
        for call in ALLOWED_CALLS:
            program.add_rule(pyseccomp.ALLOW, call)
        program.load()
    except OSError as error:
        raise CannotConfine(f"the kernel refuses the seccomp filter: {error}") from error
