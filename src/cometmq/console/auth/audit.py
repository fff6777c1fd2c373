"""The audit log: one JSON line for each login and action, in files of mode 0600 and limited size."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from pathlib import Path

import msgspec

from cometmq import logs
from cometmq.console.base.errors import ConsoleError
from cometmq.private import make_private_directory

log = logs.logger(__name__)

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 8
MAX_FIELD_LENGTH = 1024
MAX_NEWEST = 1000
BEGUN = "begun"
"""Value of `result` in the audit entry of an action that is about to be executed."""


class AuditError(ConsoleError):
    """The audit log cannot be written."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the audit log.

    Attributes:
        at: Milliseconds since 1970.
        address: IP address of the browser.
        target: Name of the object that the action changes, for example a topic.
        details: Parameters of the action, without secrets.
        result: `ok`, `refused`, BEGUN, or an error text.
    """

    at: int
    user: str
    address: str
    action: str
    target: str
    details: dict[str, str]
    result: str


class Audit:
    """The audit log. A full file is renamed to `audit.jsonl.1` and so on; the oldest file is deleted."""

    def __init__(self, path: Path, *, file_bytes: int = MAX_FILE_BYTES, files: int = MAX_FILES) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._files = files
        self.newest: deque[Entry] = deque(maxlen=MAX_NEWEST)

    def try_record(
        self,
        user: str,
        address: str,
        action: str,
        target: str = "",
        *,
        details: dict[str, str] | None = None,
        result: str = "ok",
    ) -> bool:
        """Write an audit entry after an action. Return False, instead of raising AuditError, on failure."""
        try:
            self.record(user, address, action, target, details, result)
        except AuditError:
            return False
        return True

    def record(
        self,
        user: str,
        address: str,
        action: str,
        target: str = "",
        details: dict[str, str] | None = None,
        result: str = BEGUN,
    ) -> None:
        """Write an audit entry before an action. If AuditError is raised, the action must not be executed."""
        entry = Entry(
            at=int(time.time() * 1000),
            user=user[:MAX_FIELD_LENGTH],
            address=address,
            action=action,
            target=target[:MAX_FIELD_LENGTH],
            details={key: value[:MAX_FIELD_LENGTH] for key, value in (details or {}).items()},
            result=result[:MAX_FIELD_LENGTH],
        )
        self.newest.append(entry)
        line = msgspec.json.encode(entry) + b"\n"
        try:
            self._write(line)
        except OSError as error:
            log.error(
                "audit log: %s: %s; entries lost: %s", self._path, error.strerror, line.decode().strip()
            )
            raise AuditError(f"{self._path}: {error.strerror}") from None

    def _write(self, line: bytes) -> None:
        make_private_directory(str(self._path.parent))
        try:
            if self._path.stat().st_size + len(line) > self._file_bytes:
                self._rotate()
        except FileNotFoundError:
            pass
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # end a partial line that a full disk or a killed process has left
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = f"{self._path}.{number}"
            newer = f"{self._path}.{number - 1}" if number > 1 else str(self._path)
            if os.path.exists(newer):
                os.replace(newer, older)
