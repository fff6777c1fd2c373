"""The JSON tables of `config/` (topics, groups, offsets), replaced as Apache's broker replaces them.

Saving works as in 4.9: write the new text to `f.tmp`, the current text of `f` to `f.bak`, and rename `f.tmp`
to `f`, so that `f` or `f.bak` is complete at every moment. Loading reads `f`, or `f.bak` if `f` is missing,
empty or invalid (see table_checks.py).
"""

from __future__ import annotations

import errno
import hashlib
import os

from cometmq import logs
from cometmq.errors import ProtocolError, StoreCorrupt
from cometmq.store.base.disk import Disk, read_file, write_new_file
from cometmq.store.tables.table_checks import SEALED, TABLE_RULES, Table, read_table, render, seal

log = logs.logger(__name__)


class JsonTable:
    """One table of `config/`, checked by the rule for its file name. All methods block during disk access."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path = path
        self._disk = disk or Disk()
        name = os.path.basename(path)
        self._rule = TABLE_RULES.get(name)
        self._sealed = name in SEALED
        self._written: bytes | None = None  # Digest of the text that was written last

    def load(self, *, backup: bool = True) -> Table:
        """Return the table in the file or, with `backup`, in its `.bak`; {} if they are missing or empty.

        Raises OSError, and StoreCorrupt if no file contains a valid table, and at least one is not empty. (If
        an empty table were returned, the next save would delete the content of the files.)
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
                log.error("%s; using %s", "; ".join(problems), path)
            return table
        if any("is empty" not in problem for problem in problems):
            raise StoreCorrupt("; ".join(problems), self.path)
        return {}

    def load_or_empty(self, *, backup: bool = True) -> Table:
        """Return the table in the file. An invalid table is logged and counts as empty."""
        try:
            return self.load(backup=backup)
        except StoreCorrupt as problem:
            log.error("%s is ignored: %s", self.path, problem)
            return {}

    def save(self, table: Table) -> None:
        """Replace the content of the file by `table`. After an OSError, the previous table still exists.

        In the tables that only CometMQ uses, which contain a CRC, all keys must be strings. A key of another
        type would be read back from JSON as a string, and the CRC could differ.
        """
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
        """Return whether a text is a valid table. Only a valid table may replace the `.bak`.

        The text that this object wrote last is valid. It is recognized by its digest and not parsed, because
        parsing ten thousand topics takes 70 ms of CPU.
        """
        if _digest(text) == self._written:
            return True
        try:
            read_table(text, self._rule)
        except ProtocolError:
            return False
        return True


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
