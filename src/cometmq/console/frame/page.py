"""A page as somebody has it open: its frame, what it shows live, and its way back to the server.

A page is built by a function that gets a View; see the package's text for how one is written. All text that
it shows goes through elements that show text, never HTML: names and bodies are whatever somebody sent.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from nicegui import Client, ui
from nicegui.element import Element
from starlette.requests import Request

from cometmq import logs
from cometmq.admin import Admin
from cometmq.console import texts
from cometmq.console.door.accounts import Role
from cometmq.console.door.sessions import Session
from cometmq.console.frame.live import Feed, Live, Reading
from cometmq.console.frame.rows import Cell
from cometmq.console.frame.shown import shown
from cometmq.errors import CometError

if TYPE_CHECKING:
    from cometmq.console.app import Console
    from cometmq.console.cluster import Cluster
    from cometmq.console.clusters import ClusterConnection

log = logs.logger(__name__)

V = TypeVar("V")

LANGUAGE_COOKIE, THEME_COOKIE, CLUSTER_COOKIE = "cometmq_lang", "cometmq_theme", "cometmq_cluster"
FIRST_S = 0.6
"""A page is sent after so long, also without its first answers, which then follow."""
YEAR_S = 365 * 86_400
_COOKIE = f"path=/; max-age={YEAR_S}; samesite=strict"
_LOCALES = {"en": "en-US", "zh": "zh-CN"}


class NoSuchCluster(CometError):
    """The console has no cluster of the name that a browser has chosen: it was removed."""

    name: str

    def __str__(self) -> str:
        return f"there is no cluster {self.name!r} in this console"


class View:
    """What a page's function is given. `t` says a text; `query` is the page's query as it was opened."""

    def __init__(self, console: Console, session: Session, request: Request) -> None:
        self.console = console
        self.session = session
        self.client = ui.context.client
        cookies = request.cookies
        accepted = texts.language_of(request.headers.get("accept-language", ""))
        asked = cookies.get(LANGUAGE_COOKIE, "")
        self.language = asked if asked in texts.LANGUAGES else accepted
        self.dark = {"dark": True, "light": False}.get(cookies.get(THEME_COOKIE, ""))
        self.path = request.url.path
        self.query = dict(request.query_params)
        self._watches: list[tuple[Feed[Any], Callable[[Reading[Any]], None]]] = []
        self._ends: list[Callable[[], None]] = []
        self._seen = True
        self._gone = False
        self._sent_s = time.monotonic() + FIRST_S
        forget(session.add_page(self.client.id))
        session.on_end[self] = self._session_ended
        # A page stays with the cluster that it was opened for, whatever its browser chooses afterwards.
        self.cluster_name = cookies.get(CLUSTER_COOKIE, "")
        self._connection = console.clusters.find(self.cluster_name)
        if self._connection is not None:
            self._connection.on_end[self] = self._connection_ended
        self.client.on_delete(self._closed)

    # -- what pages ask

    @property
    def has_cluster(self) -> bool:
        """Whether the console has the cluster that the browser has chosen."""
        return self._connection is not None

    @property
    def connection(self) -> ClusterConnection:
        """The cluster of the page. Raises NoSuchCluster: another one must not take its place."""
        if self._connection is None:
            raise NoSuchCluster(self.cluster_name)
        return self._connection

    @property
    def admin(self) -> Admin:
        """The one way to ask the cluster anything."""
        return self.connection.admin

    @property
    def cluster(self) -> Cluster:
        """The questions about the cluster that many pages share."""
        return self.connection.cluster

    @property
    def feeds(self) -> Live:
        return self.connection.live

    @property
    def may_change(self) -> bool:
        """Whether to show what changes something. Each action is checked again when it is done."""
        return not self.session.ended and self.session.role is Role.ADMIN

    def t(self, key: str, **values: object) -> str:
        """The text of a key, in the page's language. Raises UnknownText."""
        return texts.text(self.language, key, **values)

    def shown(self, kind: str, value: Cell) -> str:
        """A value as text; kinds: shown.KINDS."""
        return shown(self.language, kind, value)

    # -- live

    async def first(self, feed: Feed[V]) -> Reading[V]:
        """The latest reading of a feed, its first one if that comes before the page is sent: a page with many
        feeds waits no longer than one with a single one."""
        return await feed.first(max(0.0, self._sent_s - time.monotonic()))

    def watch(self, feed: Feed[V], told: Callable[[Reading[V]], None]) -> None:
        """Have `told` called with each reading of a feed, in the page's context, the latest one at once. It
        ends with the page, and rests while nobody sees the page."""

        def tell(reading: Reading[V]) -> None:
            if not self._gone:
                with self.client:
                    told(reading)

        self._watches.append((feed, tell))
        if self._seen:
            self._ends.append(feed.watch(tell))
        told(feed.latest)

    async def live(self, feed: Feed[V], draw: Callable[[V], None], *, age: bool = True) -> None:
        """An area that `draw` fills, anew whenever the answer has changed; with its age, and the problem
        where there is no newer answer. Before the first answer it says that it asks, or why there is none."""
        await self.first(feed)
        notice = ui.element("div").props("aria-live=polite")
        area = ui.element("div")
        mark = Age(self, feed) if age else None
        last: list[V] = []

        def told(reading: Reading[V]) -> None:
            self.notice(notice, reading)
            if mark is not None:
                mark.show(reading)
            if reading.value is None or (last and last[0] == reading.value):
                return
            last[:] = [reading.value]
            area.clear()
            with area:
                draw(reading.value)

        self.watch(feed, told)

    def source(self, feed: Feed[Any], key: str) -> None:
        """Of what is shown elsewhere in the page: what it is (key), how old, and why there is no newer."""
        with ui.element("div").classes("aged"):
            text_element("span", self.t(key)).classes("age")
            mark = Age(self, feed)
        notice = ui.element("div").props("aria-live=polite")

        def told(reading: Reading[Any]) -> None:
            mark.show(reading)
            self.notice(notice, reading)

        self.watch(feed, told)

    async def fill(self, place: Element, question: Awaitable[V], draw: Callable[[V], None]) -> None:
        """Ask something once and draw the answer into a place, in which stands meanwhile that it is asked,
        and afterwards the problem if there was one."""
        place.clear()
        with place:
            self.note(self.t("common.asking")).props("role=status")
        try:
            found = await question
        except Exception as error:
            place.clear()
            with place:
                self.problem(error)
            return
        place.clear()
        with place:
            draw(found)
            _aged(ui.element("span").classes("age"), time.time(), 0.0)

    def notice(self, place: Element, reading: Reading[Any]) -> None:
        """Say in a place that a feed has not answered yet, or why it has no newer answer."""
        place.clear()
        with place:
            if reading.problem is not None and reading.value is not None:
                self.note(self.t("common.stale", problem=self.why(reading.problem)), "problem")
            elif reading.problem is not None:
                self.problem(reading.problem)
            elif reading.value is None:
                self.note(self.t("common.asking"))

    # -- what stands in a page

    def title(self, said: str) -> None:
        """The page's heading, once a page."""
        text_element("h1", said)
        ui.page_title(f"{said} · CometMQ")

    @contextmanager
    def section(self, key: str) -> Iterator[None]:
        """A part of the page under a heading."""
        with ui.element("section"):
            text_element("h2", self.t(key))
            yield

    def note(self, said: str, kind: str = "note") -> TextElement:
        """A sentence. kind: a class of console.css, as `note`, `bad`, `problem`."""
        return text_element("p", said).classes(kind)

    def problem(self, error: Exception) -> None:
        """Why something is unavailable, in the words of who refused it."""
        if not isinstance(error, CometError):
            log.error("a page failed: %r", error)
        with ui.element("div").classes("problem").props("role=alert"):
            text_element("strong", self.t("common.unavailable"))
            text_element("p", self.t("common.unavailable_hint"))
            text_element("div", self.why(error)).classes("why")

    def why(self, error: Exception) -> str:
        """An error as somebody may see it: those of our own making say what happened, others only in the
        log."""
        return str(error) if isinstance(error, CometError) else self.t("common.failed")

    def empty(self, key: str) -> None:
        """That there is nothing, and what to do next."""
        text_element("p", self.t(key)).classes("empty")

    def facts(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values; the names are said already."""
        with ui.element("dl").classes("facts"):
            for name, value in pairs:
                text_element("dt", name)
                text_element("dd", value)

    def tiles(self, pairs: Sequence[tuple[str, str]]) -> None:
        """A few numbers that matter, large."""
        with ui.element("dl").classes("tiles"):
            for name, value in pairs:
                with ui.element("div").classes("tile"):
                    text_element("dt", name)
                    text_element("dd", value)

    def link(self, said: str, href: str) -> None:
        """A link within the console; href: of rows.path_of."""
        element = text_element("a", said)
        element.props["href"] = href

    def button(self, key: str, do: Callable[[], Any], *, icon: str = "", danger: bool = False) -> Element:
        """A button with its text, which takes no second click until the first one is done. danger: it
        destroys something."""

        async def clicked() -> None:
            made.props("loading")
            try:
                await self.run(do)
            finally:
                made.props(remove="loading")

        made = ui.button(
            self.t(key),
            on_click=clicked,
            icon=icon or None,
            color="negative" if danger else "primary",
        )
        return made.props("outline no-caps" if danger else "unelevated no-caps")

    # -- messages and the address

    def say(self, key: str, **values: object) -> None:
        """A message that goes away."""
        self.tell(self.t(key, **values))

    def tell(self, said: str) -> None:
        """The same, with words that are there already."""
        if self._gone:
            return
        with self.client:
            ui.notify(said[:2000], type="positive", close_button=self.t("common.close"))

    def complain(self, said: str) -> None:
        """A message that stays until it is closed."""
        if self._gone:
            return
        with self.client:
            ui.notify(
                said[:2000], type="negative", multi_line=True, timeout=0, close_button=self.t("common.close")
            )

    def note_query(self) -> None:
        """Make the page's address name what it shows, by `query`."""
        said = json.dumps(f"?{urlencode(self.query)}" if self.query else "")
        self.client.run_javascript(f"history.replaceState(null, '', location.pathname + {said})")

    async def run(self, do: Callable[..., Any], *given: Any) -> None:
        """Do what a click asks for, plain or awaitable; a failure is told."""
        try:
            with self.client:
                outcome = do(*given)
                if isawaitable(outcome):
                    await outcome
        except Exception as error:
            if not isinstance(error, CometError):
                log.exception("a click failed")
            self.complain(self.why(error))

    def open(self, path: str) -> None:
        """Go to another page of the console."""
        self.client.open(path)

    # -- its end

    def _session_ended(self) -> None:
        if not self._gone:
            self.client.open("/login")
            self._end_watches()

    def _connection_ended(self) -> None:
        """Reload the page: the cluster was removed or has other settings."""
        if not self._gone:
            name = self.connection.name
            if name not in self.console.clusters.connections:
                # A browser that had chosen none must not be shown another cluster without notice, either.
                _set_cookie(self, CLUSTER_COOKIE, name)
            self.client.open(self.path)
            self._end_watches()

    def _closed(self) -> None:
        self._gone = True
        self._end_watches()
        if self._connection is not None:
            self._connection.on_end.pop(self, None)
        self.session.on_end.pop(self, None)
        self.session.pages.pop(self.client.id, None)

    def _end_watches(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            end()

    def seen(self, seen: bool) -> None:
        """Whether the page's tab is in front: behind others nothing is asked for it."""
        if seen == self._seen or self._gone:
            return
        self._seen = seen
        self._end_watches()
        for feed, tell in self._watches if seen else ():
            self._ends.append(feed.watch(tell))


def forget(page_id: str | None) -> None:
    """Give up a page to which no browser has come: it would stay for a minute, however many there are. One
    that is open goes when its browser does."""
    client = Client.instances.get(page_id or "")
    if client is not None and client.environ is None:
        client.delete()


class Age:
    """How old the answer of a feed is, which ticks in the browser, and a button to ask again."""

    def __init__(self, view: View, feed: Feed[Any]) -> None:
        with ui.element("div").classes("aged"):
            self._element = ui.element("span").classes("age")
            # Without a colour of the framework's, which no rule of ours changes for the dark.
            button = ui.button(icon="refresh", on_click=feed.refresh, color=None)
            button.props("flat dense round size=sm")
        button.props["aria-label"] = button.props["title"] = view.t("common.refresh")

    def show(self, reading: Reading[Any]) -> None:
        """Begin anew with a reading."""
        if reading.at_s:
            _aged(self._element, reading.at_s, reading.age_s)


def _aged(element: Element, at_s: float, age_s: float) -> None:
    """Have an element of the class `age` say how old something is, from now on."""
    element.props["data-at"] = str(int(at_s * 1000))
    element.props["data-age"] = f"{age_s:.1f}"


def text_element(tag: str, said: str) -> TextElement:
    """An element of HTML with a text in it, shown as it is: the browser reads no markup in it."""
    return TextElement(tag, said)


class TextElement(Element):
    """See text_element."""

    def __init__(self, tag: str, said: str) -> None:
        super().__init__(tag)
        self._text = said

    def say(self, said: str) -> None:
        """Another text."""
        if said != self._text:
            self._text = said
            self.update()


def frame(view: View, current: str) -> Element:
    """What is around every page: bar, menu, and the element that the page is to be built in. current: the
    path of its entry in the menu."""
    page = copy.copy(view.client.page)
    page.language = _LOCALES[view.language]  # type: ignore[assignment]
    page.dark = view.dark
    view.client.page = page
    ui.on("page_seen", lambda event: view.seen(bool(event.args)))
    skip = text_element("a", view.t("frame.skip")).classes("skip")
    skip.props["href"] = "#main"
    with ui.element("header").classes("top"), ui.element("div").classes("bar"):
        menu_button = _icon_button(view, "menu", "frame.menu", None)
        menu_button.on("click", js_handler="() => document.body.classList.toggle('menu-other')")
        brand = text_element("a", "CometMQ").classes("brand")
        brand.props["href"] = "/"
        _cluster_choice(view)
        if view.has_cluster:
            text_element("span", view.t("frame.cluster", addrs=view.connection.namesrv)).classes("where")
        _icon_button(view, "contrast", "frame.dark", lambda: _toggle_dark(view))
        _icon_button(view, "translate", "frame.language", lambda: _next_language(view))
        _log_out(view)
    with ui.element("div").classes("shell"):
        with ui.element("nav").classes("menu") as menu:
            menu.props["aria-label"] = view.t("frame.menu")
            for entry in view.console.menu:
                with ui.element("a") as link:
                    link.props["href"] = entry.path
                    if entry.path == current:
                        link.props["aria-current"] = "page"
                    ui.icon(entry.icon, size="20px").props("aria-hidden=true")
                    text_element("span", view.t(entry.title))
        main = ui.element("main").classes("page")
    main.props["id"] = "main"
    main.props["tabindex"] = "-1"
    return main


def _icon_button(view: View, icon: str, key: str, do: Callable[[], Any] | None) -> ui.button:
    button = ui.button(icon=icon, on_click=do).props("flat dense round color=white")
    button.props["aria-label"] = button.props["title"] = view.t(key)
    return button


def _log_out(view: View) -> None:
    """A form: what ends a session is posted, with the session's token."""
    who = view.t("frame.user", name=view.session.name, role=view.t(f"frame.{view.session.role}"))
    with ui.element("form") as form:
        form.props["method"] = "post"
        form.props["action"] = "/logout"
        token = ui.element("input").props("type=hidden name=csrf")
        token.props["value"] = view.session.csrf
        button = ui.button(icon="logout").props("flat dense round color=white type=submit")
        button.props["aria-label"] = button.props["title"] = f"{view.t('frame.logout')}: {who}"


def _set_cookie(view: View, name: str, value: str) -> None:
    """Set a cookie for what pages show and how, which is not secret."""
    said = json.dumps(f"{name}={value}; {_COOKIE}")
    view.client.run_javascript(f"document.cookie = {said}")


def _cluster_choice(view: View) -> None:
    """Let a browser choose one of several clusters."""
    clusters = view.console.clusters
    if not (clusters.several and view.has_cluster):
        return
    made = ui.select(
        list(clusters.connections),
        value=view.connection.name,
        on_change=lambda event: _choose_cluster(view, event.value),
    )
    made.props("dense dark borderless options-dense")
    made.props["aria-label"] = view.t("clusters.choose")


def _choose_cluster(view: View, name: str) -> None:
    if name in view.console.clusters.connections:
        _set_cookie(view, CLUSTER_COOKIE, name)
    view.client.run_javascript("location.assign('/')")


def no_cluster(view: View) -> None:
    """Fill a page whose cluster was removed, with status 404: its browser must choose another cluster."""
    view.client.status_code = 404
    view.title(view.t("clusters.gone", name=view.cluster_name[:64]))
    view.note(view.t("clusters.gone_hint"))
    for name in view.console.clusters.connections:
        do = partial(_choose_cluster, view, name)
        ui.button(view.t("clusters.show", name=name), on_click=do).props("no-caps")


def _toggle_dark(view: View) -> None:
    """Of what is to be seen: without a choice it is as the browser's system has it, which it alone knows."""
    view.client.run_javascript(
        "const dark = !document.body.classList.contains('body--dark'); setDark(dark);"
        f"document.cookie = `{THEME_COOKIE}=${{dark ? 'dark' : 'light'}}; {_COOKIE}`"
    )


def _next_language(view: View) -> None:
    known = list(texts.LANGUAGES)
    _set_cookie(view, LANGUAGE_COOKIE, known[(known.index(view.language) + 1) % len(known)])
    view.client.run_javascript("location.reload()")


def zone() -> str:
    """The time zone of shown times, as `+0800`."""
    return time.strftime("%z") or "UTC"
