"""A program in a pseudo-terminal, as a user has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.kit.waiting import PATIENCE_S

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[a-zA-Z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>])")


class Terminal:
    """A process whose terminal this is; leaving the context ends it."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], size: tuple[int, int] = (24, 100)
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            words, env=dict(env), stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        """All output so far, with escape sequences."""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        """Write what a user types."""
        os.write(self._master, text.encode())

    def until(self, pattern: str, within_s: float = PATIENCE_S) -> str | None:
        """Return the output since the last call, without escapes, once it has `pattern`; None if it ends.

        Nothing within `within_s` counts as an end.
        """
        deadline = time.monotonic() + within_s
        while True:
            text = ESCAPES.sub("", self.raw[self._seen :])
            if re.search(pattern, text):
                self._seen = len(self.raw)
                return text
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                return None

    def ends(self) -> int:
        """Read the rest of the output, and return the exit code of the process."""
        while self._read(PATIENCE_S):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, within_s: float) -> bool:
        """Read output; return False if there is none in time or the last process has closed the terminal."""
        if not select.select([self._master], [], [], within_s)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)
