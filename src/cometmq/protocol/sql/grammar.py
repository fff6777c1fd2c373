"""The grammar, parser and semantics of SQL92 filters (docs/reference/storage.md, SQL92 filter).

RocketMQ's parser reads the longest valid prefix of a text and ignores the rest: `a = 5 whatever` is `a = 5`.
Therefore this parser receives tokens one by one. The first token that the grammar does not allow ends the
text, if the tokens before it form a complete condition.

Each node of an expression is a function that reads a message's properties. Logic has three values: True,
False and None (null, unknown). As in RocketMQ, each operator accepts only some operands; an operand that
RocketMQ refuses raises SqlError.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import lark
import msgspec
from lark import Lark, Token, UnexpectedCharacters, UnexpectedToken, v_args

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

GRAMMAR = r"""
start: any
?any: all (_OR all)*
?all: equality (_AND equality)*
?equality: comparison
    | equality "=" comparison                               -> equal
    | equality "<>" comparison                              -> not_equal
    | equality _IS NOT? NULL                                -> is_null
?comparison: unary
    | comparison ORDER unary                                -> compared
    | comparison NOT? _BETWEEN unary _AND unary             -> between
    | comparison NOT? _IN "(" STRING ("," STRING)* ")"      -> one_of
    | comparison NOT? SEARCH STRING                         -> searched
?unary: "+" unary
    | MINUS unary                                      -> negative
    | NOT unary                                        -> negation
    | primary
?primary: "(" any ")"
    | NAME                                             -> named
    | STRING                                           -> text
    | INTEGER                                          -> integer
    | FLOAT                                            -> floating
    | TRUE                                             -> true
    | FALSE                                            -> false
    | NULL                                             -> null

NOT.2: /NOT(?![a-z0-9_$])/i
_AND.2: /AND(?![a-z0-9_$])/i
_OR.2: /OR(?![a-z0-9_$])/i
_BETWEEN.2: /BETWEEN(?![a-z0-9_$])/i
_IN.2: /IN(?![a-z0-9_$])/i
TRUE.2: /TRUE(?![a-z0-9_$])/i
FALSE.2: /FALSE(?![a-z0-9_$])/i
NULL.2: /NULL(?![a-z0-9_$])/i
_IS.2: /IS(?![a-z0-9_$])/i
SEARCH.2: /(CONTAINS|STARTSWITH|ENDSWITH)(?![a-z0-9_$])/i
NAME: /[a-zA-Z_$][a-zA-Z0-9_$]*/
FLOAT.2: /[0-9]+\.[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
INTEGER: /0|[1-9][0-9]*[lL]?/
STRING: /'(''|[^'])*'/
ORDER: />=|<=|>|<(?!>)/
MINUS: "-"
LINE_COMMENT.3: /--[^\n\r]*+(\r\n|\n|\r)/
BLOCK_COMMENT.3: /\/\*[^*]*\*(\*|[^*\/][^*]*\*)*\//
BLANKS: /[ \t\n\r\f]+/
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
%ignore BLANKS
"""

OPERANDS = frozenset({"NAME", "STRING", "INTEGER", "FLOAT", "TRUE", "FALSE", "NULL"})
MAX_OPERANDS = 512
"""The maximum number of properties and literals in an expression, including those in the list of an IN."""
SIGNS = frozenset({"MINUS", "PLUS", "NOT"})
_WANTED = {
    "NAME": "a property or a literal",
    "COMMA": "a comma or a closing bracket",
    "RPAR": "a closing bracket",
    "LPAR": "an opening bracket",
    "STRING": "a text in quotes",
    "_BETWEEN": "BETWEEN or IN",
    "NULL": "NULL",
}


Get = Callable[[str], str | None]
"""A function that takes a property's name and returns the message's value for it, or None if it has none."""
Evaluate = Callable[[Get], Any]

DEEPEST: Final = 64
"""The maximum nesting depth of an expression, which limits the depth of calls that evaluate it."""

_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
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
    """A node of an expression's syntax tree at an index of the text: a constant, a property, or another."""

    at: int
    kind: Kind
    evaluate: Evaluate
    constant: Value = None
    name: str = ""
    depth: int = 1


def _node(at: int, kind: Kind, evaluate: Evaluate, *parts: Part) -> Part:
    """Create a node that contains `parts`. Raises SqlError if it is nested too deeply."""
    depth = 1 + max(part.depth for part in parts)
    if depth > DEEPEST:
        raise SqlError(at + 1, f"the expression is nested deeper than {DEEPEST} levels")
    return Part(at, kind, evaluate, depth=depth)


def _condition(evaluate: Evaluate, *parts: Part) -> Part:
    return _node(parts[0].at, Kind.CONDITION, evaluate, *parts)


