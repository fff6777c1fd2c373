"""A reader of fastjson's JSON dialect, for text that msgspec's strict reader refuses.

In addition to JSON it accepts (docs/reference/remoting.md, JSON dialect): bare words and numbers as keys
(`{0:"a"}`), whole objects as keys (`{{"topic":"T"}:5}`), single quotes, surplus commas, comments,
`undefined`, number suffixes (`5L`), `Set[...]`, any control character in a string, and bytes that are not
UTF-8 (replaced, as in Java's String). Keys become text: a number and the same number in quotes are one key,
as in a Java map with number keys. An object as a key becomes an `ObjectKey`.
"""

from __future__ import annotations

import re
import sys
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec

from cometmq.errors import BodyError, ProtocolError

MAX_DEPTH = 64
"""The maximum nesting depth of objects and arrays. RocketMQ's own bodies need 6."""
MAX_DIGITS = 400
"""The maximum number of digits in a number. It allows any double, and converting 400 digits is still fast."""

Json: TypeAlias = Any

_BLANK = re.compile(r"(?:[\s\ufeff]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_BLANKS_AND_COMMAS = re.compile(r"(?:[\s\ufeff,]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_DOUBLE = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_SINGLE = re.compile(r"'([^'\\]*(?:\\.[^'\\]*)*)'", re.DOTALL)
_WORD = re.compile(r"""[^\s"'{}\[\],:]+""")
_NUMBER = re.compile(r"[+-]?(\d+)?(\.\d*)?([eE][+-]?\d+)?[LSBFD]?", re.ASCII)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[0-7]|.)", re.DOTALL)
_ESCAPES = dict(zip("ntrbfFv\"'/\\", "\n\t\r\b\f\f\v\"'/\\", strict=True))
_WORDS: dict[str, Json] = {"null": None, "undefined": None, "NaN": None, "true": True, "false": False}


class LenientError(ProtocolError):
    """A text is neither standard JSON nor fastjson's dialect, from the character `pos` on."""

    problem: str
    pos: int

    def __str__(self) -> str:
        return f"{self.problem} at character {self.pos}"


class ObjectKey(tuple[tuple[str, Json], ...]):
    """An object used as a key. Its pairs are sorted by key, so that equal objects are equal keys."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Json]:
        return dict(self)


def read_lenient(
    data: bytes | bytearray | memoryview | str, *, unique: bool = False, most: int = sys.maxsize
) -> Json:
    """Parse a text that consists of a single value.

    Args:
        data: The text, or its bytes.
        unique: Whether to refuse a key that occurs twice in an object. Otherwise its last value applies.
        most: The maximum number of values, including nested ones. Parsing a value takes up to 4 µs.

    Raises:
        LenientError: The text is invalid or has too many values.
    """
    text = data if isinstance(data, str) else bytes(data).decode("utf-8", "replace")
    reader = _Reader(text, unique, most)
    value = reader.value(0)
    reader.end()
    return value


class _Reader:
    __slots__ = ("left", "pos", "text", "unique", "within_key")

    def __init__(self, text: str, unique: bool, most: int) -> None:
        self.text = text
        self.unique = unique
        self.left = most
        self.pos = 0
        self.within_key = False

    def error(self, problem: str) -> LenientError:
        return LenientError(problem, self.pos)

    def peek(self, skipped: re.Pattern[str] = _BLANK) -> str:
        """Return the next character that is not blank, or "" at the end of the text."""
        self.pos = skipped.match(self.text, self.pos).end()  # type: ignore[union-attr]
        return self.text[self.pos : self.pos + 1]

    def end(self) -> None:
        if self.peek():
            raise self.error("there is text after the JSON value")

    def value(self, depth: int) -> Json:
        self.left -= 1
        if self.left < 0:
            raise self.error("too many values")
        first = self.peek()
        if first == "{":
            return self.object(depth + 1)
        if first == "[":
            return self.array(depth + 1)
        if first in ('"', "'"):
            return self.string()
        if not first:
            raise self.error("the text ends where a JSON value is expected")
        return self.word_value(depth)

    def object(self, depth: int) -> dict[Any, Json]:
        if depth > MAX_DEPTH:
            raise self.error(f"values are nested deeper than {MAX_DEPTH} levels")
        self.pos += 1
        found: dict[Any, Json] = {}
        while True:
            first = self.peek(_BLANKS_AND_COMMAS)
            if first == "}":
                self.pos += 1
                return found
            key = self.key(first, depth)
            if self.peek() != ":":
                raise self.error("expected ':' after a key")
            if self.unique and key in found:
                raise self.error("a key occurs twice")
            self.pos += 1
            found[key] = self.value(depth)
            if self.peek() not in (",", "}"):
                raise self.error("expected ',' or '}'")

    def key(self, first: str, depth: int) -> Any:
        if first in ('"', "'"):
            return self.string()
        if first == "{":
            if self.within_key:
                raise self.error("an object that is a key contains an object as a key")
            self.within_key = True
            pairs = self.object(depth + 1)
            self.within_key = False
            return _hashable(pairs)
        return self.word()

    def array(self, depth: int) -> list[Json]:
        if depth > MAX_DEPTH:
            raise self.error(f"values are nested deeper than {MAX_DEPTH} levels")
        self.pos += 1
        found: list[Json] = []
        while True:
            if self.peek(_BLANKS_AND_COMMAS) == "]":
                self.pos += 1
                return found
            found.append(self.value(depth))
            if self.peek() not in (",", "]"):
                raise self.error("expected ',' or ']'")

    def string(self) -> str:
        pattern = _DOUBLE if self.text[self.pos] == '"' else _SINGLE
        match = pattern.match(self.text, self.pos)
        if match is None:
            raise self.error("a string is not closed")
        content = match[1]
        if "\\" in content:
            content = _ESCAPE.sub(self._unescape, content)
            if not content.isascii():
                # Java's strings are UTF-16, so two escapes (a surrogate pair) can form one character. A
                # surrogate without its partner is replaced by U+FFFD, because UTF-8 cannot represent it.
                content = content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        self.pos = match.end()
        return content

    def _unescape(self, match: re.Match[str]) -> str:
        code = match[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        if code in "01234567":
            return chr(int(code))
        found = _ESCAPES.get(code)
        if found is None:
            raise self.error(f"unknown escape \\{code} in a string")
        return found

    def word(self) -> str:
        match = _WORD.match(self.text, self.pos)
        if match is None:
            raise self.error(
                "expected a key" if self.text[self.pos : self.pos + 1] else "the text ends within an object"
            )
        self.pos = match.end()
        return match[0]

    def word_value(self, depth: int) -> Json:
        match = _WORD.match(self.text, self.pos)
        if match is None:
            raise self.error("expected a value")
        word = match[0]
        if word in _WORDS:
            self.pos = match.end()
            return _WORDS[word]
        if word in ("Set", "TreeSet") and self.text[match.end() : match.end() + 1] == "[":
            self.pos = match.end()
            return self.array(depth + 1)
        number = _NUMBER.fullmatch(word)
        if number is None or not (number[1] or number[2]) or (number[2] == "." and not number[1]):
            raise self.error("expected a value")
        if len(word) > MAX_DIGITS:
            raise self.error(f"a number has more than {MAX_DIGITS} characters")
        plain = word.rstrip("LSBFD")
        value = float(plain) if number[2] is not None or number[3] is not None else int(plain)
        self.pos = match.end()
        return value


def _hashable(value: Json) -> Json:
    """Return a hashable form of a JSON value: objects and arrays become tuples."""
    if isinstance(value, dict):
        pairs = ((str(key), _hashable(inner)) for key, inner in value.items())
        return ObjectKey(sorted(pairs, key=itemgetter(0)))
    if isinstance(value, list):
        return tuple(_hashable(inner) for inner in value)
    return value


def loads(data: bytes | bytearray | memoryview | str, what: str = "JSON") -> Json:
    """Parse standard JSON or fastjson's dialect and return plain values. Raises BodyError."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass  # Not standard JSON: the lenient reader accepts the text or reports the error
    try:
        return read_lenient(data)
    except LenientError as error:
        raise BodyError(what, str(error)) from None
