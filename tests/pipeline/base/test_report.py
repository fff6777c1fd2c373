"""A report shows its data, opens without a network, and is safe with hostile names."""

from __future__ import annotations

import base64
import os
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page as BrowserPage

from cometmq.pipeline.base.report import BARS_MAX, LINES_MAX, POINTS_MAX, ROWS_MAX, Report

HOSTILE = (
    "</title></svg><script>alert(1)</script><img src=http://x.invalid/ onerror=alert(1)>\x00\x1b[31m$\\x$"
)


class Page(HTMLParser):
    """A page as a browser parses it: its elements, text and images."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        given = dict(attrs)
        self.links += [str(given[name]) for name in ("src", "href") if name in given]
        if tag == "img":
            kind, _, data = str(given["src"]).partition("base64,")
            assert kind == "data:image/svg+xml;"
            self.images.append(base64.b64decode(data).decode())

    def handle_data(self, data: str) -> None:
        self.text += [data.strip()] if data.strip() else []


def hostile_report() -> Report:
    report = Report(HOSTILE)
    report.fact(HOSTILE, HOSTILE)
    report.table(HOSTILE, ["name", "n"], [[HOSTILE, 1]])
    report.bars(HOSTILE, {HOSTILE: 1.0, "订单": 2.0, "_x": 3.0}, HOSTILE)
    report.lines("rates", {HOSTILE: [(0, 1), (1, 2)], "_y": [(0, 2), (1, 3)], "订单": [(0, 1)]}, "/s")
    return report


def test_hostile_names_stay_text() -> None:
    html = hostile_report().html()
    page = Page(html)

    assert page.tags & {"script", "iframe", "object", "link", "a", "form"} == set()
    assert not any(name.startswith("on") for name in page.attributes)
    assert any("<script>alert(1)</script>" in text for text in page.text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", html)
    assert "default-src 'none'" in html
    for image in page.images:
        drawn = [element.tag.rpartition("}")[2] for element in ET.fromstring(image).iter()]
        assert "script" not in drawn
        assert "_y" in image or "_x" in image  # matplotlib hides names that begin with "_"


def test_nothing_outside_the_file_is_loaded() -> None:
    page = Page(hostile_report().html())

    assert len(page.images) == 2
    assert [link for link in page.links if not link.startswith("data:")] == []
    for image in page.images:
        loaded = re.findall(r"(?:href|src)\s*=\s*[\"']([^\"']*)|url\(([^)]*)\)|@import", image)
        assert [place for pair in loaded for place in pair if place and not place.startswith("#")] == []


def test_a_browser_shows_it_and_asks_nobody(tmp_path: Path, browser_page: BrowserPage) -> None:
    hostile_report().write(str(tmp_path / "report.html"))
    asked: list[str] = []
    said: list[str] = []
    browser_page.on("request", lambda request: asked.append(request.url))
    browser_page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    browser_page.on("console", lambda message: said.append(message.text))

    place = f"file://{tmp_path}/report.html"
    browser_page.goto(place)

    assert (asked, said) == ([place], [])
    assert browser_page.locator("script").count() == 0
    drawn = browser_page.eval_on_selector_all(
        "img", "all => all.map(img => [img.complete, img.naturalWidth])"
    )
    assert len(drawn) == 2
    assert all(complete and width > 100 for complete, width in drawn), drawn
    assert "<script>alert(1)</script>" in browser_page.inner_text("h1")


def test_values_are_shown_as_people_write_them() -> None:
    report = Report("t")
    for name, value in (("a", 1234567), ("b", 0.12345), ("c", 98765.4), ("d", True), ("e", None)):
        report.fact(name, value)
    page = Page(report.html())

    assert {"1,234,567", "0.1235", "98,765", "yes"} <= set(page.text)


class Row(msgspec.Struct):
    topic_name: str
    messages: int
    last_ms: int = 1_795_000_000_000


class Summary(msgspec.Struct):
    output: str
    rows: list[Row]
    away: list[str]
    kinds: dict[str, int]
    seconds: float = 1.5
    first_ms: int | None = 1_795_000_001_500
    cost_ms: int = 7000

    @property
    def complete(self) -> bool:
        return False


def test_a_summary_becomes_facts_and_tables() -> None:
    report = Report("t")
    report.summary(Summary("/out", [Row("orders", 7)], ["a", "b"], {"Pub": 3}))

    assert Page(report.html()).text[-21:] == [
        "complete", "no", "output", "/out", "away", "a, b", "kinds", "Pub: 3", "seconds", "1.5",
        "first ms", "2026-11-18 11:06:41", "cost ms", "7,000",
        "Rows", "topic name", "messages", "last ms", "orders", "7", "2026-11-18 11:06:40",
    ]  # fmt: skip


def test_what_is_too_much_is_left_out_and_said() -> None:
    report = Report("t")
    report.table("rows", ["n"], ([number] for number in range(10**6)))
    report.bars("bars", {f"b{number}": number for number in range(1000)})
    report.lines("lines", {f"l{number}": [(x, x) for x in range(10 * POINTS_MAX)] for number in range(20)})
    html = report.html()
    page = Page(html)

    assert len(html) < 3_000_000
    assert html.count("<tr>") == ROWS_MAX + 1
    for words in (f"only the first {ROWS_MAX} rows", f"only {BARS_MAX} of 1,000", f"only {LINES_MAX} of 20"):
        assert words in page.text


def test_parts_without_values_say_so() -> None:
    report = Report("t")
    report.table("rows", ["n"], [])
    report.bars("bars", {})
    report.lines("lines", {"a": []})

    assert Page(report.html()).text.count("none") == 3


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before")

    def fail(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            Report("t").write(str(path))
    assert path.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [path]
    Report("new").write(str(path))
    assert "<h1>new</h1>" in path.read_text()
