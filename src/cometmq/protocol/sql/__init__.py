"""SQL92 filters: compiling an expression and evaluating it (docs/reference/storage.md, SQL92 filter)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cometmq.errors import SqlError
from cometmq.protocol.sql.java_values import Mismatch

if TYPE_CHECKING:
    from cometmq.protocol.sql.grammar import Evaluate, Get

__all__ = ["MAX_EXPRESSION_LENGTH", "SqlFilter", "compile_sql"]

MAX_EXPRESSION_LENGTH = 8_192
"""The maximum length of an expression in characters."""


class SqlFilter:
    """A compiled SQL92 filter expression. `names` are the properties that it reads."""

    __slots__ = ("_evaluate", "expression", "names")

    def __init__(self, expression: str, evaluate: Evaluate, names: tuple[str, ...]) -> None:
        self.expression = expression
        self.names = names
        self._evaluate = evaluate

    def value(self, get: Get) -> bool | None:
        """Return True, False, or None (unknown). `get` returns a property's value or None."""
        try:
            value: bool | None = self._evaluate(get)
        except Mismatch:
            return None
        return value

    def matches(self, get: Get) -> bool:
        """Return whether a message matches. `get` returns the value of one of its properties, or None."""
        return self.value(get) is True


def compile_sql(expression: str, *, string_words: bool = True) -> SqlFilter:
    """Compile an expression. This takes milliseconds, so it must not run in the event loop.

    With `string_words`, CONTAINS, STARTSWITH and ENDSWITH are operators, as in 5.x. Raises SqlError.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        problem = f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_LENGTH} are read"
        raise SqlError(MAX_EXPRESSION_LENGTH + 1, problem)
    # Import the parser only when it is needed, because the import takes 40 ms and few programs need it.
    from cometmq.protocol.sql.grammar import parse

    part, names = parse(expression, string_words)
    return SqlFilter(expression, part.evaluate, names)
