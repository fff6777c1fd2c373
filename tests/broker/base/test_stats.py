"""Rates of messages, of the broker and of groups."""

from __future__ import annotations

import pytest

from cometmq.broker.base.stats import Stats

T0 = 1_700_000_000_000


class TestRates:
    def test_three_numbers_over_10_s_1_min_and_10_min(self):
        stats = Stats(T0, 0)
        assert stats.rates("put") == "0.0 0.0 0.0"
        for second in range(1, 101):
            stats.put += 30 if second > 90 else 5
            clock_set = -86_400_000 if second > 50 else 0
            stats.sample(T0 + second * 1000 + clock_set, second * 1000)
        ten, minute, long = (float(word) for word in stats.rates("put").split(" "))
        assert ten == pytest.approx(30)
        assert minute == pytest.approx((50 * 5 + 10 * 30) / 60)
        assert long == pytest.approx((90 * 5 + 10 * 30) / 100)

    def test_the_rate_of_a_group(self):
        stats = Stats(T0, 0)
        for second in range(1, 101):
            stats.group_get["G", "T"] = stats.group_get.get(("G", "T"), 0) + (7 if second > 40 else 1)
            stats.sample(T0, second * 1000)
        assert stats.group_rate("G", "T", 100_000) == pytest.approx(7)
        assert stats.group_rate("G", "Other", 100_000) == 0

    def test_groups_that_take_nothing_any_more_are_forgotten(self):
        stats = Stats(T0, 0)
        for second in range(1, 201):
            if second < 100:
                stats.group_get[f"G{second}", "T"] = 1
            stats.sample(T0, second * 1000)
        assert sum(len(counts) for _, counts in stats.group_spans) == 0
        assert stats.group_rate("G99", "T", 200_000) == 0
