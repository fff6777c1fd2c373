"""Rates from counters and offsets."""

from __future__ import annotations

import pytest

from cometmq.admin.rates import Rate


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        ({"a": 10}, {"a": 30}, {"a": 2.0}),
        ({"a": 10}, {"a": 30, "b": 5}, {"a": 2.0}),
        ({"a": 10, "b": 1}, {"a": 4}, {"a": 0.0}),
        ({}, {"a": 4}, {}),
    ],
)
def test_rates_are_growth_by_time(
    before: dict[object, int], after: dict[object, int], rates: dict[object, float]
) -> None:
    rate = Rate()
    assert rate.observe(100.0, before) == {}

    assert rate.observe(110.0, after) == rates
