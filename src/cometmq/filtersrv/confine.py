"""The confinement of a worker: it can only compute and use the socket that it already has.

The kernel enforces it with seccomp (libseccomp): for the rest of the process every system call except those
of `ALLOWED_CALLS` fails with EPERM, whatever code runs. Nothing here relies on restrictions within Python.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from cometmq.errors import CometError, Terminal

MAX_MEMORY_BYTES = 256 << 20
"""The address space of a worker in bytes. The interpreter takes about 30 MiB of it."""
ALLOWED_CALLS = (
    *("read", "write", "mmap", "mprotect", "munmap", "mremap", "brk", "futex", "clock_gettime"),
    *("getrandom", "rt_sigreturn", "exit_group"),
    *("mmap2", "futex_time64", "clock_gettime64", "sigreturn"),  # system calls of 32-bit machines
)


class CannotConfine(CometError, Terminal):
    """This machine cannot confine filter classes, so no class may run."""

    problem: str


def confine(parent: int) -> None:
    """Confine this process permanently.

    Args:
        parent: The process id of the parent. This process must have one thread only.

    Raises:
        CannotConfine: The process is not confined and must not run any class.
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
        file.write("1000")  # so that the kernel ends this process first if memory is short
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
