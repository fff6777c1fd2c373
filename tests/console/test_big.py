"""With a large cluster and a hanging broker, pages stay fast, and each broker gets one query for all."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.big_console import ADDRS, BROKERS, HANGS
from tests.console.conftest import READY, WAIT_MS, as_it_says, log_in, shown

from cometmq.console.base.cluster_feeds import TABLES_INTERVAL_S
from cometmq.testing import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = (
    ("/", "16 of 17 responding"),
    ("/topics/topic-04999", "Write queues"),  # although none of the page's own queries is answered
    ("/topics", "5,000 of 5,000"),
    ("/topics?q=4999", "1 of 5,000"),
    ("/groups?sort=-behind", "2,300 of 2,300"),
)
SMALL_PAGE = ("/accounts", "Console accounts")
FLUID_S = 3.0
"""Limit for a page in seconds. Two idle cores need 0.3 s, but other tests run beside this one.

A busy machine may take ten times as long as for a small page.
"""


@pytest.mark.slow("a cluster of 5,000 topics")
def test_many_topics_groups_and_brokers(browser: Browser, tmp_path: Path) -> None:
    start = "import os, runpy, sys; os.environ.pop('PYTEST_CURRENT_TEST', None); "
    start += "runpy.run_module('tests.console.big_console', run_name='__main__')"
    with ServerProcess([sys.executable, "-c", start, str(tmp_path)], READY) as process:
        console = as_it_says(process, tmp_path, "")
        started = time.monotonic()
        context = browser.new_context(base_url=console.url)
        page = context.new_page()
        page.goto("/login")
        log_in(page, "admin", console.password)
        page.locator("main h1").wait_for(timeout=WAIT_MS)
        took = {}
        for path, text in (SMALL_PAGE, *PAGES):
            page.goto(path)  # results of a first query may arrive after the page
            shown(page, text)
            spans = []
            for _ in range(3):
                began = time.monotonic()
                page.goto(path)
                shown(page, text)
                spans.append(time.monotonic() - began)
            took[path] = min(spans)
        others = [context.new_page() for _ in range(3)]
        for other in others:
            other.goto("/topics")
            shown(other, "5,000 of 5,000")
        context.close()
        process.stop()
        asked = json.loads(process.lines[-1])
        intervals = int((time.monotonic() - started) / TABLES_INTERVAL_S) + 2

    limit_s = max(FLUID_S, 10 * took[SMALL_PAGE[0]])
    assert {path: span for path, span in took.items() if span > limit_s} == {}
    for question in ("topics", "groups"):
        counts = [count for name, count in asked.items() if name.startswith(question)]
        assert len(counts) == BROKERS + 1
        assert asked[f"{question} {ADDRS[HANGS]}"] == 1, "it has not answered yet"
        assert max(counts) <= intervals, "in each interval, a broker is asked once for all"
