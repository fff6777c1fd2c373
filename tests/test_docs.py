"""The tests that the pages name as witnesses exist, and where the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
TEST = r"`(?:test_|Test)\w+`"
FILE = r"`[\w/]*test_\w+\.py`"


def named(page: str) -> set[tuple[str, str]]:
    """(test, file) of all tests that a page names, "" for what it does not name of the two."""
    found = {(test, "") for test in re.findall(TEST, page)} | {("", file) for file in re.findall(FILE, page)}
    for tests, file in re.findall(rf"({TEST}(?:(?:, | and ){TEST})*) in ({FILE})", page):
        found |= {(test, file) for test in re.findall(TEST, tests)}
    return {(test.strip("`"), file.strip("`")) for test, file in found}


def exists(test: str, file: str) -> bool:
    definition = re.compile(rf"^ *(async def|def|class) {test}\b" if test else "", re.MULTILINE)
    return any(path.endswith(file) and definition.search(text) for path, text in FILES.items())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    assert [pair for pair in sorted(named(page.read_text("utf-8"))) if not exists(*pair)] == []


def test_what_a_page_names() -> None:
    page = "| `test_a`, `TestB` in `tests/store/test_x.py` | `test_c` | `test_y.py` |"
    files = {("", "tests/store/test_x.py"), ("", "test_y.py")}
    placed = {("test_a", "tests/store/test_x.py"), ("TestB", "tests/store/test_x.py")}
    assert named(page) == {("test_a", ""), ("TestB", ""), ("test_c", ""), *files, *placed}
    assert exists("test_what_a_page_names", "test_docs.py")
    assert not exists("test_what_a_page_names", "test_readme.py")
    assert not exists("test_what_a_page", "")
