"""Token buckets and the limits of topics, groups and accounts, with a clock that the test sets."""

from __future__ import annotations

import random

import pytest

from cometmq.broker.base.attributes import RECEIVE, SEND, parse_rate
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.rates import rate_limits
from cometmq.broker.rates.rate_limits import (
    Amount,
    RateLimit,
    RateLimits,
    Rates,
    TokenBucket,
    count_one,
)
from cometmq.protocol.acl import Credentials, sign
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.codes import TOOLS_CONSUMER_GROUP, RequestCode
from cometmq.protocol.frame import Frame


class TestATokenBucket:
    def test_as_many_tokens_as_in_a_second_may_be_taken_at_once(self):
        bucket = TokenBucket(10, 0)
        assert bucket.wait_ms(10, 0) == 0
        bucket.take(10, 0)
        assert (bucket.tokens(0), bucket.wait_ms(1, 0)) == (0, 100)
        assert bucket.wait_ms(1, 99) == 1
        assert bucket.wait_ms(1, 100) == 0
        assert bucket.tokens(3_600_000) == 10

    def test_what_is_taken_in_advance_delays_those_behind(self):
        bucket = TokenBucket(10, 0)
        waits = []
        for _ in range(14):
            waits.append(bucket.wait_ms(1, 0))
            bucket.take(1, 0)
        assert waits == [0] * 10 + [100, 200, 300, 400]

    def test_more_than_a_full_bucket_passes_once_it_is_full_and_is_paid_for_afterwards(self):
        bucket = TokenBucket(10, 0)
        bucket.take(4, 0)
        assert bucket.wait_ms(50, 0) == 400
        assert bucket.wait_ms(50, 400) == 0
        bucket.take(50, 400)
        assert (bucket.tokens(400), bucket.wait_ms(1, 400)) == (-40, 4_100)

    @pytest.mark.parametrize("rate", [3, 7, 999, 1_000_003])
    def test_the_rate_is_exact_over_a_long_time(self, rate):
        """At uneven rates and amounts, no token is lost or gained in an hour."""
        bucket, numbers, now_ms, taken = TokenBucket(rate, 0), random.Random(rate), 0, 0
        bucket.take(rate, 0)
        while now_ms < 3_600_000:
            count = numbers.randrange(1, rate // 2 + 2)
            now_ms += bucket.wait_ms(count, now_ms)
            bucket.take(count, now_ms)
            taken += count
        assert taken + bucket.tokens(now_ms) == rate * now_ms // 1000

    @pytest.mark.parametrize("seed", range(5))
    def test_no_second_has_more_than_its_rate_and_one_burst(self, seed):
        numbers, rate, now_ms, due = random.Random(seed), 20, 0, []
        bucket = TokenBucket(rate, 0)
        for _ in range(2_000):
            now_ms += numbers.randrange(0, 100)
            wait_ms = bucket.wait_ms(1, now_ms)
            if wait_ms <= 2_000:
                bucket.take(1, now_ms)
                due.append(now_ms + wait_ms)
        for start in range(0, now_ms, 500):
            for seconds in (1, 5, 20):
                found = sum(start <= each < start + seconds * 1000 for each in due)
                assert found <= rate * seconds + rate
        assert len(due) >= rate * now_ms / 1000 * 0.95

    def test_a_clock_that_goes_back_adds_nothing(self):
        bucket = TokenBucket(10, 5_000)
        bucket.take(10, 5_000)
        assert bucket.tokens(1_000) == 0
        assert bucket.tokens(5_100) == 1


class TestALimit:
    def test_messages_and_bytes_are_limited_at_the_same_time(self):
        limit = RateLimit("topic", "Orders", SEND, Rates(10, 1_000), 0)
        limit.take(Amount(1, 900), 0)
        assert limit.wait_ms(Amount(1, 100), 0) == 0
        assert limit.wait_ms(Amount(1, 200), 0) == 100
        assert limit.wait_ms(Amount(12, 0), 0) == 100
        assert limit.exceeded(Amount(1, 200), 0) == (
            "rate limit of topic Orders: 1000 bytes per second (rate.send.bytes)"
        )
        assert limit.left(Amount(32, 4_096), 0) == (9, 100)

    def test_an_account_is_named_with_its_own_key(self):
        limit = RateLimit("account", "program", RECEIVE, Rates(5, 0), 0)
        assert limit.exceeded(Amount(9, 9), 0).endswith("program: 5 messages per second (receive.messages)")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("0", 0), ("12", 12), ("1000000000000", 10**12), ("1000000000001", None), ("", None), ("-1", None),
     ("1.5", None), ("1e3", None), ("٣", None), (None, None), ("9" * 5_000, None), (7, None)],
)  # fmt: skip
def test_a_limit_is_a_whole_number(text, rate):
    assert parse_rate(text) == rate


