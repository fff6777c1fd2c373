"""The view of an open page: its elements, its live values, and its connection to the server.

All text is shown by elements that cannot contain HTML, because names and bodies come from untrusted senders.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isawaitable
from typing import Any, TypeVar
from urllib.parse import urlencode

from nicegui import Client, ui
from nicegui.element import Element
from starlette.requests import Request

from cometmq import logs
from cometmq.admin import Admin
from cometmq.console.auth.accounts import Role
from cometmq.console.auth.sessions import Session
from cometmq.console.base import texts
from cometmq.console.base.cluster_feeds import ClusterFeeds
from cometmq.console.base.clusters import MAX_NAME_LENGTH, ClusterConnection
from cometmq.console.base.feeds import Feed, Feeds, Reading
from cometmq.console.widgets.formats import formatted
from cometmq.console.widgets.rows import Cell
from cometmq.console.widgets.services import Services
from cometmq.errors import CometError

log = logs.logger(__name__)

V = TypeVar("V")

LANGUAGE_COOKIE, THEME_COOKIE, CLUSTER_COOKIE = "cometmq_lang", "cometmq_theme", "cometmq_cluster"
FIRST_ANSWERS_TIMEOUT_S = 0.6
"""Seconds for which a new page waits for its first values before it is sent.

Values that arrive later are added to the open page.
"""
MAX_NOTIFICATION_LENGTH = 2000
YEAR_S = 365 * 86_400
_COOKIE = f"path=/; max-age={YEAR_S}; samesite=strict"
_LOCALES = {"en": "en-US", "zh": "zh-CN"}


class NoSuchCluster(CometError):
    """The cluster that the browser's user has chosen was removed from the console."""

    name: str

    def __str__(self) -> str:
        return f"there is no cluster {self.name!r} in this console"


