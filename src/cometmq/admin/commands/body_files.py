"""Files for the bodies of messages that `mqadmin` shows, in a private directory of the user.

Apache's tools write below the shared temporary directory, where any user can create links with predictable
names.
"""

from __future__ import annotations

import os
import re
import tempfile

from cometmq.message import MessageExt

_FILE_NAME = re.compile(r"[0-9A-Za-z]{1,64}")
"""Pattern of message ids that are safe as file names.

Ids are checked because a producer may set any text as the unique key.
"""


def write_body(message: MessageExt) -> str:
    """Write the body to a file named by the message's id that only this user can read; return its path.

    The file is in `cometmq/msgbodys` under XDG_CACHE_HOME (~/.cache), or in a new temporary directory if that
    directory is not usable. An existing file or link of that name is replaced; links are not followed.
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
    """Return the path of the user's directory for files with message bodies."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "cometmq", "msgbodys")


def open_own(path: str) -> int:
    """Return a descriptor of a directory that only this user can access. A missing directory is created.

    Raises OSError.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        os.fchmod(directory, 0o700)
    except BaseException:
        os.close(directory)
        raise
    return directory
