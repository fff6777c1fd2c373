"""References in pages and docstrings exist: tests, files, and headings of docs/reference.

`python -m tests.test_docs` corrects the paths of tests that have moved within their room.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.test_architecture import PACKAGE, SUB_ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path for base in ("src", "tests", "benchmarks", "examples") for path in (ROOT / base).rglob("*.py")
]
FILES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
NOT_OF_THE_TREE = {"commitlog/", "consumequeue/", "index/", "config/"}
TEST = r"`(?:test_|Test(?!Broker`))\w+`"  # TestBroker is a public class
FILE = r"`[\w/]*test_\w+\.py`"
# A citation is a page of the reference and headings on it: "(docs/reference/storage.md, Record, Index)", or
# the same after "See" and before a full stop.
CITATION = re.compile(r"docs/reference/(\w+)\.md(?:,([^)]+?)(?:\)|\.\s))?")
ABSENT = re.compile(
    r"(?:remoting|storage|spark|design|client)\.md (?:section )?\d|\b(?:fact|delta|reference) sheet"
)


def named(page: str) -> set[tuple[str, str]]:
    """Return (test, file) of all tests that a page names; a part that the page does not name is ""."""
    found = {(test, "") for test in re.findall(TEST, page)} | {("", file) for file in re.findall(FILE, page)}
    for tests, file in re.findall(rf"({TEST}(?:(?:, | and ){TEST})*) in ({FILE})", page):
        found |= {(test, file) for test in re.findall(TEST, tests)}
    return {(test.strip("`"), file.strip("`")) for test, file in found}


def exists(test: str, file: str) -> bool:
    definition = re.compile(rf"^ *(async def|def|class) {test}\b" if test else "", re.MULTILINE)
    return any(path.endswith(file) and definition.search(text) for path, text in FILES.items())


def headings(page: Path) -> set[str]:
    return set(re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)) if page.exists() else set()


def cited(text: str) -> set[tuple[str, str]]:
    """Return (page, heading) of all citations of docs/reference; the heading of a whole page is ""."""
    found = set()
    for page, part in CITATION.findall(text):
        names = [" ".join(name.replace("#", " ").split()) for name in part.split(",")]
        found |= {(page, name) for name in names if name or not part}
    return found


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def dead_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    dead = []
    for link in re.findall(r"\]\((?!\w+:)([^)]+)\)", page.read_text("utf-8")):
        name, _, place = link.partition("#")
        target = page.parent / name if name else page
        page_there = place and target.is_file()
        known = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE) if page_there else []
        if not target.exists() or (place and place not in map(anchor, known)):
            dead.append(link)
    return dead


def sub_rooms_drawn(page: str) -> dict[str, tuple[str, ...]]:
    """Return the ordered sub-rooms of each room from the drawing in docs/architecture.md."""
    drawing = page.partition("```\n")[2].partition("```")[0]
    drawn: dict[str, tuple[str, ...]] = {}
    room = ""
    for line in drawing.splitlines():
        if found := re.match(r"(\w+)/ ", line):
            room = found[1]
        elif found := re.match(r"  (\w+)/ ", line):
            drawn[room] = (*drawn.get(room, ()), found[1])
    return drawn


def missing_paths(page: str) -> list[str]:
    """Return the files and directories that a page names in backticks and that do not exist."""
    named = re.findall(r"`((?:\.\./)?(?:\w+/)+(?:\w+\.(?:py|md|sh|java|toml))?|(?:\w+/)+\w+\.py)`", page)
    homes = (ROOT, ROOT / "src", ROOT / "src/cometmq")
    there = (name for name in named if any((home / name).exists() for home in homes))
    return sorted(set(named) - NOT_OF_THE_TREE - set(there))


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    assert [pair for pair in sorted(named(page.read_text("utf-8"))) if not exists(*pair)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_every_fact_that_is_cited_has_its_heading_in_the_reference() -> None:
    known = {page.stem: headings(page) | {""} for page in (ROOT / "docs/reference").glob("*.md")}
    missing = [
        f"{page_name(path)}: docs/reference/{page}.md, {heading}"
        for path in SOURCES
        for page, heading in sorted(cited(path.read_text("utf-8")))
        if heading not in known.get(page, set()) and path != Path(__file__)
    ]

    assert missing == []


def test_no_source_cites_what_a_reader_does_not_have() -> None:
    absent = [
        f"{page_name(path)}: {found}"
        for path in [*SOURCES, *PAGES]
        for found in ABSENT.findall(path.read_text("utf-8"))
        if path != Path(__file__)
    ]

    assert absent == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert missing_paths(page.read_text("utf-8")) == []


def test_the_drawing_of_the_rooms_has_their_sub_rooms_in_the_order_of_imports() -> None:
    drawn = sub_rooms_drawn((ROOT / "docs/architecture.md").read_text("utf-8"))
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    without_order = {
        room: tuple(sorted(path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")))
        for room in rooms - SUB_ROOMS.keys()
    }

    assert {room: order for room, order in drawn.items() if room in SUB_ROOMS} == SUB_ROOMS
    assert {room: tuple(sorted(order)) for room, order in drawn.items() if room not in SUB_ROOMS} == {
        room: found for room, found in without_order.items() if found
    }


def test_what_a_page_names() -> None:
    page = "| `test_a`, `TestB` in `tests/store/test_x.py` | `test_c` | `test_y.py` |"
    files = {("", "tests/store/test_x.py"), ("", "test_y.py")}
    placed = {("test_a", "tests/store/test_x.py"), ("TestB", "tests/store/test_x.py")}
    assert named(page) == {("test_a", ""), ("TestB", ""), ("test_c", ""), *files, *placed}
    assert exists("test_what_a_page_names", "test_docs.py")
    assert not exists("test_what_a_page_names", "test_readme.py")
    assert not exists("test_what_a_page", "")


def test_what_a_docstring_cites() -> None:
    assert cited("(docs/reference/storage.md, Record, Batch body). More") == {
        ("storage", "Record"),
        ("storage", "Batch body"),
    }
    assert cited("# x\n# (y: docs/reference/client.md, Sends and\n# retries); z") == {
        ("client", "Sends and retries")
    }
    assert cited("as docs/reference/remoting.md has them") == {("remoting", "")}


def with_moved_tests(page: str) -> str:
    """Return the page with current paths of tests, where a room has exactly one file of a name."""

    def now(found: re.Match[str]) -> str:
        room, name = found[1], found[2]
        homes = [path for path in FILES if path.startswith(f"tests/{room}/") and path.endswith(f"/{name}")]
        return f"`{homes[0]}`" if len(homes) == 1 else found[0]

    return re.sub(r"`tests/(\w+)/(?:\w+/)*(test_\w+\.py)`", now, page)


def main() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        if (moved := with_moved_tests(text)) != text:
            page.write_text(moved, "utf-8")


if __name__ == "__main__":
    main()
