"""The table of open half messages: its bitmap after the head is compared with a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.broker.transactions import ledger as module
from cometmq.broker.transactions.ledger import CHUNK, Ledger

offsets = st.integers(0, 3 * CHUNK)


@given(offsets, st.lists(st.tuples(offsets, st.integers(1, 2 * CHUNK))), offsets)
def test_what_is_closed_is_closed_and_all_else_is_open(head, closed, start):
    book = Ledger(head)
    for first, count in closed:
        book.close_range(first, first + count)
    model = {offset for first, count in closed for offset in range(first, first + count)}

    found = book.next_open(start)

    assert found >= max(head, start)
    assert found not in model
    assert all(offset in model for offset in range(max(head, start), found))
    assert all(book.is_open(offset) == (offset >= head and offset not in model) for offset in (start, found))
    assert book.count_open(start) == len(set(range(head, start)) - model)


@given(st.sets(st.integers(0, 40)), st.integers(0, 60))
def test_the_head_passes_what_is_closed_and_no_further(closed, end):
    book = Ledger()
    for offset in closed:
        book.close(offset)

    book.advance(end)

    first_open = next(offset for offset in range(100) if offset not in closed)
    assert book.head == min(first_open, end)
    assert all(book.is_open(offset) == (offset not in closed) for offset in range(book.head, 70))


def test_the_head_waits_for_an_end_that_is_being_written():
    book = Ledger()
    book.take(0)
    book.close(1)
    book.advance(2)
    assert (book.head, book.is_open(0)) == (0, False)

    book.give_back(0)
    assert book.is_open(0)

    book.close(0)
    book.advance(2)
    assert (book.head, book.is_open(0)) == (2, False)


def test_a_copy_stands_for_the_older_ones():
    book = Ledger()
    assert book.standing_for(3, 3) == 3
    book.close(3)
    assert book.standing_for(3, 3) is None

    book.copied(3, 7)
    assert book.standing_for(3, 3) == book.standing_for(3, 7) == 7
    book.copied(3, 9)
    book.close(7)
    assert book.standing_for(3, 7) == 9

    book.ended(3, 7)  # a lower offset changes nothing
    assert book.standing_for(3, 3) == 9
    book.close(9)
    book.ended(3, 9)
    assert book.standing_for(3, 3) is None


def test_only_so_many_copies_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_COPIES", 2)
    book = Ledger()
    for first in range(3):
        book.close(first)
        book.copied(first, 10 + first)
    assert [book.standing_for(first, first) for first in range(3)] == [10, 11, None]
    book.copied(0, 20)
    assert book.standing_for(0, 0) == 20
