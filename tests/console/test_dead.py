"""The dead-letter page in a real browser: selection, display as text, export, resending, readers' rights."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.console.conftest import WAIT_MS, RunningConsole, asked, confirm, go_on, log_in, shown
from tests.console.test_app import add_user
from tests.console.test_messages import HOSTILE, no_markup
from tests.console.test_topics import made

from cometmq.admin import Admin, Selection
from cometmq.admin.dead_letters import view
from cometmq.console.messages.dead_group import (
    CSV_COLUMNS,
    ExportInProgress,
    csv_file,
    export,
    harmless,
    json_lines,
    select,
)
from cometmq.console.widgets.actions import until
from cometmq.message import Message, MessageExt
from cometmq.protocol.ids import decode_offset_id

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


async def died(console: RunningConsole, group: str, topic: str, count: int, said: str = HOSTILE) -> None:
    """Make dead letters of messages whose property `n` is their number. `said` is part of all their texts."""
    async with Admin(console.namesrv) as admin:
        for number in range(count):
            message = Message(
                topic, f"=body {number} {said}".encode(), tags=said, keys=[f"key{number}"],
                properties={"n": str(number), said: said},
            )  # fmt: skip
            place = decode_offset_id((await admin.send(message)).offset_msg_id)
            stored = await admin.client.brokers.view_message(place.host, place.physical_offset)
            await admin.client.brokers.send_message_back(place.host, stored, group, delay_level=-1)
        async with asyncio.timeout(60):
            while f"%DLQ%{group}" not in await admin.topics():
                await asyncio.sleep(0.01)


async def retried(console: RunningConsole, group: str) -> int:
    """Return the number of messages in a group's retry topic."""
    async with Admin(console.namesrv) as admin:
        if f"%RETRY%{group}" not in await admin.topics():
            return 0
        return sum(each.max_offset for each in await admin.topic_status(f"%RETRY%{group}"))


