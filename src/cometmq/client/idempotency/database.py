"""Idempotency keys in the database that a handler changes, in the same transaction."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from cometmq import logs
from cometmq.client.idempotency.memory import EXPIRY_S
from cometmq.clock import boottime
from cometmq.errors import ClientStateError, ConfigError, shown

log = logs.logger("cometmq.client.idempotency")

T = TypeVar("T")
Mark = Sequence[tuple[str, object]]
"""The columns of a stored key (scope, key and time) as pairs of column name and value."""

_PLACES: dict[str, Callable[[int, str], str]] = {
    "qmark": lambda _number, _name: "?",
    "numeric": lambda number, _name: f":{number}",
    "named": lambda _number, name: f":{name}",
    "format": lambda _number, _name: "%s",
    "pyformat": lambda _number, name: f"%({name})s",
}
"""By `paramstyle` of PEP 249: returns the placeholder of an SQL parameter with this number and name."""
_PURGES = 100
"""Expired keys are deleted this many times per lifetime of a key, but at most once per minute."""


class DatabaseMarks:
    """Idempotency keys in a database table, for plain handlers, which receive a cursor.

    The changes of the handler and the key are committed together or not at all. The handler must not commit
    or roll back, nor call `executescript` of sqlite3, which commits. If a handler commits and then raises an
    exception, its key is deleted, but its changes remain, and the message is delivered again. While a message
    is processed, the database blocks the processing of another message with the same key.

    Args:
        connect: Returns a PEP 249 connection without autocommit to a database that supports `ON CONFLICT DO
            NOTHING`, such as PostgreSQL and SQLite. One connection per concurrent listener call is kept.
        paramstyle: The paramstyle of the database module.
        table: The name of the table, created by `create_table` or by an administrator.
        expiry_s: The lifetime of a key in seconds.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        paramstyle: str,
        table: str = "cometmq_done",
        expiry_s: float = EXPIRY_S,
    ) -> None:
        if paramstyle not in _PLACES:
            raise ConfigError("paramstyle", paramstyle, ", ".join(_PLACES))
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", table, re.ASCII):
            raise ConfigError("table", table, "the name of a table, or SCHEMA.TABLE")
        self._connect = connect
        self._paramstyle = paramstyle
        self._table = table
        self._expiry_s = expiry_s
        self._idle: dict[int, deque[Any]] = {}
        """The idle connections by process id: a forked child must not close its parent's sessions."""
        self._closed = False
        self._purge_at = 0.0
        """The time of the next deletion of old keys, on the clock `boottime`."""
        self._began = time.time() - boottime()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def create_table(self) -> None:
        """Create the table and its index unless they exist."""
        index = f"{self._table.replace('.', '_')}_at"

        def make(cursor: Any) -> None:
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {self._table} (scope VARCHAR(255) NOT NULL, "
                "message_key VARCHAR(255) NOT NULL, done_at DOUBLE PRECISION NOT NULL, "
                "PRIMARY KEY (scope, message_key))"
            )
            cursor.execute(f"CREATE INDEX IF NOT EXISTS {index} ON {self._table} (done_at)")

        try:
            self._run(make)
        except Exception as error:
            # If two clients create the table concurrently, PostgreSQL reports an error to one of them.
            log.debug("table %s was not created: %s", self._table, error)
            self._run(make)

    def once(self, scope: str, key: str, act: Callable[[Any], object]) -> bool:
        """Store the key and call `act(cursor)` in one transaction. Do nothing if the key was stored before.

        Implements `Marks.once`. If this method raises a database error, nothing was committed, with one
        exception: the connection may have been lost after the commit and before its confirmation.
        """
        mark = (("scope", scope), ("message_key", key), ("done_at", max(self._clocks())))
        marked = False

        def work(cursor: Any) -> bool:
            nonlocal marked
            into = f"INSERT INTO {self._table} (scope, message_key, done_at) VALUES"
            self._execute(cursor, f"{into} ({{}}, {{}}, {{}}) ON CONFLICT DO NOTHING", mark)
            first: bool = cursor.rowcount > 0
            if first:
                marked = True
                if _is_ended(cursor):
                    raise _autocommits()
                act(cursor)
                ended = _is_ended(cursor)
                # Check that the key is stored. If the handler has suppressed a database error, PostgreSQL
                # confirms the commit but rolls everything back.
                if not self._is_there(cursor, mark):
                    raise ClientStateError(f"the handler of key {shown(key)} rolled its transaction back")
                if ended:
                    raise ClientStateError(
                        f"the handler of key {shown(key)} ended its transaction, by commit() or "
                        "executescript(), which is not allowed"
                    )
                marked = False  # from here on, the commit decides whether the key is stored
            return first

        try:
            first = self._run(work)
        except BaseException:
            if marked:
                self._unmark(mark)
            raise
        self._purge_if_due()
        return first

    def _is_there(self, cursor: Any, mark: Mark) -> bool:
        found = f"SELECT 1 FROM {self._table} WHERE scope = {{}} AND message_key = {{}} AND done_at = {{}}"
        self._execute(cursor, found, mark)
        return cursor.fetchone() is not None

    def _unmark(self, mark: Mark) -> None:
        """Delete the key that a failed handler committed, not one with another time, of another consumer."""

        def work(cursor: Any) -> None:
            if self._is_there(cursor, mark):
                self._execute(
                    cursor,
                    f"DELETE FROM {self._table} WHERE scope = {{}} AND message_key = {{}} AND done_at = {{}}",
                    mark,
                )

        try:
            self._run(work)
        except Exception as error:
            # Only log this error, because the caller raises the exception of the handler.
            log.warning(
                "table %s may contain the key of a message whose handler failed: %s", self._table, error
            )

    def close(self) -> None:
        """Close the idle connections. Each connection in use is closed after its call."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._pool.pop().close()

    @property
    def _pool(self) -> deque[Any]:
        return self._idle.setdefault(os.getpid(), deque())

    def _run(self, work: Callable[[Any], T]) -> T:
        connection = self._take()
        try:
            cursor = connection.cursor()
            try:
                result = work(cursor)
            finally:
                cursor.close()
            connection.commit()
        except BaseException:
            self._undo(connection)
            raise
        self._keep(connection)
        return result

    def _take(self) -> Any:
        with contextlib.suppress(IndexError):
            return self._pool.pop()
        connection = self._connect()
        if getattr(connection, "autocommit", False) is True:
            connection.close()
            raise _autocommits()
        return connection

    def _undo(self, connection: Any) -> None:
        try:
            connection.rollback()
        except Exception as error:
            # The connection is lost, so the database rolls back by itself. Only log this error, because the
            # caller raises the error that led to the rollback.
            log.debug("rollback failed: %r", error)
            try:
                connection.close()
            except Exception as closing:
                log.debug("close failed: %r", closing)
        else:
            self._keep(connection)

    def _keep(self, connection: Any) -> None:
        if self._closed:
            connection.close()
        else:
            self._pool.append(connection)

    def _execute(self, cursor: Any, statement: str, values: Mark) -> None:
        place = _PLACES[self._paramstyle]
        text = statement.format(*(place(number, name) for number, (name, _) in enumerate(values, 1)))
        named = self._paramstyle in ("named", "pyformat")
        cursor.execute(text, dict(values) if named else tuple(value for _, value in values))

    def _clocks(self) -> tuple[float, float]:
        """Return the wall-clock time, and the time that a wall clock without adjustments would show.

        Keys are stored with the later one and expire by the earlier one, so that no adjustment deletes a key
        early.
        """
        return time.time(), self._began + boottime()

    def _purge_if_due(self) -> None:
        if boottime() < self._purge_at:
            return
        self._purge_at = boottime() + max(60.0, self._expiry_s / _PURGES)
        try:
            old = [("before", min(self._clocks()) - self._expiry_s)]
            self._run(
                lambda cursor: self._execute(cursor, f"DELETE FROM {self._table} WHERE done_at < {{}}", old)
            )
        except Exception as error:
            # A failed purge does not prevent the processing of a message, and is repeated soon.
            log.warning("old keys of table %s could not be deleted: %s", self._table, error)


class SqliteMarks(DatabaseMarks):
    """DatabaseMarks in the SQLite file that the handler changes. Creates the table of keys.

    SQLite allows one writing transaction at a time, so handlers that use one file run one after another.

    Args:
        path: The path of the file.
        table: The name of the table.
        expiry_s: The lifetime of a key in seconds. Default: seven days.
    """

    def __init__(self, path: str, *, table: str = "cometmq_done", expiry_s: float = EXPIRY_S) -> None:
        import sqlite3  # imported here, because some Python installations lack the SQLite library

        if path == ":memory:" or not path:
            raise ConfigError("path", path, "a file: each connection has its own database in memory")
        super().__init__(
            lambda: sqlite3.connect(path, timeout=30.0, check_same_thread=False),
            paramstyle=sqlite3.paramstyle,
            table=table,
            expiry_s=expiry_s,
        )
        self.create_table()


def _is_ended(cursor: Any) -> bool:
    """Return whether the connection has no open transaction. False if the module cannot tell."""
    return getattr(getattr(cursor, "connection", None), "in_transaction", True) is False


def _autocommits() -> ConfigError:
    return ConfigError(
        "connect", "a connection with autocommit", "one without: effect and key are one transaction"
    )
