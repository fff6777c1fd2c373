"""Makes files and directories that only their user can read: they hold messages and settings.

New files get mode 0600, new directories 0700. Existing ones keep the mode that their owner gave them.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import IO


def make_private_directory(path: str) -> None:
    """Make a directory, and what is missing above it, with mode 0700; one that is there is fine. Raises
    OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_private_directory(os.path.dirname(os.path.abspath(path)))
        os.makedirs(path, 0o700, exist_ok=True)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_private(path: str, *, in_place_of: str = "") -> IO[bytes]:
    """Make or empty a file for writing, with mode 0600, or with that of the file which it will replace.
    Raises OSError, also where a link is in its place."""
    # The client makes such files too, on systems that have one of the two.
    here = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | here, 0o600), "wb")
    if in_place_of:
        keep_mode(path, in_place_of)
    return file


def lock_file(path: str) -> Callable[[], None]:
    """Lock a file, which is made if need be, for this process alone; returns what unlocks it. Raises
    BlockingIOError if it is locked already, here or elsewhere, another OSError where that is not possible."""
    with open_private(path) as file:
        descriptor = os.dup(file.fileno())
    locker = os.getpid()
    try:
        if sys.platform == "win32":
            import msvcrt

            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            except PermissionError as error:
                raise BlockingIOError(error.errno, error.strerror) from error
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise

    def unlock() -> None:
        if sys.platform != "win32" and os.getpid() == locker:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        os.close(descriptor)

    return unlock


def keep_mode(path: str, replaced: str) -> None:
    """Give a file the mode of the one whose place it will take, if there is one. Raises OSError."""
    try:
        mode = os.lstat(replaced).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(mode) and mode != os.lstat(path).st_mode:
        os.chmod(path, stat.S_IMODE(mode))