def _constant(literal: Token, value: Value) -> Part:
    return Part(_place(literal), Kind.CONSTANT, lambda _get: value, constant=value)


def _place(token: Token) -> int:
    return token.start_pos or 0


def _text_of(literal: str) -> str:
    """Return the text of a quoted literal. Two quotes within it stand for one quote."""
    return literal[1:-1].replace("''", "'")


def _as_condition(part: Part) -> Part:
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


def _chain(parts: Sequence[Part], decisive: bool) -> Part:
    """Create the node for AND or OR: `decisive` (False or True) if any operand is, else null if any is null.

    Operands after a decisive one are not evaluated.
    """
    conditions = [_as_condition(part) for part in parts]
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


def _against(name: str, test: Callable[[Any, Any], bool], literal: Value) -> Evaluate:
    """Return a function that compares a property with a literal, the most frequent comparison.

    The property's text is read as a value of the literal's type.
    """
    read = _READERS[type(literal)]

    def evaluate(get: Get) -> bool | None:
        value = get(name)
        return None if value is None else test(read(value), literal)

    return evaluate


@v_args(inline=True)
class Building(lark.Transformer[Token, Part]):
    """Creates an expression's nodes: a method for each rule, called after those of the rules within it."""

    def start(self, part: Part) -> Part:
        return _as_condition(part)

    # -- operands

    def named(self, token: Token) -> Part:
        name = str(token)
        return Part(_place(token), Kind.PROPERTY, lambda get: get(name), name=name)

    def text(self, literal: Token) -> Part:
        return _constant(literal, _text_of(literal))

    def integer(self, literal: Token) -> Part:
        """An integer has 32 bits if its value fits into 32 bits, whatever its suffix."""
        number = int(literal.rstrip("lL")[:20])
        if number > LONG_MAX:
            raise SqlError(_place(literal) + 1, f"{shown(str(literal))} is above {LONG_MAX}")
        return _constant(literal, number if number <= INT_MAX else Long(number))

    def floating(self, literal: Token) -> Part:
        """A number with a point or exponent is a positive double."""
        number = float(literal)
        if math.isinf(number) or not number:
            problem = f"{shown(str(literal))} is not a positive double: write 0 for zero"
            raise SqlError(_place(literal) + 1, problem)
        return _constant(literal, number)

    def true(self, word: Token) -> Part:
        return _constant(word, True)

    def false(self, word: Token) -> Part:
        return _constant(word, False)

    def null(self, word: Token) -> Part:
        return _constant(word, None)

    def negative(self, sign: Token, part: Part) -> Part:
        """The value of a minus sign is null unless the operand is a number."""
        inner = part.evaluate

        def evaluate(get: Get) -> Value:
            value = inner(get)
            if isinstance(value, str | bool | None):
                return None
            return -value if type(value) is not Long else Long(-value)

        return _node(_place(sign), Kind.NUMBER, evaluate, part)

    # -- logic

    def any(self, *parts: Part) -> Part:
        return _chain(parts, True)

    def all(self, *parts: Part) -> Part:
        return _chain(parts, False)

    def negation(self, word: Token, part: Part) -> Part:
        """NOT binds more tightly than every comparison."""
        return self._negation(_place(word), part)

    def _negation(self, at: int, part: Part) -> Part:
        inner = _as_condition(part).evaluate

        def evaluate(get: Get) -> bool | None:
            value: bool | None = inner(get)
            return None if value is None else not value

        return _node(at, Kind.CONDITION, evaluate, part)

    # -- equality

    def is_null(self, part: Part, *words: Token) -> Part:
        inner, wanted = part.evaluate, len(words) == 1
        return _condition(lambda get: (inner(get) is None) is wanted, part)

    def equal(self, left: Part, right: Part) -> Part:
        """The value is True if both sides are null, null if only the left is, False if only the right is."""
        for part in (left, right):
            if part.kind is Kind.CONSTANT and part.constant is None:
                raise SqlError(part.at + 1, "nothing is equal to NULL: write IS NULL")
        if (
            left.kind is right.kind is Kind.CONSTANT
            and isinstance(left.constant, bool)
            and not isinstance(right.constant, bool)
        ):
            raise SqlError(right.at + 1, "TRUE and FALSE can only be compared with TRUE and FALSE")
        if left.kind is Kind.PROPERTY and right.kind is Kind.CONSTANT:
            return _condition(_against(left.name, operator.eq, right.constant), left, right)
        first, second = left.evaluate, right.evaluate

        def evaluate(get: Get) -> bool | None:
            one, other = first(get), second(get)
            if one is None:
                return True if other is None else None
            return False if other is None else order(one, other) == 0

        return _condition(evaluate, left, right)

    def not_equal(self, left: Part, right: Part) -> Part:
        return self._negation(left.at, self.equal(left, right))

    # -- order

    def compared(self, left: Part, symbol: str, right: Part) -> Part:
        """The value is null if an operand is null. Two texts are compared as doubles."""
        for part in (left, right):
            is_number = isinstance(part.constant, int | float) and not isinstance(part.constant, bool)
            if part.kind is Kind.CONDITION or (part.kind is Kind.CONSTANT and not is_number):
                raise SqlError(part.at + 1, f"only numbers and properties can be compared by {symbol}")
        test = _ORDERS[symbol]
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

    def between(self, part: Part, *limits: Any) -> Part:
        """Both limits are included. With NOT, the value is below the first or above the second."""
        *negation, low, high = limits
        if negation:
            return _chain((self.compared(part, "<", low), self.compared(part, ">", high)), True)
        found = _chain((self.compared(part, ">=", low), self.compared(part, "<=", high)), False)
        if low.kind is high.kind is Kind.CONSTANT and order(high.constant, low.constant) < 0:
            numbers = f"BETWEEN {low.constant} AND {high.constant}"
            raise SqlError(low.at + 1, f"{numbers}: the first number is above the second")
        return found

    # -- texts

    def one_of(self, part: Part, *tokens: Token) -> Part:
        if part.kind is not Kind.PROPERTY:
            raise SqlError(part.at + 1, "IN needs a property before it")
        wanted = tokens[0].type != "NOT"
        name, listed = part.name, frozenset(map(_text_of, tokens if wanted else tokens[1:]))

        def evaluate(get: Get) -> bool | None:
            value = get(name)
            return None if value is None else (value in listed) is wanted

        return _condition(evaluate, part)

    def searched(self, part: Part, *tokens: Token) -> Part:
        """With and without NOT, the value is False for an operand that is not text, and for an empty text."""
        *negation, word, literal = tokens
        inner, text, wanted = part.evaluate, _text_of(literal), not negation
        test: Callable[[str], bool] = {
            "CONTAINS": lambda value: text in value,
            "STARTSWITH": lambda value: value.startswith(text),
            "ENDSWITH": lambda value: value.endswith(text),
        }[word.upper()]

        def evaluate(get: Get) -> bool:
            value = inner(get)
            return isinstance(value, str) and bool(text) and test(value) is wanted

        return _condition(evaluate, part)


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", lexer="basic", transformer=Building(), maybe_placeholders=False)


