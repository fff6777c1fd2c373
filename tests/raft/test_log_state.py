"""The state of a log, compared with a plain list of terms."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.raft.cluster import Disk

from cometmq.raft import HardState
from cometmq.raft.log_state import LogState

logs = st.lists(st.integers(1, 5), max_size=12).map(sorted)


def account_of(first: int, terms: list[int]) -> LogState:
    return LogState(Disk(HardState(), first, [(term, None) for term in terms]), HardState(), None)


@given(st.integers(0, 3), logs)
def test_terms_are_those_of_the_log(first: int, terms: list[int]) -> None:
    account = account_of(first, terms)

    assert [account.term_of(index) for index in range(first, first + len(terms))] == terms
    assert (account.term_of(first - 1), account.term_of(first + len(terms))) == (-1, -1)
    assert account.last_term == (terms or [-1])[-1]


@given(logs, st.integers(-1, 13), st.integers(0, 6))
def test_the_last_entry_that_is_old_enough(terms: list[int], upto: int, term: int) -> None:
    wanted = max((i for i, each in enumerate(terms) if i <= upto and each <= term), default=-1)

    assert account_of(0, terms).last_at_most(upto, term) == wanted


@given(logs.filter(bool), st.integers(1, 5), st.data())
def test_the_first_entry_of_another_term(terms: list[int], term: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(terms) - 1))
    last = data.draw(st.integers(first - 1, len(terms) - 1))
    wanted = next((i for i in range(first, last + 1) if terms[i] != term), None)

    assert account_of(0, terms).first_mismatch(first, last, term) == wanted


@given(logs, st.lists(st.tuples(st.sampled_from("acf"), st.integers(0, 12)), max_size=20))
def test_appends_and_cuts_keep_it_right(terms: list[int], steps: list[tuple[str, int]]) -> None:
    account, first = account_of(0, terms), 0
    for step, number in steps:
        if step == "a":
            term = max([*terms, 1]) + number % 2
            account.append(1 + number % 3, term)
            terms = terms + [term] * (1 + number % 3)
        elif step == "c" and first <= number <= len(terms):
            account.cut(number)
            terms = terms[:number]
        elif step == "f" and first < number < len(terms):
            account.trim_before(number)
            first = number
        kept = range(first, len(terms))
        assert [account.term_of(index) for index in kept] == [terms[index] for index in kept]
        assert (account.first, account.last) == (first, len(terms) - 1)
        stops = [account.end_of_term(index) for index in kept]
        assert stops == [max(i for i in kept if terms[i] == terms[index]) + 1 for index in kept]
