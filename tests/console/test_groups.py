"""Group pages in a real browser: members, subscriptions, progress, skipping, settings, deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.console.conftest import RunningConsole, asked, confirm, go_on, shown
from tests.console.test_topics import CLUSTER, made

from cometmq.admin import Admin
from cometmq.client import SyncPushConsumer, SyncSimpleConsumer
from cometmq.protocol.bodies import SubscriptionGroupConfig

if TYPE_CHECKING:
    from playwright.sync_api import Page


async def make_group(console: RunningConsole, group: str) -> None:
    async with Admin(console.namesrv) as admin:
        async for _ in admin.update_group(SubscriptionGroupConfig(group_name=group), cluster=CLUSTER):
            pass


async def config(console: RunningConsole, group: str) -> SubscriptionGroupConfig | None:
    async with Admin(console.namesrv) as admin:
        found = await admin.group_configs(group)
        return found[0].config if found else None


def test_a_group_that_is_behind_is_found_and_its_backlog_skipped(page: Page, console: RunningConsole) -> None:
    asked(made(console, "slow-topic", 10, "slow-group"))
    page.goto("/groups?q=slow")
    for again in page.get_by_label("Refresh now").all():
        again.click()
    shown(page, "Consumer offsets:")
    page.get_by_role("link", name="slow-group").click()
    shown(page, "No members online.")
    page.get_by_role("button", name="Skip unconsumed messages").click()
    go_on(page)
    shown(page, "0 messages would be consumed again, 5 would be skipped.")
    go_on(page)
    confirm(page, "slow-group")
    shown(page, "Queues at their new offsets: 1.")


def listened(_messages: object) -> None: ...


def test_members_that_differ_are_told(page: Page, console: RunningConsole) -> None:
    asked(made(console, "mixed-topic"))
    with (
        SyncPushConsumer("mixed-group", listened, {"mixed-topic": "a"}, namesrv=console.namesrv),
        SyncPushConsumer("mixed-group", listened, {"mixed-topic": "b"}, namesrv=console.namesrv),
    ):
        page.goto("/groups/mixed-group")
        shown(page, "Members have different subscriptions to topic mixed-topic.")
        page.locator("section", has_text="Members").get_by_role("row").nth(2).wait_for()
        shown(page, "messageModel=CLUSTERING")


def test_a_group_that_pops_shows_its_leases(page: Page, console: RunningConsole) -> None:
    asked(made(console, "popped-topic", 3))
    with SyncSimpleConsumer("popping-group", "popped-topic", namesrv=console.namesrv) as consumer:
        assert len(consumer.receive(3)) > 0
        page.goto("/groups/popping-group")
        shown(page, "Consume mode: POP.")
        tiles = page.locator("dl.tiles")
        tiles.get_by_text("In flight (leased messages)").wait_for()
        tiles.get_by_text("Oldest lease begun at").wait_for()
        offsets = page.locator("section", has_text="Consumer offsets by queue")
        row = offsets.get_by_role("row", name="popped-topic")
        row.get_by_text("all members").first.wait_for()
        page.locator("section", has_text="Members").get_by_role("cell", name="remoting").first.wait_for()


def test_settings_are_changed_and_a_group_is_deleted(page: Page, console: RunningConsole) -> None:
    asked(make_group(console, "changed-group"))
    page.goto("/groups/changed-group")
    page.get_by_role("button", name="Change settings").click()
    page.get_by_label("Retries (max)").fill("3")
    go_on(page)
    shown(page, "retry_max_times=3")
    confirm(page)
    shown(page, "Done.")
    found = asked(config(console, "changed-group"))
    assert found is not None
    assert found.retry_max_times == 3
    page.get_by_role("button", name="Delete").click()
    confirm(page, "changed-group")
    page.wait_for_url("**/groups")
    assert asked(config(console, "changed-group")) is None


def test_a_group_is_made(page: Page, console: RunningConsole) -> None:
    page.goto("/groups")
    page.get_by_role("button", name="Create a group").click()
    page.get_by_role("alertdialog").get_by_label("Group").fill("fresh-group")
    go_on(page)
    confirm(page)
    page.wait_for_url("**/groups/fresh-group")
    assert asked(config(console, "fresh-group")) is not None


def test_a_group_nobody_knows_says_so(page: Page) -> None:
    page.goto("/groups/nobody%22%3E%3Cimg%20src=x%3E")
    shown(page, "no consumer group named nobody")
    assert page.locator("main img").count() == 0
