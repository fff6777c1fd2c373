"""The page of the console's own accounts in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import RunningConsole, confirm, go_on, log_in, shown

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WORD = "a password of my own"


def added(page: Page, name: str) -> str:
    """Add a reader on the administrator's page and return the new password."""
    page.goto("/accounts")
    page.get_by_role("button", name="Add an account").click()
    page.get_by_role("alertdialog").get_by_label("Name").fill(name)
    go_on(page)
    shown(page, f"{name} will be able to log in as reader.")
    confirm(page)
    shown(page, "is shown only once")
    password = page.locator("code.secret").inner_text()
    page.get_by_role("button", name="I have copied it").click()
    page.locator("code.secret").wait_for(state="detached")
    page.get_by_role("row", name=name).wait_for()
    return password


@pytest.mark.slow("a browser walks through several pages")
def test_accounts_are_added_changed_and_removed(page: Page, console: RunningConsole) -> None:
    password = added(page, "ann")
    row = page.get_by_role("row", name="ann")
    row.get_by_role("button", name="Change role").click()
    confirm(page)
    row.get_by_text("administrator").wait_for()
    row.get_by_role("button", name="Reset password").click()
    confirm(page)
    other = page.locator("code.secret").inner_text()
    assert other != password
    page.get_by_role("button", name="I have copied it").click()
    row.get_by_role("button", name="Remove").click()
    confirm(page, "ann")
    row.wait_for(state="detached")
    page.get_by_role("row", name="admin").get_by_role("button", name="Remove").click()
    shown(page, "This is your own account")
    assert password not in console.audit
    assert other not in console.audit
    entries = [json.loads(line) for line in console.audit.splitlines()]
    assert [(each["action"], each["result"]) for each in entries if each["target"] == "ann"] == [
        ("account.add", "ok"), ("account.role", "ok"), ("account.new_password", "ok"),
        ("account.remove", "ok"),
    ]  # fmt: skip


@pytest.mark.slow("a browser walks through several pages")
def test_a_reader_changes_his_own_password_alone(
    browser: Browser, page: Page, console: RunningConsole
) -> None:
    password = added(page, "ben")
    contexts = [browser.new_context(base_url=console.url) for _ in range(2)]
    own, second = (context.new_page() for context in contexts)
    for each in (own, second):
        each.goto("/login?next=/accounts")
        log_in(each, "ben", password)
        shown(each, "Only administrators manage other accounts.")
    assert own.get_by_role("row").count() == 0
    assert own.get_by_role("button", name="Add an account").count() == 0
    for present, told in (
        ("wrong", "The current password is wrong."),
        (password, "Your password has been changed."),
    ):
        own.get_by_role("button", name="Change my password").click()
        own.get_by_label("Current password").fill(present)
        own.get_by_label("New password", exact=True).fill(WORD)
        own.get_by_label("Repeat the new password").fill("x" if present == "wrong" else WORD)
        go_on(own)
        if present == "wrong":
            shown(own, "The passwords do not match.")
            own.get_by_label("Repeat the new password").fill(WORD)
            go_on(own)
        shown(own, told)
        if present == "wrong":
            own.get_by_role("button", name="Close").first.click()
    second.wait_for_url("**/login**")  # the other session has ended, and this one continues
    own.goto("/names")
    shown(own, "responding")
    second.goto("/login?next=/names")
    log_in(second, "ben", WORD)
    shown(second, "responding")
    for context in contexts:
        context.close()
    assert WORD not in console.audit
    results = [
        json.loads(line)["result"] for line in console.audit.splitlines() if "account.own_password" in line
    ]
    assert results == ["refused", "ok"]
