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
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from weakref import WeakValueDictionary

from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import CommandError, RecordError, SqlError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import decode_properties, value_of
from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.one import Values, claim_of, properties_of, values_reader
from cometmq.protocol.sql import MAX_EXPRESSION_LENGTH, SqlFilter, compile_sql
from cometmq.store import Unit

SQL92 = "SQL92"
MAX_CHARACTERS = 1 << 20
"""The limit for the lengths of the cached expressions, each plus `_EXTRA_CHARACTERS`, in sum.

A compiled character takes up to 60 bytes.
"""
_EXTRA_CHARACTERS = 100
REST = 4.0
"""The pause after a compilation, which slows the event loop, as a multiple of the compilation's duration."""
_MAX_REST_S = 0.1
# If a filter needs at most this many properties of a record, each is searched for; else all are decoded.
_MAX_SINGLE_READS = 3
MAX_VERDICT_TABLES = 32
"""The number of filters, those used last, that may have cached results. These take 10 MiB in all."""
MAX_VERDICTS = 1_000
"""The maximum number of cached results of one filter."""
MAX_VALUES_BYTES = 64
"""The maximum total length, in bytes, of the property values of a message whose result is cached."""
PAUSED_SCANS = 100
"""For this many scans, a filter uses no cached results after its cache has saved too few evaluations."""
# The cache is worth its cost if at most one in _WORTHWHILE checked records requires an evaluation.
_WORTHWHILE = 4

Key = tuple[str, bool]  # (expression, whether words such as CONTAINS are operators)


