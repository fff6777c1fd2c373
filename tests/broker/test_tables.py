"""The broker's small tables: locks, offsets, delay levels, retry plans, subscriptions, rates."""

from __future__ import annotations

import random

import pytest

from cometmq.broker.base.delay_levels import STEP_MS, DelayLevels, DueTimes
from cometmq.broker.base.stats import Stats
from cometmq.broker.groups import subscriptions
from cometmq.broker.groups.locks import LOCK_LIVE_MS, QueueLocks
from cometmq.broker.groups.subscriptions import LONGEST_EXPRESSION, ExpressionError, tag_codes
from cometmq.broker.send.retry import is_dead_by_send, maximum_times, plan_send_back
from cometmq.broker.tables import consumer_offsets as offsets_module
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.errors import ConfigError
from cometmq.message import MessageQueue
from cometmq.protocol.properties.values import java_hash
from cometmq.store.base.config import StoreConfig

T0 = 1_700_000_000_000
Q0, Q1 = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-a", 1)


class TestLocks:
    def test_a_queue_belongs_to_one_client_until_it_gives_it_up(self):
        locks = QueueLocks()
        assert locks.lock("G", "c1", [Q0, Q1], T0) == [Q0, Q1]
        assert locks.lock("G", "c2", [Q0, Q1], T0) == []
        locks.unlock("G", "c2", [Q0])
        assert locks.lock("G", "c2", [Q0], T0) == []
        locks.unlock("G", "c1", [Q0])
        assert locks.lock("G", "c2", [Q0, Q1], T0) == [Q0]
        assert locks.lock("Other", "c3", [Q0, Q1], T0) == [Q0, Q1]

    def test_a_lock_lives_60_s_from_its_last_renewal(self):
        locks = QueueLocks()
        locks.lock("G", "c1", [Q0], T0)
        locks.lock("G", "c1", [Q0], T0 + 50_000)
        assert locks.lock("G", "c2", [Q0], T0 + 50_000 + LOCK_LIVE_MS) == []
        assert locks.holder("G", Q0, T0 + 50_000 + LOCK_LIVE_MS) == "c1"
        assert locks.holder("G", Q0, T0 + 50_001 + LOCK_LIVE_MS) is None
        assert locks.lock("G", "c2", [Q0], T0 + 50_001 + LOCK_LIVE_MS) == [Q0]
        locks.unlock("Nobody", "c", [Q0])

    def test_locks_of_clients_that_are_gone_are_forgotten(self):
        locks = QueueLocks()
        locks.lock("G", "c1", [Q0], T0)
        locks.lock("G", "c2", [Q1], T0 + 1_000)
        locks.lock("H", "c3", [Q1], T0)
        locks.expire(T0 + LOCK_LIVE_MS)
        assert len(locks) == 3
        locks.expire(T0 + LOCK_LIVE_MS + 1)
        assert len(locks) == 1
        assert list(locks._groups) == ["G"]
        locks.unlock("G", "c2", [Q1, Q1])
        assert (len(locks), locks._groups) == (0, {})

    def test_there_are_so_many_locks_and_no_more(self):
        locks = QueueLocks(most=2)
        queues = [MessageQueue("T", "broker-a", n) for n in range(4)]
        assert locks.lock("G", "c1", queues, T0) == queues[:2]
        assert locks.lock("H", "c1", queues, T0) == []
        assert list(locks._groups) == ["G"]
        assert locks.lock("G", "c1", queues, T0 + 1) == queues[:2]
        locks.unlock("G", "c1", queues[:1])
        assert locks.lock("H", "c1", queues, T0) == queues[:1]


