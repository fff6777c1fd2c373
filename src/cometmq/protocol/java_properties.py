"""Java's properties format: configuration files, and the bodies of requests 25, 26, 318 and 319.

The rules are those of java.util.Properties.load. A logical line continues after a trailing backslash. `#` and
`!` start comments. A key ends at the first unescaped `=`, `:` or blank. The escapes are \\t \\n \\r \\f
\\uXXXX; any other escaped character stands for itself. If a key occurs again, its last value applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

BLANKS = " \t\f"
ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class PropertiesError(ValueError):
    """A line cannot be parsed. `line` is its number, counted from 1; `problem` describes the error."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem

    def __reduce__(self) -> tuple[type[PropertiesError], tuple[int, str]]:
        return type(self), (self.line, self.problem)


def parse_properties(text: str) -> dict[str, str]:
    """Return the values by key, in the order in which the keys first appear. Raises PropertiesError."""
    return {key: value for _, key, value in numbered_pairs(text)}


def line_of(key: str, text: str) -> int | None:
    """Return the line (from 1) of the last pair with this key, or None. Raises PropertiesError."""
    lines = [number for number, found, _ in numbered_pairs(text) if found == key]
    return lines[-1] if lines else None


def numbered_pairs(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield each pair: the number of the pair's first line, its key and its value. Raises PropertiesError."""
    for number, line in logical_lines(text):
        end = end_of_key(line)
        rest = line[end:].lstrip(BLANKS)
        if rest[:1] in ("=", ":"):
            rest = rest[1:].lstrip(BLANKS)
        yield number, unescape(line[:end], number), unescape(rest, number)


def format_properties(pairs: Mapping[str, str]) -> str:
    """Return one `key=value` line per pair, in the mapping's order. Non-ASCII characters are escaped."""
    return "".join(f"{escape(key, key=True)}={escape(value, key=False)}\n" for key, value in pairs.items())


def set_values(text: str, values: Mapping[str, str]) -> str:
    """Return a properties text with other values. Comments, order, line ends and other pairs stay the same.

    If the text has several pairs with a key, the last one is changed. If it has none, a pair is appended.
    """
    lines = _NATURAL.findall(text)
    eol = next((found[0] for line in lines if (found := _EOL.search(line))), "\n")
    missing = dict(values)
    open_end = False
    for number, pair in reversed([*logical_lines(text)]):  # Backwards, to find a key's last pair first
        start = stop = number - 1
        while (more := ends_escaped(lines[stop].rstrip("\r\n"))) and stop + 1 < len(lines):
            stop += 1
        open_end = open_end or more
        end = end_of_key(pair)
        try:
            key = unescape(pair[:end], number)
        except PropertiesError:
            continue
        if key in missing:
            first, found, last = lines[start], _SEPARATOR.match(pair, end), _EOL.search(lines[stop])
            lead = first[: len(first) - len(first.lstrip(BLANKS))] + ("\\" if pair[0] in "#!" else "")
            value = (found[0] if found and found[0] else "=") + escape(missing.pop(key), key=False)
            lines[start] = lead + pair[:end] + value + (last[0] if last else "")
            lines[start + 1 : stop + 1] = [""] * (stop - start)
            open_end = open_end and not more
    kept = "".join(lines)
    if missing and kept and (open_end or not kept.endswith(("\r", "\n"))):
        # If the last line ends with a backslash, an appended line would continue it. An empty line between
        # them prevents this.
        kept += eol * (1 if not open_end or kept.endswith(("\r", "\n")) else 2)
    return kept + format_properties(missing).replace("\n", eol)


_LETTERS = {char: letter for letter, char in ESCAPES.items()}
_ESCAPED = re.compile(r"\\(u.{0,4}|.|\Z)", re.DOTALL)
_UNIT = re.compile(r"u[0-9a-fA-F]{4}")
_TO_ESCAPE = re.compile(r"\A |[\\=:#!]|[^ -~]")
_TO_ESCAPE_IN_KEYS = re.compile(r"[ \\=:#!]|[^ -~]")
_KEY = re.compile(r"(?:\\.?|[^\\=: \t\f])*", re.DOTALL)
_EOL = re.compile(r"\r\n|\r|\n")
_NATURAL = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and content of each logical line: a line and those that continue it after a backslash.

    Comments, blank lines and leading blanks are removed.
    """
    # `first` is the number of the line where the current logical line began. Between logical lines it is 0.
    first, joined = 0, ""
    for number, natural in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        line = natural.lstrip(BLANKS)
        if not first and line[:1] in ("#", "!"):
            continue
        first = first or number
        joined += line[:-1] if ends_escaped(line) else line
        if not ends_escaped(line):
            if joined:
                yield first, joined
            first, joined = 0, ""
    if joined:
        yield first, joined


def ends_escaped(line: str) -> bool:
    """Return whether a line ends with an odd number of backslashes, so that the next line continues it."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def end_of_key(line: str) -> int:
    """Return the index of the first unescaped separator of key and value, else the line's length."""
    return len(_KEY.match(line)[0])  # type: ignore[index]  # It matches each text


def unescape(text: str, line: int) -> str:
    """Resolve escapes. Raises PropertiesError unless four hexadecimal digits follow \\u."""
    if "\\" not in text:
        return text

    def plain(match: re.Match[str]) -> str:
        escaped = match[1]
        if not escaped.startswith("u"):
            return ESCAPES.get(escaped, escaped)
        if not _UNIT.fullmatch(escaped):
            raise PropertiesError(line, f"\\u needs four hexadecimal digits, not {escaped[1:]!r}")
        return chr(int(escaped[1:], 16))

    # Java writes a character beyond the basic plane as two \\u escapes, a surrogate pair. Join such pairs.
    return _ESCAPED.sub(plain, text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def escape(text: str, *, key: bool) -> str:
    """Escape a key (with all blanks) or a value (with a blank at the start) for Java's reader."""
    return (_TO_ESCAPE_IN_KEYS if key else _TO_ESCAPE).sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    if " " <= char < "\x7f":
        return "\\" + char
    if char in _LETTERS:
        return "\\" + _LETTERS[char]
    units = char.encode("utf-16-be", "surrogatepass").hex().upper()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
