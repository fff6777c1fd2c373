"""The SQL92 filters of a broker.

Expressions are compiled in a thread and cached in a table of limited size; the filtering of a pull has a time
limit. Refusals and their codes are those of Apache's broker, except for pulls with an invalid expression
(docs/reference/storage.md, Pull answers).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import CommandError, RecordError, SqlError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import decode_properties, value_of
from cometmq.protocol.record.one import properties_of
from cometmq.protocol.sql import MAX_EXPRESSION_LENGTH, SqlFilter, compile_sql
from cometmq.store import Buffer

SQL92 = "SQL92"
MAX_CHARACTERS = 1 << 20
"""The maximum total length of the cached expressions, in characters, plus a fixed number for each.

It bounds the memory of the cache, because each character of an expression takes up to 60 bytes when compiled.
"""
_EXTRA_CHARACTERS = 100
REST = 4.0
"""The pause after a compilation, as a multiple of its duration.

A compilation slows the event loop even though it runs in a thread, so pauses limit its share of the time.
"""
_MAX_REST_S = 0.1
_MAX_SINGLE_READS = 3  # properties that are read singly before all are decoded

Key = tuple[str, bool]  # expression; whether words such as CONTAINS are operators


class NotCompiled(Exception):
    """The filter of an expression is not in the table, so the expression must be compiled first."""

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key = key


class SqlFilters:
    """The compiled filters of a broker. All methods must be called in the event loop's thread."""

    def __init__(self, config: BrokerConfig, compiler: Callable[..., SqlFilter] = compile_sql) -> None:
        self._config = config
        self._compiler = compiler
        self._table: OrderedDict[Key, SqlFilter | SqlError] = OrderedDict()
        self._characters = 0
        self._turn = asyncio.Lock()
        self._turns_of: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._not_before = 0.0
        self._stopping = asyncio.Event()

    def find(self, expression: str | None, expression_type: str, version: int) -> SqlFilter:
        """Return the filter of a subscription whose expression is not a tag expression.

        Args:
            expression: The expression.
            expression_type: The type of the expression.
            version: The version of the request. Expressions of 5.x have more operators.

        Raises:
            NotCompiled: The expression must be compiled first.
            SqlError: The expression or its type is invalid.
            CommandError: Property filters are disabled.
        """
        if not self._config.enable_property_filter:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {expression_type}",
            )
        if expression_type != SQL92:
            raise SqlError(1, f"the expression type must be TAG or {SQL92}, not {expression_type}")
        if not expression or len(expression) > MAX_EXPRESSION_LENGTH:
            return compile_sql(expression or "")
        key = expression, compat.is_5x(version)
        found = self._table.get(key)
        if found is None:
            raise NotCompiled(key)
        self._table.move_to_end(key)
        if isinstance(found, SqlError):
            raise SqlError(found.column, found.problem)
        return found

    def stop(self) -> None:
        """Make all waiting compilations fail, because the broker is stopping."""
        self._stopping.set()

    async def compile(self, key: Key, asker: Hashable) -> None:
        """Compile an expression, and store its filter or its error in the table.

        Only one compilation runs at a time. The compilations of one connection (`asker`) queue among
        themselves first, so that many of them do not delay other connections.

        Raises:
            CommandError: The broker is stopping.
        """
        own = self._turns_of.setdefault(asker, asyncio.Lock())
        async with own, self._turn:
            if key in self._table:
                return
            loop = asyncio.get_running_loop()
            rest_s = self._not_before - loop.time()
            if rest_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), rest_s)
            if self._stopping.is_set():
                raise CommandError(ResponseCode.SERVICE_NOT_AVAILABLE, "the broker stops")
            began = loop.time()
            expression, string_words = key
            found: SqlFilter | SqlError
            try:
                found = await asyncio.to_thread(self._compiler, expression, string_words=string_words)
            except SqlError as error:
                found = SqlError(error.column, error.problem)  # a copy without the traceback
            self._not_before = loop.time() + min(REST * (loop.time() - began), _MAX_REST_S)
            self._table[key] = found
            self._characters += len(expression) + _EXTRA_CHARACTERS
            while self._characters > MAX_CHARACTERS:
                (oldest, _), _ = self._table.popitem(last=False)
                self._characters -= len(oldest) + _EXTRA_CHARACTERS


class FilterScan:
    """The filter of one pull, which checks records until a time limit.

    After the limit, it returns None, which means "not checked". It always checks the first record.
    """

    __slots__ = ("_asked", "_decoded", "_matches", "_now_s", "_over", "_properties", "_until")

    def __init__(
        self, sql: SqlFilter, seconds: float, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._matches = sql.matches
        self._now_s = now_s
        self._until = now_s() + seconds
        self._over = False
        self._properties = b""
        self._asked = 0
        self._decoded: dict[str, str] = {}

    def __call__(self, record: Buffer) -> bool | None:
        """Return whether a record matches, or None after the time limit.

        A damaged record matches, so that the consumer notices the damage.
        """
        if self._over:
            return None
        try:
            self._properties = properties_of(record)
        except RecordError:
            return True
        self._asked = 0
        passes = self._matches(self._get)
        self._over = self._now_s() >= self._until
        return passes

    def _get(self, name: str) -> str | None:
        """Return a property of the current record, or None.

        Up to three properties are read singly, which takes a third of the time of decoding all of them.
        """
        self._asked += 1
        if self._asked <= _MAX_SINGLE_READS:
            value = value_of(self._properties, name.encode("utf-8", "replace"))
            return value.decode("utf-8", "replace") or None
        if self._asked == _MAX_SINGLE_READS + 1:
            self._decoded = decode_properties(self._properties)
        return self._decoded.get(name)
