"""The pages of accounts of brokers with aclEnable and of expired transactions, in a real browser.

The cluster requires accounts, and the console has an account.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.broker.access.test_files import write
from tests.broker.access.test_guard import ACL
from tests.console.conftest import (
    READY,
    RunningConsole,
    as_it_says,
    asked,
    confirm,
    console_command,
    go_on,
    log_in,
    shown,
)
from tests.console.test_waiting import Undecided

from cometmq.client import ClientOptions, TransactionProducer
from cometmq.message import Message
from cometmq.standalone import Standalone
from cometmq.testing import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ADMIN = {"COMETMQ_ACCESS_KEY": "adminer", "COMETMQ_SECRET_KEY": "secret-of-adminer"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Run a console for a cluster with accounts whose broker checks each transaction once, immediately."""
    home = tmp_path_factory.mktemp("guarded")
    write(home / "conf" / "plain_acl.yml", ACL)
    settings = {
        "aclEnable": "true", "rocketmqHome": str(home), "transactionTimeOut": "50",
        "transactionCheckInterval": "100", "transactionCheckMax": "1",
    }  # fmt: skip
    with Standalone(home / "data", 0, 0, settings=settings).run_in_thread() as cluster:
        command = console_command(cluster.namesrv_addr, home / "console")
        with ServerProcess(command, READY, ADMIN) as process:
            yield as_it_says(process, home / "console", cluster.namesrv_addr)
            assert "secret-of" not in process.output


@pytest.fixture
def guarded_page(browser: Browser, guarded: RunningConsole) -> Iterator[Page]:
    context = browser.new_context(base_url=guarded.url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto("/login?next=/access")
    log_in(page, "admin", guarded.password)
    yield page
    context.close()


@pytest.mark.slow("a long walk through the pages")
def test_accounts_are_made_explained_changed_and_deleted(guarded_page: Page, guarded: RunningConsole) -> None:
    page = guarded_page
    shown(page, "Orders=PUB|SUB, In=SUB")
    page.get_by_role("button", name="Add an account").click()
    box = page.get_by_role("alertdialog")
    box.get_by_label("Account").fill("short")
    go_on(page)
    shown(page, "At least 7 characters")
    box.get_by_label("Account").fill("somebody")
    box.get_by_label("Topics, NAME").fill("Bills=SUB\nOrders=PUB")
    go_on(page)
    confirm(page)
    shown(page, "is shown only once")
    secret = page.locator("code.secret").inner_text()
    page.get_by_role("button", name="I have copied it").click()
    shown(page, "Bills=SUB, Orders=PUB")

    explain = page.locator("section", has_text="Check a permission")
    explain.get_by_label("Account").fill("somebody")
    explain.get_by_label("Resource").fill("Bills")
    explain.get_by_role("button", name="Check").click()
    shown(page, "Denied: No default permission for topic:Bills")
    page.wait_for_function("location.search.includes('resource=Bills')")
    explain.get_by_label("Resource").fill("Orders")
    explain.get_by_role("button", name="Check").click()
    shown(page, "Allowed: topicPerms: Orders=PUB")

    row = page.get_by_role("row", name="somebody")
    row.get_by_role("button", name="Change").click()
    box.get_by_label("Groups, NAME").fill("G=WRONG")
    go_on(page)
    confirm(page)
    shown(page, "is none of DENY, PUB, SUB")
    row.get_by_role("button", name="Delete").click()
    go_on(page)
    confirm(page, "somebody")
    row.wait_for(state="detached")
    assert secret not in guarded.audit
    assert secret not in page.content()
    for secrets in ("secret-of-adminer", "secret-of-program"):
        assert secrets not in page.content() + guarded.audit
    assert [line.count("acl.put") for line in guarded.audit.splitlines()].count(1) == 2


def test_deleting_the_consoles_own_account_is_warned_of(guarded_page: Page) -> None:
    row = guarded_page.get_by_role("row", name="adminer")
    row.get_by_role("button", name="Delete").click()
    go_on(guarded_page)
    shown(guarded_page, "The console itself signs with this account")


def test_a_white_list_is_set(guarded_page: Page) -> None:
    guarded_page.get_by_role("button", name="Set the white list").click()
    guarded_page.get_by_label("Addresses, one per line").fill("10.9.8.*\n10.1.0.1-7")
    go_on(guarded_page)
    confirm(guarded_page, "DefaultCluster")
    shown(guarded_page, "10.9.8.*, 10.1.0.1-7")


def test_who_gave_up_is_asked_again(guarded_page: Page, guarded: RunningConsole) -> None:
    async def begun() -> None:
        options = ClientOptions(access_key="adminer", secret_key="secret-of-adminer")
        async with TransactionProducer(
            "bookers", Undecided(), namesrv=guarded.namesrv, client_options=options
        ) as producer:
            await producer.send_in_transaction(Message("Orders", b"half"))

    asked(begun())
    guarded_page.goto("/transactions")
    given_up = guarded_page.locator("section", has_text="neither delivered nor lost")
    again = given_up.get_by_role("button", name="Check again:")
    for _ in range(60):
        if again.count():
            break
        given_up.get_by_label("Refresh now").click()
        guarded_page.wait_for_timeout(300)
    again.first.click()
    confirm(guarded_page)
    shown(guarded_page, "Done.")


def test_without_accounts_the_page_says_so(page: Page) -> None:
    page.goto("/access")
    shown(page, "this broker has no access control (aclEnable=false)")
    shown(page, "No broker lists an account.")
