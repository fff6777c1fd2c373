"""Loggers whose lines are short and harmless: names, remarks and errors in them come from other programs.

They are made printable here, once, instead of at each call. All rooms use `log = logs.logger(__name__)` in
place of `logging.getLogger`. A process calls `set_up` once; libraries' users set up logging themselves.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from cometmq.text import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMATS = ("text", "json")
LEVEL, FORMAT = "COMETMQ_LOG_LEVEL", "COMETMQ_LOG_FORMAT"
"""Variables of the environment, which processes that are started inherit."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ARGUMENT_LIMIT = 512  # characters; a remark of a server may be this long
MESSAGE_LIMIT = 8192  # of a record, with its arguments
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


class _OneLine(logging.Filter):
    """Makes the words of any record one harmless line: libraries that log know nothing of us."""

    def filter(self, record: logging.LogRecord) -> bool:
        _filter.filter(record)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit: what there is must be seen
            record.msg, record.args = f"{record.msg} {record.args}", ()
            text = record.msg
        safe = printable(text, MESSAGE_LIMIT)
        if safe != text:
            record.msg, record.args = safe, ()
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


class BadLevels(ValueError):
    """A text that `levels_of` cannot read; str() says what is expected."""


class _JsonLines(logging.Formatter):
    """An event as one line of JSON: what happened in the words of the code, and the values in them."""

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
        # In ASCII: what the stream escapes for itself is no JSON.
        return json.dumps(event, default=str, separators=(",", ":"))


def set_up(default: str = "WARNING") -> None:
    """Events to standard error, as COMETMQ_LOG_LEVEL (`default` without it) and COMETMQ_LOG_FORMAT say. What
    cannot be used is told, and changes nothing."""
    level, form = os.environ.get(LEVEL, default), os.environ.get(FORMAT, "text").lower()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_OneLine())
    logging.basicConfig(level=default, handlers=[handler])
    logging.captureWarnings(True)
    threading.excepthook = _thread_ended
    log = logger(__name__)
    if form not in FORMATS:
        log.warning("%s=%s is no format: %s", FORMAT, form, ", ".join(FORMATS))
    try:
        use_levels(level)
    except BadLevels as problem:
        log.warning("%s: %s", LEVEL, problem)


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """What nobody has caught in a thread is an event as well."""
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = ended.thread.name if ended.thread is not None else "unknown"
        found = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        logger(__name__).error("thread %s ended", name, exc_info=found)


def levels_of(text: str) -> dict[str, str]:
    """Logger ("" is all) -> level, of `INFO,cometmq.broker.pull=DEBUG`. Raises BadLevels."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, level = part.rpartition("=")
        level = level.strip().upper()
        if level not in LEVELS:
            raise BadLevels(f"{printable(level)} is no level: {', '.join(LEVELS)}")
        name = name.strip()
        if name and not _is_logger(name):
            raise BadLevels(f"there is no logger {printable(name)}")
        found[name] = level
    return found


def _is_logger(name: str) -> bool:
    """Whether a logger has this name at every start: a module of ours, or of a package that is installed. Not
    those that exist now: what is accepted here is written to files, and must be good enough to start with."""
    package, *within = name.split(".")
    if not all(part.isidentifier() for part in (package, *within)):
        return False
    if package != "cometmq":
        return package in sys.stdlib_module_names or find_spec(package) is not None
    path = Path(__file__).parent.joinpath(*within)
    return path.is_dir() or path.with_suffix(".py").is_file()


_changed: set[str] = set()


def use_levels(text: str) -> None:
    """Put levels into force at once; loggers that were named before and are not now follow the others. ""
    is what the environment says. Raises BadLevels."""
    levels = levels_of(text or os.environ.get(LEVEL, "WARNING"))
    for name in _changed - levels.keys():
        logging.getLogger(name).setLevel(logging.NOTSET)
    _changed.clear()
    for name, level in levels.items():
        logging.getLogger(name or None).setLevel(level)
        if name:
            _changed.add(name)
