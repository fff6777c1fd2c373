"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ["tests.scheduling", "tests.tiers"]

# A shell starts background jobs with SIGINT ignored, and the servers that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collections of garbage during the collection of tests would find none, and take a fifth of its CPU time.
gc.disable()

# Examples share the machine with other processes, so a slow one is not a failure. For a long manual run:
# `--hypothesis-profile=thorough`.
settings.register_profile(
    "cometmq", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("cometmq"), max_examples=5000)
settings.load_profile("cometmq")

# So that all worker processes end at about the same time, folders with long files or tests come first.
LONG_FIRST = (
    "interop",
    "pipeline",
    "faults",
    "console",
    "cli",
    "broker",
    "",
    "simulation",
    "testing",
    "typing",
)
SLOW_IMPORTS = ("jsonschema", "sqlalchemy")
"""Packages that take more than half a second to import, which each process of a run would spend: the tests
that need them import them in functions."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(here).parts[:-1]
        name = room[0] if room else ""
        return LONG_FIRST.index(name) if name in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check the imports, fetch the browser, and exempt what was collected from garbage collection.

    The browser is fetched before the first test, whose time limit a slow registry must not use up.

    These are 600,000 objects. Otherwise each full collection would take 0.3 s of CPU time, during which the
    clients and servers of a test stand still; several times as long on a busy machine.
    """
    if found := [name for name in SLOW_IMPORTS if name in sys.modules]:
        raise pytest.UsageError(f"a test module imports {', '.join(found)}; it should do that in a function")
    if not session.config.option.collectonly and any(map(_uses_browser, session.items)):
        from tests.browser import chromium
        from tests.interop.jars import NOT_FETCHED

        with NOT_FETCHED:
            chromium()
    gc.freeze()
    gc.enable()


def _uses_browser(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return "browser" in fixtures or "browser_page" in fixtures or item.path.name == "test_console.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hostile-frames", type=int, default=100_000, help="frames of tests/faults/test_hostile_requests.py"
    )


@pytest.fixture
def browser_page() -> Iterator[Page]:
    """An empty page in a real browser."""
    from tests.browser import running_browser

    with running_browser() as browser:
        yield browser.new_page()
