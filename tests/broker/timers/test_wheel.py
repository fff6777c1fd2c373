"""Compare the timing wheel with a sorted list."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cometmq.broker.timers.wheel import NEVER, Waiting, Wheel

T0 = 1_700_000_000_000

# Operations: add a message due in some ms, step the clock, take due messages, move messages.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-400_000, 1_200_000)),
        st.tuples(st.just("clock"), st.integers(-400_000, 500_000)),
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("move"), st.integers(0, 40)),
        st.tuples(st.just("page"), st.integers(-400_000, 1_200_000)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_it_gives_what_is_due_and_nothing_else(operations):
    wheel, model, now = Wheel(), [], T0
    position = 0
    for name, value in operations:
        if name == "add":
            position += 1
            added = Waiting(now + value, position, now + value - 1_000)
            wheel.add(*added)
            model.append(added)
        elif name == "clock":
            now += value
        elif name == "take":
            taken = wheel.take(now, value)
            assert all(each in model and each.due_ms <= now for each in taken)
            if not taken:
                # A due message may be held back for the rest of its second, and no longer.
                assert all(each.due_ms // 1_000 >= now // 1_000 for each in model)
            elif taken:
                earliest = min(each.due_ms for each in model) // 1_000
                assert {each.due_ms // 1_000 for each in taken} == {earliest}
                wheel.drop(len(taken))
                model = [each for each in model if each not in taken]
        elif name == "move":
            before = []
            for table in wheel.tables:
                for key in table.before(value):
                    found = table.get(key).first(2, value)
                    before += found
                    table.drop(key, len(found))
            assert all(each.position < value for each in before)
            assert before or all(each.position >= value for each in model)
            model = [each for each in model if each not in before]
        else:
            behind = sorted(each for each in model if (each.due_ms, each.position) > (T0 + value, 3))
            assert wheel.page((T0 + value, 3), 4) == behind[:4]
        assert len(wheel) == len(model)
        first = min(table.first_out() for table in wheel.tables)
        assert first <= min((each.out_ms for each in model), default=NEVER)
        first = min(table.first_position() for table in wheel.tables)
        assert first == min((each.position for each in model), default=NEVER)
        assert wheel.next_ms() <= max(now, min((each.due_ms for each in model), default=NEVER) + 1_000)
        assert (wheel.next_ms() == NEVER) == (not model)


def test_those_of_one_time_come_in_the_order_in_which_they_were_added():
    wheel = Wheel()
    for position in range(1_000):
        wheel.add(T0, position, 0)
    found = []
    while taken := wheel.take(T0, 32):
        found += [each.position for each in taken]
        wheel.drop(len(taken))
    assert found == list(range(1_000))


def test_a_page_of_a_minute_with_many_messages():
    wheel = Wheel()
    rng = np.random.default_rng(7)
    dues = (T0 + rng.integers(0, 5, 20_000) * 1_000).tolist()
    for position, due in enumerate(dues):
        wheel.add(due, position, 0)
    order = sorted((due, position) for position, due in enumerate(dues))
    after = (-1, -1)
    for start in range(0, 300, 100):
        page = wheel.page(after, 100)
        assert [(each.due_ms, each.position) for each in page] == order[start : start + 100]
        after = page[-1].due_ms, page[-1].position