class TestOffsets:
    def test_what_is_committed_is_found_and_lower_offsets_count_too(self):
        offsets = ConsumerOffsets()
        assert offsets.query("G", "T", 0) == -1
        offsets.commit("G", "T", 0, 8)
        offsets.commit("G", "T", 0, 3)
        assert (offsets.query("G", "T", 0), offsets.query("G", "T", 1), offsets.query("X", "T", 0)) == (
            3,
            -1,
            -1,
        )
        assert offsets.dirty

    def test_groups_and_topics_are_told_apart_and_removed(self):
        offsets = ConsumerOffsets()
        for group, topic in (("G", "T"), ("G", "%RETRY%G"), ("H", "T")):
            offsets.commit(group, topic, 2, 5)
        assert offsets.topics_of("G") == {"T", "%RETRY%G"}
        assert offsets.groups_of("T") == {"G", "H"}
        offsets.clone("G", "New", "T")
        assert offsets.query("New", "T", 2) == 5
        offsets.remove_group("G")
        offsets.remove_topic("Nothing")
        assert offsets.groups() == {"H", "New"}
        offsets.remove_topic("T")
        assert offsets.to_table() == {"offsetTable": {}}

    def test_there_are_so_many_offsets_and_no_more(self, monkeypatch):
        monkeypatch.setattr("cometmq.broker.tables.consumer_offsets.MOST_OFFSETS", 4)
        offsets = ConsumerOffsets()
        offsets.load({"offsetTable": {"T@G": {0: 4, "1": 9}}})
        offsets.clone("G", "H", "T")
        offsets.clone("G", "I", "T")
        assert (len(offsets), offsets.groups()) == (4, {"G", "H"})
        assert not offsets.commit("G", "T", 2, 5)
        assert not offsets.commit("I", "T", 0, 5)
        assert offsets.commit("G", "T", 1, 5)
        offsets.clone("G", "H", "T")
        offsets.clone("G", "G", "T")
        assert (len(offsets), offsets.query("H", "T", 1)) == (4, 5)
        offsets.remove_group("H")
        assert offsets.commit("G", "T", 2, 5)
        assert offsets.commit("I", "T", 0, 5)
        offsets.remove_topic("T")
        assert (len(offsets), offsets.to_table()) == (0, {"offsetTable": {}})

    def test_the_file_is_read_with_keys_of_either_kind(self):
        offsets = ConsumerOffsets()
        offsets.load({"offsetTable": {"T@G": {0: 4, "1": "9"}}})
        assert offsets.to_table() == {"offsetTable": {"T@G": {0: 4, 1: 9}}}
        assert not offsets.dirty

    def test_the_topics_of_each_group_are_known_without_a_look_at_every_entry(self, monkeypatch):
        offsets = ConsumerOffsets()
        for number in range(1000):
            offsets.commit(f"G{number}", f"T{number % 10}", 0, number)
        looked_at = []
        split = offsets_module.split_key
        monkeypatch.setattr(offsets_module, "split_key", lambda key: looked_at.append(key) or split(key))
        assert all(offsets.topics_of(f"G{number}") == {f"T{number % 10}"} for number in range(1000))
        assert sum(len(offsets.groups_of(f"T{number}")) for number in range(10)) == 1000
        offsets.remove_group("G7")
        offsets.remove_topic("T3")
        assert looked_at == []

    def test_what_is_known_of_groups_and_topics_is_what_the_table_holds(self):
        draw = random.Random(5)
        offsets = ConsumerOffsets()
        for _ in range(3000):
            group, topic = draw.choice("GHIJ"), draw.choice(["T", "U", "%RETRY%G", "odd@V"])
            change = draw.randrange(8)
            if change < 5:
                offsets.commit(group, topic, draw.randrange(2), 1)
            elif change == 5:
                offsets.clone(group, draw.choice("GHIJ"), topic)
            elif change == 6:
                draw.choice([offsets.remove_group, offsets.remove_topic])(draw.choice([group, topic]))
            else:
                offsets.load(
                    {"offsetTable": {**offsets.to_table()["offsetTable"], f"{topic}@{group}": {0: 1}}}
                )
            held = [offsets_module.split_key(key) for key in offsets.to_table()["offsetTable"]]
            assert offsets.groups() == {name for _, name in held}
            for name in ("G", "H", "V@G"):
                assert offsets.topics_of(name) == {there for there, other in held if other == name}
            for name in ("T", "odd"):
                assert offsets.groups_of(name) == {other for there, other in held if there == name}


class TestDelays:
    def test_the_levels_of_the_setting(self):
        levels = DelayLevels.of(StoreConfig())
        assert [levels.delay_ms(level) for level in (1, 2, 5, 18, 19)] == [
            1_000,
            5_000,
            60_000,
            7_200_000,
            1_000,
        ]
        assert [levels.effective(wanted) for wanted in (-1, 0, 3, 18, 99)] == [0, 0, 3, 18, 18]
        own = DelayLevels.of(StoreConfig(message_delay_level="2s 1d"))
        assert own.delays_ms == (2_000, 86_400_000)

    def test_a_bad_setting_says_what_is_expected(self):
        with pytest.raises(ConfigError, match="messageDelayLevel"):
            DelayLevels.of(StoreConfig(message_delay_level="1s 5x"))


