"""The access check of every request: an ASGI application around the application of the pages.

Requests with a session are passed on; all other requests get the login page. The gate refuses a request whose
Host header contains an unknown name. This prevents DNS rebinding, by which another site makes its own host
name point to the console's address. The gate also refuses forms and connections from pages of other sites,
and logins after too many failures. Each page has an id, which is a secret of the session that requested the
page; a websocket without the id of a page is refused. The response headers forbid scripts and frames of other
sites.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from cometmq import logs
from cometmq.console.auth import http
from cometmq.console.auth.accounts import MAX_NAME_LENGTH, Account, AccountError, Accounts, TooBusy
from cometmq.console.auth.attempts import Attempts, address_key
from cometmq.console.auth.audit import Audit
from cometmq.console.auth.http import App, Message, Receive, Scope, Send
from cometmq.console.auth.sessions import Session, Sessions
from cometmq.console.base.texts import LANGUAGES, preferred_language, text

log = logs.logger(__name__)

PUBLIC = ("/_nicegui/", "/static/")
"""Paths of static files of the framework and the console, which are served without a session."""
SOCKET_PREFIX = "/_nicegui_ws/"
YEAR_S = 365 * 86_400
LOGIN, LOGOUT, ALIVE = "/login", "/logout", "/alive"
SESSION = "cometmq.session"
"""Key of the session in the `state` of an ASGI scope."""

ADDRESS_BURST, ADDRESS_REFILL_S = 10, 15.0
ACCOUNT_BURST, ACCOUNT_REFILL_S = 20, 15.0
_MAX_ADDRESS_LENGTH = 64  # a limit is needed, because a proxy may pass on any text as the client's address
_SESSION_ENDED, _BAD_FRAME = 4401, 4400  # codes with which a page's connection is closed
_USER_EVENT = '42["event"'  # start of the frame that a page sends when its user clicks or types
# The policy permits eval, because the framework in the browser compiles templates, and runs JavaScript that
# the console's server sends. It forbids scripts of other sites, and scripts in the page without the nonce.
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
# The login page is plain HTML, so that the framework cannot be reached without a session.
_LOGIN_PAGE = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8"><title>CometMQ · {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/static/favicon.svg"><link rel="stylesheet" href="/static/console.css"></head>
<body class="login{dark}"><main><h1>CometMQ</h1>
{problem}<form method="post" action="/login" autocomplete="on">
<input type="hidden" name="csrf" value="{token}"><input type="hidden" name="next" value="{where}">
<label for="name">{name}</label>
<input id="name" name="name" autocomplete="username" required autofocus maxlength="64">
<label for="password">{password}</label>
<input id="password" name="password" type="password" autocomplete="current-password" required maxlength="256">
<button type="submit">{enter}</button></form></main></body></html>
"""


