"""The running servers of this user: one locked file per process in a run directory.

A server holds an exclusive lock on its file during its lifetime. A file left by `kill -9` has no lock, even
if another process has reused its process id. The directory is COMETMQ_RUN_DIR, else `cometmq` under
XDG_RUNTIME_DIR, else ~/.cometmq/run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

from cometmq import logs
from cometmq.private import make_private_directory

log = logs.logger(__name__)


def run_directory() -> str:
    """Return the directory of the run files, without creating it."""
    if given := os.environ.get("COMETMQ_RUN_DIR"):
        return given
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "cometmq")
    return os.path.expanduser("~/.cometmq/run")


class RunFile:
    """Context manager that registers this process as a server of a kind ("namesrv", "broker", "standalone").

    If the run directory cannot be written, a warning is logged: the server works, but `mqshutdown` cannot
    find it.
    """

    def __init__(self, kind: str) -> None:
        self.path = os.path.join(run_directory(), f"{kind}-{os.getpid()}.pid")
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            make_private_directory(os.path.dirname(self.path))
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            # Lock the pid file under another name first, because `running` removes unlocked pid files.
            new = f"{self.path.removesuffix('.pid')}.new"
            self._descriptor = os.open(new, flags, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, b"%d\n" % os.getpid())
            os.replace(new, self.path)
        except OSError as error:
            log.warning(
                "mqshutdown cannot find this process, because its file %s could not be written: %s",
                self.path,
                error.strerror,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.unlink(self.path)
            os.close(self._descriptor)


def running(kind: str) -> Iterator[int]:
    """Yield the process ids of the running servers of a kind. Remove the pid files of ended servers."""
    directory = run_directory()
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        if not (name.startswith(f"{kind}-") and name.endswith(".pid")):
            continue
        path = os.path.join(directory, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # the pid file was deleted meanwhile, or belongs to another user
        try:
            if _is_held(descriptor):
                text = os.read(descriptor, 32).decode("ascii", "replace").strip()
                if text.isdigit():
                    yield int(text)
            else:
                with suppress(OSError):
                    os.unlink(path)
        finally:
            os.close(descriptor)


def _is_held(descriptor: int) -> bool:
    """Return whether another process holds the file's lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
