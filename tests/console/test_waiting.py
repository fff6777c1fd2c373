"""The pages of timer messages and of open transactions, in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import RunningConsole, asked, confirm, shown

from cometmq.client import Producer, TransactionProducer
from cometmq.console.messages.timers import places_of
from cometmq.message import Message, MessageExt, TransactionState

if TYPE_CHECKING:
    from playwright.sync_api import Page


class Undecided:
    """A transaction listener that returns UNKNOWN or a set result."""

    def __init__(self, state: TransactionState = TransactionState.UNKNOWN) -> None:
        self.state = state

    def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        del message, argument
        return self.state

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        del message
        return self.state


async def timed(console: RunningConsole, topic: str, count: int) -> None:
    """Send messages due from one hour on, one per second, and one with a delay level."""
    async with Producer("timed", namesrv=console.namesrv) as producer:
        for number in range(count):
            later_ms = 3_600_000 + number * 1000
            await producer.send(
                Message(topic, b"<b>%d</b>" % number, keys=[f"key-{number}"], delay_ms=later_ms)
            )
        await producer.send(Message(topic, b"level", delay_level=18))


async def begun(console: RunningConsole, topic: str) -> None:
    """Begin two transactions and commit one of them."""
    for state in (TransactionState.COMMIT, TransactionState.UNKNOWN):
        listener = Undecided(state)
        async with TransactionProducer("bookers", listener, namesrv=console.namesrv) as producer:
            await producer.send_in_transaction(Message(topic, b"half", keys=[state.name]))


@pytest.mark.slow("a browser walks through several pages")
def test_timers_are_found_and_cancelled(page: Page, console: RunningConsole) -> None:
    asked(timed(console, "alarms", 30))
    page.goto("/timers")
    page.get_by_role("textbox", name="Topic").fill("alarms")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/timers?topic=alarms")
    shown(page, "31 of 31")
    shown(page, "Page 1 of 2")
    page.get_by_label("Key or id").fill("key-7")
    page.get_by_label("Key or id").press("Enter")
    page.wait_for_url("**/timers?topic=alarms&key=key-7")
    shown(page, "All waiting messages with this key or id.")
    assert page.get_by_role("row").count() == 2
    page.get_by_role("button", name="Cancel delivery").click()
    shown(page, "will not be delivered")
    confirm(page)
    shown(page, "Cancelled")
    page.goto("/timers?topic=alarms")
    shown(page, "30 of 30")
    entry = json.loads(console.audit.splitlines()[-1])
    assert (entry["action"], entry["result"], entry["details"]["topic"]) == ("timer.cancel", "ok", "alarms")


def test_one_at_a_delay_level_cannot_be_cancelled(page: Page, console: RunningConsole) -> None:
    asked(timed(console, "levels", 0))
    page.goto("/timers?topic=levels")
    page.get_by_role("button", name="Cancel delivery").click()
    shown(page, "cannot be cancelled")


def test_a_place_of_a_link_that_is_none_is_the_beginning(page: Page) -> None:
    assert places_of('{"broker-a":[5,7]}') == {"broker-a": (5, 7)}
    for said in ("", "x", "[1]", '{"a":[1]}', '{"a":["x",1]}', '{"a":[1,2]}' + " " * 5000):
        assert places_of(said) == {}
    page.goto("/timers?after=%7B%22broker-a%22%3A%5B9999999999999%2C1%5D%7D")
    shown(page, "From the beginning")
    page.get_by_role("link", name="From the beginning").click()
    page.wait_for_function("location.search == ''")


def test_a_transaction_that_nobody_has_ended_is_shown_with_its_group(
    page: Page, console: RunningConsole
) -> None:
    asked(begun(console, "seats"))  # other tests of this cluster begin transactions, too
    page.goto("/transactions")
    shown(page, "seats")
    row = page.get_by_role("row").filter(has_text="seats")
    assert row.get_by_text("bookers").count() == 1
    assert row.get_by_text("UNKNOWN").count() == 1
    assert row.get_by_text("COMMIT", exact=True).count() == 0
    shown(page, "There are no abandoned transactions.")
