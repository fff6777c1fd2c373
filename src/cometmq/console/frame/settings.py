"""Settings of a server as a list; what may be a secret is not shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState

_SECRET = re.compile(r"secret|passw|token|credential|private|accesskey|authconfig", re.IGNORECASE)
HIDDEN = "••••••"


@dataclass(frozen=True)
class Setting:
    """A key and its value, or HIDDEN."""

    key: str
    value: str


def setting_rows(settings: Mapping[str, str]) -> list[Setting]:
    """Settings by key, those with secrets hidden."""
    return [
        Setting(key, HIDDEN if value and _SECRET.search(key) else value) for key, value in settings.items()
    ]


def settings_list(view: View, *, name: str = "") -> Listing[Setting]:
    """A list for them."""
    columns: list[Column[Setting]] = [
        Column("key", "settings.key", lambda row: row.key, searched=True),
        Column("value", "settings.value", lambda row: row.value, searched=True),
    ]
    return Listing(view, columns, lambda row: row.key, default=ListState(sort="key", size=50), name=name)
