"""Several clusters in one console, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import READY, WAIT_MS, as_it_says, confirm, console_command, go_on, log_in, shown
from tests.console.test_app import add_user

from cometmq.testing import ServerProcess, StandaloneProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def add(page: Page, name: str, namesrv: str) -> None:
    page.goto("/names")
    page.get_by_role("button", name="Add a cluster").click()
    page.get_by_role("textbox", name="Cluster").last.fill(name)
    page.get_by_role("textbox", name="Name servers").last.fill(namesrv)
    go_on(page)


@pytest.mark.slow("two clusters, and a console that starts twice")
def test_an_administrator_adds_a_cluster_that_outlives_the_console(
    browser: Browser, cluster: StandaloneProcess, tmp_path: Path
) -> None:
    data = tmp_path / "console"
    command = console_command(cluster.namesrv, data)
    with StandaloneProcess(tmp_path / "second") as second:
        with ServerProcess(command, READY) as process:
            console = as_it_says(process, data, cluster.namesrv)
            context = browser.new_context(base_url=console.url, locale="en-US")
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            page.goto("/login")
            log_in(page, "admin", console.password)
            shown(page, f"Name servers: {cluster.namesrv}")
            add(page, "second", second.namesrv)
            confirm(page)
            page.get_by_label("Cluster shown").click()
            page.get_by_role("option", name="second").click()
            shown(page, f"Name servers: {second.namesrv}")
            page.goto("/names")
            row = page.get_by_role("row").filter(has_text="second")
            row.get_by_role("button", name="Make default").click()
            shown(page, "Browsers without a chosen cluster will show second.")
            confirm(page)
            row.get_by_text("yes", exact=True).wait_for(timeout=WAIT_MS)
            password = add_user(console, "dora", "admin")
            context.close()

            page = (context := browser.new_context(base_url=console.url, locale="en-US")).new_page()
            page.set_default_timeout(WAIT_MS)
            page.goto("/login")
            log_in(page, "dora", password)
            shown(page, f"Name servers: {second.namesrv}")
            add(page, "third", "127.0.0.1:1")
            add_user(console, "dora", "reader")
            confirm(page)
            page.wait_for_url("**/login**")
            context.close()
        entries = [json.loads(line) for line in console.audit.splitlines()]
        done = [(each["user"], each["action"], each["target"], each["result"]) for each in entries]
        assert ("admin", "cluster.add", "second", "ok") in done
        assert ("admin", "cluster.standard", "second", "ok") in done
        assert done[-1] == ("dora", "cluster.add", "third", "refused")

        with ServerProcess(command, READY) as process:
            url = process.wait_line(READY, 60).rpartition(" ")[2].rstrip("/")
            page = (context := browser.new_context(base_url=url, locale="en-US")).new_page()
            page.set_default_timeout(WAIT_MS)
            page.goto("/login?next=/names")
            log_in(page, "admin", console.password)
            shown(page, f"Name servers: {second.namesrv}")
            assert page.get_by_text("third").count() == 0
            context.close()