class View:
    """An open page, passed to the function that builds it. `query` is the query of the page's address."""

    def __init__(self, services: Services, session: Session, request: Request) -> None:
        self.services = services
        self.session = session
        self.client = ui.context.client
        cookies = request.cookies
        accepted = texts.preferred_language(request.headers.get("accept-language", ""))
        chosen = cookies.get(LANGUAGE_COOKIE, "")
        self.language = chosen if chosen in texts.LANGUAGES else accepted
        self.dark = {"dark": True, "light": False}.get(cookies.get(THEME_COOKIE, ""))
        self.path = request.url.path
        self.query = dict(request.query_params)
        self._watches: list[tuple[Feed[Any], Callable[[Reading[Any]], None]]] = []
        self._end_functions: list[Callable[[], None]] = []
        self._visible = True
        self._closed = False
        self._send_at_s = time.monotonic() + FIRST_ANSWERS_TIMEOUT_S
        delete_unopened(session.add_page(self.client.id))
        session.on_end[self] = self._session_ended
        # Read the name of the chosen cluster only once, so that this page keeps its cluster when the user
        # chooses another cluster in another page.
        self.cluster_name = cookies.get(CLUSTER_COOKIE, "")
        self._connection = services.clusters.find(self.cluster_name)
        if self._connection is not None:
            self._connection.on_end[self] = self._connection_ended
        self.client.on_delete(self._on_closed)

    @property
    def has_cluster(self) -> bool:
        """Whether the console has the cluster that the browser's user has chosen."""
        return self._connection is not None

    @property
    def connection(self) -> ClusterConnection:
        """The connection to the page's cluster.

        Raises NoSuchCluster if the cluster was removed, because another cluster must not replace it
        unnoticed.
        """
        if self._connection is None:
            raise NoSuchCluster(self.cluster_name)
        return self._connection

    @property
    def admin(self) -> Admin:
        """The admin client of the page's cluster."""
        return self.connection.admin

    @property
    def cluster(self) -> ClusterFeeds:
        """The feeds that several pages of the cluster share."""
        return self.connection.cluster

    @property
    def feeds(self) -> Feeds:
        return self.connection.feeds

    @property
    def may_change(self) -> bool:
        """Whether to show buttons for changes. Each change checks the user's permission again."""
        return not self.session.ended and self.session.role is Role.ADMIN

    def t(self, key: str, **values: object) -> str:
        """Return the text of a key in the page's language. Raises UnknownText."""
        return texts.text(self.language, key, **values)

    def format(self, kind: str, value: Cell) -> str:
        """Return a value as a text. `kind` is a key of formats.KINDS."""
        return formatted(self.language, kind, value)

    # -- live values

    async def first_reading(self, feed: Feed[V]) -> Reading[V]:
        """Return the state of a feed.

        If no request of the feed has ended yet, wait for the first one until the page must be sent
        (FIRST_ANSWERS_TIMEOUT_S).
        """
        return await feed.first(max(0.0, self._send_at_s - time.monotonic()))

    def watch(self, feed: Feed[V], on_reading: Callable[[Reading[V]], None]) -> None:
        """Call `on_reading` with the state of a feed now and after each request, in the context of the page.

        The calls pause while the page is not visible, and end when the page is closed.
        """

        def call(reading: Reading[V]) -> None:
            if not self._closed:
                with self.client:
                    on_reading(reading)

        self._watches.append((feed, call))
        if self._visible:
            self._end_functions.append(feed.watch(call))
        on_reading(feed.latest)

    async def live(self, feed: Feed[V], draw: Callable[[V], None], *, age: bool = True) -> None:
        """Add an area that `draw` fills each time the value of a feed has changed.

        The area also shows the age of the value, or, without a value, that the feed is loading or has failed.
        """
        await self.first_reading(feed)
        notice = live_area()
        area = ui.element("div")
        age_element = Age(self, feed) if age else None
        last: list[V] = []

        def show(reading: Reading[V]) -> None:
            self.show_state(notice, reading)
            if age_element is not None:
                age_element.show(reading)
            if reading.value is None or (last and last[0] == reading.value):
                return
            last[:] = [reading.value]
            area.clear()
            with area:
                draw(reading.value)

        self.watch(feed, show)

    def show_age(self, feed: Feed[Any], key: str) -> None:
        """Show the age and the errors of a feed whose values are shown in another part of the page.

        `key` is the key of the translated text before the age.
        """
        with ui.element("div").classes("aged"):
            text_element("span", self.t(key)).classes("age")
            age = Age(self, feed)
        notice = live_area()

        def show(reading: Reading[Any]) -> None:
            age.show(reading)
            self.show_state(notice, reading)

        self.watch(feed, show)

    async def load(self, place: Element, question: Awaitable[V], draw: Callable[[V], None]) -> None:
        """Show in `place` that data is being requested, then what `draw` adds, or the error.

        `draw` is called with the result of `question`.
        """
        place.clear()
        with place:
            self.note(self.t("common.asking")).props("role=status")
        try:
            answer = await question
        except Exception as error:
            place.clear()
            with place:
                self.error(error)
            return
        place.clear()
        with place:
            draw(answer)
            _set_age(ui.element("span").classes("age"), time.time(), 0.0)

    def show_state(self, place: Element, reading: Reading[Any]) -> None:
        """Show in `place` the error of a feed's last request, or that its first value is being requested.

        If the feed has a value and its last request succeeded, `place` is emptied.
        """
        place.clear()
        with place:
            if reading.problem is not None and reading.value is not None:
                self.note(self.t("common.stale", problem=self.error_text(reading.problem)), "problem")
            elif reading.problem is not None:
                self.error(reading.problem)
            elif reading.value is None:
                self.note(self.t("common.asking"))

    # -- elements of a page

    def title(self, text: str) -> None:
        """Add the heading of the page."""
        text_element("h1", text)
        ui.page_title(f"{text} · CometMQ")

    @contextmanager
    def section(self, key: str) -> Iterator[None]:
        """Add a section with a heading. The `with` body fills it."""
        with ui.element("section"):
            text_element("h2", self.t(key))
            yield

    def note(self, text: str, kind: str = "note") -> TextElement:
        """Add a sentence. `kind` is a CSS class in console.css, for example `note`, `bad` or `problem`."""
        return text_element("p", text).classes(kind)

    def missing_brokers(self, missing: Mapping[str, object]) -> None:
        """Add a note for each broker that did not respond. `missing` has the errors by broker name."""
        for name, problem in missing.items():
            self.note(self.t("common.missing", name=name, problem=problem), "problem")

    def error(self, error: Exception) -> None:
        """Add the text of an error, which tells the user why a value is unavailable."""
        if not isinstance(error, CometError):
            log.error("a page failed: %r", error)
        with ui.element("div").classes("problem").props("role=alert"):
            text_element("strong", self.t("common.unavailable"))
            text_element("p", self.t("common.unavailable_hint"))
            text_element("div", self.error_text(error)).classes("why")

    def error_text(self, error: Exception) -> str:
        """Return the text of a CometError. For any other error, return a general text without details."""
        return str(error) if isinstance(error, CometError) else self.t("common.failed")

    def empty(self, key: str) -> None:
        """Add a text for an empty result. The text includes a hint about what to do next."""
        text_element("p", self.t(key)).classes("empty")

    def facts(self, pairs: Sequence[tuple[str, str]], *, translated: bool = False) -> None:
        """Add a list of names and values.

        The names are keys of texts, or with `translated` the texts themselves.
        """
        with ui.element("dl").classes("facts"):
            for name, value in pairs:
                text_element("dt", name if translated else self.t(name))
                text_element("dd", value)

    def tiles(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Add important values in large type. Each pair is the key of the value's label and the value."""
        with ui.element("dl").classes("tiles"):
            for key, value in pairs:
                with ui.element("div").classes("tile"):
                    text_element("dt", self.t(key))
                    text_element("dd", value)

    def link(self, text: str, href: str) -> None:
        """Add a link within the console. `href` is a result of `rows.path_of`."""
        text_element("a", text).props["href"] = href

    def button(
        self, key: str, on_click: Callable[[], Any], *, icon: str = "", danger: bool = False
    ) -> Element:
        """Add a button that ignores further clicks until the action of the first click has ended.

        `danger` marks an action that destroys data.
        """

        async def clicked() -> None:
            made.props("loading")
            try:
                await self.run(on_click)
            finally:
                made.props(remove="loading")

        made = ui.button(
            self.t(key), on_click=clicked, icon=icon or None, color="negative" if danger else "primary"
        )
        return made.props("outline no-caps" if danger else "unelevated no-caps")

    # -- notifications, address, navigation

    def notify(self, text: str) -> None:
        """Show a message that disappears by itself."""
        self._notify(text, type="positive")

    def notify_error(self, text: str) -> None:
        """Show a message until the user closes it."""
        self._notify(text, type="negative", multi_line=True, timeout=0)

    def _notify(self, text: str, **options: Any) -> None:
        if not self._closed:
            with self.client:
                close = self.t("common.close")
                ui.notify(text[:MAX_NOTIFICATION_LENGTH], close_button=close, **options)

    def set_query(self, query: dict[str, str]) -> None:
        """Set the query of the page's address, so that the address identifies what the page shows."""
        self.query = query
        suffix = json.dumps(f"?{urlencode(query)}" if query else "")
        self.client.run_javascript(f"history.replaceState(null, '', location.pathname + {suffix})")

    async def run(self, action: Callable[..., Any], *args: Any) -> None:
        """Call a function, plain or asynchronous. If it raises an error, show the error to the user."""
        try:
            with self.client:
                outcome = action(*args)
                if isawaitable(outcome):
                    await outcome
        except Exception as error:
            if not isinstance(error, CometError):
                log.exception("a click failed")
            self.notify_error(self.error_text(error))

    def open(self, path: str) -> None:
        """Open another page of the console."""
        self.client.open(path)

    # -- end of the page

    def _session_ended(self) -> None:
        if not self._closed:
            self.client.open("/login")
            self._end_watches()

    def _connection_ended(self) -> None:
        """Reload the page, because its cluster was removed or its settings were changed."""
        if not self._closed:
            name = self.connection.name
            if name not in self.services.clusters.connections:
                # The cluster was removed. The cookie makes the reloaded page report this, even if the user
                # has never chosen a cluster. Otherwise the page would switch to another cluster unnoticed.
                _set_cookie(self, CLUSTER_COOKIE, name)
            self.client.open(self.path)
            self._end_watches()

    def _on_closed(self) -> None:
        self._closed = True
        self._end_watches()
        if self._connection is not None:
            self._connection.on_end.pop(self, None)
        self.session.on_end.pop(self, None)
        self.session.pages.pop(self.client.id, None)

    def _end_watches(self) -> None:
        ends, self._end_functions = self._end_functions, []
        for end in ends:
            end()

    def set_visible(self, visible: bool) -> None:
        """Pause the feeds of the page while its browser tab is in the background."""
        if visible == self._visible or self._closed:
            return
        self._visible = visible
        self._end_watches()
        for feed, call in self._watches if visible else ():
            self._end_functions.append(feed.watch(call))


def delete_unopened(page_id: str | None) -> None:
    """Delete a page that no browser has opened, because it would occupy memory for a minute."""
    client = Client.instances.get(page_id or "")
    if client is not None and client.environ is None:
        client.delete()


class Age:
    """The age of a feed's value, which the browser updates, and a button that requests a new value."""

    def __init__(self, view: View, feed: Feed[Any]) -> None:
        with ui.element("div").classes("aged"):
            self._element = ui.element("span").classes("age")
            # No color, because NiceGUI's default color for buttons is illegible on the dark theme.
            button = ui.button(icon="refresh", on_click=feed.refresh, color=None)
            set_label(button.props("flat dense round size=sm"), view.t("common.refresh"))

    def show(self, reading: Reading[Any]) -> None:
        """Show the age of the feed's latest value. Does nothing before the first value."""
        if reading.at_s:
            _set_age(self._element, reading.at_s, reading.age_s)


def _set_age(element: Element, at_s: float, age_s: float) -> None:
    """Set the attributes from which console.js computes the age shown in an element of the class `age`."""
    element.props["data-at"] = str(int(at_s * 1000))
    element.props["data-age"] = f"{age_s:.1f}"


def set_label(element: Element, label: str) -> None:
    """Set the accessible name and the tooltip of a button that has only an icon."""
    element.props["aria-label"] = element.props["title"] = label


def live_area() -> Element:
    """Return an empty element. Screen readers announce what is later added to it."""
    return ui.element("div").props("aria-live=polite")


class TextElement(Element):
    """An HTML element whose text the browser does not parse as HTML."""

    def __init__(self, tag: str, text: str) -> None:
        super().__init__(tag)
        self._text = text

    def set_text(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self.update()


text_element = TextElement


def frame(view: View, current: str) -> Element:
    """Add the top bar and the console's menu to the page. Return the element for the page's content.

    `current` is the path of the page's menu entry.
    """
    page = copy.copy(view.client.page)
    page.language = _LOCALES[view.language]  # type: ignore[assignment]
    page.dark = view.dark
    view.client.page = page
    ui.on("page_seen", lambda event: view.set_visible(bool(event.args)))
    text_element("a", view.t("frame.skip")).classes("skip").props["href"] = "#main"
    with ui.element("header").classes("top"), ui.element("div").classes("bar"):
        menu_button = _icon_button(view, "menu", "frame.menu", None)
        menu_button.on("click", js_handler="() => document.body.classList.toggle('menu-other')")
        text_element("a", "CometMQ").classes("brand").props["href"] = "/"
        _cluster_choice(view)
        if view.has_cluster:
            text_element("span", view.t("frame.cluster", addrs=view.connection.namesrv)).classes("where")
        _icon_button(view, "contrast", "frame.dark", lambda: _toggle_dark(view))
        _icon_button(view, "translate", "frame.language", lambda: _next_language(view))
        _logout_button(view)
    with ui.element("div").classes("shell"):
        with ui.element("nav").classes("menu") as menu:
            menu.props["aria-label"] = view.t("frame.menu")
            for entry in view.services.menu:
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


def _icon_button(view: View, icon: str, key: str, on_click: Callable[[], Any] | None) -> ui.button:
    button = ui.button(icon=icon, on_click=on_click).props("flat dense round color=white")
    set_label(button, view.t(key))
    return button


def _logout_button(view: View) -> None:
    """Add a form with the session's token.

    A link is not possible, because a logout must be a POST request.
    """
    user = view.t("frame.user", name=view.session.name, role=view.t(f"frame.{view.session.role}"))
    with ui.element("form").props("method=post action=/logout"):
        ui.element("input").props("type=hidden name=csrf").props["value"] = view.session.csrf
        button = ui.button(icon="logout").props("flat dense round color=white type=submit")
        set_label(button, f"{view.t('frame.logout')}: {user}")


def _set_cookie(view: View, name: str, value: str) -> None:
    """Set a cookie with a display setting of the user. Such settings are not secret."""
    cookie = json.dumps(f"{name}={value}; {_COOKIE}")
    view.client.run_javascript(f"document.cookie = {cookie}")


def _cluster_choice(view: View) -> None:
    """If there are several clusters, add a field in which the user chooses a cluster."""
    clusters = view.services.clusters
    if not (clusters.several and view.has_cluster):
        return
    made = ui.select(
        list(clusters.connections), value=view.connection.name,
        on_change=lambda event: _choose_cluster(view, event.value),
    )  # fmt: skip
    made.props("dense dark borderless options-dense").props["aria-label"] = view.t("clusters.choose")


def _choose_cluster(view: View, name: str) -> None:
    if name in view.services.clusters.connections:
        _set_cookie(view, CLUSTER_COOKIE, name)
    view.client.run_javascript("location.assign('/')")


def no_cluster(view: View) -> None:
    """Show, with status 404, that the cluster was removed, and let the user choose another cluster."""
    view.client.status_code = 404
    view.title(view.t("clusters.gone", name=view.cluster_name[:MAX_NAME_LENGTH]))
    view.note(view.t("clusters.gone_hint"))
    for name in view.services.clusters.connections:
        choose = partial(_choose_cluster, view, name)
        ui.button(view.t("clusters.show", name=name), on_click=choose).props("no-caps")


def _toggle_dark(view: View) -> None:
    """Toggle the theme in the browser, because only the browser knows the system's setting."""
    view.client.run_javascript(
        "const dark = !document.body.classList.contains('body--dark'); setDark(dark);"
        f"document.cookie = `{THEME_COOKIE}=${{dark ? 'dark' : 'light'}}; {_COOKIE}`"
    )


def _next_language(view: View) -> None:
    languages = list(texts.LANGUAGES)
    following = languages[(languages.index(view.language) + 1) % len(languages)]
    _set_cookie(view, LANGUAGE_COOKIE, following)
    view.client.run_javascript("location.reload()")


def zone() -> str:
    """Return the time zone in which the console shows times, for example `+0800`."""
    return time.strftime("%z") or "UTC"
