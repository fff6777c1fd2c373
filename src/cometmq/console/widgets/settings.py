"""A list of a server's settings. Values that may be secrets are hidden."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState

_SECRET = re.compile(
    r"secret|passw|token|credential|private|accesskey|authconfig|authenticationuser|exporterheader",
    re.IGNORECASE,
)
HIDDEN = "••••••"


@dataclass(frozen=True)
class Setting:
    """A setting's key and its value, which is HIDDEN for a secret."""

    key: str
    value: str


def setting_rows(settings: Mapping[str, str]) -> list[Setting]:
    """Return settings as rows, with secrets hidden."""
    return [
        Setting(key, HIDDEN if value and _SECRET.search(key) else value) for key, value in settings.items()
    ]


def settings_list(view: View, *, name: str = "") -> Listing[Setting]:
    """Return an empty list of settings. `name` is the prefix of the list's fields in the query string."""
    columns: list[Column[Setting]] = [
        Column("key", "settings.key", lambda row: row.key, searched=True),
        Column("value", "settings.value", lambda row: row.value, searched=True),
    ]
    return Listing(view, columns, lambda row: row.key, default=ListState(sort="key", size=50), name=name)
