"""CHANGELOG.md has the notes of each version, the newest first: its date, highlights, kinds of changes."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.version import Version

from cometmq import __version__

PAGE = Path(__file__).parents[1] / "CHANGELOG.md"
KINDS = (
    *("Highlights", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"),
    "Different from RocketMQ on purpose",
)
HEADING = re.compile(r"(?P<version>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)(?: - (?P<date>\S+)|, not released yet)")


class Notes(NamedTuple):
    """The notes of one version."""

    version: str
    released: date | None
    parts: dict[str, str]
    """Texts by kind of change, in the order of the page."""


def read(page: str) -> list[Notes]:
    """Return the notes of all versions, in the order of the page.

    Raises:
        ValueError: A heading is not of the format, or occurs twice.
    """
    notes = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found = HEADING.fullmatch(heading)
        if found is None:
            raise ValueError(f"not 'VERSION - YYYY-MM-DD' and not 'VERSION, not released yet': {heading!r}")
        names = re.findall(r"^### (.+)$", text, re.MULTILINE)
        if len(set(names)) < len(names) or not set(names) <= set(KINDS):
            raise ValueError(f"headings of {heading} are not once each of {', '.join(KINDS)}: {names}")
        texts = re.split(r"^### .+$", text, flags=re.MULTILINE)[1:]
        released = date.fromisoformat(found["date"]) if found["date"] else None
        notes.append(Notes(found["version"], released, dict(zip(names, texts, strict=True))))
    return notes


def test_the_newest_notes_are_those_of_the_packages_version_and_begin_with_highlights() -> None:
    notes = read(PAGE.read_text("utf-8"))

    assert notes[0].version == __version__
    assert next(iter(notes[0].parts)) == "Highlights"
    assert 3 <= notes[0].parts["Highlights"].count("\n- ") <= 15


def test_versions_and_their_dates_fall_and_only_the_newest_may_be_unreleased() -> None:
    notes = read(PAGE.read_text("utf-8"))
    versions = [Version(each.version) for each in notes]
    dates = [each.released for each in notes if each.released is not None]

    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert len(dates) >= len(notes) - 1
    assert all(each.released for each in notes[1:])


@pytest.mark.parametrize(
    "section",
    [
        "## 0.2\n",
        "## 0.2.0 - tomorrow\n",
        "## 0.2.0\n",
        "## 0.2.0 - 2027-01-31\n### News\n",
        "## Unreleased\n",
    ],
)
def test_notes_of_another_format_are_refused(section: str) -> None:
    with pytest.raises(ValueError, match=r"not |Invalid isoformat"):
        read(section)
