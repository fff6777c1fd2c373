"""The grammar and parser of SQL92 filters (docs/reference/storage.md, SQL92 filter).

RocketMQ's parser reads the longest valid prefix of a text and ignores the rest: `a = 5 whatever` is `a = 5`.
Therefore this parser receives tokens one by one. The first token that the grammar does not allow ends the
text, if the tokens before it form a complete condition.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import lark
from lark import Lark, Token, UnexpectedCharacters, UnexpectedToken, v_args

from cometmq.errors import SqlError, shown
from cometmq.protocol.sql import expressions
from cometmq.protocol.sql.expressions import DEEPEST, Part

GRAMMAR = r"""
start: any
any: all (OR all)*
all: equality (AND equality)*
?equality: comparison
    | equality "=" comparison                          -> equal
    | equality "<>" comparison                         -> not_equal
    | equality IS NULL                                 -> is_null
    | equality IS NOT NULL                             -> is_not_null
?comparison: unary
    | comparison ORDER unary                           -> compared
    | comparison BETWEEN unary AND unary               -> between
    | comparison NOT BETWEEN unary AND unary           -> not_between
    | comparison IN "(" STRING ("," STRING)* ")"       -> one_of
    | comparison NOT IN "(" STRING ("," STRING)* ")"   -> none_of
    | comparison SEARCH STRING                         -> searched
    | comparison NOT SEARCH STRING                     -> not_searched
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
AND.2: /AND(?![a-z0-9_$])/i
OR.2: /OR(?![a-z0-9_$])/i
BETWEEN.2: /BETWEEN(?![a-z0-9_$])/i
IN.2: /IN(?![a-z0-9_$])/i
TRUE.2: /TRUE(?![a-z0-9_$])/i
FALSE.2: /FALSE(?![a-z0-9_$])/i
NULL.2: /NULL(?![a-z0-9_$])/i
IS.2: /IS(?![a-z0-9_$])/i
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
    "BETWEEN": "BETWEEN or IN",
    "NULL": "NULL",
}


@v_args(inline=True)
class Building(lark.Transformer[Token, Part]):
    """The transformer from grammar rules to expression nodes. It handles a rule after all rules within it."""

    def start(self, part: Part) -> Part:
        return expressions.as_condition(part)

    def any(self, *parts: Any) -> Part:
        return parts[0] if len(parts) == 1 else expressions.any_of(parts[::2])

    def all(self, *parts: Any) -> Part:
        return parts[0] if len(parts) == 1 else expressions.all_of(parts[::2])

    def equal(self, left: Part, right: Part) -> Part:
        return expressions.equal(left, right)

    def not_equal(self, left: Part, right: Part) -> Part:
        return expressions.not_equal(left, right)

    def is_null(self, part: Part, *_words: Token) -> Part:
        return expressions.is_null(part)

    def is_not_null(self, part: Part, *_words: Token) -> Part:
        return expressions.is_not_null(part)

    def compared(self, left: Part, symbol: Token, right: Part) -> Part:
        return expressions.compared(left, str(symbol), right)

    def between(self, part: Part, _between: Token, low: Part, _and: Token, high: Part) -> Part:
        return expressions.between(part, low, high)

    def not_between(
        self, part: Part, _not: Token, _between: Token, low: Part, _and: Token, high: Part
    ) -> Part:
        return expressions.not_between(part, low, high)

    def one_of(self, part: Part, _in: Token, *texts: Token) -> Part:
        return expressions.one_of(part, [expressions.text_of(text) for text in texts], True)

    def none_of(self, part: Part, _not: Token, _in: Token, *texts: Token) -> Part:
        return expressions.one_of(part, [expressions.text_of(text) for text in texts], False)

    def searched(self, part: Part, word: Token, text: Token) -> Part:
        return expressions.searched(part, word.upper(), expressions.text_of(text), True)

    def not_searched(self, part: Part, _not: Token, word: Token, text: Token) -> Part:
        return expressions.searched(part, word.upper(), expressions.text_of(text), False)

    def negative(self, sign: Token, part: Part) -> Part:
        return expressions.negative(_place(sign), part)

    def negation(self, word: Token, part: Part) -> Part:
        return expressions.negation(_place(word), part)

    def named(self, name: Token) -> Part:
        return expressions.named(_place(name), str(name))

    def text(self, literal: Token) -> Part:
        return expressions.constant(_place(literal), expressions.text_of(literal))

    def integer(self, literal: Token) -> Part:
        return expressions.whole_number(_place(literal), str(literal))

    def floating(self, literal: Token) -> Part:
        return expressions.floating_number(_place(literal), str(literal))

    def true(self, word: Token) -> Part:
        return expressions.constant(_place(word), True)

    def false(self, word: Token) -> Part:
        return expressions.constant(_place(word), False)

    def null(self, word: Token) -> Part:
        return expressions.constant(_place(word), None)


def _place(token: Token) -> int:
    return token.start_pos or 0


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", lexer="basic", transformer=Building(), maybe_placeholders=False)


def parse(text: str, string_words: bool) -> tuple[Part, tuple[str, ...]]:
    """Parse a condition, and return it with the names of its properties.

    Args:
        text: The condition.
        string_words: Whether CONTAINS, STARTSWITH and ENDSWITH are operators. Otherwise they are names.

    Raises:
        SqlError: The text is invalid.
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