async def test_results_end_when_somebody_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop also ends results whose next item never arrives."""
    monkeypatch.setattr("cometmq.console.widgets.actions.STOP_TIMEOUT_S", 0.05)
    stop, ended = asyncio.Event(), []

    async def results():  # type: ignore[no-untyped-def]
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(60):
        assert [each async for each in until(results(), stop)] == [1]
    assert ended


async def test_a_selection_ends_by_count_and_time() -> None:
    class Endless:
        async def dead_letters(self, _wanted: Selection):  # type: ignore[no-untyped-def]
            while True:
                await asyncio.sleep(0)
                if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    yield message_of(b"abc")

    found = await select(Endless(), Selection(group="g"), 5, keep=2)  # type: ignore[arg-type]
    assert ([each.body for each in found.messages], found.more) == ([b"ab"] * 5, True)

    class Silent(Endless):
        async def dead_letters(self, _wanted: Selection):  # type: ignore[no-untyped-def]
            await asyncio.sleep(60)
            yield message_of(b"")

    late = await select(Silent(), Selection(group="g"), 5, timeout_s=0.01)  # type: ignore[arg-type]
    assert (late.messages, late.more) == ([], True)


def message_of(body: bytes):  # type: ignore[no-untyped-def]
    from cometmq.message import MessageExt

    return MessageExt("%DLQ%g", body)


async def test_of_a_session_one_file_is_made_at_a_time() -> None:
    """Each file needs at least 16 MiB of memory."""
    session = SimpleNamespace(exporting=True)
    view: Any = SimpleNamespace(session=session, t=lambda key: key)

    with pytest.raises(ExportInProgress):
        await export(view, Selection(group="g"), "csv")
    assert session.exporting, "the other one goes on"


@pytest.mark.slow("a long walk through the pages")
def test_letters_are_chosen_exported_and_sent_again(page: Page, console: RunningConsole) -> None:
    asked(made(console, "dying"))
    asked(died(console, "mortals", "dying", 20))  # unless it is stopped, the last run takes 18 s
    page.goto("/dead")
    page.get_by_label("Refresh now").click()  # the shown counts may be cached
    page.get_by_role("link", name="mortals", exact=True).click()
    shown(page, "20 of 20")
    no_markup(page)
    page.get_by_label("SQL expression on properties").fill("n >= 18")
    page.get_by_role("button", name="Find", exact=True).click()
    shown(page, "2 of 2")
    page.wait_for_function("location.search.includes('sql=')")

    with page.expect_download() as download:
        page.get_by_role("button", name="Export as CSV").click()
    rows = list(csv.reader(io.StringIO(download.value.path().read_text(), newline="")))
    assert [row[13][:9] for row in rows] == ["body", "'=body 18", "'=body 19"]

    page.get_by_role("button", name="Resend selected").click()
    shown(page, "Select dead letters in the list first.")
    page.get_by_role("checkbox", name="Select", exact=False).nth(1).click()
    page.get_by_role("button", name="Resend selected").click()
    go_on(page)
    shown(page, "Dead letters of group mortals will be resent to this group: 1.")
    confirm(page)
    shown(page, "1 resent, 0 skipped, 0 failed")
    assert asked(retried(console, "mortals")) == 1

    page.get_by_role("button", name="Resend all results").click()
    page.get_by_label("Messages per second (max)").fill("100")
    go_on(page)
    confirm(page)
    shown(page, "1 resent, 1 skipped, 0 failed")
    assert asked(retried(console, "mortals")) == 2

    page.goto("/dead/mortals")
    page.get_by_role("button", name="Resend all results").click()
    page.get_by_label("Messages per second (max)").fill("1")
    go_on(page)
    confirm(page)
    shown(page, re.compile(r"[1-9] resent, "))
    page.get_by_role("button", name="Stop").click()
    shown(page, "Another run resends the remaining dead letters.")
    stopped = asked(retried(console, "mortals"))
    assert stopped < 20
    entries = [json.loads(line) for line in console.audit.splitlines()]
    mine = [each for each in entries if each["target"] == "mortals"]
    assert [each["action"] for each in mine] == ["export", *["dead.resend"] * 3]
    assert [each["result"][:7] for each in mine] == ["ok", "ok", "ok", "Stopped"]
    assert mine[-2]["details"]["RESENT"] == mine[-2]["details"]["SKIPPED"] == "1"
    assert mine[-1]["details"]["RESENT"] == str(stopped - 2)

    page.goto("/dead/mortals?sql=n%20%3E%3E%203")
    shown(page, "Currently unavailable")
    page.goto("/dead/%3Cimg%20src=x%20onerror=alert(1)%3E")
    shown(page, "no consumer group named")
    no_markup(page)


def test_what_is_chosen_stays_so_on_other_pages_of_the_list(page: Page, console: RunningConsole) -> None:
    asked(made(console, "dying3"))
    asked(died(console, "many", "dying3", 27, "plain"))
    page.goto("/dead/many?q=body")
    shown(page, "27 of 27")
    boxes = page.get_by_role("checkbox", name="Select", exact=False)
    boxes.nth(1).click()
    shown(page, "1 selected on all pages")
    page.get_by_label("Next page").click()
    shown(page, "Page 2 of 2")
    boxes.nth(0).click()  # selects the whole page
    shown(page, "3 selected on all pages")
    page.get_by_label("Previous page").click()
    shown(page, "Page 1 of 2")
    assert [boxes.nth(number).get_attribute("aria-checked") for number in (1, 2)] == ["true", "false"]
    page.get_by_role("button", name="Resend selected").click()
    go_on(page)
    shown(page, "Dead letters of group many will be resent to this group: 3.")
    page.get_by_role("alertdialog").last.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Clear selection").click()
    page.get_by_text("selected on all pages").wait_for(state="hidden")
    page.get_by_role("button", name="Resend selected").click()
    shown(page, "Select dead letters in the list first.")


def test_readers_only_look_and_who_becomes_one_sends_nothing(
    browser: Browser, console: RunningConsole
) -> None:
    asked(made(console, "dying2"))
    asked(died(console, "watched", "dying2", 1))
    before = asked(retried(console, "watched"))
    context = browser.new_context(base_url=console.url)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto("/login?next=/dead/watched")
    log_in(page, "dora", add_user(console, "dora", "admin"))
    page.get_by_role("button", name="Resend all results").click()
    go_on(page)
    password = add_user(console, "dora", "reader")
    confirm(page)
    page.wait_for_url("**/login**")
    entry = json.loads(console.audit.splitlines()[-1])
    assert (entry["user"], entry["action"], entry["result"]) == ("dora", "dead.resend", "refused")
    assert asked(retried(console, "watched")) == before

    page.goto("/login?next=/dead/watched")
    log_in(page, "dora", password)
    shown(page, "1 of 1")
    assert page.get_by_role("button", name="Export as CSV").count() == 1
    assert page.get_by_role("button", name="again", exact=False).filter(has_text="Send").count() == 0
    assert page.get_by_role("checkbox").count() == 0
    page.get_by_role("main").get_by_role("link").last.click()
    shown(page, "Properties")
    shown(page, "No group consumes this topic.")
    for name in ("Resend as a new message", "Deliver to a member now"):
        assert page.get_by_role("button", name=name).count() == 0
    context.close()


# -- Dead letters as files: complete, and harmless to a spreadsheet


def letter(body: bytes, **properties: str) -> MessageExt:
    return MessageExt("%DLQ%g", body, properties=properties, born_host="10.0.0.1:1", store_host="10.0.0.1:2")


def test_json_lines_hold_everything() -> None:
    lines = json_lines([view(letter(b"a\nb", k="v")), view(letter(b"\xff"))]).decode().splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["body"] for each in found] == ["a\nb", "/w=="]
    assert found[0]["properties"] == {"k": "v"}


def test_rows_stay_rows_whatever_is_in_them() -> None:
    hostile = letter(b'=cmd|"/c calc"!A1,\r\n+1', KEYS="@SUM(1)", TAGS="-2", RETRY_TOPIC="a\nb", x='","')
    rows = list(
        csv.reader(io.StringIO(csv_file([view(hostile), view(letter(b"plain"))]).decode(), newline=""))
    )
    assert rows[0] == list(CSV_COLUMNS)
    assert [len(row) for row in rows] == [len(CSV_COLUMNS)] * 3
    cells = dict(zip(CSV_COLUMNS, rows[1], strict=True))
    assert cells["body"] == '\'=cmd|"/c calc"!A1,\r\n+1'
    assert (cells["keys"], cells["tags"], cells["originalTopic"]) == ("'@SUM(1)", "'-2", "a\nb")
    assert json.loads(cells["properties"])["x"] == '","'
    assert dict(zip(CSV_COLUMNS, rows[2], strict=True))["body"] == "plain"


@pytest.mark.parametrize(
    "cell", ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", " =1", "\ufeff=1", "\uff1d1"]
)
def test_what_a_spreadsheet_would_calculate_is_led_by_an_apostrophe(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"


def test_other_cells_stay_as_they_are() -> None:
    assert [harmless(each) for each in ("a=1", "", 5, None)] == ["a=1", "", 5, ""]
    assert harmless("a\0b") == "a\N{REPLACEMENT CHARACTER}b"
