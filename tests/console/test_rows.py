"""Search, sorting and paging of lists, and the URLs that contain them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.console.widgets.rows import Column, ListState, path_of, query_of, read_state, select

NAME = Column[tuple[str, int | None]]("name", "x", lambda row: row[0], searched=True)
LAG = Column[tuple[str, int | None]]("lag", "x", lambda row: row[1], "number")
COLUMNS = (NAME, LAG)
ROWS: list[tuple[str, int | None]] = [("b", 2), ("A", None), ("c", 10), ("a%<b>", 0)]


def names(state: ListState) -> list[str]:
    return [row[0] for row in select(ROWS, COLUMNS, state).rows]


def test_rows_come_as_they_are_without_a_state() -> None:
    assert names(ListState()) == ["b", "A", "c", "a%<b>"]


@pytest.mark.parametrize(
    ("sort", "descending", "expected"),
    [
        ("name", False, ["A", "a%<b>", "b", "c"]),
        ("lag", False, ["a%<b>", "b", "c", "A"]),
        ("lag", True, ["c", "b", "a%<b>", "A"]),
        ("unknown", False, ["b", "A", "c", "a%<b>"]),
    ],
)
def test_unknown_values_stand_last_either_way(sort: str, descending: bool, expected: list[str]) -> None:
    assert names(ListState(sort=sort, descending=descending)) == expected


def test_each_word_of_a_search_must_be_found_in_a_searched_column() -> None:
    assert names(ListState(search="A b>")) == ["a%<b>"]
    assert names(ListState(search="10")) == []


def test_a_page_behind_the_last_is_the_last() -> None:
    found = select(list(range(51)), (), ListState(page=9, size=25))

    assert (list(found.rows), found.page, found.pages, found.total) == ([50], 3, 3, 51)


def test_no_rows_are_one_empty_page() -> None:
    found = select([], COLUMNS, ListState(page=4))

    assert (found.rows, found.page, found.pages) == ([], 1, 1)


@given(
    st.builds(
        ListState,
        search=st.text(max_size=20),
        sort=st.sampled_from(["", "name", "lag"]),
        page=st.integers(1, 1000),
        size=st.sampled_from([25, 50, 100, 200]),
    ),
    st.booleans(),
    st.sampled_from(["", "m."]),
)
def test_an_address_names_its_state(state: ListState, descending: bool, prefix: str) -> None:
    default = ListState(sort="lag", descending=True)
    state = ListState(state.search, state.sort, bool(state.sort) and descending, state.page, state.size)

    assert read_state(query_of(state, default, prefix), COLUMNS, default, prefix) == state


@pytest.mark.parametrize("page", ["0", "-1", "x", "", "1e9", "٣", "9" * 40])
def test_nonsense_in_an_address_is_the_default(page: str) -> None:
    state = read_state({"page": page, "size": "7", "sort": "-secret", "q": "x" * 999}, COLUMNS, ListState())

    assert (state.page, state.size, state.sort, state.descending) == (1, 25, "", False)
    assert len(state.search) == 200


def test_a_head_is_clicked_up_down_and_off() -> None:
    up = ListState(page=3).sorted_by("lag")
    down = up.sorted_by("lag")

    assert (up.sort, up.descending, up.page) == ("lag", False, 1)
    assert (down.sort, down.descending) == ("lag", True)
    assert down.sorted_by("lag").sort == ""


def test_paths_hold_whatever_a_name_holds() -> None:
    assert path_of("topics", "%RETRY%g/?#") == "/topics/%25RETRY%25g%2F%3F%23"
