"""The console as a server: the framework set up, the gate before it, its pages put in.

The framework keeps its pages in the process, so there is one console a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from cometmq.console import texts
from cometmq.console.clusters import Clusters
from cometmq.console.door.accounts import Accounts
from cometmq.console.door.audit import Audit
from cometmq.console.door.connections import TimedProtocol
from cometmq.console.door.gate import SESSION, Gate
from cometmq.console.door.sessions import Sessions
from cometmq.console.frame.page import View, frame, no_cluster, text_element, zone
from cometmq.console.pages import PAGES
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
CONNECTIONS_MAX = 1000
MESSAGE_MAX = 1 << 20
"""Bytes of one message of a page's connection."""
RECONNECT_S = 10.0
OLD_SESSIONS_S = 30.0

Build = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class MenuEntry:
    """A line of the menu. title: key of its text; place: they are sorted by it."""

    path: str
    title: str
    icon: str
    place: int


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """namesrv: name servers, None as of the client. data: directory of accounts and audit log. host and port:
    where to listen, 0 any free port. names: more names that browsers call it by. cert and key: files of a
    certificate, for TLS. reports: the directory with what pipeline jobs have left. proxies: addresses and
    networks of proxies in front, whose X-Forwarded-For is believed."""

    namesrv: str | None = None
    data: Path
    host: str = HOST
    port: int = PORT
    names: Sequence[str] = ()
    cert: Path | None = None
    key: Path | None = None
    reports: Path | None = None
    proxies: Sequence[str] = ()


class ConsoleError(CometError):
    """The console cannot start."""

    problem: str

    def __str__(self) -> str:
        return self.problem


