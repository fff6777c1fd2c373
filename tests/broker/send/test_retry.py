"""Destinations of messages that a consumer failed to handle."""

from __future__ import annotations

import pytest

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.groups.locks import LOCK_LIVE_MS, QueueLocks
from cometmq.broker.send.retry import RetryRules, plan_send_back
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.versions import Versions
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import SubscriptionGroupConfig


class TestRetries:
    @pytest.mark.parametrize(
        ("times", "maximum", "asked", "topic", "level"),
        [
            (0, 16, 0, "%RETRY%G", 3),
            (1, 16, 0, "%RETRY%G", 4),
            (15, 16, 0, "%RETRY%G", 18),
            (30, 100, 0, "%RETRY%G", 33),
            (16, 16, 0, "%DLQ%G", 0),
            (0, 16, 5, "%RETRY%G", 5),
            (0, 16, -1, "%DLQ%G", 0),
            (0, 0, 0, "%DLQ%G", 0),
        ],
    )
    def test_where_a_failed_message_goes(self, times, maximum, asked, topic, level):
        assert plan_send_back("G", times, maximum, asked) == (topic, level)


class TestRules:
    @pytest.fixture
    def rules(self):
        groups = SubscriptionGroups(BrokerConfig(), Versions(lambda: 0), lambda: None)
        return RetryRules(groups, ConsumerTable(), QueueLocks())

    @pytest.mark.parametrize(
        ("requested", "version", "maximum"), [(3, 407, 3), (None, 407, 16), (3, 120, 16), (3, 513, 3)]
    )
    def test_whose_maximum_counts(self, rules, requested, version, maximum):
        assert rules.maximum(rules.group("G"), requested, version, "channel") == maximum

    def test_a_groups_own_maximum_is_not_overridden_in_silence(self, rules, caplog):
        rules.groups.put(SubscriptionGroupConfig(group_name="G", retry_max_times=1))
        rules.consumers.join("G", "channel", ("c1", "JAVA", 407), 0)
        assert rules.maximum(rules.group("G"), 16, 407, "channel") == 16
        assert [line for line in caplog.messages if "retryMaxTimes=1" in line]

    def test_what_a_client_sends_to_its_retry_topic_is_not_taken_for_its_limit(self, rules, caplog):
        for client, channel in (("c1", "a"), ("c2", "b")):
            rules.consumers.join("G", channel, (client, "JAVA", 407), 0)
            rules.maximum(rules.group("G"), 16, 407, channel)
        assert rules.maximum(rules.group("G"), 17, 407) == 17
        assert not caplog.messages

    @pytest.mark.parametrize(
        ("times", "version", "dead"), [(2, 407, False), (3, 407, True), (3, 513, False), (4, 513, True)]
    )
    def test_when_a_clients_own_retry_is_dead(self, rules, times, version, dead):
        assert rules.is_dead_by_send("G", times, 3, version, 0) is dead

    @pytest.mark.parametrize(
        ("holder", "version", "now_ms", "dead"),
        [
            ("G", 513, LOCK_LIVE_MS, True),
            ("G", 513, LOCK_LIVE_MS + 1, False),
            ("G", 407, 0, False),
            ("Other", 513, 0, False),
        ],
    )
    def test_a_group_that_consumes_in_order_gives_up_at_5x_at_once(
        self, rules, holder, version, now_ms, dead
    ):
        rules.locks.lock(holder, "c1", [MessageQueue("T", "broker-a", 0)], 0)
        assert rules.is_dead_by_send("G", 0, 16, version, now_ms) is dead
