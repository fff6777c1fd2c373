"""Lists: searched, sorted and cut into pages on the server, by a state that lies in the page's address.

A list of any length sends the browser one page of it. Its state is a few words of the query, so that a link
shows somebody else the same rows: `?q=order&sort=-lag&page=2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

T = TypeVar("T")

PAGE_SIZES = (25, 50, 100, 200)
SEARCH_MAX = 200
PAGE_MAX = 1_000_000
Cell = str | int | float | bool | None
"""None: not known, which sorts behind everything else and is shown as such."""


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column. name: in addresses; title: key of its text; value: what is sorted and shown; kind: how it
    is shown (page.SHOWN); link: where a click on it leads; searched: by its
    text."""

    name: str
    title: str
    value: Callable[[T], Cell]
    kind: str = "text"
    link: Callable[[T], str | None] | None = None
    searched: bool = False


@dataclass(frozen=True)
class ListState:
    """What part of a list is shown. sort: a column's name, "" for the order in which the rows come; page from
    1 on."""

    search: str = ""
    sort: str = ""
    descending: bool = False
    page: int = 1
    size: int = PAGE_SIZES[0]

    def sorted_by(self, name: str) -> ListState:
        """After a click on a column's head: up, then down, then as it comes."""
        if self.sort != name:
            return replace(self, sort=name, descending=False, page=1)
        if not self.descending:
            return replace(self, descending=True, page=1)
        return replace(self, sort="", descending=False, page=1)


@dataclass(frozen=True)
class Selected(Generic[T]):
    """One page of a list. total: rows that the search found; all: rows without it; page and pages: from 1
    on."""

    rows: Sequence[T]
    total: int
    all: int
    page: int
    pages: int


def read_state(
    query: Mapping[str, str], columns: Iterable[Column[Any]], default: ListState, prefix: str = ""
) -> ListState:
    """The state that an address names; what makes no sense there is as by default. prefix: as of query_of."""
    query = {name.removeprefix(prefix): value for name, value in query.items() if name.startswith(prefix)}
    names = {column.name for column in columns}
    sort = query.get("sort", ("-" if default.descending else "") + default.sort)
    name = sort.removeprefix("-")
    known = name in names
    return ListState(
        search=query.get("q", default.search)[:SEARCH_MAX],
        sort=name if known else "",
        descending=known and sort.startswith("-"),
        page=_number(query.get("page", ""), 1, PAGE_MAX, default.page),
        size=_size(query.get("size", ""), default.size),
    )


def query_of(state: ListState, default: ListState, prefix: str = "") -> dict[str, str]:
    """The fields of a query that name a state; none for the default. prefix: before their names."""
    fields = {}
    if state.search != default.search:
        fields["q"] = state.search
    if (state.sort, state.descending) != (default.sort, default.descending):
        fields["sort"] = ("-" if state.descending else "") + state.sort
    if state.page != 1:
        fields["page"] = str(state.page)
    if state.size != default.size:
        fields["size"] = str(state.size)
    return {prefix + name: value for name, value in fields.items()}


def select(items: Sequence[T], columns: Sequence[Column[T]], state: ListState) -> Selected[T]:
    """The rows that a state shows. A search finds rows in whose searched columns every word stands, in any
    case; a page behind the last is the last."""
    found: Sequence[T] = items
    words = state.search.casefold().split()
    if words:
        searched = [column.value for column in columns if column.searched]
        found = [item for item in items if _has(words, searched, item)]
    for column in columns:
        if column.name == state.sort:
            found = _sorted(found, column.value, descending=state.descending)
    pages = max(1, -(-len(found) // state.size))
    page = min(max(state.page, 1), pages)
    begin = (page - 1) * state.size
    return Selected(found[begin : begin + state.size], len(found), len(items), page, pages)


def _has(words: list[str], searched: list[Callable[[T], Cell]], item: T) -> bool:
    text = "\n".join(str(value(item) or "") for value in searched).casefold()
    return all(word in text for word in words)


def _sorted(items: Sequence[T], value: Callable[[T], Cell], *, descending: bool) -> list[T]:
    """Numbers by size, then texts without regard to case; what is not known comes last either way."""
    known: list[tuple[tuple[int, float, str, str], T]] = []
    unknown: list[T] = []
    for item in items:
        cell = value(item)
        if cell is None:
            unknown.append(item)
        elif isinstance(cell, str):
            known.append(((1, 0.0, cell.casefold(), cell), item))
        else:
            known.append(((0, float(cell), "", ""), item))
    known.sort(key=lambda pair: pair[0], reverse=descending)
    return [item for _, item in known] + unknown


def _number(text: str, least: int, most: int, default: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        return default
    return min(max(int(text), least), most)


def _size(text: str, default: int) -> int:
    size = _number(text, 1, PAGE_SIZES[-1], default)
    return size if size in PAGE_SIZES else default


def path_of(*parts: str) -> str:
    """A path of the console whose parts are names, whatever stands in them: /topics/%25RETRY%25g."""
    return "/" + "/".join(quote(part, safe="") for part in parts)