class NotCompiled(Exception):
    """The table of compiled filters does not contain an expression, so it must be compiled first."""

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
        """Return the filter of an expression, which is not a tag expression. 5.x's have more operators.

        Raises:
            NotCompiled: The expression must be compiled first.
            SqlError: The expression or its type is invalid.
            CommandError: Property filters are disabled.
        """
        if not self._config.enable_property_filter:
            raise CommandError.failed(
                f"The broker does not support consumer to filter message by {expression_type}"
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

        Only one compilation runs at a time. The compilations of one connection (`asker`) queue together
        first, so that many do not delay other connections. Raises CommandError if the broker is stopping.
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
                # Cache a new error, because the caught one would keep its traceback in memory.
                found = SqlError(error.column, error.problem)
            self._not_before = loop.time() + min(REST * (loop.time() - began), _MAX_REST_S)
            self._table[key] = found
            self._characters += len(expression) + _EXTRA_CHARACTERS
            while self._characters > MAX_CHARACTERS:
                (oldest, _), _ = self._table.popitem(last=False)
                self._characters -= len(oldest) + _EXTRA_CHARACTERS


class Verdicts(dict[Values, bool]):
    """A cache of the results of one filter: whether certain values of its properties match.

    The key is the value of the only property, or the tuple of the values of all properties in the order of
    the filter. A missing result is evaluated and added. After MAX_VERDICTS evaluations the cache is cleared.
    If it has saved few evaluations of a filter with several properties, the next PAUSED_SCANS scans do not
    use it: a lookup needs the values of all properties, while an evaluation often needs only the first.
    """

    __slots__ = ("_evaluated", "_paused", "_sql", "checked")

    def __init__(self, sql: SqlFilter) -> None:
        self._sql = sql
        self._evaluated = 0
        self._paused = 0  # The next scans, up to this number, do not use the cache
        self.checked = 0  # The number of records checked with the cache since it was cleared

    def begin_scan(self) -> bool:
        """Begin a scan of records. Return whether the scan uses the cached results."""
        if not self._paused:
            return True
        self._paused -= 1
        return False

    def __missing__(self, values: Values) -> bool:
        passes = self.evaluate(values)
        several = values if isinstance(values, tuple) else ()
        if self._evaluated >= MAX_VERDICTS:
            if several and self.checked < _WORTHWHILE * self._evaluated:
                self._paused = PAUSED_SCANS
            self.clear()
            self._evaluated = self.checked = 0
        self._evaluated += 1
        if sum(map(len, several)) <= MAX_VALUES_BYTES:
            self[values] = passes
        return passes

    def evaluate(self, values: Values) -> bool:
        """Evaluate the filter for the given property values, without using the cache."""
        each = (values,) if isinstance(values, bytes) else values
        texts = [value.decode("utf-8", "replace") or None for value in each]
        return self._sql.matches(dict(zip(self._sql.names, texts, strict=True)).get)


@lru_cache(MAX_VERDICT_TABLES)
def _cached_parts(sql: SqlFilter) -> tuple[Callable[[bytes | bytearray, int, int], Values], Verdicts]:
    """Return a function that reads a filter's properties from a record, and the filter's result cache."""
    return values_reader(tuple(name.encode() for name in sql.names)), Verdicts(sql)


class FilterScan:
    """Checks records with the filter of one pull, until a time limit.

    Budget: 1 µs of CPU per record if the filter uses one property and the result for the record's value of
    this property is cached. The value is found in the bytes of the record, and the result is looked up by the
    bytes of the value. If a filter uses more than _MAX_SINGLE_READS properties, no results are cached, and
    only the properties that the evaluation needs are read.
    """

    __slots__ = (
        "_asked",
        "_decoded",
        "_is_cached",
        "_matches",
        "_now_s",
        "_over",
        "_properties",
        "_read",
        "_until",
        "verdicts",
    )

    def __init__(
        self, sql: SqlFilter, seconds: float, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._matches = sql.matches
        self._read, self.verdicts = _cached_parts(sql)
        self._is_cached = len(sql.names) <= _MAX_SINGLE_READS and self.verdicts.begin_scan()
        self._now_s = now_s
        self._until = now_s() + seconds
        self._over = False
        self._properties = b""
        self._asked = 0
        self._decoded: dict[str, str] = {}

    def find_match(
        self, data: bytes | bytearray, start: int, units: Sequence[Unit], first: int, stop: int
    ) -> tuple[int, bool | None]:
        """Return the index of the first entry in `units` whose record matches the filter, and True.

        If no checked record matches, return the index after the last checked entry, and None if the time
        limit has ended the scan, otherwise False. A damaged record counts as a match, so that its consumer
        sees the damage. The first record of a scan is always checked. `RecordFilter` describes the arguments.
        """
        length, read, now_s, until = len(data), self._read, self._now_s, self._until
        verdicts, is_cached, over = self.verdicts, self._is_cached, self._over
        passes: bool | None = False
        index = first
        while index < stop:
            if over:
                passes = None
                break
            position, size, _ = units[index]
            at = position - start
            if at < 0 or at + size > length or size < MIN_SIZE:
                break
            try:
                if not is_cached:
                    passes = self._evaluate(data, at, size)
                else:
                    values = read(data, at, size)
                    # Cache no results for long values: hashing such a value takes longer than the evaluation.
                    passes = (
                        verdicts[values] if len(values) <= MAX_VALUES_BYTES else verdicts.evaluate(values)
                    )
            except RecordError:
                return index, True
            self._over = over = now_s() >= until
            if passes:
                break
            index += 1
        if is_cached:
            verdicts.checked += index - first + (passes is True)
        return index, passes

    def _evaluate(self, data: bytes | bytearray, at: int, size: int) -> bool:
        """Evaluate the filter for a record. A property is read when the evaluation needs it."""
        if claim_of(data, at)[0] != size:
            return True
        self._properties = properties_of(data, at)
        self._asked = 0
        return self._matches(self._get)

    def _get(self, name: str) -> str | None:
        """Return a property of the current record, or None.

        The first three properties that are requested are searched for one by one, which takes a third of the
        time of decoding all properties. If a fourth one is requested, all properties are decoded.
        """
        self._asked += 1
        if self._asked <= _MAX_SINGLE_READS:
            value = value_of(self._properties, name.encode("utf-8", "replace"))
            return value.decode("utf-8", "replace") or None
        if self._asked == _MAX_SINGLE_READS + 1:
            self._decoded = decode_properties(self._properties)
        return self._decoded.get(name)
