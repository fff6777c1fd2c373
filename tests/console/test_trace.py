"""The trace page in a real browser, with traces that our clients write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.console.conftest import RunningConsole, asked, shown
from tests.console.test_messages import HOSTILE, no_markup
from tests.console.test_topics import made

from cometmq import Producer, PushConsumer
from cometmq.admin import Admin
from cometmq.client import ClientOptions, TraceOptions
from cometmq.message import Message, MessageExt

if TYPE_CHECKING:
    from playwright.sync_api import Page


async def traced(console: RunningConsole, topic: str, group: str, tag: str = HOSTILE) -> str:
    """Send and consume a message with traces; return its id once both traces are stored."""
    taken = asyncio.Event()
    options = ClientOptions(trace=TraceOptions())

    async def take(_messages: list[MessageExt]) -> None:
        taken.set()

    async with (
        PushConsumer(group, take, topic, namesrv=console.namesrv, client_options=options),
        Producer("tracing", namesrv=console.namesrv, client_options=options) as producer,
    ):
        sent = await producer.send(Message(topic, b"x", keys=["traced-key"], tags=tag))
        await asyncio.wait_for(taken.wait(), 20)
    async with Admin(console.namesrv) as admin, asyncio.timeout(60):
        while len(await admin.traces(sent.msg_id)) < 3:
            await asyncio.sleep(0.05)
    return sent.msg_id


def test_by_key_to_the_line_of_time(page: Page, console: RunningConsole) -> None:
    asked(made(console, "traced"))
    msg_id = asked(traced(console, "traced", "trace-readers"))
    page.goto("/trace")
    page.get_by_label("Topic", exact=True).fill("traced")
    page.get_by_label("Key", exact=True).fill("traced-key")
    page.get_by_role("button", name="Find", exact=True).click()
    page.get_by_role("link", name="Trace", exact=True).last.click()
    page.wait_for_url(f"**/trace?id={msg_id}")
    shown(page, "Sent by  tracing")
    shown(page, "Consumed by  trace-readers")
    assert page.locator(".timeline li").count() == 2
    assert page.locator(".timeline .bar-ok").count() == 2
    shown(page, HOSTILE)
    no_markup(page)
    page.goto("/trace?id=<img/src=x/onerror=alert(1)>")
    shown(page, "There is no trace of this message.")
    page.goto(f"/trace?id={msg_id}&trace=no-such-topic")
    shown(page, "no route to topic")
    no_markup(page)
