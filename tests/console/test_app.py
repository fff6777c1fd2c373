"""The whole console in a real browser: logins, roles, sessions, languages, keyboard, hostile texts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import (
    READY,
    WAIT_MS,
    RunningConsole,
    as_it_says,
    asked,
    console_command,
    log_in,
    shown,
)
from tests.console.test_topics import known, made
from tests.ports import HOST, closed_port

from cometmq.cli.standalone import announcement
from cometmq.client import SyncProducer
from cometmq.client.cluster.options import ClientOptions
from cometmq.console.app import Console, ConsoleOptions
from cometmq.console.base.cluster_feeds import BROKERS_INTERVAL_S
from cometmq.message import Message
from cometmq.testing import ServerProcess, StandaloneProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGES = (
    *("/", "/brokers", "/names", "/topics", "/topics/TBW102", "/groups", "/groups/TOOLS_CONSUMER"),
    *("/producers", "/messages?topic=TBW102", "/trace", "/dead", "/dead/TOOLS_CONSUMER"),
    *("/timers", "/transactions", "/access", "/jobs", "/accounts"),
)
HOSTILE = "'\"><img src=x onerror=\"document.title='pwned'\">{{7*7}}${7*7}`"


def add_user(console: RunningConsole, name: str, role: str) -> str:
    command = [sys.executable, "-m", "cometmq", "console", "--data", str(console.data)]
    done = subprocess.run(
        [*command, "--add-user", name, "--role", role], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()[-1]


@pytest.mark.representative
def test_a_wrong_password_is_refused_and_a_link_is_kept_over_the_login(
    browser: Browser, console: RunningConsole
) -> None:
    context = browser.new_context(base_url=console.url)
    page = context.new_page()
    page.goto("/topics?q=x&kind=system")
    log_in(page, "admin", "wrong")
    shown(page, "Wrong name or password.")
    page.goto("/topics?q=x&kind=system")
    log_in(page, "admin", console.password)
    page.wait_for_url("**/topics?q=x&kind=system")
    page.get_by_label("Log out").click()
    page.wait_for_url("**/login")
    page.goto("/topics")
    page.wait_for_url("**/login?next=*")
    context.close()


@pytest.mark.slow("a browser opens every page")
def test_a_reader_sees_everything_and_changes_nothing(browser: Browser, console: RunningConsole) -> None:
    password = add_user(console, "eve", "reader")
    context = browser.new_context(base_url=console.url)
    page = context.new_page()
    page.goto("/login?next=/topics/TBW102")
    log_in(page, "eve", password)
    shown(page, "Route")
    for name in ("Delete", "Purge", "Send a test message", "Change settings"):
        assert page.get_by_role("button", name=name).count() == 0
    for path in PAGES:
        page.goto(path)
        page.locator("main h1").first.wait_for()
        assert page.locator("main .actions").count() == 0, path
    context.close()


def test_a_session_ends_with_its_account_and_its_open_pages_with_it(
    browser: Browser, console: RunningConsole
) -> None:
    password = add_user(console, "mallory", "admin")
    asked(made(console, "kept"))
    context = browser.new_context(base_url=console.url)
    page = context.new_page()
    page.goto("/login?next=/topics/kept")
    log_in(page, "mallory", password)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("alertdialog").get_by_role("textbox").fill("kept")
    add_user(console, "mallory", "reader")  # the open session belongs to the account before this change
    page.get_by_role("alertdialog").get_by_role("button", name="Confirm").click()
    page.wait_for_url("**/login**", timeout=WAIT_MS)
    assert asked(known(console, "kept"))
    entry = json.loads(console.audit.splitlines()[-1])
    assert (entry["user"], entry["action"], entry["result"]) == ("mallory", "topic.delete", "refused")
    context.close()


def test_what_others_write_is_text_everywhere(page: Page, console: RunningConsole) -> None:
    options = ClientOptions(instance_name=HOSTILE)
    with SyncProducer("hostile-producers", namesrv=console.namesrv, client_options=options) as producer:
        producer.send(Message(topic="TBW102", body=HOSTILE.encode()))
        page.goto("/producers?q=hostile")
        page.get_by_label("Refresh now").click()
        shown(page, "{{7*7}}${7*7}")
    page.goto("/topics?" + "q=" + "%22%3E%3Cimg src=x onerror=document.title='pwned'%3E")
    page.locator("main h1").wait_for()
    page.goto("/groups/" + "%3Cscript%3Edocument.title='pwned'%3C%2Fscript%3E")
    shown(page, "no consumer group named <script>")
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "pwned"


def test_scripts_of_others_do_not_run_in_a_page(browser: Browser, console: RunningConsole) -> None:
    context = browser.new_context(base_url=console.url)  # errors in this browser do not fail the test
    page = context.new_page()
    page.goto("/login?next=/names")
    log_in(page, "admin", console.password)
    shown(page, "responding")
    page.evaluate("""() => { const each = document.createElement('script');
        each.textContent = 'window.pwned = 1'; document.body.append(each); }""")
    assert page.evaluate("window.pwned") is None
    context.close()


@pytest.mark.slow("all pages, one after the other")
@pytest.mark.representative("en-Topics")
@pytest.mark.parametrize(("language", "title"), [("en", "Topics"), ("zh", "消费者组")])
def test_every_page_is_there_in_every_language_on_a_phone(page: Page, language: str, title: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto("/")
    if language != "en":
        page.get_by_label("Language").click()
    page.wait_for_function(f"document.documentElement.lang.startsWith('{language}')")
    for path in PAGES:
        page.goto(path)
        page.locator("main h1").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is too wide"
    page.goto("/topics?kind=system")
    page.locator("td[data-label]").first.wait_for()
    # In a cell the label is before the value and does not overlap it.
    label = "getComputedStyle(document.querySelector('td[data-label]'), '::before').position"
    assert page.evaluate(label) == "static"
    page.locator("header button").first.click()
    page.locator("nav a", has_text=title).first.click()
    page.wait_for_function("location.pathname != '/producers'")


def test_a_page_is_used_by_keyboard_and_named_for_screen_readers(page: Page) -> None:
    page.goto("/topics")
    page.locator("main h1").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.locator("main h1").click()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    unnamed = page.evaluate("""() => [...document.querySelectorAll('button, a, input')].filter(each =>
        each.offsetParent && !each.textContent.trim().replace(/^(menu|chevron_left|chevron_right)$/, '')
        && !each.ariaLabel && !each.labels?.length).map(each => each.outerHTML)""")
    assert unnamed == []


@pytest.mark.slow("waits for the intervals of a page")
def test_nothing_is_asked_for_a_page_that_is_not_in_front(page: Page) -> None:
    page.goto("/brokers")
    page.locator(".age").first.wait_for()
    age = "document.querySelector('.age').dataset.at"
    before = page.evaluate(age)
    page.wait_for_function(f"{age} !== '{before}'", timeout=WAIT_MS)
    page.evaluate("window.emitEvent('page_seen', false)")
    page.wait_for_timeout(500)
    before = page.evaluate(age)
    page.wait_for_timeout(round(1000 * BROKERS_INTERVAL_S * 1.2))
    assert page.evaluate(age) == before
    page.evaluate("window.emitEvent('page_seen', true)")
    page.wait_for_function(f"{age} !== '{before}'", timeout=WAIT_MS)
    page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => true})")
    page.goto("/brokers")  # opened after other pages
    page.wait_for_timeout(1500)
    before = page.evaluate(age)
    page.wait_for_timeout(round(1000 * BROKERS_INTERVAL_S * 1.2))
    assert page.evaluate(age) == before


def test_dark_and_light_are_remembered(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto("/names")
    page.wait_for_function("document.body.classList.contains('body--dark')")  # the system's setting
    page.get_by_label("Dark or light theme").click()
    page.wait_for_function("!document.body.classList.contains('body--dark')")
    page.emulate_media(color_scheme="light")
    page.get_by_label("Dark or light theme").click()
    page.wait_for_function("document.body.classList.contains('body--dark')")
    page.reload()
    page.wait_for_function("document.body.classList.contains('body--dark')")


@pytest.mark.slow("a console starts twice beside a browser")
def test_a_page_outlives_a_console_that_is_started_again(
    browser: Browser, cluster: StandaloneProcess, tmp_path: Path
) -> None:
    command = console_command(cluster.namesrv, tmp_path)
    with ServerProcess(command, READY) as process:
        first = as_it_says(process, tmp_path, cluster.namesrv)
        context = browser.new_context(base_url=first.url)
        page = context.new_page()
        page.goto("/login?next=/names")
        log_in(page, "admin", first.password)
        shown(page, "responding")
    port = first.url.rpartition(":")[2]
    command[command.index("--port") + 1] = port
    with ServerProcess(command, READY) as process:
        page.wait_for_url("**/login?next=%2Fnames", timeout=60_000)
        assert "first account" not in process.output
    context.close()


def test_standalone_brings_its_console_and_takes_it_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cometmq", "standalone", "--data", str(tmp_path), "--namesrv-port", "0"]
    command += ["--broker-port", "0", "--console", "--console-port", "0"]
    with ServerProcess(command, r"^\s*name server\s+\S+$") as process:
        line = process.wait_line(READY, 60)
        process.wait_line("first account", 10)
        assert process.stop() == 0
    assert (tmp_path / "console" / "users.json").exists()
    address = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
    assert address is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address[1])), 1).close()


def test_a_console_that_others_reach_says_so(tmp_path: Path) -> None:
    def said(**options: object) -> str:
        return announcement(Console(ConsoleOptions(data=tmp_path, **options)))  # type: ignore[arg-type]

    assert "WARNING" not in said()
    assert "other machines can reach the console" in said(host="0.0.0.0")
    assert "plain text" in said(host="10.0.0.1")
    assert "plain text" not in said(host="10.0.0.1", cert=tmp_path / "x.pem")


def test_a_cluster_that_is_away_is_unavailable_and_not_empty(browser: Browser, tmp_path: Path) -> None:
    with closed_port() as port:
        namesrv = f"{HOST}:{port}"
        with ServerProcess(console_command(namesrv, tmp_path), READY) as process:
            console = as_it_says(process, tmp_path, namesrv)
            context = browser.new_context(base_url=console.url)
            page = context.new_page()
            page.goto("/login")
            log_in(page, "admin", console.password)
            for path in ("/", "/topics", "/groups/x"):
                page.goto(path)
                shown(page, "Currently unavailable.")
                assert page.get_by_text("There is no").count() == 0, path
            page.goto("/names")
            shown(page, "no response")
            context.close()
            assert "Traceback" not in process.output, process.output
