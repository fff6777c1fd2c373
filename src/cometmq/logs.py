"""Loggers that make their arguments printable and short, because names and errors come from other programs.

Modules use `log = logs.logger(__name__)` in place of `logging.getLogger`, so that calls can pass arguments
unchanged. A server process calls `set_up` once. Users of the library configure logging themselves.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from datetime import UTC, datetime
from importlib.util import find_spec

from cometmq.text import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMATS = ("text", "json")
LEVEL, FORMAT = "COMETMQ_LOG_LEVEL", "COMETMQ_LOG_FORMAT"
"""Environment variables for the level and the format of logs. Child processes inherit them."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ARGUMENT_LIMIT = 512  # maximum characters of an argument, enough for a server's remark
MESSAGE_LIMIT = 8192  # maximum characters of a log message, including its arguments
TRACEBACK_LINES = 100


class LogLimiter:
    """A limit on the rate of log lines, so that invalid requests, for example, do not fill the disk.

    At most `most` lines are allowed in `period_s` seconds, which begin with a line. `log` receives a line
    with the number of lines that were omitted in the previous period.
    """

    __slots__ = ("_asked", "_begun", "_log", "_most", "_period_s")

    def __init__(self, most: int = 10, period_s: float = 1.0, log: logging.Logger | None = None) -> None:
        self._most = most
        self._period_s = period_s
        self._log = log
        self.reset()

    def reset(self) -> None:
        """End the current period, so that the next log line begins a new one."""
        self._begun = -math.inf
        self._asked = 0

    def allows(self) -> bool:
        """Return whether another log line may be written now."""
        now = time.monotonic()
        if now - self._begun >= self._period_s:
            if self._log is not None and self._asked > self._most:
                self._log.warning("%d similar lines omitted", self._asked - self._most)
            self._begun, self._asked = now, 0
        self._asked += 1
        return self._asked <= self._most


class _Harmless(logging.Filter):
    """Escapes and shortens arguments, and indents tracebacks, so that their lines are no log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_harmless, record.args))
        if record.exc_info and not record.exc_text:
            lines = logging.Formatter().formatException(record.exc_info).splitlines()
            if len(lines) > TRACEBACK_LINES:
                lines[TRACEBACK_LINES // 2 : -TRACEBACK_LINES // 2] = ["..."]
            record.exc_text = "\n".join(f"  | {printable(line, ARGUMENT_LIMIT)}" for line in lines)
        return True


class _OneLine(logging.Filter):
    """Makes each log message one printable line, including messages from the loggers of other libraries."""

    def filter(self, record: logging.LogRecord) -> bool:
        _filter.filter(record)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # the arguments do not fit the format string, so log both unchanged
            record.msg, record.args = f"{record.msg} {record.args}", ()
            text = record.msg
        safe = printable(text, MESSAGE_LIMIT)
        if safe != text:
            record.msg, record.args = safe, ()
        return True


_filter = _Harmless()


def _harmless(value: object) -> object:
    """Return a value that is safe to log. A value that is short and printable is returned unchanged."""
    if isinstance(value, bool | int | float | None):
        return value
    text = str(value)
    safe = printable(text, ARGUMENT_LIMIT)
    return value if safe == text else safe


def logger(name: str) -> logging.Logger:
    """Return the logger of a module. It accepts positional arguments only (`log.info("%s", name)`)."""
    log = logging.getLogger(name)
    log.addFilter(_filter)  # adding the same filter again has no effect
    return log


class BadLevels(ValueError):
    """A text is not a valid list of log levels; str() of the error describes the problem."""


class _JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON, in which `values` is the list of the message's arguments."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "event": str(record.msg),
            "values": list(record.args) if isinstance(record.args, tuple) else [],
        }
        if record.exc_text:
            event["traceback"] = record.exc_text
        # json.dumps writes non-ASCII characters as JSON escapes. If it did not, standard error would write
        # the characters that it cannot encode as Python escapes, some of which are invalid in JSON.
        return json.dumps(event, default=str, separators=(",", ":"))


def set_up(default: str = "WARNING") -> None:
    """Configure logging to standard error, as COMETMQ_LOG_LEVEL and COMETMQ_LOG_FORMAT specify.

    `default` is the level without the former. An invalid value is ignored with a warning in the log.
    """
    level, form = os.environ.get(LEVEL, default), os.environ.get(FORMAT, "text").lower()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_OneLine())
    logging.basicConfig(level=default, handlers=[handler])
    logging.captureWarnings(True)
    threading.excepthook = _thread_ended
    log = logger(__name__)
    if form not in FORMATS:
        log.warning("%s=%s is not a log format: %s", FORMAT, form, ", ".join(FORMATS))
    try:
        use_levels(level)
    except BadLevels as problem:
        log.warning("%s: %s", LEVEL, problem)


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """Log an exception that ended a thread."""
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = ended.thread.name if ended.thread is not None else "unknown"
        found = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        logger(__name__).error("thread %s ended", name, exc_info=found)


def levels_of(text: str) -> dict[str, str]:
    """Parse levels like `INFO,cometmq.broker.pull=DEBUG`, by logger ("" for all). Raises BadLevels."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, level = part.rpartition("=")
        level = level.strip().upper()
        if level not in LEVELS:
            raise BadLevels(f"{printable(level)} is not a log level. Levels: {', '.join(LEVELS)}")
        name = name.strip()
        if name and not _is_logger(name):
            raise BadLevels(f"unknown logger {printable(name)}")
        found[name] = level
    return found


def _is_logger(name: str) -> bool:
    """Return whether a logger name is that of a module of this package or of another installed package.

    The logger need not exist now: the name may be in a settings file and must be valid at the next start.
    """
    package, *within = name.split(".")
    if not all(part.isidentifier() for part in (package, *within)):
        return False
    if package != "cometmq":
        return package in sys.stdlib_module_names or find_spec(package) is not None
    path = os.path.join(os.path.dirname(__file__), *within)
    return os.path.isdir(path) or os.path.isfile(f"{path}.py")


_changed: set[str] = set()


def use_levels(text: str) -> None:
    """Set the levels of loggers from a text such as `INFO,cometmq.broker.pull=DEBUG`. Raises BadLevels.

    A logger that the previous text named and this text does not name gets the general level again. An empty
    text stands for the levels in the environment variable COMETMQ_LOG_LEVEL.
    """
    levels = levels_of(text or os.environ.get(LEVEL, "WARNING"))
    for name in _changed - levels.keys():
        logging.getLogger(name).setLevel(logging.NOTSET)
    _changed.clear()
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
        if name:
            _changed.add(name)
