"""What jobs of the pipeline have left in the directory of reports, and one report.

A report is somebody's HTML file: it is shown in a frame without scripts, forms, links out and any origin.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from nicegui import ui

from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View, text_element
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.pages.reports import Finder, Work, Works, read

if TYPE_CHECKING:
    from pathlib import Path

    from cometmq.console.app import Console

INTERVAL_S = 15.0
JSON_SHOWN = 200_000
"""Characters of a summary."""
KINDS = {"report": "jobs.report", "summary": "jobs.summary", "tables": "jobs.tables"}


def pages(console: Console) -> None:
    """Put the pages in."""

    @console.page("/jobs", "jobs.title", menu=130, icon="insights")
    async def jobs(view: View) -> None:
        view.title(view.t("jobs.title"))
        root = view.console.options.reports
        if root is None:
            view.empty("jobs.no_directory")
            return
        view.note(view.t("jobs.says", path=str(root)))
        notice = ui.element("div")
        listing = Listing(
            view, _columns(view), lambda row: f"{row.kind} {row.path}", empty="jobs.none",
            default=ListState(sort="at", descending=True),
            classes=lambda row: {"whole": "warn"} if row.whole is False else {},
        )  # fmt: skip

        def pick(found: Works) -> list[Work]:
            notice.clear()
            with notice:
                if found.partly:
                    view.note(view.t("jobs.partly"))
            return found.rows

        finder = Finder(root)  # that of the first page that asked serves them all
        await listing.follow(
            view.feeds.feed("reports", lambda: asyncio.to_thread(finder.find), INTERVAL_S), pick
        )

    @console.page("/jobs/{path:path}", "jobs.title", under="/jobs")
    async def job(view: View, path: str) -> None:
        root = view.console.options.reports
        if root is None:
            view.title(view.t("jobs.title"))
            view.empty("jobs.no_directory")
            return
        await _show(view, root, path)


def _columns(view: View) -> list[Column[Work]]:
    def whole(row: Work) -> str:
        if row.whole is None:
            return ""
        return view.t("jobs.whole" if row.whole else "jobs.not_whole")

    return [
        Column("name", "jobs.name", lambda row: row.name, searched=True),
        Column(
            "path", "jobs.path", lambda row: row.path, searched=True,
            link=lambda row: None if row.kind == "tables" else path_of("jobs", *row.path.split("/")),
        ),
        Column("kind", "jobs.kind", lambda row: view.t(KINDS[row.kind])),
        Column("whole", "jobs.state", whole),
        Column("size", "jobs.size", lambda row: "" if row.size is None else view.shown("size", row.size)),
        Column("at", "jobs.at", lambda row: row.at_ms, "ago"),
    ]  # fmt: skip


async def _show(view: View, root: Path, path: str) -> None:
    work, data = await asyncio.to_thread(read, root, path)
    view.title(work.name)
    view.facts(
        [
            (view.t("jobs.path"), work.path),
            (view.t("jobs.at"), view.shown("time", work.at_ms)),
            (view.t("jobs.size"), view.shown("size", work.size)),
        ]
    )
    if work.kind == "report":
        frame = ui.element("iframe").classes("report")
        frame.props["sandbox"] = ""
        frame.props["title"] = work.name
        frame.props["srcdoc"] = data.decode("utf-8", "replace")
    else:
        text_element("pre", pretty(data)).classes("body")


def pretty(data: bytes) -> str:
    """Return a summary with indents, or as it is where it is no JSON.

    It runs in the loop of the console: as Python objects, the values of a file of 8 MiB would take 300 MiB
    and hold up all pages for seconds.
    """
    with suppress(msgspec.DecodeError, RecursionError):
        data = msgspec.json.format(data, indent=2)
    said = data.decode("utf-8", "replace")
    return said if len(said) <= JSON_SHOWN else f"{said[:JSON_SHOWN]}…"
