"""SQL92 filters: compiling an expression, and trying messages against it
(docs/reference/storage.md, SQL92 filter)."""

from __future__ import annotations

from cometmq.errors import SqlError
from cometmq.protocol.sql.expressions import Evaluate, Get
from cometmq.protocol.sql.java_values import Mismatch

__all__ = ["LONGEST", "SqlFilter", "compile_sql"]

LONGEST = 8_192
"""Characters of an expression."""


class SqlFilter:
    """A compiled expression."""

    __slots__ = ("_evaluate", "expression")

    def __init__(self, expression: str, evaluate: Evaluate) -> None:
        self.expression = expression
        self._evaluate = evaluate

    def value(self, get: Get) -> bool | None:
        """True, False, or None for unknown; `get` gives the value of a property, None without one."""
        try:
            value: bool | None = self._evaluate(get)
        except Mismatch:
            return None
        return value

    def matches(self, get: Get) -> bool:
        """Whether a message with these properties passes."""
        return self.value(get) is True


def compile_sql(expression: str, *, string_words: bool = True) -> SqlFilter:
    """The filter that an expression says. Milliseconds, so not for the loop. Raises SqlError.

    string_words: with CONTAINS, STARTSWITH and ENDSWITH, as 5.x has them.
    """
    if len(expression) > LONGEST:
        raise SqlError(
            LONGEST + 1, f"the expression has {len(expression)} characters, at most {LONGEST} are read"
        )
    # The parser takes 40 ms to import, and few programs need it.
    from cometmq.protocol.sql.grammar import parse

    return SqlFilter(expression, parse(expression, string_words).evaluate)
