"""Reports of pipeline jobs in a real browser: they are shown and cannot run scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.console.conftest import RunningConsole, log_in, shown

from cometmq.pipeline.base.report import Report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = """<!DOCTYPE html><title>Evil &lt;i&gt;</title><h1>evil report</h1>
<script>parent.document.title = 'pwned'; document.body.append('script ran')</script>
<img src="x" onerror="top.location = 'http://127.0.0.1:1/'">
<meta http-equiv="refresh" content="0;url=//127.0.0.1:1/">
<form action="//127.0.0.1:1/"><input name=x></form>"""


@pytest.fixture
def reports(console: RunningConsole) -> None:
    report = Report("Audit of orders")
    report.fact("complete", True)
    report.fact("messages", 85_022)
    report.bars("Found", {"missing": 3.0, "late": 1.0}, "messages")
    report.write(str(console.reports / "audit.html"))
    (console.reports / "nightly").mkdir(exist_ok=True)
    (console.reports / "nightly" / "evil.html").write_text(HOSTILE)
    (console.reports / "lag.json").write_text('{"complete": false, "lag": "<b>17</b>"}')


def test_jobs_are_listed_and_a_report_is_shown(page: Page, reports: None) -> None:
    page.goto("/jobs")
    shown(page, "Audit of orders")
    shown(page, "incomplete")
    page.get_by_role("link", name="audit.html").click()
    page.wait_for_url("**/jobs/audit.html")
    frame = page.frame_locator("iframe.report")
    frame.get_by_text("85,022").wait_for()
    assert frame.locator("img").first.evaluate("each => each.naturalWidth") > 0
    page.goto("/jobs/lag.json")
    shown(page, '"lag": "<b>17</b>"')


def test_a_report_can_do_nothing(browser: Browser, console: RunningConsole, reports: None) -> None:
    context = browser.new_context(base_url=console.url)  # errors in this browser do not fail the test
    page = context.new_page()
    page.goto("/login?next=/jobs")
    log_in(page, "admin", console.password)
    page.get_by_role("link", name="nightly/evil.html").click()
    page.frame_locator("iframe.report").get_by_text("evil report").wait_for()
    frame = page.locator("iframe.report")
    assert frame.get_attribute("sandbox") == ""
    page.frame_locator("iframe.report").locator("form").wait_for(state="attached")
    assert page.frame_locator("iframe.report").get_by_text("script ran").count() == 0
    assert page.title() == "Evil <i> · CometMQ"
    assert page.url.endswith("/jobs/nightly/evil.html")
    context.close()


def test_a_path_leads_nowhere_else(page: Page, reports: None) -> None:
    for path in ("..%2F..%2Fusers.json", "%2Fetc%2Fpasswd.html", "nightly%2F..%2F..%2Fx.html"):
        page.goto(f"/jobs/{path}")
        page.locator("main .problem").wait_for()
        assert page.locator("iframe").count() == 0
