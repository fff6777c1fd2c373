"""Who did what: one JSON line for each login and action, in a file of mode 0600 that does not grow for
ever."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import msgspec

from cometmq import logs
from cometmq.private import make_private_directory

log = logs.logger(__name__)

FILE_BYTES = 16 << 20
FILES = 8
FIELD_MAX = 1024
NEWEST = 1000


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody did. at: ms since 1970; address: where the browser is; target: the name of what was acted
    on; details: the values given, never a secret; result: `ok`, `refused`, or what went wrong."""

    at: int
    user: str
    address: str
    action: str
    target: str
    details: dict[str, str]
    result: str


class Audit:
    """The log. Full files are `audit.jsonl.1` and so on; the oldest goes."""

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, files: int = FILES) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._files = files
        self.newest: deque[Entry] = deque(maxlen=NEWEST)

    def add(
        self,
        user: str,
        address: str,
        action: str,
        target: str = "",
        details: dict[str, str] | None = None,
        result: str = "ok",
    ) -> None:
        """Write an entry. A disk that takes none is an error in the log of events: the action has
        happened."""
        entry = Entry(
            at=int(time.time() * 1000),
            user=user[:FIELD_MAX],
            address=address,
            action=action,
            target=target[:FIELD_MAX],
            details={key: value[:FIELD_MAX] for key, value in (details or {}).items()},
            result=result[:FIELD_MAX],
        )
        self.newest.append(entry)
        line = msgspec.json.encode(entry) + b"\n"
        try:
            self._write(line)
        except OSError as error:
            log.error("audit: %s: %s; lost: %s", self._path, error.strerror, line.decode().strip())

    def _write(self, line: bytes) -> None:
        make_private_directory(str(self._path.parent))
        try:
            if self._path.stat().st_size + len(line) > self._file_bytes:
                self._rotate()
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = f"{self._path}.{number}"
            newer = f"{self._path}.{number - 1}" if number > 1 else str(self._path)
            if os.path.exists(newer):
                os.replace(newer, older)
