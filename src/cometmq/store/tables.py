"""JSON tables of `config/`: topics, groups, offsets, in Apache's text style and with its protocol of files.

Text (fact sheet 1.4): one TAB per level, LF, no newline at the end; keys of maps from numbers to numbers
stand without quotes on one line. Reading accepts fastjson's dialect and standard JSON.

Saving 4.9's way: new text to `f.tmp`, the present text of `f` to `f.bak`, rename `f.tmp` to `f`; so at
every moment one of `f` and `f.bak` is whole. Loading: `f`, or `f.bak` when `f` is missing, empty or cannot
be parsed.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import msgspec

from cometmq.errors import ProtocolError, StoreCorrupt
from cometmq.protocol.lenient import read_lenient
from cometmq.store.disk import Disk, OsDisk, read_file, write_new_file

log = logging.getLogger(__name__)


def render(value: Any, level: int = 0) -> str:
    """A value (dict, list, str, int, float, bool, None) in the text style of Apache's broker."""
    if isinstance(value, dict):
        if not value:
            return "{}"
        if all(isinstance(key, int) for key in value):
            inner = ",".join(f"{key}:{render(item, level + 1)}" for key, item in value.items())
            return "{" + inner + "\n" + "\t" * level + "}"
        indent = "\n" + "\t" * (level + 1)
        inner = ("," + indent).join(f"{_quoted(str(k))}:{render(v, level + 1)}" for k, v in value.items())
        return "{" + indent + inner + "\n" + "\t" * level + "}"
    if isinstance(value, (list, tuple)):
        if not value:
            return "[]"
        indent = "\n" + "\t" * (level + 1)
        return (
            "["
            + indent
            + ("," + indent).join(render(v, level + 1) for v in value)
            + "\n"
            + "\t" * level
            + "]"
        )
    if isinstance(value, str):
        return _quoted(value)
    return json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read(text: bytes) -> Any:
    """Standard JSON quickly, anything else as fastjson would read it. Raises ProtocolError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return read_lenient(text)


class JsonTable:
    """One file of `config/`. Its methods wait for the device; big tables belong in a thread."""

    __slots__ = ("_disk", "path")

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path = path
        self._disk = disk or OsDisk()

    def load(self) -> dict[str, Any]:
        """The table, empty when neither the file nor its `.bak` is there.

        Raises StoreCorrupt when there is something but none of it can be read: starting with an empty
        table would lose what it held at the next save.
        """
        problems = []
        for path in (self.path, self.path + ".bak"):
            try:
                text = read_file(self._disk, path)
            except FileNotFoundError:
                continue
            if not text.strip(b" \t\r\n\0"):
                problems.append(f"{path} is empty")
                continue
            try:
                value = _read(text)
            except ProtocolError as problem:
                problems.append(f"{path}: {problem}")
                continue
            if isinstance(value, dict):
                if problems:
                    log.error("%s; going on with %s", "; ".join(problems), path)
                return value
            problems.append(f"{path} holds no JSON object")
        if any("is empty" not in problem for problem in problems):
            raise StoreCorrupt("; ".join(problems), self.path)
        return {}

    def load_or_empty(self) -> dict[str, Any]:
        """The table; one that cannot be read is named in the log and taken for empty."""
        try:
            return self.load()
        except StoreCorrupt as problem:
            log.error("going on without %s: %s", self.path, problem)
            return {}

    def save(self, value: dict[Any, Any]) -> None:
        """Replace the table. Raises OSError; then the previous one is still there."""
        text = render(value).encode()
        directory = os.path.dirname(self.path)
        if not self._disk.is_dir(directory):
            self._disk.makedirs(directory)
            self._disk.fsync_dir(os.path.dirname(directory))
        write_new_file(self._disk, self.path + ".tmp", text)
        try:
            previous = read_file(self._disk, self.path)
        except FileNotFoundError:
            previous = b""
        if previous and self._readable(previous):
            write_new_file(self._disk, self.path + ".bak", previous)
        self._disk.rename(self.path + ".tmp", self.path)
        self._disk.fsync_dir(directory)

    @staticmethod
    def _readable(text: bytes) -> bool:
        """A damaged table must not take the place of a good `.bak`."""
        try:
            return isinstance(_read(text), dict)
        except ProtocolError:
            return False
