"""Forged requests as from a custom browser: by strangers, readers, and administrators with double clicks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.console.conftest import READY, RunningConsole, as_it_says, asked, console_command
from tests.console.forged import Forged, ForgedPage
from tests.console.test_app import add_user
from tests.console.test_topics import made

from cometmq.testing import ServerProcess, StandaloneProcess

TOPIC = "forged"


@pytest.fixture(scope="module")
def own(cluster: StandaloneProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Run a separate console: these tests use up login attempts and remove the audit log."""
    data = tmp_path_factory.mktemp("forged")
    with ServerProcess(console_command(cluster.namesrv, data), READY) as process:
        found = as_it_says(process, data, cluster.namesrv)
        asked(made(found, TOPIC))
        yield found
        assert "Traceback" not in process.output, process.output


@pytest.fixture(scope="module")
def admin(own: RunningConsole) -> Forged:
    somebody = Forged(own.url)
    assert somebody.log_in("admin", own.password) == 303
    return somebody


def to_send(page: ForgedPage, body: str) -> None:
    """Request a test message, up to the confirmation dialog."""
    page.click("Send a test message")
    page.fill("Body (text)", body)
    page.click("Continue")
    page.until(lambda: page.find("Confirm"))


def sends(own: RunningConsole) -> list[str]:
    entries = map(json.loads, own.audit.splitlines())
    return [each["result"] for each in entries if each["action"] == "topic.send"]


def told(page: ForgedPage) -> str:
    """Return the first notification on the page."""
    page.until(lambda: any(kind == "notify" for kind, *_ in page.heard))
    return next(str(given[0]["message"]) for kind, *given in page.heard if kind == "notify")


@pytest.mark.parametrize(
    "path",
    ["/_nicegui/x", "/_nicegui/%2e%2e/topics", "/_nicegui/0/static/x", "/static/x", "/static/../topics"],
)
def test_strangers_get_files_and_nothing_else(own: RunningConsole, path: str) -> None:
    status, said = Forged(own.url).ask(path)

    assert status == 404
    assert "client_id" not in said


def test_an_origin_that_is_none_is_another_sites(own: RunningConsole) -> None:
    assert Forged(own.url).ask("/login", {"name": "x"}, Origin="http://[")[0] == 403


def test_a_click_that_comes_twice_is_done_once(own: RunningConsole, admin: Forged) -> None:
    before = len(sends(own))
    with admin.open(f"/topics/{TOPIC}") as page:
        to_send(page, "once")
        page.click("Confirm", times=5)
        page.until(lambda: not page.find("Confirm"))

    assert sends(own)[before:] == ["ok"]


def test_events_with_wrong_fields_are_dropped(admin: Forged) -> None:
    """The events must cause no traceback, which the console's fixture checks."""
    with admin.open("/topics") as page:
        for name in ("event", "javascript_response", "ack", "handshake"):
            for fields in ({}, {"id": [], "request_id": [], "next_message_id": "x"}, {"args": ["{"]}):
                page.socket.send("42" + json.dumps([name, {"client_id": page.client_id, **fields}]))
        page.click("Create a topic")
        page.until(lambda: page.find("Continue"))


def test_a_reader_does_nothing_in_an_administrators_page(own: RunningConsole, admin: Forged) -> None:
    reader = Forged(own.url)
    assert reader.log_in("eve", add_user(own, "eve", "reader")) == 303
    with admin.open(f"/topics/{TOPIC}") as page, reader.open(f"/topics/{TOPIC}") as other:
        delete = page.find("Delete")
        assert delete is not None
        assert other.find("Delete") is None
        other.event(delete, {}, client_id=page.client_id)
        with pytest.raises(AssertionError):
            page.until(lambda: page.find("Confirm"), 2)
        page.event(delete, {})
        page.until(lambda: page.find("Confirm"))


def test_what_cannot_be_noted_is_not_done(own: RunningConsole, admin: Forged) -> None:
    log = own.data / "audit.jsonl"
    kept = log.rename(own.data / "kept")
    log.mkdir()
    try:
        with admin.open(f"/topics/{TOPIC}") as page:
            to_send(page, "unnoted")
            page.click("Confirm")
            assert "Nothing was done because the audit log cannot be written" in told(page)
    finally:
        log.rmdir()
        kept.rename(log)


def test_an_action_is_noted_before_it_is_done(own: RunningConsole, admin: Forged) -> None:
    with admin.open(f"/topics/{TOPIC}") as page:
        to_send(page, "noted")
        page.click("Confirm")
        page.until(lambda: not page.find("Confirm"))
    lines = Path(own.data / "audit.jsonl").read_text().splitlines()
    entries = [each for each in map(json.loads, lines) if each["action"] == "topic.send"]

    assert [each["result"] for each in entries[-2:]] == ["begun", "ok"]


@pytest.mark.slow("the framework waits ten seconds for the browser to return")
def test_a_page_that_is_left_with_an_open_dialog_ends_quietly(own: RunningConsole, admin: Forged) -> None:
    """The fixture checks at the console's stop that the end of the page was not logged as an error."""
    with admin.open(f"/topics/{TOPIC}") as page:
        page.click("Send a test message")
        page.until(lambda: page.find("Continue"))
    ends = time.monotonic() + 60  # the framework waits ten seconds for the browser to return
    while admin.ask(f"/alive?page={page.client_id}")[0] == 204:
        assert time.monotonic() < ends
        time.sleep(0.2)


def test_nobody_chooses_the_address_that_his_failures_count_for(own: RunningConsole, admin: Forged) -> None:
    statuses = [
        Forged(own.url).log_in("nobody", "wrong", **{"X-Forwarded-For": f"1.2.3.{number}"})
        for number in range(12)
    ]

    assert statuses[-1] == 429
    assert "1.2.3." not in own.audit
    assert Forged(own.url).log_in("admin", own.password) == 429
    assert admin.log_in("admin", own.password) == 303  # this browser has logged in before


def test_a_page_of_a_removed_cluster_never_becomes_one_of_another(own: RunningConsole, admin: Forged) -> None:
    with admin.open("/names") as page:
        page.click("Add a cluster")
        page.fill("Cluster", "second")
        page.fill("Name servers", own.namesrv)
        page.click("Continue")
        page.click("Confirm")
        page.until(lambda: not page.find("Confirm"))
    operator = Forged(own.url)
    operator.cookies = {**admin.cookies, "cometmq_cluster": "second"}
    before = len(sends(own))
    with operator.open(f"/topics/{TOPIC}") as late, admin.open("/names") as page:
        to_send(late, "too late")
        rows = next(
            (number, event["listener_id"])
            for number, each in page.elements.items()
            for event in each.get("events", ())
            if event["type"] == "row_act"
        )
        page.event(rows, {"id": "second", "act": "remove"})
        page.click("Confirm")
        page.until(lambda: not page.find("Confirm"))
        late.click("Confirm")
        assert "Nothing was done: cluster second was removed" in told(late)
    entry = json.loads(own.audit.splitlines()[-1])
    assert (entry["action"], entry["details"]["cluster"]) == ("topic.send", "second")
    assert sends(own)[before:] == ["refused"]
    for path in (f"/topics/{TOPIC}", "/names", "/"):
        status, said = operator.ask(path)
        assert status == 404
        assert "There is no cluster" in said
        assert "Show default" in said
        assert f"Name servers: {own.namesrv}" not in said
    assert admin.ask(f"/topics/{TOPIC}")[0] == 200
