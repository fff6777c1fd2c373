"""Files for the bodies of messages that `mqadmin` shows, in a directory of the user's own.

Apache's tools write below the shared temporary directory, where anybody can plant links under future names.
"""

from __future__ import annotations

import os
import re
import tempfile

from cometmq.message import MessageExt

_FILE_NAME = re.compile(r"[0-9A-Za-z]{1,64}")
"""An id that may be a file's name: a producer may send any text for its unique key."""


def write_body(message: MessageExt) -> str:
    """Write the body to a file that only this user can read, called by the message's id; returns its path.

    The file lies in `cometmq/msgbodys` under XDG_CACHE_HOME (~/.cache), or in a new temporary directory where
    that one cannot be used. A file or link of the name is replaced, never written through.
    """
    name = message.msg_id if _FILE_NAME.fullmatch(message.msg_id) else message.offset_msg_id
    path = bodies_path()
    try:
        directory = open_own(path)
    except OSError:
        path = tempfile.mkdtemp(prefix="cometmq-msgbodys-")
        directory = open_own(path)
    try:
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(message.body)
    finally:
        os.close(directory)
    return os.path.join(path, name)


def bodies_path() -> str:
    """Where the user's files of this kind lie."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "cometmq", "msgbodys")


def open_own(path: str) -> int:
    """A descriptor of a directory that is this user's alone, made if it is missing. Raises OSError."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.getuid():
            raise PermissionError(f"{path} is another user's")
        os.fchmod(directory, 0o700)
    except BaseException:
        os.close(directory)
        raise
    return directory
