"""The running servers of this user, one locked file per process in a run directory, and `mqshutdown`.

A server holds an exclusive lock on its file during its lifetime. A file left by `kill -9` has no lock, even
if another process has reused its process id. The directory is COMETMQ_RUN_DIR, else `cometmq` under
XDG_RUNTIME_DIR, else ~/.cometmq/run.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

import click

from cometmq import __version__, logs
from cometmq.cli.options import HELP
from cometmq.command_options import FiniteRange, opt
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


POLL_INTERVAL_S = 0.05


@click.command(context_settings=HELP)
@click.argument("kind", type=click.Choice(["broker", "namesrv", "standalone"], case_sensitive=False))
@opt(
    "-w --wait wait_s",
    type=FiniteRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Maximum time to wait for the processes to stop. The exit code is 1 if one is still running then.",
)
@click.version_option(__version__, "-V", "--version")
def mqshutdown(kind: str, wait_s: float) -> int:
    """Stop every running name server or broker of this user after draining it."""
    name = kind if kind == "standalone" else f"mq{kind}"
    pids = list(running(kind))
    if not pids:
        click.echo(f"No {name} running.")
        return 255  # Apache's script returns -1 if no server runs
    for pid in pids:
        click.echo(f"The {name}({pid}) is running...")
        os.kill(pid, signal.SIGTERM)
        click.echo(f"Send shutdown request to {name}({pid}) OK")
    deadline = time.monotonic() + wait_s
    while wait_s and (left := set(pids) & set(running(kind))):
        if time.monotonic() > deadline:
            click.echo(f"{name} still runs after {wait_s:g} s: {', '.join(map(str, sorted(left)))}", err=True)
            return 1
        time.sleep(POLL_INTERVAL_S)
    return 0
