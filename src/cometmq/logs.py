"""Loggers whose lines are short and harmless: names, remarks and errors in them come from other programs.

They are made printable here, once, instead of at each call. All rooms use `log = logs.logger(__name__)` in
place of `logging.getLogger`.
"""

from __future__ import annotations

import logging

from cometmq.text import printable

ARGUMENT_LIMIT = 512  # characters; a remark of a server may be this long
TRACEBACK_LINES = 100


class _Harmless(logging.Filter):
    """Quotes and shortens a record's arguments; indents its traceback, so that no line of it looks like
    another record."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_harmless, record.args))
        if record.exc_info and not record.exc_text:
            lines = logging.Formatter().formatException(record.exc_info).splitlines()
            if len(lines) > TRACEBACK_LINES:
                lines[TRACEBACK_LINES // 2 : -TRACEBACK_LINES // 2] = ["..."]
            record.exc_text = "\n".join(f"  | {printable(line, ARGUMENT_LIMIT)}" for line in lines)
        return True


_filter = _Harmless()


def _harmless(value: object) -> object:
    """A value as it may be shown: itself where that is short and harmless."""
    if isinstance(value, bool | int | float | None):
        return value
    text = str(value)
    safe = printable(text, ARGUMENT_LIMIT)
    return value if safe == text else safe


def logger(name: str) -> logging.Logger:
    """The logger of a module. It takes arguments by position only (`log.info("%s", name)`)."""
    log = logging.getLogger(name)
    log.addFilter(_filter)  # a second time changes nothing
    return log
