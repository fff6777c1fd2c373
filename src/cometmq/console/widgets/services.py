"""The services of the console that pages use, and the declaration of a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from cometmq.console.auth.accounts import Accounts
from cometmq.console.auth.attempts import Attempts
from cometmq.console.auth.audit import Audit
from cometmq.console.auth.sessions import Sessions
from cometmq.console.base.clusters import Clusters

Build = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class Page:
    """A page of the console. The decorator `page` creates it."""

    path: str
    title: str
    build: Build
    menu: int | None
    icon: str
    under: str


def page(
    path: str, title: str, *, menu: int | None = None, icon: str = "", under: str = ""
) -> Callable[[Build], Page]:
    """Declare a page; the decorated function builds it from a View and the parts of its path.

    Args:
        path: Path of the page with the names of its parts, for example `/topics/{name:path}`.
        title: Key of the text in the browser's title and in the menu.
        menu: Position in the menu; None for a page that is not in the menu.
        icon: Name of the icon in the menu.
        under: Path of the menu entry that is marked while the page is shown.
    """
    return lambda build: Page(path, title, build, menu, icon, under or path)


@dataclass(frozen=True)
class Services:
    """The services that a View offers to its page.

    Attributes:
        clusters: The clusters that the console shows.
        menu: The pages in the menu, in their order.
        reports: The directory of reports of pipeline jobs, or None.
        password_changes: Limits the failed attempts of each user to change the user's own password.
    """

    clusters: Clusters
    accounts: Accounts
    sessions: Sessions
    audit: Audit
    menu: tuple[Page, ...] = ()
    reports: Path | None = None
    password_changes: Attempts = field(default_factory=lambda: Attempts(5, 30.0))
