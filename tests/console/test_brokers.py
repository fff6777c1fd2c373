"""The pages of brokers and producers, and the overview, in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import (
    READY,
    WAIT_MS,
    RunningConsole,
    as_it_says,
    asked,
    confirm,
    console_command,
    go_on,
    log_in,
    shown,
)
from tests.interop.comet import CometBroker, CometNamesrv

from cometmq.admin import Admin
from cometmq.client import SyncProducer
from cometmq.message import Message
from cometmq.testing import ServerProcess, StandaloneProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


async def setting(console: RunningConsole, addr: str, key: str) -> str:
    async with Admin(console.namesrv) as admin:
        return (await admin.broker_config(addr))[key]


def test_a_broker_shows_itself_and_takes_a_setting(
    page: Page, console: RunningConsole, cluster: StandaloneProcess
) -> None:
    addr = cluster.brokers["broker-a"]
    page.goto("/brokers")
    shown(page, "responding")
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
    shown(page, "Unknown to the broker: someSecretKey")
    assert "hunter2" not in console.audit


def test_files_are_cleaned_and_writing_is_taken_and_given(
    page: Page, console: RunningConsole, cluster: StandaloneProcess
) -> None:
    addr = cluster.brokers["broker-a"]
    page.goto(f"/brokers/{addr}")
    page.get_by_role("button", name="Delete expired queue files").click()
    confirm(page, addr)
    shown(page, "Done.")
    page.get_by_role("button", name="Disable writes").click()
    confirm(page, "broker-a")
    shown(page, "Topics changed:")
    page.get_by_role("button", name="Enable writes").click()
    confirm(page)
    page.locator(".q-notification__badge").wait_for()  # the badge counts a repeated message
    actions = [json.loads(line)["action"] for line in console.audit.splitlines()]
    assert actions[-3:] == ["broker.clean_queues", "broker.wipe", "broker.allow"]


def test_an_address_that_is_no_brokers_is_not_asked(page: Page) -> None:
    page.goto("/brokers/10.1.2.3:10911")
    shown(page, "no broker named 10.1.2.3:10911")


def test_producers_are_listed(page: Page, console: RunningConsole) -> None:
    with SyncProducer("shown-producers", namesrv=console.namesrv) as producer:
        producer.send(Message(topic="TBW102", body=b"x"))
        page.goto("/producers?q=shown")
        page.get_by_label("Refresh now").click()
        shown(page, "shown-producers")
        shown(page, "broker-a")


def test_the_overview_shows_the_cluster(page: Page) -> None:
    page.goto("/")
    shown(page, "1 of 1 responding")
    page.locator("figure svg").first.wait_for()


@pytest.mark.slow("a master, a slave and a browser")
def test_how_far_a_slave_is_behind_its_master_is_shown(browser: Browser, tmp_path: Path) -> None:
    with (
        CometNamesrv(tmp_path / "names") as server,
        CometBroker(tmp_path / "master", namesrv := f"127.0.0.1:{server.port}") as master,
        CometBroker(tmp_path / "slave", namesrv, settings={"brokerId": "1", "brokerRole": "SLAVE"}) as slave,
        ServerProcess(console_command(namesrv, tmp_path / "console"), READY) as process,
    ):
        console = as_it_says(process, tmp_path / "console", namesrv)
        context = browser.new_context(base_url=console.url)
        page = context.new_page()
        page.goto("/login?next=/brokers")
        log_in(page, "admin", console.password)
        behind = (
            page.get_by_role("row").filter(has_text="SLAVE").get_by_role("cell", name=re.compile(r"^0 B$"))
        )
        behind.wait_for(timeout=WAIT_MS)
        page.goto(f"/brokers/127.0.0.1:{master.port}")
        shown(page, "Slaves")
        os.kill(slave.pid, signal.SIGSTOP)
        with SyncProducer("slow-slave", namesrv=namesrv) as producer:
            for _ in range(64):
                producer.send(Message("orders", os.urandom(1 << 16)))
        page.get_by_role("cell", name=re.compile(r"^\d\.\d MiB$")).wait_for(timeout=WAIT_MS)
        os.kill(slave.pid, signal.SIGCONT)
        context.close()


# -- The page of name servers, in a real browser


def test_name_servers_and_their_settings(page: Page, console: RunningConsole) -> None:
    page.goto("/names")
    shown(page, "responding")
    page.get_by_role("link", name=console.namesrv, exact=True).click()
    shown(page, "listenPort")
    page.get_by_label("Search").fill("listenport")
    shown(page, "1 of ")
    page.wait_for_function("location.search.includes('q=listenport')")
    page.reload()
    shown(page, "1 of ")
    assert page.get_by_role("row").count() == 2


def test_an_address_in_a_link_is_not_asked_unless_it_is_a_name_server(page: Page) -> None:
    page.goto("/names/10.1.2.3:9876")
    shown(page, "no name server named 10.1.2.3:9876")
