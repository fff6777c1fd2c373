"""The parsing of YAML files into values with line numbers, so that every error can name a line.

All values are text: `no` or `1e3` is not converted. Features that a hostile file could exploit are rejected:
anchors and aliases (a few hundred bytes can expand to gigabytes), tags, several documents, duplicate keys,
deep nesting and large files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from cometmq.errors import YamlError
from cometmq.text import is_utf8, printable, shortened

BYTES_MAX = 256 * 1024
NODES_MAX = 10_000
_DEPTH_MAX = 20
_WORD = 60  # maximum characters of a key in an error text


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its position in the file.

    Attributes:
        line: Line of the value's key, or of the value itself in a list.
        text_line: Line of the file at which the text of the value begins. None if the lines of the text are
            not the lines of the file, as in a folded or a quoted text of several lines.
    """

    value: str | list[Node] | dict[str, Node]
    line: int
    text_line: int | None = None


def load(data: bytes, bytes_max: int = BYTES_MAX, nodes_max: int = NODES_MAX) -> Node:
    """Parse the content of a file. Raises YamlError with a line number, counted from 1."""
    if len(data) > bytes_max:
        raise YamlError(1, f"the file has {len(data)} bytes, at most {bytes_max} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise YamlError(data.count(b"\n", 0, error.start) + 1, "the file is not UTF-8 text") from None
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        return _Loader(iter(loader.get_event, None), nodes_max).document()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, f"a character that YAML does not allow: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(part for part in (error.problem, error.context) if part)
        raise YamlError(_line(error.problem_mark), problem or "this is no YAML") from None
    # PyYAML does not convert these exceptions to its own error classes.
    except (ValueError, OverflowError, RecursionError) as error:
        line = 1 if loader is None else loader.line + 1
        raise YamlError(line, f"the file is not YAML: {printable(str(error))}") from None


class _Loader:
    def __init__(self, events: Iterator[yaml.Event], nodes_max: int) -> None:
        self._events, self._nodes, self._nodes_max = events, 0, nodes_max

    def document(self) -> Node:
        self._next(yaml.StreamStartEvent)
        first = next(self._events)
        if isinstance(first, yaml.StreamEndEvent):
            raise YamlError(1, "the file is empty")
        node = self._node(next(self._events), 0)
        self._next(yaml.DocumentEndEvent)
        if not isinstance(after := next(self._events), yaml.StreamEndEvent):
            self._refuse(after, "a second document begins here: one is allowed")
        return node

    def _next(self, kind: type[yaml.Event]) -> None:
        assert isinstance(next(self._events), kind)

    def _refuse(self, event: yaml.Event, problem: str) -> None:
        raise YamlError(_line(event.start_mark), problem)

    def _node(self, event: yaml.Event, depth: int, key_line: int | None = None) -> Node:
        own_line = _line(event.start_mark)
        line = key_line or own_line
        self._nodes += 1
        if self._nodes > self._nodes_max:
            self._refuse(event, f"more than {self._nodes_max} values")
        if depth > _DEPTH_MAX:
            self._refuse(event, f"nested deeper than {_DEPTH_MAX}")
        if getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors and aliases (&, *) are not allowed")
        if getattr(event, "tag", None) not in (None, "!"):  # PyYAML reports the tag "!" for quoted text
            self._refuse(event, "tags (!) are not allowed")
        if isinstance(event, yaml.ScalarEvent):
            if not is_utf8(event.value):
                self._refuse(event, "half a character (a surrogate as \\ud800) is no text")
            block = event.style == "|"
            whole = block or _line(event.end_mark) == own_line
            return Node(event.value, line, own_line + block if whole else None)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            return Node(items, line)
        return Node(self._pairs(depth), line)

    def _pairs(self, depth: int) -> dict[str, Node]:
        pairs: dict[str, Node] = {}
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            name = self._node(key, depth + 1)
            if not isinstance(name.value, str):
                self._refuse(key, "a key must be text")
                continue
            if name.value in pairs:
                first = pairs[name.value].line
                # Name only the part before the colon: in `password:x` the rest may be a secret.
                word = name.value.partition(":")[0]
                self._refuse(key, f"{shortened(word, _WORD)!r} is here twice, first in line {first}")
            pairs[name.value] = self._node(next(self._events), depth + 1, name.line)
        return pairs


def dump(value: dict[str, Any]) -> bytes:
    """Return the content of a YAML file with the given value. The keys keep their order."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False).encode()


def _line(mark: Any) -> int:
    return mark.line + 1 if mark else 1