class TestDueTimes:
    """A level of 10 s, with two messages stored before the start; monotonic time 0 is wall time T0."""

    DELAY = 10_000

    def due(self, now_ms=T0):
        return DueTimes(self.DELAY, 2, now_ms, 0)

    def test_what_was_stored_before_the_start_goes_by_the_wall_clock(self):
        assert self.due().due_ms(0, T0 - 4_000) == 6_000 + STEP_MS
        assert self.due().due_ms(1, T0 - 60_000) < 0

    def test_a_clock_set_back_before_the_start_makes_nothing_early(self):
        """Whatever time it bears, it was stored before the start: a delay after that it is due for sure."""
        assert self.due(T0 - 3_600_000).due_ms(1, T0) == self.DELAY

    def test_a_clock_set_back_between_storing_and_delivery_changes_nothing(self):
        due = self.due()
        due.arrived(2, -T0)
        before = due.due_ms(2, T0 + 1_000)
        due.arrived(3, -T0 + 3_600_000)  # an hour back
        assert due.due_ms(2, T0 + 1_000) == before == 11_000 + STEP_MS
        assert due.due_ms(3, T0 - 3_600_000 + 2_000) == 12_000 + STEP_MS

    def test_neither_does_one_that_is_set_forward(self):
        due = self.due()
        due.arrived(2, -T0)
        due.arrived(3, -T0 - 3_600_000)
        assert due.due_ms(2, T0) == self.DELAY + STEP_MS
        assert due.due_ms(3, T0 + 3_600_000) == self.DELAY + STEP_MS

    @pytest.mark.parametrize("way", [1, -1])
    def test_a_clock_that_is_set_right_slowly_makes_no_message_early(self, way):
        due = self.due()
        for number in range(1_000):  # half a second in a thousand messages
            ahead = -T0 + way * number // 2
            due.arrived(2 + number, ahead)
            assert due.due_ms(2 + number, number - ahead) >= number + self.DELAY

    def test_steps_that_are_behind_all_messages_are_forgotten(self):
        due = self.due()
        for number in range(2, 100):
            due.arrived(number, -T0 + number * 1_000)
            due.passed(number)
        assert len(due._ahead) == 1


class TestRetries:
    @pytest.mark.parametrize(
        ("times", "maximum", "asked", "topic", "level"),
        [
            (0, 16, 0, "%RETRY%G", 3),
            (1, 16, 0, "%RETRY%G", 4),
            (15, 16, 0, "%RETRY%G", 18),
            (16, 16, 0, "%DLQ%G", 0),
            (0, 16, 5, "%RETRY%G", 5),
            (0, 16, -1, "%DLQ%G", 0),
            (0, 0, 0, "%DLQ%G", 0),
        ],
    )
    def test_where_a_failed_message_goes(self, times, maximum, asked, topic, level):
        plan = plan_send_back("G", times, maximum, asked)
        assert (plan.topic, plan.delay_level) == (topic, level)
        assert plan.dead is topic.startswith("%DLQ%")

    def test_whose_maximum_counts(self):
        assert maximum_times(16, 3, 409) == 3
        assert maximum_times(16, None, 409) == 16
        assert maximum_times(16, 3, 120) == 16
        assert is_dead_by_send(3, 3)
        assert not is_dead_by_send(2, 3)


class TestSubscriptions:
    @pytest.mark.parametrize("expression", [None, "", "*"])
    def test_what_lets_everything_through(self, expression):
        assert tag_codes(expression) is None

    def test_tags_are_split_and_trimmed(self):
        assert tag_codes("TagA || TagB||  ||TagC") == {
            java_hash("TagA"),
            java_hash("TagB"),
            java_hash("TagC"),
        }
        assert tag_codes("  ") == frozenset()
        assert tag_codes(" || ") == frozenset()
        with pytest.raises(ExpressionError):
            tag_codes("||")

    def test_an_expression_is_taken_up_to_a_length_and_long_ones_are_not_hoarded(self):
        longest = "tag||" * (LONGEST_EXPRESSION // 5)
        assert tag_codes(longest) == {java_hash("tag")}
        with pytest.raises(ExpressionError, match=f"at most {LONGEST_EXPRESSION}"):
            tag_codes(longest + "tag||")
        for number in range(200):
            tag_codes(f"{number}||{longest[:-10]}")
        assert subscriptions._long_codes.cache_info().currsize <= 64


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
        assert sum(len(counts) for _, counts in stats._group_spans) == 0
        assert stats.group_rate("G99", "T", 200_000) == 0
