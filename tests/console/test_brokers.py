"""Brokers, producers and the overview in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.console.conftest import RunningConsole, asked, confirm, go_on, shown

from cometmq.admin import Admin
from cometmq.client import SyncProducer
from cometmq.message import Message
from cometmq.testing import StandaloneProcess

if TYPE_CHECKING:
    from playwright.sync_api import Page


async def setting(console: RunningConsole, addr: str, key: str) -> str:
    async with Admin(console.namesrv) as admin:
        return (await admin.broker_config(addr))[key]


def test_a_broker_shows_itself_and_takes_a_setting(
    page: Page, console: RunningConsole, cluster: StandaloneProcess
) -> None:
    addr = cluster.brokers["broker-a"]
    page.goto("/brokers")
    shown(page, "answers")
    page.get_by_role("link", name=addr).click()
    shown(page, "ASYNC_FLUSH")
    page.get_by_role("button", name="Change a setting").click()
    page.get_by_role("alertdialog").get_by_label("Setting").fill("fileReservedTime")
    page.get_by_role("alertdialog").get_by_label("Value").fill("48")
    go_on(page)
    shown(page, "fileReservedTime=48")
    confirm(page, addr)
    shown(page, "Done.")
    assert asked(setting(console, addr, "fileReservedTime")) == "48"


def test_a_setting_with_a_secret_is_hidden_from_page_and_log(
    page: Page, console: RunningConsole, cluster: StandaloneProcess
) -> None:
    page.goto(f"/brokers/{cluster.brokers['broker-a']}")
    page.get_by_role("button", name="Change a setting").click()
    page.get_by_role("alertdialog").get_by_label("Setting").fill("someSecretKey")
    page.get_by_role("alertdialog").get_by_label("Value").fill("hunter2")
    go_on(page)
    shown(page, "someSecretKey=••••••")
    confirm(page, cluster.brokers["broker-a"])
    shown(page, "The broker does not know: someSecretKey")
    assert "hunter2" not in console.audit


def test_files_are_cleaned_and_writing_is_taken_and_given(
    page: Page, console: RunningConsole, cluster: StandaloneProcess
) -> None:
    addr = cluster.brokers["broker-a"]
    page.goto(f"/brokers/{addr}")
    page.get_by_role("button", name="Delete expired queue files").click()
    confirm(page, addr)
    shown(page, "Done.")
    page.get_by_role("button", name="Take writing away").click()
    confirm(page, "broker-a")
    shown(page, "topics are changed.")
    page.get_by_role("button", name="Give writing back").click()
    confirm(page)
    page.locator(".q-notification__badge").wait_for()  # the same message again
    actions = [json.loads(line)["action"] for line in console.audit.splitlines()]
    assert actions[-3:] == ["broker.clean_queues", "broker.wipe", "broker.allow"]


def test_an_address_that_is_no_brokers_is_not_asked(page: Page) -> None:
    page.goto("/brokers/10.1.2.3:10911")
    shown(page, "no broker named 10.1.2.3:10911")


def test_producers_are_listed(page: Page, console: RunningConsole) -> None:
    with SyncProducer("shown-producers", namesrv=console.namesrv) as producer:
        producer.send(Message(topic="TBW102", body=b"x"))
        page.goto("/producers?q=shown")
        page.get_by_label("Ask again now").click()
        shown(page, "shown-producers")
        shown(page, "broker-a")


def test_the_overview_shows_the_cluster(page: Page) -> None:
    page.goto("/")
    shown(page, "1 of 1 answer")
    page.locator("figure svg").first.wait_for()
