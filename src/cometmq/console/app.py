"""The console as a server: the web framework with the pages, behind the access check (auth/gate.py).

The framework stores its pages in global variables, so a process can run only one console.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI
from nicegui import app as framework
from nicegui import core, ui
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cometmq import logs
from cometmq.client.cluster.options import namesrv_addresses
from cometmq.console.auth.accounts import Accounts
from cometmq.console.auth.audit import Audit
from cometmq.console.auth.connections import TimedProtocol
from cometmq.console.auth.gate import SESSION, Gate
from cometmq.console.auth.sessions import Sessions
from cometmq.console.base import texts
from cometmq.console.base.clusters import Clusters
from cometmq.console.base.errors import ConsoleError
from cometmq.console.pages import PAGES
from cometmq.console.widgets.page import View, frame, no_cluster, text_element, zone
from cometmq.console.widgets.services import Page, Services, page
from cometmq.errors import CometError
from cometmq.periodic import Periodic

log = logs.logger(__name__)

HOST = "127.0.0.1"
PORT = 8082
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANY = ("0.0.0.0", "::")
STATIC = Path(__file__).parent / "static"
HEAD = '<link rel="stylesheet" href="/static/console.css"><script defer src="/static/console.js"></script>'
COLORS = {"primary": "#1558b0", "negative": "#b3261e", "positive": "#1e6b2e", "warning": "#8a5300"}
MAX_CONNECTIONS = 1000
MAX_WEBSOCKET_MESSAGE_BYTES = 1 << 20
RECONNECT_TIMEOUT_S = 10.0
EXPIRY_INTERVAL_S = 30.0
"""Interval, in seconds, between two checks for expired sessions."""


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """Options of a console.

    Attributes:
        namesrv: Name servers; None for the default of the client.
        data: Directory of the accounts and the audit log.
        host: Address to listen on.
        port: Port to listen on; 0 for any free port.
        names: Additional host names under which browsers reach the console.
        cert: Certificate file for TLS.
        key: Key file for TLS.
        reports: Directory of reports of pipeline jobs.
        proxies: Addresses and networks of proxies whose X-Forwarded-For header is trusted.
    """

    namesrv: str | None = None
    data: Path
    host: str = HOST
    port: int = PORT
    names: Sequence[str] = ()
    cert: Path | None = None
    key: Path | None = None
    reports: Path | None = None
    proxies: Sequence[str] = ()


class Console:
    """A console. Call `await start()` to start it, and `await stop()` to stop it.

    If `start` created the first account, `password` is the password of that account.
    """

    def __init__(self, options: ConsoleOptions) -> None:
        self.options = options
        self.password: str | None = None
        self.namesrv = ";".join(namesrv_addresses(options.namesrv))
        self.port = options.port
        accounts = Accounts(options.data / "users.json")
        self.services = Services(
            clusters=Clusters(options.data / "clusters.json", self.namesrv),
            accounts=accounts,
            sessions=Sessions(accounts),
            audit=Audit(options.data / "audit.jsonl"),
            menu=tuple(sorted((each for each in PAGES if each.menu), key=lambda each: each.menu or 0)),
            reports=options.reports,
        )
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._expiry: Periodic | None = None

    async def start(self) -> None:
        """Create the first account if there is none, and start to listen. Raises ConsoleError and OSError."""
        self.password = await asyncio.to_thread(self.services.accounts.make_first)
        texts.table()
        tls = self._tls()
        listening = self._listen()
        self.port = listening.getsockname()[1]
        await self.services.clusters.start()
        config = uvicorn.Config(
            self._application(tls is not None),
            log_config=None,
            access_log=False,
            server_header=False,
            http=TimedProtocol,
            limit_concurrency=MAX_CONNECTIONS,
            ws_max_size=MAX_WEBSOCKET_MESSAGE_BYTES,
            timeout_graceful_shutdown=2,
            # By default, uvicorn would trust the headers X-Forwarded-For and X-Forwarded-Proto of every
            # process on this machine, so both headers are enabled only for configured proxies.
            proxy_headers=bool(self.options.proxies),
            forwarded_allow_ips=self._proxies(),
            lifespan="on",
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise ConsoleError("the web server did not start: see the log")
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        sessions = self.services.sessions
        self._expiry = Periodic(loop, EXPIRY_INTERVAL_S, sessions.end_expired, name="expiry of sessions")
        self._expiry.start()

    async def stop(self) -> None:
        """End all sessions and pages, and close the connections to the cluster."""
        if self._expiry is not None:
            self._expiry.cancel()
        self.services.sessions.end_all()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
        await self.services.clusters.stop()

    @property
    def url(self) -> str:
        """The address at which a browser on this machine reaches the console."""
        host = HOST if self.options.host in (*LOOPBACK, *ANY) else self.options.host
        return f"{'https' if self.options.cert else 'http'}://{host}:{self.port}/"

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach the console."""
        return self.options.host not in LOOPBACK

    def _hosts(self) -> frozenset[str]:
        names = {*LOOPBACK, *self.options.names}
        if self.options.host not in ANY:
            names.add(self.options.host)
        hosts = {f"[{name}]" if ":" in name and not name.startswith("[") else name for name in names}
        permitted = {f"{host}:{self.port}" for host in hosts}
        # A Host header with one of these names and no port is permitted, too. Browsers omit a default port,
        # and a proxy in front of the console may listen on that port while the console listens on another.
        permitted |= set(self.options.names)
        if self.port == (443 if self.options.cert else 80):
            permitted |= hosts
        return frozenset(name.lower() for name in permitted)

    def _proxies(self) -> list[str]:
        for each in self.options.proxies:
            try:
                ip_network(each, strict=False)
            except ValueError:
                raise ConsoleError(f"{each!r} is not the address of a proxy") from None
        return list(self.options.proxies)

    def _tls(self) -> ssl.SSLContext | None:
        if self.options.cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.options.cert, self.options.key)
        except (OSError, ssl.SSLError) as error:
            raise ConsoleError(f"cannot use the certificate {self.options.cert}: {error}") from None
        return context

    def _listen(self) -> socket.socket:
        host, port = self.options.host, self.options.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            listening.close()
            raise ConsoleError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        return listening

    def _application(self, secure: bool) -> Any:
        ui.add_head_html(HEAD, shared=True)
        framework.add_static_files("/static", STATIC)
        # Paths below /_nicegui/ need no session. For an unknown path of this kind, the framework would build
        # a page; this route responds with an error instead.
        framework.add_route("/_nicegui/{path:path}", _no_file)
        for each in (*PAGES, not_found_page):
            self._serve(each)
        core.app.config.socket_io_js_transports = ["websocket"]
        core.sio.on("log", lambda *_args: None)  # browsers must not write to the server's log
        for event in ("handshake", "event", "javascript_response", "ack"):
            core.sio.on(event, _of_its_page(core.sio.handlers["/"][event]))
        core.app.config.quasar_config = {**core.app.config.quasar_config, "brand": COLORS}
        outer = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        ui.run_with(
            outer,
            title="CometMQ",
            favicon=STATIC / "favicon.svg",
            dark=None,
            binding_refresh_interval=None,
            reconnect_timeout=RECONNECT_TIMEOUT_S,
            gzip_middleware_factory=None,
            tailwind=False,
            show_welcome_message=False,
        )
        gate = Gate(
            app=outer,
            accounts=self.services.accounts,
            sessions=self.services.sessions,
            audit=self.services.audit,
            hosts=self._hosts(),
            port=self.port,
            secure=secure,
        )
        return GZipMiddleware(gate, minimum_size=1024, compresslevel=4)

    def _serve(self, page: Page) -> None:
        """Register a page with the framework."""

        async def build(request: Request) -> None:
            view = View(self.services, request.scope["state"][SESSION], request)
            ui.page_title(f"{view.t(page.title)} · CometMQ")
            with frame(view, page.under):
                try:
                    if view.has_cluster:
                        await page.build(view, **request.path_params)
                    else:
                        no_cluster(view)
                except Exception as error:
                    if not isinstance(error, CometError):
                        log.exception("page %s failed", page.path)
                    view.error(error)
                view.note(view.t("frame.times", zone=zone()))

        ui.page(page.path)(build)


@page("/{path:path}", "frame.not_found")
async def not_found_page(view: View, **_parts: str) -> None:
    """Build the page for unknown paths."""
    view.client.status_code = 404
    text_element("h1", view.t("frame.not_found"))


def _of_its_page(handle: Callable[[str, Any], Any]) -> Callable[[str, Any], Awaitable[Any]]:
    """Return a handler that only accepts events for the page to which the connection belongs.

    Otherwise the framework would execute an event for any page that the event names, with the permissions of
    that page's session. Events with invalid fields are dropped, because the framework would log a traceback
    for each of them.
    """

    async def checked(sid: str, event: Any) -> Any:
        environ = core.sio.get_environ(sid) or {}
        page_id = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [""])[0]
        if not (isinstance(event, dict) and event.get("client_id") == page_id):
            return None
        try:
            outcome = handle(sid, event)
            return await outcome if isawaitable(outcome) else outcome
        except (LookupError, TypeError, ValueError) as error:
            log.debug("an event of a page has wrong fields: %r", error)
            return None

    return checked


async def _no_file(_request: Request) -> Response:
    return PlainTextResponse("No such file.\n", 404)


class _Server(uvicorn.Server):
    """The web server without its own signal handlers, because the console's command installs handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
