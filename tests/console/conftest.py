"""A real cluster and a console over it, once for all tests of pages; a browser for each module."""

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
"""For what a page shows: the machine may be busy."""


@dataclass(frozen=True)
class RunningConsole:
    """A console process. url: without the last slash; data: its directory; namesrv: of its cluster."""

    url: str
    password: str
    data: Path
    namesrv: str

    @property
    def reports(self) -> Path:
        """What pipeline jobs have left, where the console was started with it."""
        return self.data / "reports"

    @property
    def audit(self) -> str:
        """The audit log without what was begun: what came out of it."""
        lines = (self.data / "audit.jsonl").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if '"result":"begun"' not in line)


def console_command(namesrv: str, data: Path, *more: str) -> list[str]:
    """The command of a console at any free port."""
    # The framework behaves otherwise where it sees pytest's variable.
    start = "import os, runpy; os.environ.pop('PYTEST_CURRENT_TEST', None); runpy.run_module('cometmq')"
    options = ["console", "-n", namesrv, "--port", "0", "--data", str(data), *more]
    return [sys.executable, "-c", start.replace("('cometmq')", "('cometmq', run_name='__main__')"), *options]


def as_it_says(process: ServerProcess, data: Path, namesrv: str) -> RunningConsole:
    """The console that a process announces."""
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


# Its driver has a loop that runs as long as it does: tests of other modules need theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from tests.browser import running_browser

    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def _logged_in(browser: Browser, console: RunningConsole) -> list[dict[str, object]]:
    """The cookies of a login: one for all pages, since logins are limited."""
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
    """A page of the administrator's. What its browser complains of fails the test; what it showed then is
    printed."""
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
    """Fill in the form of a login page and send it."""
    page.fill("#name", name)
    page.fill("#password", password)
    page.click("button[type=submit]")


def shown(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until a page shows a text."""
    page.get_by_text(text).first.wait_for(timeout=WAIT_MS)


def asked(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives, run on a loop of another thread: the browser's driver has this one."""
    with loop_in_thread("console-tests") as run:
        return run(work)


def confirm(page: Page, name: str = "") -> None:
    """Confirm what will be done, with the name where it is wanted."""
    box = page.get_by_role("alertdialog").last
    if name:
        box.get_by_role("textbox").fill(name)
    box.get_by_role("button", name="Confirm").click()


def go_on(page: Page) -> None:
    """Send a form."""
    page.get_by_role("alertdialog").last.get_by_role("button", name="Continue").click()
