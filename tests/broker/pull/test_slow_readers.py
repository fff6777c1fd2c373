"""A setting lets a broker disable consuming for groups whose lag is too large."""

from __future__ import annotations

import pytest
from tests.kit.brokers import records, refused

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.pull import backlog
from cometmq.broker.pull.backlog import SlowReaders
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.versions import Versions
from cometmq.protocol.codes import RequestCode

ON = {"disableConsumeIfConsumerReadSlowly": "true", "consumerFallbehindThreshold": "3000"}


@pytest.fixture
def groups():
    found = SubscriptionGroups(BrokerConfig(), Versions(lambda: 0), lambda: None)
    assert found.find("G")
    return found


def readers(groups, **settings):
    return SlowReaders(BrokerConfig.from_properties({**ON, **settings}), groups)


@pytest.mark.parametrize(
    ("pulls", "settings", "enabled"),
    [
        ([("G", 3001)], {}, False),
        ([("G", 3000)], {}, True),
        ([("G", 5000), ("G", 0)], {}, True),  # the group has caught up since
        ([("G", 5000)], {"disableConsumeIfConsumerReadSlowly": "false"}, True),
        ([("G", 5000)], {"consumerFallbehindThreshold": "5000"}, True),
        ([("other", 5000)], {}, True),
        ([("other", 5000), ("G", 5000)], {}, False),
    ],
)
def test_a_group_whose_last_pull_was_far_behind_is_disabled(groups, pulls, settings, enabled):
    slow = readers(groups, **settings)
    for group, behind in pulls:
        slow.record_lag((group, "T", 0), behind)
    slow.check()
    assert groups.table["G"].consume_enable is enabled


def test_groups_that_tools_read_with_are_left_alone(groups):
    slow = readers(groups)
    slow.record_lag(("TOOLS_CONSUMER", "T", 0), 5000)
    slow.check()
    assert groups.table["TOOLS_CONSUMER"].consume_enable


def test_a_group_that_pulls_no_more_is_forgotten_and_one_that_is_enabled_again_gets_a_new_chance(groups):
    slow = readers(groups)
    slow.record_lag(("G", "T", 0), 5000)
    slow.check()
    groups.table["G"].consume_enable = True
    slow.check()
    assert groups.table["G"].consume_enable


def test_no_more_readers_are_kept_than_there_is_room_for(groups, monkeypatch):
    monkeypatch.setattr(backlog, "MAX_SLOW_READERS", 1)
    slow = readers(groups)
    slow.record_lag(("first", "T", 0), 5000)
    slow.record_lag(("G", "T", 0), 5000)
    slow.check()
    assert groups.table["G"].consume_enable


async def test_its_pulls_are_refused_until_an_administrator_lets_it_go_on(started, caplog):
    cluster, peer = await started(**ON)
    for _ in range(5):
        await peer.send(body=b"x" * 1000)
    assert len(records(await peer.pull(group="Late", max_msg_nums=1))) == 1
    assert len(records(await peer.pull(group="Prompt"))) == 5
    cluster.broker.parts.slow_readers.check()
    refused(await peer.pull(group="Late", offset=1), 16, "subscription group no permission, Late")
    assert len(records(await peer.pull(group="Prompt"))) == 5
    assert "group Late disabled: its lag in topic Orders queue 0 is" in caplog.text
    await cluster.restart()  # the group setting survives a restart
    peer = cluster.peer()
    refused(await peer.pull(group="Late", offset=1), 16, "Late")
    assert (await peer.set_group(b'{"groupName":"Late","consumeEnable":true}')).code == 0
    assert len(records(await peer.pull(group="Late", offset=1))) == 4


async def test_the_check_is_a_live_setting(started):
    cluster, peer = await started()
    for _ in range(5):
        await peer.send(body=b"x" * 1000)
    await peer.pull(group="Late", max_msg_nums=1)
    cluster.broker.parts.slow_readers.check()
    assert (await peer.pull(group="Late", max_msg_nums=1)).code == 0
    body = "\n".join(f"{key}={value}" for key, value in ON.items()).encode()
    assert (await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body)).code == 0
    await peer.pull(group="Late", max_msg_nums=1)
    cluster.broker.parts.slow_readers.check()
    refused(await peer.pull(group="Late", max_msg_nums=1), 16, "Late")
