"""A forged browser that logs in, opens pages, and sends arbitrary events on a page's connection."""

from __future__ import annotations

import html
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

WITHIN_S = 60.0
Elements = dict[int, dict[str, Any]]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_given: Any) -> None:
        return None


class Forged:
    """A client with cookies. `url` is the console's address."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url = url
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.cookies: dict[str, str] = {}
        self._opener = urllib.request.build_opener(_NoRedirect)

    @property
    def cookie(self) -> str:
        return "; ".join(f"{name}={value}" for name, value in self.cookies.items())

    def ask(self, path: str, form: dict[str, str] | None = None, **headers: str) -> tuple[int, str]:
        """Return the status and text of a response; cookies are kept."""
        body = urlencode(form).encode() if form is not None else None
        asked = urllib.request.Request(self.url + path, body, {**self.headers, **headers})
        if self.cookies:
            asked.add_header("Cookie", self.cookie)
        try:
            answer = self._opener.open(asked, timeout=WITHIN_S)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            for line in answer.headers.get_all("set-cookie") or []:
                name, _, value = line.split(";")[0].partition("=")
                self.cookies[name] = value
            return answer.status, answer.read().decode()

    def log_in(self, name: str, password: str, **headers: str) -> int:
        """Log in and return the status of the response, which is 303 on success."""
        token = re.search(r'name="csrf" value="([^"]+)"', self.ask("/login")[1])
        assert token is not None
        form = {"csrf": token[1], "name": name, "password": password}
        return self.ask("/login", form, **headers)[0]

    def open(self, path: str) -> ForgedPage:
        """Open a page and its connection."""
        status, said = self.ask(path)
        assert status in (200, 404), f"{status} {said[:200]}"
        return ForgedPage(self, said)


class ForgedPage:
    """An open page: its elements and its connection. Use as a context manager."""

    def __init__(self, who: Forged, said: str) -> None:
        found = re.search(r'"client_id":\s*"([^"]+)"', said) or re.search(r"'client_id': '([^']+)'", said)
        drawn = re.search(r"parseElements\(String.raw`(.*?)`\)", said, re.DOTALL)
        assert found is not None, said[-3000:]
        assert drawn is not None
        self.client_id = found[1]
        plain = json.loads(html.unescape(drawn[1]))
        self.elements: Elements = {int(number): each for number, each in plain.items()}
        self.heard: list[list[Any]] = []
        query = {
            "client_id": self.client_id, "next_message_id": 0, "implicit_handshake": "true", "EIO": 4,
            "tab_id": f"tab-{self.client_id}", "document_id": "d", "transport": "websocket",
        }  # fmt: skip
        place = urlsplit(who.url)
        connecting = connect(
            f"ws://{place.netloc}/_nicegui_ws/socket.io/?{urlencode(query)}",
            origin=Origin(who.url), additional_headers={"Cookie": who.cookie}, max_size=1 << 28,
        )  # fmt: skip
        self._closing = ExitStack()
        self.socket: ClientConnection = self._closing.enter_context(connecting)
        self.socket.recv(timeout=WITHIN_S)
        self.socket.send("40")
        self.until(lambda: bool(self.heard))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._closing.close()

    def until(self, true: Callable[[], Any], within_s: float = WITHIN_S) -> None:
        """Receive messages until a condition is true."""
        ends = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < ends, f"not within {within_s} s; heard {str(self.heard[-5:])[:2000]}"
            try:
                self._hear(self.socket.recv(timeout=0.1))
            except TimeoutError:
                continue

    def _hear(self, message: str | bytes) -> None:
        if message == "2":
            self.socket.send("3")
        elif isinstance(message, str) and message.startswith("40"):
            self.heard.append(["connected"])
        elif isinstance(message, str) and message.startswith(("42", "45")):
            kind, *given = json.loads(message[message.index("[") :])
            self.heard.append([kind, *given])
            if kind == "update":
                for number, each in given[0].items():
                    if number != "_id" and each is None:
                        self.elements.pop(int(number), None)
                    elif number != "_id":
                        self.elements[int(number)] = each

    # -- elements of the page

    def find(self, said: str, kind: str = "click") -> tuple[int, str] | None:
        """Return (id, listener) of the newest element with a label and a listener of this kind."""
        for number, each in sorted(self.elements.items(), reverse=True):
            props = each.get("props", {})
            if said in (props.get("label"), props.get("aria-label"), each.get("text")):
                for event in each.get("events", ()):
                    if event["type"].startswith(kind):
                        return number, event["listener_id"]
        return None

    # -- events

    def emit(self, event: str, said: dict[str, Any]) -> None:
        self.socket.send("42" + json.dumps([event, said]))

    def event(self, found: tuple[int, str], *args: Any, client_id: str = "") -> None:
        """Send an event of an element. `client_id` may be the id of another page."""
        number, listener = found
        given = [json.dumps(each) for each in args]
        page = client_id or self.client_id
        self.emit("event", {"id": number, "client_id": page, "listener_id": listener, "args": given})

    def click(self, said: str, times: int = 1) -> None:
        """Click the element with a label once it exists."""
        self.until(lambda: self.find(said))
        found = self.find(said)
        assert found is not None
        for _ in range(times):
            self.event(found, {})

    def fill(self, said: str, value: Any) -> None:
        """Enter a value into the field with a label."""
        self.until(lambda: self.find(said, "update:"))
        found = self.find(said, "update:")
        assert found is not None
        self.event(found, value)
