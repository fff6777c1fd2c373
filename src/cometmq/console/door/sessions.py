"""Who is logged in: sessions live in the server's memory, the browser has nothing but a random id."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cometmq.console.door.accounts import Account, Accounts, Role

IDLE_S = 30 * 60.0
"""Without a click or key for so long a session ends, though its page still draws."""
LIFE_S = 12 * 3600.0
"""However busy: then the password is asked for again."""
SESSIONS_MAX = 2000
PER_ACCOUNT_MAX = 20
PAGES_MAX = 100
"""Open pages of one session."""
_ID_BYTES = 32


@dataclass(eq=False)
class Session:
    """One login. pages: the ids of its open pages, each a secret of that page alone, by which the page's
    connection is let in. on_end: called once when it ends."""

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

    @property
    def role(self) -> Role:
        return self.account.role

    def add_page(self, page_id: str) -> None:
        """Let the connection of a page in; the oldest page of too many is forgotten."""
        self.pages[page_id] = None
        while len(self.pages) > PAGES_MAX:
            del self.pages[next(iter(self.pages))]


class Sessions:
    """All sessions. An account that is removed or changed has none any more."""

    def __init__(
        self,
        accounts: Accounts,
        *,
        idle_s: float = IDLE_S,
        life_s: float = LIFE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._accounts = accounts
        self._idle_s = idle_s
        self._life_s = life_s
        self._clock = clock
        self._by_id: dict[str, Session] = {}

    def begin(self, name: str, account: Account, address: str) -> Session:
        """A new session with an id that nobody had before; the oldest ones make room."""
        self.end_old()
        own = [each for each in self._by_id.values() if each.name == name]
        for each in own[: max(0, len(own) - PER_ACCOUNT_MAX + 1)]:
            self.end(each)
        while len(self._by_id) >= SESSIONS_MAX:
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
        """A session that has not ended. used: somebody did something."""
        session = self._by_id.get(session_id)
        if session is None or not self.valid(session):
            return None
        if used:
            session.used_s = self._clock()
        return session

    def valid(self, session: Session) -> bool:
        """Whether a session goes on; one whose time is over, or whose account is another now, is ended."""
        now = self._clock()
        over = now - session.used_s > self._idle_s or now - session.began_s > self._life_s
        if not session.ended and (over or self._accounts.get(session.name) != session.account):
            self.end(session)
        return not session.ended

    def end(self, session: Session) -> None:
        """End a session and what hangs on it."""
        self._by_id.pop(session.id, None)
        session.ended = True
        session.pages.clear()
        handlers, session.on_end = list(session.on_end.values()), {}
        for handler in handlers:
            handler()

    def end_old(self) -> None:
        """End all sessions whose time is over."""
        for session in list(self._by_id.values()):
            self.valid(session)

    def end_all(self) -> None:
        """The console stops."""
        for session in list(self._by_id.values()):
            self.end(session)
