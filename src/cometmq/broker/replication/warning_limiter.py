"""Rate-limited warnings about strangers at a port."""

from __future__ import annotations

import logging
import time

MAX_LINES_PER_PERIOD = 20
PERIOD_S = 60.0


class WarningLimiter:
    """At most MAX_LINES_PER_PERIOD warnings per period.

    The first one of the next period reports how many were left out.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._begun = -PERIOD_S
        self._lines = 0

    def warn(self, text: str, *values: object) -> None:
        """Log a warning, with the arguments of the logger."""
        now = time.monotonic()
        if now - self._begun >= PERIOD_S:
            if self._lines > MAX_LINES_PER_PERIOD:
                self._log.warning("%d similar warnings omitted", self._lines - MAX_LINES_PER_PERIOD)
            self._begun, self._lines = now, 0
        self._lines += 1
        if self._lines <= MAX_LINES_PER_PERIOD:
            self._log.warning(text, *values)
