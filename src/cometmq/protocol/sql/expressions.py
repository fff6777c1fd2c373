"""The semantics of SQL92 filters: each node of an expression is a function that reads a message's properties.

Logic has three values: True, False and None (null, unknown). As in RocketMQ, each operator accepts only some
operands; an operand that RocketMQ refuses raises SqlError (docs/reference/storage.md, SQL92 filter).
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from cometmq.errors import SqlError, shown
from cometmq.protocol.sql.java_values import (
    INT_MAX,
    LONG_MAX,
    Long,
    Value,
    order,
    to_bool,
    to_double,
    to_int,
    to_long,
)

Get = Callable[[str], str | None]
"""A function that takes a property's name and returns the message's value for it, or None if it has none."""
Evaluate = Callable[[Get], Any]

DEEPEST: Final = 64
"""The maximum nesting depth of an expression.

It limits the depth of the calls that evaluate the expression.
"""

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip


def _double(text: str) -> float:
    """Return the double for a property's text, to compare it with a double literal.

    NaN is replaced by infinity, because Java's Double.compare orders NaN above all other numbers, whereas in
    Python NaN is not greater than any number. Raises Mismatch if the text is not a double.
    """
    number = to_double(text)
    return number if number == number else math.inf


_READERS: dict[type, Callable[[str], Any]] = {
    str: str, bool: to_bool, int: to_int, Long: to_long, float: _double,
}  # fmt: skip


class Kind(enum.Enum):
    """The kinds of nodes in an expression. The kind determines where a node may be used."""

    CONSTANT = 0
    PROPERTY = 1
    NUMBER = 2  # A minus sign with its operand. The node's value is a number or null
    CONDITION = 3


class Part(msgspec.Struct, frozen=True):
    """A node of an expression's syntax tree.

    Attributes:
        at: The index of the node in the text of the expression.
        constant: The value of a node of kind CONSTANT.
        name: The property of a node of kind PROPERTY.
    """

    at: int
    kind: Kind
    evaluate: Evaluate
    constant: Value = None
    name: str = ""
    depth: int = 1


def _within(at: int, *parts: Part) -> int:
    """Return the depth of a node that contains `parts`. Raises SqlError if this depth exceeds the maximum."""
    depth = 1 + max(part.depth for part in parts)
    if depth > DEEPEST:
        raise SqlError(at + 1, f"the expression is nested deeper than {DEEPEST} levels")
    return depth


def _condition(evaluate: Evaluate, *parts: Part) -> Part:
    at = parts[0].at
    return Part(at, Kind.CONDITION, evaluate, depth=_within(at, *parts))


# -- operands


def constant(at: int, value: Value) -> Part:
    """Create the expression node for a literal."""
    return Part(at, Kind.CONSTANT, lambda _get: value, constant=value)


def whole_number(at: int, text: str) -> Part:
    """Create the expression node for an integer literal.

    The literal has 32 bits if its value fits into 32 bits, whatever its suffix.
    """
    number = int(text.rstrip("lL")[:20])
    if number > LONG_MAX:
        raise SqlError(at + 1, f"{shown(text)} is above {LONG_MAX}")
    return constant(at, number if number <= INT_MAX else Long(number))


def floating_number(at: int, text: str) -> Part:
    """Create the expression node for a number with a point or exponent.

    Such a literal is a positive double.
    """
    number = float(text)
    if math.isinf(number) or not number:
        raise SqlError(at + 1, f"{shown(text)} is not a positive double: write 0 for zero")
    return constant(at, number)


def text_of(literal: str) -> str:
    """Return the text of a quoted literal. Two quotes within it stand for one quote."""
    return literal[1:-1].replace("''", "'")


def named(at: int, name: str) -> Part:
    """Create the expression node for a property."""
    return Part(at, Kind.PROPERTY, lambda get: get(name), name=name)


def negative(at: int, part: Part) -> Part:
    """Create the expression node for a minus sign. The value is null unless the operand is a number."""
    inner = part.evaluate

    def evaluate(get: Get) -> Value:
        value = inner(get)
        if isinstance(value, str | bool | None):
            return None
        return -value if type(value) is not Long else Long(-value)

    return Part(at, Kind.NUMBER, evaluate, depth=_within(at, part))


# -- logic


def as_condition(part: Part) -> Part:
    """Convert an expression node to a condition.

    As a condition, a property is False if the message has it, because its value is a text and not a boolean.
    If the message does not have the property, the condition is null.
    """
    if part.kind is Kind.CONDITION or (part.kind is Kind.CONSTANT and isinstance(part.constant, bool | None)):
        return part
    if part.kind is not Kind.PROPERTY:
        raise SqlError(part.at + 1, "expected a condition, not a number or a text")
    name = part.name
    return _condition(lambda get: None if get(name) is None else False, part)


def negation(at: int, part: Part) -> Part:
    """Create the expression node for NOT, which binds more tightly than every comparison."""
    inner = as_condition(part).evaluate

    def evaluate(get: Get) -> bool | None:
        value: bool | None = inner(get)
        return None if value is None else not value

    return Part(at, Kind.CONDITION, evaluate, depth=_within(at, part))


def all_of(parts: Sequence[Part]) -> Part:
    """Create the expression node for AND: False if any operand is False, else null if any operand is null.

    Operands after a False one are not evaluated.
    """
    return _chain(parts, False)


def any_of(parts: Sequence[Part]) -> Part:
    """Create the expression node for OR: True if any operand is True, else null if any operand is null.

    Operands after a True one are not evaluated.
    """
    return _chain(parts, True)


def _chain(parts: Sequence[Part], decisive: bool) -> Part:
    conditions = [as_condition(part) for part in parts]
    inner = tuple(condition.evaluate for condition in conditions)

    def evaluate(get: Get) -> bool | None:
        outcome: bool | None = not decisive
        for each in inner:
            value: bool | None = each(get)
            if value is decisive:
                return decisive
            if value is None:
                outcome = None
        return outcome

    return _condition(evaluate, *conditions)


# -- equality


def is_null(part: Part) -> Part:
    """Create the expression node for IS NULL."""
    inner = part.evaluate
    return _condition(lambda get: inner(get) is None, part)


def is_not_null(part: Part) -> Part:
    """Create the expression node for IS NOT NULL."""
    inner = part.evaluate
    return _condition(lambda get: inner(get) is not None, part)


def equal(left: Part, right: Part) -> Part:
    """Create the expression node for `=`.

    The value is True if both sides are null, null if only the left is null, and False if only the right is
    null.
    """
    for part in (left, right):
        if part.kind is Kind.CONSTANT and part.constant is None:
            raise SqlError(part.at + 1, "nothing is equal to NULL: write IS NULL")
    if (
        left.kind is right.kind is Kind.CONSTANT
        and isinstance(left.constant, bool)
        and not isinstance(right.constant, bool)
    ):
        raise SqlError(right.at + 1, "TRUE and FALSE can only be compared with TRUE and FALSE")
    return _condition(_equality(left, right), left, right)


def not_equal(left: Part, right: Part) -> Part:
    """Create the expression node for `<>`, the negation of `=`."""
    return negation(left.at, equal(left, right))


def _equality(left: Part, right: Part) -> Evaluate:
    if left.kind is Kind.PROPERTY and right.kind is Kind.CONSTANT:
        return _against(left.name, operator.eq, right.constant)
    first, second = left.evaluate, right.evaluate

    def evaluate(get: Get) -> bool | None:
        one, other = first(get), second(get)
        if one is None:
            return True if other is None else None
        return False if other is None else order(one, other) == 0

    return evaluate


# -- order


def compared(left: Part, symbol: str, right: Part) -> Part:
    """Create the expression node for `>`, `>=`, `<` or `<=`. The value is null if an operand is null.

    Two texts are compared as doubles.
    """
    for part in (left, right):
        if part.kind is Kind.CONDITION or (part.kind is Kind.CONSTANT and not _is_number(part.constant)):
            raise SqlError(part.at + 1, f"only numbers and properties can be compared by {symbol}")
    test = _OPERATORS[symbol]
    if left.kind is Kind.PROPERTY and right.kind is Kind.CONSTANT:
        return _condition(_against(left.name, test, right.constant), left, right)
    first, second = left.evaluate, right.evaluate

    def evaluate(get: Get) -> bool | None:
        one = first(get)
        if one is None:
            return None
        other = second(get)
        if other is None:
            return None
        if type(one) is type(other) is str:
            one, other = to_double(one), to_double(other)
        return test(order(one, other), 0)

    return _condition(evaluate, left, right)


def _against(name: str, test: Callable[[Any, Any], bool], literal: Value) -> Evaluate:
    """Return a function that compares a property with a literal, the most frequent comparison.

    The property's text is read as a value of the literal's type.
    """
    read = _READERS[type(literal)]

    def evaluate(get: Get) -> bool | None:
        value = get(name)
        return None if value is None else test(read(value), literal)

    return evaluate


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def between(part: Part, low: Part, high: Part) -> Part:
    """Create the expression node for BETWEEN; both limits are included."""
    found = all_of((compared(part, ">=", low), compared(part, "<=", high)))
    if low.kind is high.kind is Kind.CONSTANT and order(high.constant, low.constant) < 0:
        raise SqlError(
            low.at + 1, f"BETWEEN {low.constant} AND {high.constant}: the first number is above the second"
        )
    return found


def not_between(part: Part, low: Part, high: Part) -> Part:
    """Create the expression node for NOT BETWEEN: below `low` or above `high`."""
    return any_of((compared(part, "<", low), compared(part, ">", high)))


# -- texts


def one_of(part: Part, texts: Sequence[str], wanted: bool) -> Part:
    """Create the expression node for IN, or for NOT IN if `wanted` is False."""
    if part.kind is not Kind.PROPERTY:
        raise SqlError(part.at + 1, "IN needs a property before it")
    name, listed = part.name, frozenset(texts)

    def evaluate(get: Get) -> bool | None:
        value = get(name)
        return None if value is None else (value in listed) is wanted

    return _condition(evaluate, part)


def searched(part: Part, word: str, text: str, wanted: bool) -> Part:
    """Create the expression node for CONTAINS, STARTSWITH or ENDSWITH, negated by NOT unless `wanted` is set.

    With and without NOT, the value is False for an operand that is not text, and for an empty `text`.
    """
    inner = part.evaluate
    test: Callable[[str], bool] = {
        "CONTAINS": lambda value: text in value,
        "STARTSWITH": lambda value: value.startswith(text),
        "ENDSWITH": lambda value: value.endswith(text),
    }[word]

    def evaluate(get: Get) -> bool:
        value = inner(get)
        return isinstance(value, str) and bool(text) and test(value) is wanted

    return _condition(evaluate, part)
