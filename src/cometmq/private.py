"""Creation of private files and directories, for messages and settings, and their sync to disk.

New files have mode 0600 and new directories 0700, so that only their owner can read them. Existing files and
directories keep their mode.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from typing import IO


def make_private_directory(path: str) -> None:
    """Create a directory and its missing parents with mode 0700, unless it exists. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_private_directory(os.path.dirname(os.path.abspath(path)))
        os.makedirs(path, 0o700, exist_ok=True)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_private(path: str, *, in_place_of: str = "") -> IO[bytes]:
    """Create or empty a file with mode 0600 or that of `in_place_of`. Raises OSError, also for a link."""
    # Some systems on which the client runs lack O_NOFOLLOW or O_BINARY.
    here = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | here, 0o600), "wb")
    if in_place_of:
        keep_mode(path, in_place_of)
    return file


def replace_private(path: str, content: bytes) -> None:
    """Write a private file durably, and its missing directories. Raises OSError."""
    directory = os.path.dirname(os.path.abspath(path))
    make_private_directory(directory)
    fresh = f"{path}.new"
    with open_private(fresh) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    if sys.platform != "win32":
        sync_path(directory)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Sync a file, or a directory and thus the names in it, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: str) -> Callable[[], None]:
    """Lock a file for this process, create it if necessary, and return a function that unlocks it.

    Raises BlockingIOError if it is locked, in this or another process, and another OSError if locking fails.
    """
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
            # Closing does not unlock the file if a forked child has it open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    return unlock


def keep_mode(path: str, replaced: str) -> None:
    """Set the mode of `path` to that of `replaced`, if that is a regular file. Raises OSError."""
    try:
        mode = os.lstat(replaced).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(mode) and mode != os.lstat(path).st_mode:
        os.chmod(path, stat.S_IMODE(mode))