@dataclass(eq=False)
class Console:
    """`await start()`, `await stop()`. password: of the first account, if start made it."""

    options: ConsoleOptions
    menu: list[MenuEntry] = field(default_factory=list)
    password: str | None = None

    def __post_init__(self) -> None:
        data = self.options.data
        self.namesrv = ";".join(namesrv_addresses(self.options.namesrv))
        self.clusters = Clusters(data / "clusters.json", self.namesrv)
        self.accounts = Accounts(data / "users.json")
        self.sessions = Sessions(self.accounts)
        self.audit = Audit(data / "audit.jsonl")
        self.port = self.options.port
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ending: Periodic | None = None

    # -- pages

    def page(
        self, path: str, title: str, *, menu: int | None = None, icon: str = "", under: str = ""
    ) -> Callable[[Build], Build]:
        """Register a page: its function is awaited with a View, and with the parts of the path as they stand
        in it (`/topics/{name:path}`). title: key of the text in browser and menu; menu: its place there;
        under: the path of the entry that is marked for it."""
        if menu is not None:
            self.menu = sorted([*self.menu, MenuEntry(path, title, icon, menu)], key=lambda each: each.place)

        def register(build: Build) -> Build:
            async def opened(request: Request) -> None:
                view = View(self, request.scope["state"][SESSION], request)
                ui.page_title(f"{view.t(title)} · CometMQ")
                with frame(view, under or path):
                    try:
                        if view.has_cluster:
                            await build(view, **request.path_params)
                        else:
                            no_cluster(view)
                    except Exception as error:
                        if not isinstance(error, CometError):
                            log.exception("page %s failed", path)
                        view.problem(error)
                    view.note(view.t("frame.times", zone=zone()))

            ui.page(path)(opened)
            return build

        return register

    # -- life

    async def start(self) -> None:
        """Listen, and make the first account if there is none.

        Raises ConsoleError, AccountError, OSError.
        """
        self.password = await asyncio.to_thread(self.accounts.make_first)
        texts.table()
        tls = self._tls()
        listening = self._listen()
        self.port = listening.getsockname()[1]
        await self.clusters.start()
        config = uvicorn.Config(
            self._application(tls is not None),
            log_config=None,
            access_log=False,
            server_header=False,
            http=TimedProtocol,
            limit_concurrency=CONNECTIONS_MAX,
            ws_max_size=MESSAGE_MAX,
            timeout_graceful_shutdown=2,
            # Unasked, the server would believe everybody on this machine who he is.
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
        self._ending = Periodic(loop, OLD_SESSIONS_S, self.sessions.end_old, name="the end of old sessions")
        self._ending.start()

    async def stop(self) -> None:
        """End all sessions and pages, and close the connections to the cluster."""
        if self._ending is not None:
            self._ending.cancel()
        self.sessions.end_all()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving])
        await self.clusters.stop()

    @property
    def url(self) -> str:
        """Where a browser of this machine finds it."""
        host = HOST if self.options.host in (*LOOPBACK, *ANY) else self.options.host
        return f"{'https' if self.options.cert else 'http'}://{host}:{self.port}/"

    @property
    def exposed(self) -> bool:
        """Whether others than this machine reach it."""
        return self.options.host not in LOOPBACK

    def _hosts(self) -> frozenset[str]:
        names = {*LOOPBACK, *self.options.names}
        if self.options.host not in ANY:
            names.add(self.options.host)
        with_brackets = {f"[{name}]" if ":" in name and not name.startswith("[") else name for name in names}
        found = {f"{name.lower()}:{self.port}" for name in with_brackets}
        # A proxy in front has its own port, and a browser leaves out the usual one.
        return frozenset(found | {name.lower() for name in self.options.names} | self._usual(with_brackets))

    def _usual(self, names: set[str]) -> set[str]:
        usual = 443 if self.options.cert else 80
        return {name.lower() for name in names} if self.port == usual else set()

    def _proxies(self) -> list[str]:
        for each in self.options.proxies:
            try:
                ip_network(each, strict=False)
            except ValueError:
                raise ConsoleError(f"{each!r} is no address of a proxy") from None
        return list(self.options.proxies)

    def _tls(self) -> ssl.SSLContext | None:
        if self.options.cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.options.cert, self.options.key)
        except (OSError, ssl.SSLError) as error:
            raise ConsoleError(f"the certificate {self.options.cert} cannot be used: {error}") from None
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
            raise ConsoleError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
        return listening

    def _application(self, secure: bool) -> Any:
        ui.add_head_html(HEAD, shared=True)
        framework.add_static_files("/static", STATIC)
        # Without this the page of last resort would be built for strangers.
        framework.add_route("/_nicegui/{path:path}", _no_file)
        for pages in PAGES:
            pages(self)
        _page_of_last_resort(self)
        core.app.config.socket_io_js_transports = ["websocket"]
        core.sio.on("log", _ignore)
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
            reconnect_timeout=RECONNECT_S,
            gzip_middleware_factory=None,
            tailwind=False,
            show_welcome_message=False,
        )
        gate = Gate(
            app=outer,
            accounts=self.accounts,
            sessions=self.sessions,
            audit=self.audit,
            hosts=self._hosts(),
            port=self.port,
            secure=secure,
        )
        return GZipMiddleware(gate, minimum_size=1024, compresslevel=4)


def _ignore(*_given: object) -> None:
    """Of what browsers may ask: the framework would write their words into our log, line ends and all."""


def _of_its_page(handle: Callable[[str, Any], Any]) -> Callable[[str, Any], Awaitable[Any]]:
    """Return a handler of an event that takes only events of the page whose connection it is.

    Without it the framework would take the page that an event names, with what that page's session may do.
    An event with wrong fields is dropped: the framework would write a traceback for each.
    """

    async def checked(sid: str, said: Any) -> Any:
        environ = core.sio.get_environ(sid) or {}
        page = parse_qs(environ.get("QUERY_STRING", "")).get("client_id", [""])[0]
        if not (isinstance(said, dict) and said.get("client_id") == page):
            return None
        try:
            outcome = handle(sid, said)
            return await outcome if isawaitable(outcome) else outcome
        except (LookupError, TypeError, ValueError) as error:
            log.debug("an event of a page has wrong fields: %r", error)
            return None

    return checked


async def _no_file(_request: Request) -> Response:
    return PlainTextResponse("There is no such file.\n", 404)


class _Server(uvicorn.Server):
    """The web server; signals are its owner's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _page_of_last_resort(console: Console) -> None:
    async def missing(view: View, **_parts: str) -> Response | None:
        view.client.status_code = 404
        text_element("h1", view.t("frame.not_found"))
        return None

    console.page("/{path:path}", "frame.not_found")(missing)  # type: ignore[arg-type]
