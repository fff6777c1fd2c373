"""What stands before every page: who may ask, from where, and how often.

An ASGI application around that of the pages. It lets through what has a session, and gives everybody else the
page to log in; it refuses names of hosts that are not its own (a page of another site could otherwise reach a
console on this machine under that site's name), forms and connections of other sites, and logins that fail
too often. The connection of a page is let in by the page's id, a secret of the session that got the page.
Pages come with headers that forbid foreign scripts and frames.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote

from cometmq import logs
from cometmq.console.door import http
from cometmq.console.door.accounts import NAME_MAX, Account, AccountError, Accounts, TooBusy
from cometmq.console.door.attempts import Attempts, address_key
from cometmq.console.door.audit import Audit
from cometmq.console.door.http import App, Message, Receive, Scope, Send
from cometmq.console.door.login import LoginPage, login_page
from cometmq.console.door.sessions import Session, Sessions

log = logs.logger(__name__)

PUBLIC = ("/_nicegui/", "/static/")
"""Files of the framework and our own: the same for everybody."""
SOCKET_PREFIX = "/_nicegui_ws/"
YEAR_S = 365 * 86_400
LOGIN, LOGOUT, ALIVE = "/login", "/logout", "/alive"
SESSION = "cometmq.session"
"""Where a page finds its session in the scope of its request."""

ADDRESS_BURST, ADDRESS_REFILL_S = 10, 15.0
ACCOUNT_BURST, ACCOUNT_REFILL_S = 20, 15.0
_ADDRESS_MAX = 64  # a proxy may pass on anything
_ENDED, _NO_FRAME = 4401, 4400  # why the connection of a page is closed
_USED = '42["event"'  # what a page's connection says when somebody clicks or types
# The framework compiles its templates and runs our own calls in the browser: that is eval to a browser.
# Scripts of other places, and any that stand in the page without the nonce, do not run.
_POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws://{host} wss://{host}; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; frame-src 'none'"
)
_ALWAYS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
)


@dataclass(eq=False)
class Gate:
    """hosts: what may stand in a request's Host header, `name:port` in small letters. secure: pages come by
    TLS. port: makes the names of the cookies this console's own, which browsers share between ports."""

    app: App
    accounts: Accounts
    sessions: Sessions
    audit: Audit
    hosts: frozenset[str]
    port: int
    secure: bool = False
    by_address: Attempts = field(default_factory=lambda: Attempts(ADDRESS_BURST, ADDRESS_REFILL_S))
    by_account: Attempts = field(default_factory=lambda: Attempts(ACCOUNT_BURST, ACCOUNT_REFILL_S))
    by_known: Attempts = field(default_factory=lambda: Attempts(ACCOUNT_BURST, ACCOUNT_REFILL_S))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # -- cookies

    @property
    def session_cookie(self) -> str:
        return f"{'__Host-' if self.secure else ''}cometmq_session_{self.port}"

    @property
    def _login_cookie(self) -> str:
        return f"{'__Host-' if self.secure else ''}cometmq_login_{self.port}"

    @property
    def _known_cookie(self) -> str:
        return f"{'__Host-' if self.secure else ''}cometmq_known_{self.port}"

    def _set_cookie(
        self, name: str, value: str, *, secure: bool = False, age_s: int | None = None
    ) -> tuple[str, str]:
        """A cookie that no script reads and no other site sends; an empty one goes away. secure: the page
        came by TLS, ours or a proxy's. age_s: None while the browser runs."""
        flags = "; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if self.secure or secure else "")
        age_s = age_s if value else 0
        return "set-cookie", f"{name}={value}{flags}" + ("" if age_s is None else f"; Max-Age={age_s}")

    # -- requests

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = http.header(scope, "host").lower()
        nonce = secrets.token_urlsafe(16)
        fixed = [*_ALWAYS, ("content-security-policy", _POLICY.format(nonce=nonce, host=host))]
        path, method = scope["path"], scope["method"]
        public = path.startswith(PUBLIC)
        if not public:
            fixed.append(("cache-control", "no-store"))
        if self.secure:
            fixed.append(("strict-transport-security", "max-age=31536000"))
        send = http.with_headers(send, fixed, nonce)
        # The framework would write it into its pages: nobody in front of us sets it.
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"x-forwarded-prefix"]
        if host not in self.hosts:
            known = ", ".join(sorted(self.hosts))
            await http.answer(
                send, 421, f"This console is not known by that name, but as {known}.\n".encode()
            )
        elif method == "POST" and path in (LOGIN, LOGOUT):
            await self._post(scope, receive, send)
        elif method not in ("GET", "HEAD") or path.startswith(SOCKET_PREFIX):
            await http.answer(send, 405, b"There is nothing to send here.\n")
        elif public:
            await self.app(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        session = self._session(scope)
        if path == ALIVE:
            known = session is not None and http.query(scope, "page") in session.pages
            await http.answer(send, 204 if known else 401, b"")
        elif path == LOGIN:
            await self._login_page(scope, send)
        elif session is not None:
            session = self.sessions.find(session.id, used=True)
            scope.setdefault("state", {})[SESSION] = session
            await self.app(scope, receive, send)
        elif http.header(scope, "sec-fetch-site") == "cross-site":
            # A link in another site's page: the browser held the cookie back. Asked for by our own page it
            # comes along, if there is one.
            where = _target(scope)
            page = f'<!doctype html><meta http-equiv="refresh" content="0;url={where}">'.encode()
            await http.answer(send, 200, page, kind="text/html; charset=utf-8")
        else:
            await http.redirect(send, f"{LOGIN}?next={quote(_target(scope), safe='')}")

    def _session(self, scope: Scope) -> Session | None:
        try:
            return self.sessions.find(http.cookie(scope, self.session_cookie))
        except AccountError as error:
            log.error("nobody is let in: %s", error)
            return None

    def _own_origin(self, scope: Scope, *, needed: bool) -> bool:
        """Whether the page that asks is one of ours. Old browsers name no origin for forms."""
        origin = http.header(scope, "origin").lower()
        if not origin:
            return not needed
        # Without TLS of ours there may be a proxy in front that has it.
        schemes = ("https",) if self.secure else ("http", "https")
        return origin in [f"{scheme}://{http.header(scope, 'host').lower()}" for scheme in schemes]

    # -- login and logout

    async def _login_page(self, scope: Scope, send: Send, *, problem: str = "", status: int = 200) -> None:
        token = http.cookie(scope, self._login_cookie) or secrets.token_urlsafe(32)
        page = LoginPage(
            language=http.cookie(scope, "cometmq_lang"),
            accepted=http.header(scope, "accept-language"),
            dark={"dark": True, "light": False}.get(http.cookie(scope, "cometmq_theme")),
            token=token,
            where=http.query(scope, "next"),
            problem=problem,
        )
        cookie = self._set_cookie(self._login_cookie, token)
        await http.answer(send, status, login_page(page), [cookie], kind="text/html; charset=utf-8")

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await http.form(receive)
        if fields is None:
            await http.answer(send, 400, b"This is no form.\n")
        elif not self._own_origin(scope, needed=False):
            await http.answer(send, 403, b"The form is another site's.\n")
        elif scope["path"] == LOGIN:
            await self._login(scope, send, fields)
        else:
            await self._logout(scope, send, fields)

    async def _login(self, scope: Scope, send: Send, fields: dict[str, str]) -> None:
        expected = http.cookie(scope, self._login_cookie)
        if not expected or not _same(fields.get("csrf", ""), expected):
            await self._login_page(scope, send, problem="login.stale", status=403)
            return
        name, password, address = fields.get("name", ""), fields.get("password", ""), _address(scope)
        try:
            known = _same(http.cookie(scope, self._known_cookie), self.accounts.mark(name))
            keys = self._keys(name, address, known=known)
            if any(attempts.wait_s(key) > 0 for attempts, key in keys):
                await self._login_page(scope, send, problem="login.too_often", status=429)
                return
            # Before it is known, so that many at once do not slip through; a success takes it back.
            for attempts, key in keys:
                attempts.failed(key)
            account = await self.accounts.check(name, password, known=known)
        except (TooBusy, AccountError) as error:
            log.warning("login: %s", error)
            await self._login_page(scope, send, problem="login.unavailable", status=503)
            return
        if account is None:
            self.audit.add(name[:NAME_MAX], address, "login", result="refused")
            await self._login_page(scope, send, problem="login.wrong", status=401)
            return
        for attempts, key in keys:
            attempts.passed(key)
        await self._let_in(scope, send, name, account, fields.get("next", ""))

    def _keys(self, name: str, address: str, *, known: bool) -> list[tuple[Attempts, str]]:
        """What a login that fails is counted for. A browser in which somebody has logged in to the account
        before is not kept out by strangers who try it, nor by those who share its address."""
        if known:
            return [(self.by_known, name)]
        return [(self.by_address, address_key(address)), (self.by_account, name[:NAME_MAX])]

    async def _let_in(self, scope: Scope, send: Send, name: str, account: Account, where: str) -> None:
        before = self._session(scope)
        if before is not None:
            self.sessions.end(before)
        address = _address(scope)
        session = self.sessions.begin(name, account, address)
        self.audit.add(name, address, "login")
        secure = http.header(scope, "origin").lower().startswith("https:")
        cookies = [
            self._set_cookie(self.session_cookie, session.id, secure=secure),
            self._set_cookie(self._known_cookie, self.accounts.mark(name), secure=secure, age_s=YEAR_S),
            self._set_cookie(self._login_cookie, ""),
        ]
        await http.redirect(send, own_path(where), cookies)

    async def _logout(self, scope: Scope, send: Send, fields: dict[str, str]) -> None:
        session = self._session(scope)
        if session is not None:
            if not _same(fields.get("csrf", ""), session.csrf):
                await http.answer(send, 403, b"The form is not this session's.\n")
                return
            self.audit.add(session.name, _address(scope), "logout")
            self.sessions.end(session)
        await http.redirect(send, LOGIN, [self._set_cookie(self.session_cookie, "")])

    # -- connections of pages

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session(scope)
        good = (
            scope["path"].startswith(SOCKET_PREFIX)
            and http.header(scope, "host").lower() in self.hosts
            and self._own_origin(scope, needed=True)
            and session is not None
            and http.query(scope, "client_id") in session.pages
        )
        if not good or session is None:
            await receive()
            await send({"type": "websocket.close", "code": 4403})
            return
        ended = asyncio.Event()
        mark = object()
        session.on_end[mark] = ended.set
        try:
            await self.app(scope, self._until_end(receive, send, session, ended), send)
        finally:
            session.on_end.pop(mark, None)

    def _until_end(
        self, receive: Receive, send: Send, session: Session, ended: asyncio.Event
    ) -> Callable[[], asyncio.Future[Message] | asyncio.Task[Message]]:
        """Return a `receive` that ends with the session or with a message that no browser sends, and that
        notes the clicks and keys."""

        async def next_message() -> Message:
            code = _ENDED
            reading = asyncio.ensure_future(receive())
            waiting = asyncio.ensure_future(ended.wait())
            try:
                await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and not ended.is_set():
                    message = reading.result()
                    if http.is_page_frame(message):
                        if str(message.get("text") or "").startswith(_USED):
                            self.sessions.find(session.id, used=True)
                        return message
                    code = _NO_FRAME
            finally:
                waiting.cancel()
            reading.cancel()
            with suppress(Exception):
                await send({"type": "websocket.close", "code": code})
            return {"type": "websocket.disconnect", "code": code}

        return lambda: asyncio.ensure_future(next_message())


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0])[:_ADDRESS_MAX] if client else ""


def _target(scope: Scope) -> str:
    """The path and query that a request asks for, as they may stand in a link."""
    raw = scope.get("query_string", b"").decode("latin-1")
    return own_path(quote(scope["path"]) + (f"?{quote(raw, safe='=&%+')}" if raw else ""))


def own_path(where: str) -> str:
    """A path of this console: what leads elsewhere becomes its first page."""
    plain = where.startswith("/") and not where.startswith(("//", "/\\")) and where.isprintable()
    if not plain or "\\" in where or len(where) > 4096:
        return "/"
    return quote(where, safe="/?=&%+:;,@!$*~.-_")