@dataclass(eq=False)
class Gate:
    """The access check of the console, an ASGI application around the application of the pages.

    Attributes:
        hosts: Permitted Host headers, `name:port` in lower case.
        port: Port of the console. It is part of the cookies' names, because browsers share cookies between
            the ports of a host.
        secure: Whether the console has a TLS certificate.
        by_address: Limiter of failed logins by client address.
        by_account: Limiter of failed logins by account.
        by_known: Limiter of failed logins by account, for browsers that have logged in to the account before.
    """

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
        """Return a Set-Cookie header. Scripts and other sites cannot use the cookie.

        Args:
            name: Name of the cookie.
            value: Value of the cookie. An empty value deletes the cookie.
            secure: Whether the browser reaches the console through a proxy with TLS.
            age_s: Lifetime in seconds. None: until the browser is closed.
        """
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
        # The framework would write the value of this header into its pages. No proxy of a console needs the
        # header, so it is removed.
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"x-forwarded-prefix"]
        if host not in self.hosts:
            known = ", ".join(sorted(self.hosts))
            await http.respond(send, 421, f"Unknown host name. Names of this console: {known}.\n".encode())
        elif method == "POST" and path in (LOGIN, LOGOUT):
            await self._post(scope, receive, send)
        elif method not in ("GET", "HEAD") or path.startswith(SOCKET_PREFIX):
            await http.respond(send, 405, b"Method not allowed.\n")
        elif public:
            await self.app(scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        session = self._session(scope)
        if path == ALIVE:
            known = session is not None and http.query(scope, "page") in session.pages
            await http.respond(send, 204 if known else 401, b"")
        elif path == LOGIN:
            await self._login_page(scope, send)
        elif session is not None:
            session = self.sessions.find(session.id, used=True)
            scope.setdefault("state", {})[SESSION] = session
            await self.app(scope, receive, send)
        elif http.header(scope, "sec-fetch-site") == "cross-site":
            # The user followed a link on another site's page. Browsers send no session cookie then, even if
            # the user has a session. So the response is a page that makes the browser load the same path
            # again: the second request comes from a page of the console, so it contains the cookie.
            where = _target(scope)
            html = f'<!doctype html><meta http-equiv="refresh" content="0;url={where}">'.encode()
            await http.respond(send, 200, html, kind="text/html; charset=utf-8")
        else:
            await http.redirect(send, f"{LOGIN}?next={quote(_target(scope), safe='')}")

    def _session(self, scope: Scope) -> Session | None:
        try:
            return self.sessions.find(http.cookie(scope, self.session_cookie))
        except AccountError as error:
            log.error("all requests are refused: %s", error)
            return None

    def _own_origin(self, scope: Scope, *, needed: bool) -> bool:
        """Return whether the Origin header shows that a page of this console sent the request.

        If the header is missing, the result is False if `needed` is true, and otherwise True. Forms are
        checked without `needed`, because old browsers omit the header when they send a form.
        """
        origin = http.header(scope, "origin").lower()
        if not origin:
            return not needed
        # Even without a certificate of its own, the console may be reached by https, through a proxy with
        # TLS.
        schemes = ("https",) if self.secure else ("http", "https")
        return origin in [f"{scheme}://{http.header(scope, 'host').lower()}" for scheme in schemes]

    # -- login and logout

    async def _login_page(self, scope: Scope, send: Send, *, problem: str = "", status: int = 200) -> None:
        token = http.cookie(scope, self._login_cookie) or secrets.token_urlsafe(32)
        page = login_page(
            language=http.cookie(scope, "cometmq_lang"),
            accepted=http.header(scope, "accept-language"),
            dark={"dark": True, "light": False}.get(http.cookie(scope, "cometmq_theme")),
            token=token,
            where=http.query(scope, "next"),
            problem=problem,
        )
        cookie = self._set_cookie(self._login_cookie, token)
        await http.respond(send, status, page, [cookie], kind="text/html; charset=utf-8")

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = await http.form(receive)
        if fields is None:
            await http.respond(send, 400, b"This is not a form.\n")
        elif not self._own_origin(scope, needed=False):
            await http.respond(send, 403, b"The form belongs to another site.\n")
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
            known = _same(http.cookie(scope, self._known_cookie), self.accounts.browser_token(name))
            keys = self._keys(name, address, known=known)
            if any(attempts.wait_s(key) > 0 for attempts, key in keys):
                await self._login_page(scope, send, problem="login.too_often", status=429)
                return
            # The failure is counted before the check, so that concurrent logins are limited, too. A
            # successful login removes the counted failure.
            for attempts, key in keys:
                attempts.failed(key)
            account = await self.accounts.check_password(name, password, known=known)
        except (TooBusy, AccountError) as error:
            log.warning("login: %s", error)
            await self._login_page(scope, send, problem="login.unavailable", status=503)
            return
        if account is None:
            self.audit.try_record(name[:MAX_NAME_LENGTH], address, "login", result="refused")
            await self._login_page(scope, send, problem="login.wrong", status=401)
            return
        for attempts, key in keys:
            attempts.passed(key)
        await self._begin_session(scope, send, name, account, fields.get("next", ""))

    def _keys(self, name: str, address: str, *, known: bool) -> list[tuple[Attempts, str]]:
        """Return the limiters and keys with which a failed login is counted.

        A browser that has logged in to the account before has a separate key, so that failures in other
        browsers do not lock this browser out.
        """
        if known:
            return [(self.by_known, name)]
        return [(self.by_address, address_key(address)), (self.by_account, name[:MAX_NAME_LENGTH])]

    async def _begin_session(self, scope: Scope, send: Send, name: str, account: Account, where: str) -> None:
        before = self._session(scope)
        if before is not None:
            self.sessions.end(before)
        address = _address(scope)
        session = self.sessions.begin(name, account, address)
        self.audit.try_record(name, address, "login")
        secure = http.header(scope, "origin").lower().startswith("https:")
        known = self.accounts.browser_token(name)
        cookies = [
            self._set_cookie(self.session_cookie, session.id, secure=secure),
            self._set_cookie(self._known_cookie, known, secure=secure, age_s=YEAR_S),
            self._set_cookie(self._login_cookie, ""),
        ]
        await http.redirect(send, own_path(where), cookies)

    async def _logout(self, scope: Scope, send: Send, fields: dict[str, str]) -> None:
        session = self._session(scope)
        if session is not None:
            if not _same(fields.get("csrf", ""), session.csrf):
                await http.respond(send, 403, b"The form belongs to another session.\n")
                return
            self.audit.try_record(session.name, _address(scope), "logout")
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
        """Return an ASGI `receive` that ends when the session ends, or after a message that no browser sends.

        Each click or keystroke of the user extends the session.
        """

        async def next_message() -> Message:
            code = _SESSION_ENDED
            reading = asyncio.ensure_future(receive())
            waiting = asyncio.ensure_future(ended.wait())
            try:
                await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and not ended.is_set():
                    message = reading.result()
                    if http.is_page_frame(message):
                        if str(message.get("text") or "").startswith(_USER_EVENT):
                            self.sessions.find(session.id, used=True)
                        return message
                    code = _BAD_FRAME
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
    return str(client[0])[:_MAX_ADDRESS_LENGTH] if client else ""


def _target(scope: Scope) -> str:
    """Return the path and query of a request, quoted for a link."""
    raw = scope.get("query_string", b"").decode("latin-1")
    return own_path(quote(scope["path"]) + (f"?{quote(raw, safe='=&%+')}" if raw else ""))


def own_path(where: str) -> str:
    """Return a path in quoted form. Return "/" for a path that is invalid or leads to another site."""
    plain = where.startswith("/") and not where.startswith(("//", "/\\")) and where.isprintable()
    if not plain or "\\" in where or len(where) > 4096:
        return "/"
    return quote(where, safe="/?=&%+:;,@!$*~.-_")


def login_page(
    *, language: str, accepted: str, dark: bool | None, token: str, where: str, problem: str
) -> bytes:
    """Return the login page as HTML.

    Args:
        language: Value of the language cookie.
        accepted: The Accept-Language header.
        dark: Whether to use the dark theme; None for the setting of the browser.
        token: Token in the form, without which forms of other sites are refused.
        where: Path of the page to show after the login.
        problem: Key of an error text, or "".
    """
    shown_in = language if language in LANGUAGES else preferred_language(accepted)

    def escaped(key: str) -> str:
        return escape(text(shown_in, key))

    return _LOGIN_PAGE.format(
        language=shown_in,
        title=escaped("login.title"),
        dark={True: " dark", False: "", None: " auto"}[dark],
        problem=f'<p class="problem" role="alert">{escaped(problem)}</p>\n' if problem else "",
        token=escape(token),
        where=escape(where),
        name=escaped("login.name"),
        password=escaped("login.password"),
        enter=escaped("login.enter"),
    ).encode()
