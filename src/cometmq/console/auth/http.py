"""ASGI helpers for the gate: reading requests and writing responses."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[str, str]]

MAX_FORM_BYTES = 8192
_MAX_FORM_FIELDS = 16
_FRAME = re.compile(r"[123]|4[01]|42\d{0,9}(?=\[)")
"""Pattern for the start of the frames that a page sends.

They are ping, pong, connect, disconnect, and an event with or without the number of its acknowledgement.
"""
_SCRIPT = re.compile(rb"<script(?=[\s>])")


def header(scope: Scope, name: str) -> str:
    """Return the value of the first header with a name, or ""."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(bytes(value), "latin-1")
    return ""


def cookie(scope: Scope, name: str) -> str:
    """Return the value of a cookie, or ""."""
    for part in header(scope, "cookie").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def query(scope: Scope, name: str) -> str:
    """Return the value of a parameter in a request's query string, or "" if there is none."""
    try:
        found = parse_qs(str(scope.get("query_string", b""), "latin-1"), max_num_fields=100)
    except ValueError:
        return ""
    return found.get(name, [""])[0]


async def form(receive: Receive) -> dict[str, str] | None:
    """Return the fields of a posted form, or None if the form is too long, incomplete or malformed."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_FORM_BYTES:
            return None
        if not message.get("more_body"):
            break
    try:
        fields = parse_qs(
            body.decode("utf-8"),
            keep_blank_values=True,
            max_num_fields=_MAX_FORM_FIELDS,
            strict_parsing=bool(body),
        )
    except ValueError:
        return None
    return {name: values[0] for name, values in fields.items()}


def is_page_frame(message: Message) -> bool:
    """Return whether a message is of a kind that a page in a browser sends on its connection.

    Other messages must not reach the framework, because the framework keeps any number of binary attachments
    in memory, and logs a traceback for each message that it cannot parse.
    """
    if message["type"] != "websocket.receive":
        return True
    text = message.get("text") or ""
    head = _FRAME.match(text)
    if head is None:
        return False
    try:
        given = msgspec.json.decode(text[head.end() :] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return False
    if not head[0].startswith("42"):
        return isinstance(given, dict)
    return (
        isinstance(given, list)
        and len(given) == 2
        and isinstance(given[0], str)
        and isinstance(given[1], dict)
    )


async def respond(send: Send, status: int, body: bytes, headers: Headers = (), *, kind: str = "") -> None:
    """Send a complete response. `kind` is the media type of the body."""
    kind = kind or "text/plain; charset=utf-8"
    lines = [("content-type", kind), ("content-length", str(len(body))), *headers]
    start = {"type": "http.response.start", "status": status, "headers": encoded(lines)}
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def redirect(send: Send, where: str, headers: Headers = ()) -> None:
    """Redirect the browser to another page."""
    await respond(send, 303, b"", [("location", where), *headers])


def encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def with_headers(send: Send, added: Headers, nonce: str) -> Send:
    """Return an ASGI `send` that adds headers to a response, and a nonce to the script elements of HTML.

    The headers in `added` replace those of the same name. All script elements of a page may get the nonce,
    because the template contains them: user data, such as a topic's name or a message's body, is escaped.
    """
    fresh = encoded(added)
    names = {name for name, _ in fresh}
    held: list[Message] = []
    body: list[bytes] = []

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message["headers"] if name.lower() not in names]
            kinds = [value for name, value in headers if name.lower() == b"content-type"]
            message["headers"] = headers + fresh
            if not (kinds and kinds[0].startswith(b"text/html")):
                await send(message)
            else:
                held.append(message)
        elif message["type"] == "http.response.body" and held:
            body.append(message.get("body", b""))
            if not message.get("more_body"):
                page = _SCRIPT.sub(b'<script nonce="%s"' % nonce.encode(), b"".join(body))
                start = held.pop()
                start["headers"] = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
                start["headers"].append((b"content-length", str(len(page)).encode()))
                await send(start)
                await send({"type": "http.response.body", "body": page})
        else:
            await send(message)

    return send_on