def parse(text: str, string_words: bool) -> tuple[Part, tuple[str, ...]]:
    """Parse a condition, and return it with the names of its properties. Raises SqlError.

    Without `string_words`, CONTAINS, STARTSWITH and ENDSWITH are names.
    """
    reading = _parser().parse_interactive()
    operands = signs = 0  # `signs` counts the tokens -, + and NOT since the last operand
    last: Token | None = None
    refused: UnexpectedToken | None = None
    names: dict[str, None] = {}
    try:
        for token in _parser().lex(text):
            if token.type == "SEARCH" and not string_words:
                token.type = "NAME"
            operands += token.type in OPERANDS
            if operands > MAX_OPERANDS:
                raise SqlError(_place(token) + 1, f"more than {MAX_OPERANDS} properties and literals")
            signs = 0 if token.type in OPERANDS else signs + (token.type in SIGNS)
            if signs > DEEPEST:
                raise SqlError(_place(token) + 1, f"more than {DEEPEST} signs and NOTs before an operand")
            try:
                reading.feed_token(token)
            except UnexpectedToken as error:
                refused = error
                break
            last = token
            if token.type == "NAME":
                names[str(token)] = None
        part: Part = reading.feed_eof(last)  # type: ignore[no-untyped-call]
    except UnexpectedToken as error:
        raise _unexpected(refused or error, len(text)) from None
    except UnexpectedCharacters as error:
        at = error.pos_in_stream or 0
        what = (
            "a text without its closing quote"
            if text[at] == "'"
            else f"{shown(text[at])}, which means nothing"
        )
        raise SqlError(at + 1, f"here is {what}") from None
    return part, tuple(names)


def _unexpected(error: UnexpectedToken, end: int) -> SqlError:
    """Return the error for an unexpected token. The error names the first of the tokens that were allowed."""
    token = error.token
    ends = token.type == "$END"
    what = "the expression ends" if ends else f"{shown(str(token))} stands"
    wanted = next((said for name, said in _WANTED.items() if name in error.expected), "another word")
    return SqlError((end if ends else _place(token)) + 1, f"{what} where {wanted} is wanted")
