"""Screenshots of every page: light, dark, Chinese, and dark on a phone. COMETMQ_PICTURES: their directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import WAIT_MS, RunningConsole, asked
from tests.console.test_app import PAGES
from tests.console.test_dead import died
from tests.console.test_topics import made
from tests.console.test_trace import traced
from tests.console.test_waiting import begun, timed
from tests.long_form import long_form

from cometmq.pipeline.base.report import Report

if TYPE_CHECKING:
    from playwright.sync_api import Page

KEPT = os.environ.get("COMETMQ_PICTURES")
SHOWN = {"topic": "/topics/orders", "group": "/groups/billing", "letters": "/dead/ledger"}
"""Pages with content; the message page is added once its message is sent."""
SIZES = {"light": (1280, 900), "dark": (1280, 900), "chinese": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def something(console: RunningConsole) -> None:
    """Create content for most pages."""
    asked(made(console, "orders", 40, "billing"))
    asked(timed(console, "reminders", 5))
    asked(begun(console, "bookings"))
    asked(made(console, "payments"))
    asked(died(console, "ledger", "payments", 12, "overdue"))
    SHOWN["message"] = f"/trace?id={asked(traced(console, 'payments', 'receipts', 'paid'))}"
    report = Report("Audit of orders")
    report.fact("complete", True)
    report.bars("Found", {"missing": 3.0, "late": 1.0}, "messages")
    report.write(str(console.reports / "orders.html"))


@pytest.mark.slow("a picture of every page")
@pytest.mark.parametrize(
    "look",
    [
        "phone",
        *(pytest.param(look, marks=long_form("the same pages, wider")) for look in SIZES if look != "phone"),
    ],
)
def test_every_page_has_its_picture(
    page: Page, console: RunningConsole, something: None, look: str, tmp_path: Path
) -> None:
    width, height = SIZES[look]
    page.set_viewport_size({"width": width, "height": height})
    chosen = {
        "cometmq_theme": "light" if look in ("light", "chinese") else "dark",
        "cometmq_lang": "zh" if look == "chinese" else "en",
    }
    page.context.add_cookies(
        [{"name": name, "value": value, "url": console.url} for name, value in chosen.items()]
    )
    directory = Path(KEPT) if KEPT else tmp_path
    directory.mkdir(parents=True, exist_ok=True)
    for path in (*PAGES, "/jobs/orders.html", *SHOWN.values()):
        page.goto(path)
        page.locator("main h1").first.wait_for(timeout=WAIT_MS)
        page.evaluate("document.fonts.ready.then(() => 0)")  # wait for the icon font
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is too wide"
        if page.locator(".age").count():
            page.wait_for_function("document.querySelector('.age[data-at]')?.textContent")
        name = re.sub(r"\W+", "-", path).strip("-") or "overview"
        page.screenshot(path=directory / f"{name}-{look}.png")
        assert (directory / f"{name}-{look}.png").stat().st_size > 5_000


@pytest.mark.slow("lags are requested every 30 s")
def test_a_long_name_of_a_group_does_not_widen_a_phones_overview(page: Page, console: RunningConsole) -> None:
    name = "g" * 120
    asked(made(console, "reports", 40, name))
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/")
    page.locator(".panel li").get_by_text(name).wait_for(timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
