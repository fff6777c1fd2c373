"""Marks in a table of the database in which the effects are: both in one transaction."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from cometmq import logs
from cometmq.client.idempotency.memory import EXPIRY_S
from cometmq.clock import boottime
from cometmq.errors import ClientStateError, ConfigError, shown

__all__ = ["DatabaseMarks", "SqliteMarks"]

log = logs.logger("cometmq.client.idempotency")

T = TypeVar("T")
Mark = Sequence[tuple[str, object]]
"""Scope, key and time, by the names of their columns."""

_PLACES: dict[str, Callable[[int, str], str]] = {
    "qmark": lambda _number, _name: "?",
    "numeric": lambda number, _name: f":{number}",
    "named": lambda _number, name: f":{name}",
    "format": lambda _number, _name: "%s",
    "pyformat": lambda _number, name: f"%({name})s",
}
"""How a statement names its parameters, for each paramstyle of PEP 249."""
_PURGES = 100
"""Old marks are deleted so often in the life of a mark, but at most once a minute."""


class DatabaseMarks:
    """For plain handlers, which get a cursor: what it does and the mark are committed together, or neither
    is.

    connect: gives a connection as PEP 249 has it, without autocommit; as many are kept as listeners run at
    once. paramstyle: that of its module. The database knows `ON CONFLICT DO NOTHING`, as PostgreSQL and
    SQLite do. table: made by `create_table`, else by whoever owns the database.

    A handler leaves commit and rollback to the marks, and with sqlite3 `executescript` too, which commits.
    When one that has committed raises, its mark is deleted again, what it committed stays, and the message
    comes again. Two that get the same key wait for each other, as the
    database does it.
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
            raise ConfigError("table", table, "the name of a table, perhaps behind that of its schema")
        self._connect = connect
        self._paramstyle = paramstyle
        self._table = table
        self._expiry_s = expiry_s
        self._idle: dict[int, deque[Any]] = {}
        """Process id -> its connections. A forked child leaves those of its parent alone: to close one there
        would end it for the parent."""
        self._closed = False
        self._purge_at = 0.0
        """By boottime."""
        self._began = time.time() - boottime()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_table(self) -> None:
        """Make the table and its index, where they are missing."""
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
            # PostgreSQL lets one of two fail that make it at once.
            log.debug("table %s was not made: %s", self._table, error)
            self._run(make)

    def once(self, scope: str, key: str, act: Callable[[Any], object]) -> bool:
        """Call act(cursor) unless the key is marked, in the transaction that marks it. Raises what the
        database raises: then nothing of it has happened, or a commit whose answer was lost."""
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
                # A handler may have swallowed an error: then PostgreSQL answers the commit and undoes it all.
                if not self._is_there(cursor, mark):
                    raise ClientStateError(f"the handler of key {shown(key)} has rolled its transaction back")
                if ended:
                    raise ClientStateError(
                        f"the handler of key {shown(key)} has ended its transaction, by commit() or "
                        "executescript(): leave that to the marks"
                    )
                marked = False  # from here on the commit decides
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
        """Delete the mark of a handler that committed it and failed. Somebody else's mark of this key, made
        since then, has another time."""

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
            # What the handler raised counts.
            log.warning(
                "whether table %s has the mark of a failed handler is unknown: %s", self._table, error
            )

    def close(self) -> None:
        """Close the connections that are not in use; the others close after their use."""
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
            # The connection is lost, so the database undoes it; what went wrong first is raised.
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
        """The time, and what it would be if nobody had set it since this object was made. A mark gets the
        later one, and the earlier one deletes it, so that a step of the clock deletes nothing early."""
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
            # The message that happened to come is done all the same; the next purge is not far.
            log.warning("old marks of table %s were not deleted: %s", self._table, error)


class SqliteMarks(DatabaseMarks):
    """DatabaseMarks in an SQLite file, in which the effects are too. Makes its table. SQLite lets one
    transaction write at a time, so handlers of one file run one after another."""

    def __init__(self, path: str, *, table: str = "cometmq_done", expiry_s: float = EXPIRY_S) -> None:
        import sqlite3  # with its library, for those who use it

        if path == ":memory:" or not path:
            raise ConfigError("path", path, "a file, since each connection would have a memory of its own")
        super().__init__(
            lambda: sqlite3.connect(path, timeout=30.0, check_same_thread=False),
            paramstyle=sqlite3.paramstyle,
            table=table,
            expiry_s=expiry_s,
        )
        self.create_table()


def _is_ended(cursor: Any) -> bool:
    """Whether no transaction is open, as far as the module can say: sqlite3 can."""
    return getattr(getattr(cursor, "connection", None), "in_transaction", True) is False


def _autocommits() -> ConfigError:
    return ConfigError(
        "connect", "a connection with autocommit", "one without: effect and mark are one transaction"
    )
