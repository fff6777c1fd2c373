"""Topic pages in a real browser: search, creation, sends, changes, resets, purges and deletion."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import RunningConsole, asked, confirm, go_on, shown

from cometmq.admin import Admin, TopicSettings
from cometmq.client import PullConsumer
from cometmq.message import Message, MessageQueue

if TYPE_CHECKING:
    from playwright.sync_api import Page

CLUSTER = "DefaultCluster"


async def made(console: RunningConsole, topic: str, messages: int = 0, group: str = "") -> None:
    """Create a topic of one queue with messages, half of which a group has consumed."""
    async with Admin(console.namesrv) as admin:
        settings = TopicSettings(topic=topic, read_queue_nums=1, write_queue_nums=1)
        async for _ in admin.create_topic(settings, cluster=CLUSTER):
            pass
        for number in range(messages):
            await admin.send(Message(topic=topic, body=b"%d" % number))
    if group:
        async with PullConsumer(group, namesrv=console.namesrv) as consumer:
            await consumer.subscribe(topic)
            for _ in range(20):
                if await consumer.poll(1.0):
                    break
            await consumer.commit({MessageQueue(topic, "broker-a", 0): messages // 2})


async def known(console: RunningConsole, topic: str) -> bool:
    async with Admin(console.namesrv) as admin:
        return topic in await admin.topics()


def test_a_link_shows_the_same_rows_to_somebody_else(page: Page, console: RunningConsole) -> None:
    for number in range(30):
        asked(made(console, f"linked-{number:02d}"))
    page.goto("/topics")
    shown(page, "Page 1 of 2")
    page.get_by_label("Search").fill("LINKED")
    shown(page, "30 of ")
    page.get_by_role("button", name="Sort by Topic").click()
    page.get_by_role("button", name="Next page").click()
    shown(page, "linked-04")
    page.wait_for_function("location.search.includes('page=2')")
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    shown(page, "Page 2 of 2")
    assert page.get_by_role("row").count() == 6
    assert page.locator("th[aria-sort=descending]").count() == 1
    page.get_by_role("link", name="linked-00").click()
    shown(page, "Write queues")


@pytest.mark.slow("a browser walks through several pages")
def test_a_topic_is_made_and_sent_to_and_its_deletion_asks_for_its_name(
    page: Page, console: RunningConsole
) -> None:
    page.goto("/topics")
    page.get_by_role("button", name="Create a topic").click()
    page.get_by_role("alertdialog").get_by_label("Topic").fill("bad name!")
    go_on(page)
    shown(page, "Only letters, digits and")
    page.get_by_role("alertdialog").get_by_label("Topic").fill("orders")
    go_on(page)
    shown(page, "Topic orders will be created")
    confirm(page)
    page.wait_for_url("**/topics/orders")
    assert asked(known(console, "orders"))

    page.get_by_role("button", name="Send a test message").click()
    page.get_by_label("Body (text)").fill("hello <script>alert(1)</script>")
    go_on(page)
    confirm(page)
    shown(page, "SEND_OK")

    page.get_by_role("button", name="Delete").click()
    confirm(page, "order")
    shown(page, "The name does not match.")
    assert asked(known(console, "orders"))
    confirm(page, "orders")
    page.wait_for_url("**/topics")
    assert not asked(known(console, "orders"))
    entries = [json.loads(line) for line in console.audit.splitlines()]
    assert [(each["action"], each["result"]) for each in entries if each["target"] == "orders"] == [
        ("topic.create", "ok"), ("topic.send", "ok"), ("topic.delete", "ok"),
    ]  # fmt: skip
    assert "hello" not in console.audit


def test_a_reset_shows_what_it_would_do_first(page: Page, console: RunningConsole) -> None:
    asked(made(console, "replayed", 10, "replayers"))
    page.goto("/topics/replayed")
    page.locator("section", has_text="Consumer groups").get_by_label("Refresh now").click()
    shown(page, "replayers")
    page.get_by_role("button", name="Reset consumer offsets").click()
    go_on(page)
    shown(page, "5 messages would be consumed again, 0 would be skipped.")
    go_on(page)
    confirm(page, "replayers")
    shown(page, "Queues at their new offsets: 1.")

    async def offset() -> int:
        async with Admin(console.namesrv) as admin:
            return next(each.consumer_offset for each in (await admin.progress("replayers")).queues)

    assert asked(offset()) == 0


def test_a_purge_says_how_much_would_go(page: Page, console: RunningConsole) -> None:
    asked(made(console, "purged", 7))
    page.goto("/topics/purged")
    page.get_by_role("button", name="Purge").click()
    go_on(page)
    shown(page, "7 messages of topic purged")
    confirm(page, "purged")
    shown(page, "7 messages were purged.")


def test_settings_are_changed(page: Page, console: RunningConsole) -> None:
    asked(made(console, "changed"))
    page.goto("/topics/changed")
    page.get_by_role("button", name="Change settings").click()
    page.get_by_label("Write queues").fill("0")
    page.get_by_label("Retention (hours").fill("1.5")
    go_on(page)
    shown(page, "A whole number from 1 to 65535")
    shown(page, "A whole number from 1 to 87600")
    assert page.get_by_label("Write queues").input_value() == "0"
    page.get_by_label("Write queues").fill("3")
    page.get_by_label("Retention (hours").fill("2")
    go_on(page)
    shown(page, "retention.ms=7200000")
    confirm(page)
    shown(page, "Done.")
    page.get_by_text("retention.ms=7200000").first.wait_for()


def test_a_topic_nobody_knows_says_so(page: Page) -> None:
    page.goto("/topics/%3Cimg%20src=x%20onerror=alert(1)%3E")
    shown(page, "no route to topic")
    assert page.locator("main img").count() == 0
