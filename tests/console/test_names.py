"""The page of name servers, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.console.conftest import RunningConsole, shown

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
