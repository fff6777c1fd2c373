"""Where a message goes that a consumer failed on."""

from __future__ import annotations

import pytest

from cometmq.broker.send.retry import is_dead_by_send, maximum_times, plan_send_back


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
