"""The console's read-only pages on Apache's clusters, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.browser import running_browser
from tests.console.conftest import READY, WAIT_MS, as_it_says, console_command, log_in, shown
from tests.interop.apache import ApacheCluster
from tests.interop.jars import SERVER_VERSIONS

from cometmq.client import SyncProducer
from cometmq.message import Message
from cometmq.testing import ServerProcess

PAGES = {
    "/": "1 of 1 responding",
    "/brokers": "responding",
    "/names": "responding",
    "/topics": "ConsoleTopic",
    "/topics/ConsoleTopic": "Write queues",
    "/groups?kind=system": "TOOLS_CONSUMER",
    "/producers": "console-producers",
    "/messages?topic=ConsoleTopic": "Newest 1 of",
    "/messages?topic=ConsoleTopic&begin=2020-01-01T00:00:00&end=2099-01-01T00:00:00": "Newest 1 of",
    "/dead": "Messages that a group failed to consume after all retries.",
    "/transactions": "Half messages that were neither committed nor rolled back",
    "/accounts": "administrator",
}
UNKNOWN_TO_APACHE = {"/timers": "Currently unavailable.", "/access": "has no access control"}


@pytest.mark.slow("a console and a browser over Apache's servers")
@pytest.mark.parametrize("version", SERVER_VERSIONS)
def test_pages_show_apaches_clusters(
    apache_clusters: Callable[[str], ApacheCluster], version: str, tmp_path: Path
) -> None:
    apache = apache_clusters(version)
    with SyncProducer("console-producers", namesrv=apache.namesrv) as producer:
        producer.send(Message(topic="ConsoleTopic", body=b"x"))
        with (
            ServerProcess(console_command(apache.namesrv, tmp_path), READY) as process,
            running_browser() as browser,
        ):
            console = as_it_says(process, tmp_path, apache.namesrv)
            page = browser.new_context(base_url=console.url).new_page()
            page.set_default_timeout(WAIT_MS)
            page.goto("/login")
            log_in(page, "admin", console.password)
            for path, text in PAGES.items():
                page.goto(path)
                page.locator("main h1").first.wait_for()
                shown(page, text)
                assert page.locator(".problem").count() == 0, f"{path}: {page.locator('main').inner_text()}"
            for path, text in UNKNOWN_TO_APACHE.items():
                page.goto(path)
                shown(page, text)
            page.goto("/brokers")
            page.locator("main td a").first.click()
            shown(page, "brokerClusterName")
        assert "Traceback" not in process.output, process.output
