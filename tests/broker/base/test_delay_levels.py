"""Delay levels and the due times of their messages."""

from __future__ import annotations

import time

import pytest

from cometmq.broker.base.delay_levels import STEP_MS, DelayLevels, DueTimes
from cometmq.errors import ConfigError
from cometmq.store.base.config import StoreConfig

T0 = 1_700_000_000_000


class TestDelays:
    def test_the_levels_of_the_setting(self):
        levels = DelayLevels.of(StoreConfig())
        delays = {1: 1_000, 2: 5_000, 5: 60_000, 18: 7_200_000, 19: 1_000}
        assert {level: levels.delay_ms(level) for level in delays} == delays
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
        """The message was stored before the start, so it is due at the latest one delay after the start."""
        assert self.due(T0 - 3_600_000).due_ms(1, T0) == self.DELAY

    def test_a_clock_set_back_between_storing_and_delivery_changes_nothing(self):
        due = self.due()
        due.steps.note(2, -T0)
        before = due.due_ms(2, T0 + 1_000)
        due.steps.note(3, -T0 + 3_600_000)  # set back by one hour
        assert due.due_ms(2, T0 + 1_000) == before == 11_000 + STEP_MS
        assert due.due_ms(3, T0 - 3_600_000 + 2_000) == 12_000 + STEP_MS

    def test_neither_does_one_that_is_set_forward(self):
        due = self.due()
        due.steps.note(2, -T0)
        due.steps.note(3, -T0 - 3_600_000)
        assert due.due_ms(2, T0) == self.DELAY + STEP_MS
        assert due.due_ms(3, T0 + 3_600_000) == self.DELAY + STEP_MS

    def test_the_oldest_is_found_at_once_among_many_steps(self):
        """Each arrival records a step while syncs take longer than a second."""
        due = self.due()
        for offset in range(2, 50_002):
            due.steps.note(offset, -T0 + 100 * offset)
        begun = time.process_time()
        for offset in range(2, 1_002):
            assert due.due_ms(offset, T0) == self.DELAY + STEP_MS + 100 * offset
            due.steps.passed(offset + 1)
        assert time.process_time() - begun < 0.3

    @pytest.mark.parametrize("way", [1, -1])
    def test_a_clock_that_is_set_right_slowly_makes_no_message_early(self, way):
        due = self.due()
        for number in range(1_000):  # half a second within a thousand messages
            ahead = -T0 + way * number // 2
            due.steps.note(2 + number, ahead)
            assert due.due_ms(2 + number, number - ahead) >= number + self.DELAY

    def test_steps_that_are_behind_all_messages_are_forgotten(self):
        due = self.due()
        for number in range(2, 100):
            due.steps.note(number, -T0 + number * 1_000)
            due.steps.passed(number)
        assert len(due.steps.notes) == 1
