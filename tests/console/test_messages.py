"""Message pages in a real browser: each search, display as text, direct consumption, resending."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.console.conftest import RunningConsole, asked, confirm, go_on, shown
from tests.console.test_topics import made
from tests.kit.waiting import until

from cometmq import PushConsumer
from cometmq.admin import Admin
from cometmq.message import Message, MessageExt
from cometmq.remoting import loop_in_thread

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"


async def sent(console: RunningConsole, message: Message) -> MessageExt:
    async with Admin(console.namesrv) as admin:
        return await admin.message_by_id((await admin.send(message)).offset_msg_id)


def no_markup(page: Page) -> None:
    """Check that no text of a message has become an element of the page."""
    assert page.locator("main img, main script").count() == 0


def test_the_newest_of_a_topic_are_shown_and_the_link_shows_them_again(
    page: Page, console: RunningConsole
) -> None:
    asked(made(console, "looked-at", 60))
    page.goto("/messages")
    page.get_by_label("Topic", exact=True).fill("looked-at")
    page.get_by_role("button", name="Find", exact=True).click()
    shown(page, "Newest 60 of about 60 messages.")
    shown(page, "Page 1 of 3")
    page.get_by_role("button", name="Next page").click()
    shown(page, "Page 2 of 3")
    page.wait_for_function("location.search.includes('page=2')")
    page.goto(page.url)
    shown(page, "Page 2 of 3")
    page.goto("/messages?topic=no-such-topic")
    shown(page, "no route to topic")


def test_a_hostile_message_is_found_by_key_and_id_and_shown_as_text(
    page: Page, console: RunningConsole
) -> None:
    key = "<img/src=x/onerror=alert(3)>"
    properties = {HOSTILE: HOSTILE, ":onclick": "alert(4)", "__proto__": "x"}
    asked(made(console, "hostile"))
    body = json.dumps({"said": HOSTILE}).encode()
    message = asked(sent(console, Message("hostile", body, tags="<b>tag", keys=[key], properties=properties)))

    page.goto(f"/messages?by=key&topic=hostile&key={key}")
    shown(page, message.msg_id)
    no_markup(page)
    page.goto(f"/messages?by=id&id={message.msg_id}")
    page.get_by_role("link", name=message.msg_id).click()
    shown(page, ":onclick")
    shown(page, HOSTILE)
    body_area = page.locator("pre.body")
    assert body_area.inner_text() == body.decode()
    page.get_by_role("button", name="JSON", exact=True).click()
    page.wait_for_function("document.querySelector('pre.body').textContent.includes('\\n  ')")
    page.get_by_role("button", name="Hex", exact=True).click()
    page.wait_for_function("document.querySelector('pre.body').textContent.startsWith('000000  7b 22')")
    shown(page, "No group consumes this topic.")
    no_markup(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.path().read_bytes() == body


def test_a_message_is_processed_once_more_and_sent_again(page: Page, console: RunningConsole) -> None:
    asked(made(console, "repeated"))
    taken: list[MessageExt] = []
    fail = False

    async def take(messages: list[MessageExt]) -> None:
        taken.extend(messages)
        if fail:
            raise ValueError("not today")

    async def count(least: int) -> None:
        await until(lambda: len(taken) >= least)

    with loop_in_thread("consumer") as run:
        consumer = PushConsumer("repeaters", take, "repeated", namesrv=console.namesrv)
        run(consumer.start())
        try:
            message = run(sent(console, Message("repeated", b"once", keys=["k"])))
            run(count(1))
            page.goto(f"/messages/{message.offset_msg_id}")
            page.get_by_role("button", name="Deliver to a member now: repeaters").click()
            go_on(page)
            confirm(page)
            shown(page, "The listener processed the message in")
            run(count(2))
            assert taken[1].offset_msg_id == message.offset_msg_id

            page.get_by_role("button", name="Resend as a new message").click()
            confirm(page)
            shown(page, "SEND_OK")
            run(count(3))
            assert (taken[2].body, taken[2].keys) == (b"once", ("k",))
            assert taken[2].offset_msg_id != message.offset_msg_id

            fail = True
            page.get_by_role("button", name="Deliver to a member now: repeaters").click()
            go_on(page)
            confirm(page)
            shown(page, "The listener did not process the message")
        finally:
            run(consumer.stop())
    entries = [json.loads(line) for line in console.audit.splitlines()]
    assert [(each["action"], each["target"], each["result"][:12]) for each in entries if
            each["details"].get("message") == message.offset_msg_id] == [
        ("message.direct", "repeaters", "ok"), ("message.again", "repeated", "ok"),
        ("message.direct", "repeaters", "The listener"),
    ]  # fmt: skip
