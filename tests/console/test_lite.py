"""The lite topics of a parent topic and of a group, as the pages request them and in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import RunningConsole, asked, shown
from tests.console.test_topics import CLUSTER
from tests.kit.brokers import Cluster

from cometmq.admin import Admin, TopicSettings
from cometmq.client import LiteConsumer
from cometmq.client.group.options import SimpleOptions
from cometmq.console.pages import lite
from cometmq.console.pages.group import ask_members
from cometmq.message import Message
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.standalone import Standalone

if TYPE_CHECKING:
    from playwright.sync_api import Page

PARENT, GROUP = "LiteParent", "lite-group"


async def fill(namesrv: str) -> None:
    """Create a parent topic with four lite topics, and a group that has consumed nothing."""
    async with Admin(namesrv) as admin:
        settings = TopicSettings(topic=PARENT, attributes="+message.type=LITE")
        async for _ in admin.create_topic(settings, cluster=CLUSTER):
            pass
        config = SubscriptionGroupConfig(group_name=GROUP, attributes={"+lite.bind.topic": PARENT})
        async for _ in admin.update_group(config, cluster=CLUSTER):
            pass
        for name in ("a-1", "a-2", "a-2", "b-1", "b-1", "b-1", "c-1"):
            await admin.send(Message(PARENT, b"x", lite_topic=name))


def consumer_of(namesrv: str) -> LiteConsumer:
    return LiteConsumer(GROUP, PARENT, ["a-2", "b-1"], namesrv=namesrv, options=SimpleOptions(wait_s=20))


async def test_pages_request_lite_topics_and_subscriptions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with Standalone(tmp_path, 0, 0) as standalone:
        namesrv = Cluster(standalone).namesrv_addr
        await fill(namesrv)
        async with Admin(namesrv) as admin, consumer_of(namesrv) as consumer:
            (first,) = await consumer.receive(1)
            await consumer.ack(first)
            found = await lite.ask_topics(admin, PARENT, "")
            acked = first.properties["__LITE_TOPIC"]
            lags = {"a-1": None, "a-2": 2, "b-1": 3, "c-1": None}
            lags[acked] = (lags[acked] or 0) - 1
            assert {row.name: row.lag for row in found.rows} == lags
            assert [(row.stored, row.subscribers) for row in found.rows] == [(1, 0), (2, 1), (3, 1), (1, 0)]
            assert [row.groups for row in found.rows] == ["", GROUP, GROUP, ""]
            assert (found.total, found.more, found.missing) == (4, False, {})
            assert min(row.last_ms for row in found.rows) > 0

            found = await lite.ask_topics(admin, PARENT, "a-")
            assert ([row.name for row in found.rows], found.total) == (["a-1", "a-2"], 4)
            monkeypatch.setattr(lite, "MAX_LISTED", 3)
            found = await lite.ask_topics(admin, PARENT, "")
            assert ([row.name for row in found.rows], found.more) == (["a-1", "a-2", "b-1"], True)

            members = await ask_members(admin, GROUP)
            state = await lite.ask_group(admin, PARENT, GROUP, members)
            assert (state.total, dict(state.lags)) == (4, {name: lags[name] for name in ("a-2", "b-1")})
            (client,) = state.clients
            assert (client.client_id, client.count, client.names) == (
                members.members[0].client_id,
                2,
                "a-2, b-1",
            )
            assert client.seen_ms > 0


def test_lite_topics_are_on_the_pages_of_their_parent_and_of_their_group(
    page: Page, console: RunningConsole
) -> None:
    async def walk() -> None:
        await fill(console.namesrv)

    asked(walk())
    page.goto(f"/topics/{PARENT}")
    shown(page, "Lite topics of this topic: 4")
    topics = page.locator("section", has=page.get_by_role("heading", name="Lite topics"))
    topics.get_by_role("cell", name="c-1").wait_for()
    topics.get_by_label("Names that begin with").fill("a-")
    topics.get_by_role("cell", name="c-1").wait_for(state="detached")
    assert topics.get_by_role("row").count() == 3
    page.wait_for_function("location.search.includes('prefix=a-')")

    page.goto(f"/groups/{GROUP}")
    shown(page, "Lite topics with the largest lag")
    shown(page, "Subscriptions to lite topics")
    shown(page, "Lag in all lite topics: 0")
