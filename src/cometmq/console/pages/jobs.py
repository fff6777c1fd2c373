"""The list of results of pipeline jobs in the directory of reports, and the page of one result.

A report is an HTML file from an untrusted source, so it is shown in a frame that permits no scripts, forms or
links and has no origin.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from nicegui import ui

from cometmq.console.pages.reports import JobResult, Scanner, read
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View, text_element
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page

INTERVAL_S = 15.0
MAX_JSON_LENGTH = 200_000
"""Maximum length of a summary that is shown, in characters."""
KINDS = {"report": "jobs.report", "summary": "jobs.summary", "tables": "jobs.tables"}


@page("/jobs", "jobs.title", menu=130, icon="insights")
async def jobs_page(view: View) -> None:
    view.title(view.t("jobs.title"))
    root = view.services.reports
    if root is None:
        view.empty("jobs.no_directory")
        return
    view.note(view.t("jobs.says", path=str(root)))
    listing = Listing(
        view, _columns(view), lambda row: f"{row.kind} {row.path}", empty="jobs.none",
        default=ListState(sort="at", descending=True),
        classes=lambda row: {"whole": "warn"} if row.complete is False else {},
    )  # fmt: skip
    # If another page has already created the shared feed, this scanner is not used.
    scanner = Scanner(root)
    feed = view.feeds.feed("reports", lambda: asyncio.to_thread(scanner.scan), INTERVAL_S)
    await listing.follow(
        feed,
        lambda found: found.rows,
        notes=lambda found: view.note(view.t("jobs.partly")) if found.truncated else None,
    )


def _columns(view: View) -> list[Column[JobResult]]:
    states = {None: "", True: view.t("jobs.whole"), False: view.t("jobs.not_whole")}
    return [
        Column("name", "jobs.name", lambda row: row.name, searched=True),
        Column("path", "jobs.path", lambda row: row.path, searched=True,
               link=lambda row: None if row.kind == "tables" else path_of("jobs", *row.path.split("/"))),
        Column("kind", "jobs.kind", lambda row: view.t(KINDS[row.kind])),
        Column("whole", "jobs.state", lambda row: states[row.complete]),
        Column("size", "jobs.size", lambda row: "" if row.size is None else view.format("size", row.size)),
        Column("at", "jobs.at", lambda row: row.at_ms, "ago"),
    ]  # fmt: skip


@page("/jobs/{path:path}", "jobs.title", under="/jobs")
async def job_page(view: View, path: str) -> None:
    root = view.services.reports
    if root is None:
        view.title(view.t("jobs.title"))
        view.empty("jobs.no_directory")
        return
    result, data = await asyncio.to_thread(read, root, path)
    view.title(result.name)
    view.facts(
        [
            ("jobs.path", result.path),
            ("jobs.at", view.format("time", result.at_ms)),
            ("jobs.size", view.format("size", result.size)),
        ]
    )
    if result.kind == "report":
        frame = ui.element("iframe").classes("report")
        frame.props["sandbox"] = ""
        frame.props["title"] = result.name
        frame.props["srcdoc"] = data.decode("utf-8", "replace")
    else:
        text_element("pre", pretty(data)).classes("body")


def pretty(data: bytes) -> str:
    """Return a summary with indentation. Data that is not JSON is returned unchanged.

    The JSON is not decoded into Python objects. For a file of 8 MiB, these objects would take 300 MiB, and
    the decoding would block the event loop for seconds.
    """
    with suppress(msgspec.DecodeError, RecursionError):
        data = msgspec.json.format(data, indent=2)
    text = data.decode("utf-8", "replace")
    return text if len(text) <= MAX_JSON_LENGTH else f"{text[:MAX_JSON_LENGTH]}…"
