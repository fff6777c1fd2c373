"""JSON tables of `config/`: topics, groups, offsets, with Apache's protocol of files.

Saving 4.9's way: new text to `f.tmp`, the present text of `f` to `f.bak`, rename `f.tmp` to `f`; so at
every moment one of `f` and `f.bak` is whole. Loading: `f`, or `f.bak` when `f` is missing, empty or no table
(table_checks.py says what one is).
"""

from __future__ import annotations

import errno
import hashlib
import os

from cometmq import logs
from cometmq.errors import ProtocolError, StoreCorrupt
from cometmq.store.base.disk import Disk, OsDisk, read_file, write_new_file
from cometmq.store.tables.table_checks import SEALED, TABLE_RULES, Table, read_table, render, seal

log = logs.logger(__name__)


class JsonTable:
    """One file of `config/`, which must hold what a file of its name holds. Its methods wait for the device;
    big tables belong in a thread."""

    __slots__ = ("_disk", "_rule", "_sealed", "_written", "path")

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path = path
        self._disk = disk or OsDisk()
        name = os.path.basename(path)
        self._rule = TABLE_RULES.get(name)
        self._sealed = name in SEALED
        self._written: bytes | None = None  # digest of the text that we wrote last

    def load(self, *, backup: bool = True) -> Table:
        """The table, empty when neither the file nor its `.bak` is there. backup: whether that one counts.

        Raises StoreCorrupt when there is something but none of it is the table: starting with an empty one
        would lose what it held at the next save. Raises OSError.
        """
        problems = []
        for path in (self.path, self.path + ".bak") if backup else (self.path,):
            try:
                text = read_file(self._disk, path)
            except FileNotFoundError:
                continue
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                problems.append(f"{path} cannot be read: {failure.strerror}")
                continue
            if not text.strip():
                problems.append(f"{path} is empty")
                continue
            try:
                table = read_table(text, self._rule)
            except ProtocolError as problem:
                problems.append(f"{path}: {problem}")
                continue
            if problems:
                log.error("%s; going on with %s", "; ".join(problems), path)
            return table
        if any("is empty" not in problem for problem in problems):
            raise StoreCorrupt("; ".join(problems), self.path)
        return {}

    def load_or_empty(self, *, backup: bool = True) -> Table:
        """The table; one that cannot be read is named in the log and taken for empty."""
        try:
            return self.load(backup=backup)
        except StoreCorrupt as problem:
            log.error("going on without %s: %s", self.path, problem)
            return {}

    def save(self, table: Table) -> None:
        """Replace the table. Raises OSError; then the previous one is still there. CometMQ's own tables have
        text as keys everywhere: their CRC is over what is read back."""
        text = render(seal(table) if self._sealed else table).encode()
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
        self._written = _digest(text)
        self._disk.fsync_dir(directory)

    def _readable(self, text: bytes) -> bool:
        """Whether a text is a table, and may replace the `.bak`. What we wrote last need not be read again:
        with ten thousand topics that takes 70 ms of CPU."""
        if _digest(text) == self._written:
            return True
        try:
            read_table(text, self._rule)
        except ProtocolError:
            return False
        return True


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
