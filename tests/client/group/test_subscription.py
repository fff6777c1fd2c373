"""Subscriptions as brokers see them: which of two is the newer one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.client.fakes import FakeBroker, FakeNamesrv, ignore

from cometmq import PullConsumer, PushConsumer
from cometmq.client.group import subscription


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
async def test_a_changed_subscription_is_newer_though_the_clock_was_set_back(
    kind: type[PushConsumer | PullConsumer],
    namesrv: FakeNamesrv,
    broker: FakeBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brokers keep what they know unless the version is higher."""
    times = iter([5000.0, 5000.0, 5000.0, 1400.0, 1400.0])
    monkeypatch.setattr(subscription, "time", SimpleNamespace(time=lambda: next(times, 1400.0)))
    member = (
        PushConsumer("g", ignore, {"T": "a"}, namesrv=namesrv.addr)
        if kind is PushConsumer
        else PullConsumer("g", namesrv=namesrv.addr)
    )
    async with member:
        for expression in ("a", "b", "c", "d"):
            await member.subscribe("T", expression)
    told = {
        each.sub_string: each.sub_version
        for beat in broker.heartbeats
        for group in beat.consumer_data_set
        for each in group.subscription_data_set
        if each.topic == "T"
    }
    assert sorted(told, key=told.__getitem__) == ["a", "b", "c", "d"]
    assert len(set(told.values())) == 4
