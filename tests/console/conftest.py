"""Fixtures: a real cluster and a console, shared by all tests of pages, and a browser for each module."""

from __future__ import annotations

import re
import sys
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from cometmq.remoting import loop_in_thread
from cometmq.testing import ServerProcess, StandaloneProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

T = TypeVar("T")

READY = r"^The console of .* is ready: "
WAIT_MS = 60_000
"""Timeout for content of a page, in ms, on a busy machine."""


@dataclass(frozen=True)
class RunningConsole:
    """A console process.

    Attributes:
        url: Address without the last slash.
        data: The console's directory.
        namesrv: Name server of its cluster.
    """

    url: str
    password: str
    data: Path
    namesrv: str

    @property
    def reports(self) -> Path:
        """The directory of pipeline jobs' reports, if the console was started with one."""
        return self.data / "reports"

    @property
    def audit(self) -> str:
        """The audit log's lines with outcomes, without those that mark a begin."""
        lines = (self.data / "audit.jsonl").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if '"result":"begun"' not in line)


def console_command(namesrv: str, data: Path, *more: str) -> list[str]:
    """Return the command of a console on any free port."""
    # The framework changes its behaviour if pytest's variable is set.
    start = "import os, runpy; os.environ.pop('PYTEST_CURRENT_TEST', None); runpy.run_module('cometmq')"
    options = ["console", "-n", namesrv, "--port", "0", "--data", str(data), *more]
    return [sys.executable, "-c", start.replace("('cometmq')", "('cometmq', run_name='__main__')"), *options]


def as_it_says(process: ServerProcess, data: Path, namesrv: str) -> RunningConsole:
    """Return the console whose address a process has printed."""
    url = process.wait_line(READY, 60).rpartition(" ")[2].rstrip("/")
    password = process.wait_line(r"first account .*password", 10).split()[-1]
    return RunningConsole(url, password, data, namesrv)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneProcess]:
    with StandaloneProcess(tmp_path_factory.mktemp("cluster")) as process:
        yield process


@pytest.fixture(scope="session")
def console(cluster: StandaloneProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    data = tmp_path_factory.mktemp("console")
    (data / "reports").mkdir()
    command = console_command(cluster.namesrv, data, "--reports", str(data / "reports"))
    with ServerProcess(command, READY) as process:
        yield as_it_says(process, data, cluster.namesrv)
        assert "Traceback" not in process.output, process.output


# Its driver occupies an event loop while it exists, and tests of other modules need their own loops.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from tests.browser import running_browser

    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def _logged_in(browser: Browser, console: RunningConsole) -> list[dict[str, object]]:
    """Return the cookies of a login. All pages share them, because logins are limited."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{console.url}/login")
    log_in(page, "admin", console.password)
    page.wait_for_selector("main.page", timeout=WAIT_MS)
    cookies = [dict(each) for each in context.cookies()]
    context.close()
    return cookies


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture
def page(
    browser: Browser,
    console: RunningConsole,
    _logged_in: list[dict[str, object]],
    request: pytest.FixtureRequest,
) -> Iterator[Page]:
    """Open a page as administrator. An error in its browser fails the test and prints the page's content."""
    context = browser.new_context(
        base_url=console.url, viewport={"width": 1280, "height": 900}, locale="en-US"
    )
    context.add_cookies(_logged_in)  # type: ignore[arg-type]
    made = context.new_page()
    made.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    foreign: list[str] = []
    made.on("request", lambda asked: None if asked.url.startswith(console.url) else foreign.append(asked.url))
    yield made
    if request.node.stash.get(_FAILED, False):
        print(f"{made.url} showed, in the end:\n{made.locator('body').inner_text()}\n{problems}")
    context.close()
    assert problems == []
    assert [url for url in foreign if not re.match(r"(ws|data|blob):", url)] == []


def log_in(page: Page, name: str, password: str) -> None:
    """Fill in and submit the form of a login page."""
    page.fill("#name", name)
    page.fill("#password", password)
    page.click("button[type=submit]")


def shown(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until a page shows a text."""
    page.get_by_text(text).first.wait_for(timeout=WAIT_MS)


def asked(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of another thread, because the browser's driver uses this thread's loop."""
    with loop_in_thread("console-tests") as run:
        return run(work)


def confirm(page: Page, name: str = "") -> None:
    """Confirm an action, with the object's name where it is required."""
    box = page.get_by_role("alertdialog").last
    if name:
        box.get_by_role("textbox").fill(name)
    box.get_by_role("button", name="Confirm").click()


def go_on(page: Page) -> None:
    """Submit a form."""
    page.get_by_role("alertdialog").last.get_by_role("button", name="Continue").click()
