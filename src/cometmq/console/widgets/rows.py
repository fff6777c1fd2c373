"""Searching, sorting and paging of lists, computed on the server.

The browser receives one page of a list. The query string of the URL holds the search, the order and the page
of the list, so that a link shows the same rows to other users: `?q=order&sort=-lag&page=2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

T = TypeVar("T")

PAGE_SIZES = (25, 50, 100, 200)
MAX_SEARCH_LENGTH = 200
MAX_PAGE = 1_000_000
Cell = str | int | float | bool | None
"""The value of a cell. None stands for an unknown value, which is sorted last and shown as unavailable."""


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a list.

    Attributes:
        name: Name of the column in the query strings of pages.
        title: Key of the heading's text.
        value: Returns the value of a row, by which rows are sorted and which is shown.
        kind: Format of the value, a key of formats.KINDS.
        link: Returns the path of the page that a click on the value opens.
        searched: Whether the search of the list includes the column.
    """

    name: str
    title: str
    value: Callable[[T], Cell]
    kind: str = "text"
    link: Callable[[T], str | None] | None = None
    searched: bool = False


@dataclass(frozen=True)
class ListState:
    """The part of a list that is shown.

    `sort` is the name of a column, or "" for the given order. `page` is counted from 1.
    """

    search: str = ""
    sort: str = ""
    descending: bool = False
    page: int = 1
    size: int = PAGE_SIZES[0]

    def sorted_by(self, name: str) -> ListState:
        """Return the state after a click on a heading.

        The first click sorts in ascending order, the second in descending order, and the third restores the
        given order.
        """
        if self.sort != name:
            return replace(self, sort=name, descending=False, page=1)
        if not self.descending:
            return replace(self, descending=True, page=1)
        return replace(self, sort="", descending=False, page=1)


@dataclass(frozen=True)
class Selected(Generic[T]):
    """One page of a list, with the size of the list.

    `total` is the number of rows that match the search, `all` the number of all rows, and `page` is counted
    from 1.
    """

    rows: Sequence[T]
    total: int
    all: int
    page: int
    pages: int


def read_state(
    query: Mapping[str, str], columns: Iterable[Column[Any]], default: ListState, prefix: str = ""
) -> ListState:
    """Return the list state that a query string describes. Invalid values are replaced by those of `default`.

    Only fields of the query string whose names begin with `prefix` are used. `query_of` writes such fields.
    """
    query = {name.removeprefix(prefix): value for name, value in query.items() if name.startswith(prefix)}
    names = {column.name for column in columns}
    sort = query.get("sort", ("-" if default.descending else "") + default.sort)
    name = sort.removeprefix("-")
    known = name in names
    return ListState(
        search=query.get("q", default.search)[:MAX_SEARCH_LENGTH],
        sort=name if known else "",
        descending=known and sort.startswith("-"),
        page=_number(query.get("page", ""), 1, MAX_PAGE, default.page),
        size=_size(query.get("size", ""), default.size),
    )


def query_of(state: ListState, default: ListState, prefix: str = "") -> dict[str, str]:
    """Return the query string fields of a list state, without fields that have the default value.

    `prefix` is put before the name of each field.
    """
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
    """Return the rows of a list that match the search in `state` and are on its page, sorted as it requests.

    A row matches if its searchable columns together contain every word of the search, regardless of case. A
    page number beyond the last page selects the last page.
    """
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
    """Sort numbers before texts, and texts regardless of case. Unknown values are last in both orders."""
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


def _number(text: str, low: int, high: int, default: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        return default
    return min(max(int(text), low), high)


def _size(text: str, default: int) -> int:
    size = _number(text, 1, PAGE_SIZES[-1], default)
    return size if size in PAGE_SIZES else default


def path_of(*parts: str) -> str:
    """Return a path of the console built from names, which are quoted: `/topics/%25RETRY%25g`."""
    return "/" + "/".join(quote(part, safe="") for part in parts)
