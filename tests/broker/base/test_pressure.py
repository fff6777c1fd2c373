"""Requests that an overloaded broker refuses, and the remarks it sends."""

from __future__ import annotations

import pytest

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.pressure import Load, exceeded, remark

SENDS = {10, 310, 320, 36}
PULLS = {11, 361}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("load", "codes"),
    [
        (Load(), set()),
        (Load(lag_ms=199), set()),
        (Load(lag_ms=200), SENDS),
        (Load(lag_ms=2_999), SENDS),
        (Load(lag_ms=3_000), {*SENDS, 37}),
        (Load(lag_ms=5_000), {*SENDS, 37, *PULLS}),
        (Load(lag_ms=31_000), {*SENDS, 37, *PULLS, 34}),
        (Load(sync_ms=999, waiting=10_000), set()),
        (Load(sync_ms=1_000), SENDS),
        (Load(sync_ms=60_000), SENDS),
        (Load(unflushed=GIB - 1), set()),
        (Load(unflushed=GIB), SENDS),
    ],
)
def test_each_kind_of_request_has_its_limits(load, codes):
    assert exceeded(load, BrokerConfig()).keys() == codes


@pytest.mark.parametrize(
    ("setting", "load", "codes"),
    [
        ("waitTimeMillsInSendQueue=500", Load(lag_ms=499), set()),
        ("waitTimeMillsInPullQueue=100", Load(lag_ms=100), {11}),
        ("waitTimeMillsInLitePullQueue=100", Load(lag_ms=100), {361}),
        ("waitTimeMillsInHeartbeatQueue=100", Load(lag_ms=100), {34}),
        ("waitTimeMillsInTransactionQueue=100", Load(lag_ms=100), {37}),
        ("osPageCacheBusyTimeOutMills=50", Load(sync_ms=50), SENDS),
        ("maxUnflushedBytes=1", Load(unflushed=1), SENDS),
        ("maxUnflushedBytes=0", Load(unflushed=1 << 50), set()),
        ("brokerFastFailureEnable=false", Load(60_000, 60_000, 1, 1 << 50), set()),
    ],
)
def test_each_limit_is_a_setting(setting, load, codes):
    config = BrokerConfig.from_properties(dict([setting.split("=")]))
    assert exceeded(load, config).keys() == codes


@pytest.mark.parametrize(
    ("load", "code", "words"),
    [
        (
            Load(lag_ms=312),
            310,
            "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: 312ms, "
            "size of queue: 0, reason: loop lag 312 ms, limit 200 ms (waitTimeMillsInSendQueue)",
        ),
        (
            Load(lag_ms=6_000),
            11,
            "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: 6000ms, "
            "size of queue: 0, reason: loop lag 6000 ms, limit 5000 ms (waitTimeMillsInPullQueue)",
        ),
        (
            Load(sync_ms=1_500, waiting=35),
            310,
            "[PCBUSY_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: 1500ms, "
            "size of queue: 35, reason: flush backlog 1500 ms, limit 1000 ms (osPageCacheBusyTimeOutMills)",
        ),
        (
            Load(lag_ms=250, unflushed=GIB + 5),
            10,
            "[OVERLOAD]broker busy, start flow control for a while, period in queue: 250ms, "
            "size of queue: 0, reason: pending size 1073741829 bytes, limit 1073741824 bytes "
            "(maxUnflushedBytes); loop lag 250 ms, limit 200 ms (waitTimeMillsInSendQueue)",
        ),
    ],
)
def test_a_refusal_names_every_limit_that_is_exceeded_and_by_how_much(load, code, words):
    assert remark(exceeded(load, BrokerConfig())[code], load) == words
