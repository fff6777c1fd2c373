"""Message rates of the broker and of groups."""

from __future__ import annotations

import pytest

from cometmq.broker.base.stats import SpanCounts, Stats

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
        assert stats.group_rate("G99", "T", 200_000) == 0


class TestCounts:
    def test_messages_of_a_topic_in_the_last_minute_hour_and_day(self):
        stats = Stats(T0, 0)
        stats.count_topics({"T": 100}, 0)
        for second in range(10, 7_210, 10):
            stats.count_topics({"T": 100 + second // 10, "Idle": 5}, second * 1000)
        minute, hour, day = stats.topic_put("T", 100 + 720 + 2, 7_200_000)
        assert (minute.sum, hour.sum, day.sum) == (6 + 2, 360 + 2, 720 + 2)
        assert minute.per_second == pytest.approx(8 / 60)
        assert [counted.sum for counted in stats.topic_put("Gone", 0, 7_200_000)] == [0, 0, 0]

    def test_what_was_there_before_the_start_is_not_counted(self):
        stats = Stats(T0, 0)
        assert [counted.sum for counted in stats.topic_put("T", 7, 0)] == [0, 0, 0]
        stats.count_topics({"T": 7}, 0)
        assert [counted.sum for counted in stats.topic_put("T", 9, 5_000)] == [2, 2, 2]

    def test_a_topic_that_was_made_anew_is_not_counted_below_nothing(self):
        stats = Stats(T0, 0)
        stats.count_topics({"T": 7}, 0)
        assert stats.topic_put("T", 1, 5_000)[0].sum == 0
        stats.count_topics({"T": 1}, 10_000)
        assert stats.topic_put("T", 3, 15_000)[0].sum == 2

    def test_messages_that_a_group_took(self):
        stats = Stats(T0, 0)
        for second in range(1, 101):
            stats.group_get["G", "T"] = stats.group_get.get(("G", "T"), 0) + 3
            stats.sample(T0, second * 1000)
        minute, hour, _ = stats.group_got("G", "T", 100_000)
        assert (minute.sum, hour.sum) == (180, 300)

    def test_what_is_idle_for_a_day_is_forgotten(self):
        counts = SpanCounts(0)
        counts.add({"T": 1}, 10_000)
        assert len(counts) == 1
        for hour in range(1, 27):
            counts.add({}, hour * 3_600_000)
        assert len(counts) == 0
