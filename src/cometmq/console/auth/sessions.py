"""Sessions of logged-in users. They are in the server's memory; the browser has only their random ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cometmq.console.auth.accounts import Account, Accounts, Role

IDLE_TIMEOUT_S = 30 * 60.0
"""Time, in seconds, after the user's last click or keystroke until a session ends.

Automatic updates of an open page do not extend the session.
"""
MAX_LIFETIME_S = 12 * 3600.0
MAX_SESSIONS = 2000
MAX_SESSIONS_PER_ACCOUNT = 20
MAX_PAGES = 100
"""Maximum number of open pages of a session."""
_ID_BYTES = 32


@dataclass(eq=False)
class Session:
    """The session of a logged-in user.

    Attributes:
        pages: Ids of its open pages. Each id is a secret of its page, and permits the page's connection.
        on_end: Callbacks that are called once, at the end of the session.
        exporting: Whether a file for a download is being created.
    """

    id: str
    name: str
    account: Account
    address: str
    began_s: float
    used_s: float
    csrf: str
    pages: dict[str, None] = field(default_factory=dict)
    on_end: dict[object, Callable[[], None]] = field(default_factory=dict)
    ended: bool = False
    exporting: bool = False

    @property
    def role(self) -> Role:
        return self.account.role

    def add_page(self, page_id: str) -> str | None:
        """Permit the connection of a page.

        If the session then has more than MAX_PAGES pages, remove the oldest one and return its id, else None.
        """
        self.pages[page_id] = None
        if len(self.pages) <= MAX_PAGES:
            return None
        oldest = next(iter(self.pages))
        del self.pages[oldest]
        return oldest


class Sessions:
    """All sessions. The sessions of an account end when the account is removed or changed."""

    def __init__(
        self,
        accounts: Accounts,
        *,
        idle_s: float = IDLE_TIMEOUT_S,
        life_s: float = MAX_LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounts = accounts
        self._idle_s = idle_s
        self._life_s = life_s
        self._clock = clock
        self._by_id: dict[str, Session] = {}

    def begin(self, name: str, account: Account, address: str) -> Session:
        """Create a session.

        If the account has MAX_SESSIONS_PER_ACCOUNT sessions, or all accounts together have MAX_SESSIONS, the
        oldest session of the account or of all accounts is ended first.
        """
        self.end_expired()
        own = [each for each in self._by_id.values() if each.name == name]
        for each in own[: max(0, len(own) - MAX_SESSIONS_PER_ACCOUNT + 1)]:
            self.end(each)
        while len(self._by_id) >= MAX_SESSIONS:
            self.end(next(iter(self._by_id.values())))
        now = self._clock()
        session = Session(
            id=secrets.token_urlsafe(_ID_BYTES),
            name=name,
            account=account,
            address=address,
            began_s=now,
            used_s=now,
            csrf=secrets.token_urlsafe(_ID_BYTES),
        )
        self._by_id[session.id] = session
        return session

    def find(self, session_id: str, *, used: bool = False) -> Session | None:
        """Return the session with an id. Return None if there is none, or if the session has ended.

        `used` means that the session's user has just clicked or typed, which extends the session.
        """
        session = self._by_id.get(session_id)
        if session is None or not self.is_valid(session):
            return None
        if used:
            session.used_s = self._clock()
        return session

    def is_valid(self, session: Session) -> bool:
        """Return whether a session may continue. End an expired session, or one whose account has changed."""
        now = self._clock()
        over = now - session.used_s > self._idle_s or now - session.began_s > self._life_s
        if not session.ended and (over or self._accounts.get(session.name) != session.account):
            self.end(session)
        return not session.ended

    def end(self, session: Session) -> None:
        """End a session and call its callbacks."""
        self._by_id.pop(session.id, None)
        session.ended = True
        session.pages.clear()
        handlers, session.on_end = list(session.on_end.values()), {}
        for handler in handlers:
            handler()

    def end_expired(self) -> None:
        """End all sessions that have expired."""
        for session in list(self._by_id.values()):
            self.is_valid(session)

    def end_all(self) -> None:
        """End all sessions, because the console stops."""
        for session in list(self._by_id.values()):
            self.end(session)