def limits(accounts: dict[str, dict[str, str]] | None = None, **settings: int) -> RateLimits:
    groups = {
        "Slow": SubscriptionGroupConfig("Slow", attributes={"rate.receive.messages": "5"}),
        "Free": SubscriptionGroupConfig("Free", attributes={"rate.receive.messages": "0"}),
        "Odd": SubscriptionGroupConfig("Odd", attributes={"rate.receive.messages": "many", "other": "1"}),
    }
    return RateLimits(BrokerConfig(**settings), groups, lambda: accounts or {}, lambda: 0)


class TestTheLimitsOfABroker:
    def test_without_settings_nothing_has_a_limit(self):
        found = limits()
        assert found.topic_rates(TopicConfig("Orders")) is None
        assert not found.of_receive("G", "")
        assert not found.of_send("Orders", None, "")
        assert not len(found)

    @pytest.mark.parametrize(
        ("group", "rates"), [("Slow", [(5, 70)]), ("Free", [(0, 70)]), ("Odd", [(9, 70)]), ("New", [(9, 70)])]
    )
    def test_an_attribute_replaces_the_default_and_0_means_no_limit(self, group, rates):
        found = limits(max_group_receive_messages_per_second=9, max_group_receive_bytes_per_second=70)
        assert [each.rates for each in found.of_receive(group, "")] == rates

    def test_a_topic_has_its_attributes_or_the_default(self):
        found = limits(max_topic_send_bytes_per_second=70)
        given = TopicConfig("Orders", attributes={"rate.send.messages": "5", "rate.send.bytes": "0"})
        assert found.topic_rates(given) == (5, 0)
        assert found.topic_rates(TopicConfig("Bills")) == (0, 70)

    def test_tools_are_not_limited(self):
        found = limits({"me": {"receive.messages": "1"}}, max_group_receive_messages_per_second=9)
        assert not found.of_receive(TOOLS_CONSUMER_GROUP, "me")
        assert not found.of_receive("CID_RMQ_SYS_TRANS", "me")

    def test_an_account_has_its_own_limits_or_the_defaults_and_a_stranger_none(self):
        found = limits({"a": {"send.messages": "7"}, "b": {}}, max_account_send_messages_per_second=3)
        for account, rates in (("a", [(7, 0)]), ("b", [(3, 0)]), ("nobody", []), ("", [])):
            assert [each.rates for each in found.of_send("Orders", None, account)] == rates
        assert not found.of_receive("G", "a")

    def test_requests_are_searched_for_their_account_only_if_an_account_has_a_limit(self):
        default = {"max_account_receive_bytes_per_second": 3}
        frame = Frame(code=RequestCode.PULL_MESSAGE)
        sign(frame, Credentials("a", "secret"))
        for accounts, settings, account in [
            ({}, {}, ""), ({}, default, ""), ({"a": {}, "b": {}}, {}, ""),
            ({"a": {}, "b": {"send.messages": "7"}}, {}, "a"), ({"a": {}}, default, "a"),
        ]:  # fmt: skip
            assert limits(accounts, **settings).account_of(frame) == account

    def test_each_name_keeps_its_tokens_until_its_rate_changes(self):
        found = limits()
        (limit,) = found.of_send("Orders", Rates(2, 0), "")
        found.take([limit], Amount(2, 10))
        assert found.of_send("Orders", Rates(2, 0), "") == [limit]
        (changed,) = found.of_send("Orders", Rates(3, 0), "")
        assert changed.wait_ms(Amount(3, 0), 0) == 0

    def test_a_delivery_takes_no_more_than_every_limit_has_left(self):
        found = limits({"me": {"receive.messages": "3"}})
        both = found.of_receive("Slow", "me")
        assert found.allowance(both, Amount(32, 100)) == ((3, 100), None, 0)
        found.take(both, Amount(3, 100))
        most, limit, wait_ms = found.allowance(both, Amount(32, 100))
        assert (most, limit, wait_ms) == ((32, 100), both[1], 334)

    def test_tables_are_bounded(self, monkeypatch):
        monkeypatch.setattr(rate_limits, "MAX_LIMITS", 10)
        found = limits()
        for number in range(25):
            (limit,) = found.of_send(f"T{number}", Rates(1, 0), "")
            count_one(found.refused_sends, f"T{number}", limit)
            assert max(len(found), len(found.refused_sends)) <= 10
        assert found.of_send("T24", Rates(1, 0), "") == [limit]
