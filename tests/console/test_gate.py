"""Logins and refusals of the gate, tested without the framework, before an application that records calls."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from argon2 import PasswordHasher
from tests.kit.waiting import until

from cometmq.console.auth.accounts import Accounts, Role
from cometmq.console.auth.attempts import Attempts, address_key
from cometmq.console.auth.audit import Audit
from cometmq.console.auth.gate import SESSION, Gate, own_path
from cometmq.console.auth.http import Message, Receive, Scope, Send
from cometmq.console.auth.sessions import Session, Sessions

HOST = "127.0.0.1:8082"
FAST = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
SOCKET = "/_nicegui_ws/socket.io/"


@dataclass
class Answer:
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    def cookie(self, part: str) -> str:
        return next((value for key, value in self.headers if key == "set-cookie" and part in value), "")


class House:
    """A gate before an application that returns a page and records the user."""

    def __init__(self, directory: Path, *, secure: bool = False) -> None:
        self.accounts = Accounts(directory / "users.json", FAST)
        self.password = self.accounts.make_first() or ""
        self.sessions = Sessions(self.accounts)
        self.audit_path = directory / "audit.jsonl"
        self.came: list[Scope] = []
        self.heard: list[Message] = []
        self.page = b"<html><script>1</script><script type=x>2</script>\xc3\xa4</html>"
        self.gate = Gate(
            app=self.app,
            accounts=self.accounts,
            sessions=self.sessions,
            audit=Audit(self.audit_path),
            hosts=frozenset({HOST}),
            port=8082,
            secure=secure,
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.append(scope)
        if scope["type"] == "websocket":
            while True:
                self.heard.append(await receive())
                if self.heard[-1]["type"] == "websocket.disconnect":
                    return
        length = str(len(self.page)).encode()
        headers = [
            (b"content-type", b"text/html"),
            (b"content-length", length),
            (b"x-frame-options", b"ALLOW"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.page[:5], "more_body": True})
        await send({"type": "http.response.body", "body": self.page[5:]})

    def scope(self, path: str, **headers: str) -> Scope:
        plain, _, query = path.partition("?")
        given = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return {
            "type": "http",
            "method": "GET",
            "path": plain,
            "query_string": query.encode(),
            "client": ("10.0.0.7", 4321),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }

    async def ask(
        self, path: str, form: dict[str, str] | bytes | None = None, method: str = "", **headers: str
    ) -> Answer:
        scope = self.scope(path, **headers)
        body = form if isinstance(form, bytes) else urlencode(form or {}).encode()
        scope["method"] = method or ("GET" if form is None else "POST")
        answer = Answer()

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
            else:
                answer.body += message.get("body", b"")

        await self.gate(scope, receive, send)
        return answer

    async def log_in(
        self, name: str = "admin", password: str | None = None, *, known: str = "", **more: str
    ) -> Answer:
        shown = await self.ask("/login")
        token = re.search(rb'name="csrf" value="([^"]+)"', shown.body)
        assert token is not None
        fields = {"csrf": token[1].decode(), "name": name, "password": password or self.password, **more}
        cookie = shown.cookie("login").split(";")[0]
        return await self.ask("/login", fields, cookie=f"{cookie}; {known}")

    async def session(self) -> tuple[Session, str]:
        """Return a session and its cookie."""
        answer = await self.log_in()
        cookie = answer.cookie("session").split(";")[0]
        session = self.sessions.find(cookie.partition("=")[2])
        assert session is not None
        return session, cookie

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_path.read_text().splitlines()]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def test_a_page_needs_a_login_and_is_found_again_after_it(house: House) -> None:
    refused = await house.ask("/topics/%25RETRY%25g?q=a%26b&sort=-lag")
    where = refused.header("location")

    assert (refused.status, house.came) == (303, [])
    assert where.startswith("/login?next=")
    shown = await house.ask(where)
    hidden = re.search(rb'name="next" value="([^"]*)"', shown.body)
    assert hidden is not None
    answer = await house.log_in(next=hidden[1].decode().replace("&amp;", "&"))
    assert answer.header("location") == "/topics/%2525RETRY%2525g?q=a%26b&sort=-lag"


async def test_a_session_opens_pages_and_the_audit_log_has_the_login(house: House) -> None:
    session, cookie = await house.session()
    page = await house.ask("/topics", cookie=f"other=1; {cookie}")

    assert page.status == 200
    assert house.came[-1]["state"][SESSION] is session
    entry = house.audited()[-1]
    assert (entry["user"], entry["action"], entry["address"], entry["result"]) == (
        "admin", "login", "10.0.0.7", "ok",
    )  # fmt: skip
    assert house.audit_path.stat().st_mode & 0o777 == 0o600
    assert house.password not in house.audit_path.read_text()


@pytest.mark.parametrize("secure", [False, True])
async def test_cookies_are_for_this_site_and_no_script(tmp_path: Path, secure: bool) -> None:
    cookie = (await House(tmp_path, secure=secure).log_in()).cookie("session")

    for flag in ("HttpOnly", "SameSite=Strict", "Path=/"):
        assert flag in cookie
    assert ("Secure" in cookie, cookie.startswith("__Host-")) == (secure, secure)


async def test_pages_allow_no_script_but_their_own(house: House) -> None:
    _, cookie = await house.session()
    page = await house.ask("/", cookie=cookie)
    policy = page.header("content-security-policy")
    nonce = re.search(r"'nonce-([^']+)'", policy)
    assert nonce is not None

    assert page.body.count(f'<script nonce="{nonce[1]}"'.encode()) == 2
    assert int(page.header("content-length")) == len(page.body)
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert [value for key, value in page.headers if key == "x-frame-options"] == ["DENY"]
    assert page.header("cache-control") == "no-store"
    assert nonce[1] not in (await house.ask("/", cookie=cookie)).header("content-security-policy")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8082", "127.0.0.1", "", "127.0.0.1:8083"])
async def test_other_names_of_the_host_are_refused(house: House, host: str) -> None:
    _, cookie = await house.session()
    house.came.clear()

    assert (await house.ask("/", host=host, cookie=cookie)).status == 421
    assert house.came == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_nothing_is_posted_to_pages(house: House, method: str) -> None:
    _, cookie = await house.session()
    house.came.clear()

    assert (await house.ask("/topics", method=method, cookie=cookie)).status == 405
    assert (await house.ask(SOCKET, method="GET", cookie=cookie)).status == 405
    assert house.came == []


async def test_a_form_of_another_site_does_not_log_in(house: House) -> None:
    shown = await house.ask("/login")
    cookie = shown.cookie("login").split(";")[0]
    good = {"csrf": cookie.partition("=")[2], "name": "admin", "password": house.password}

    assert (await house.ask("/login", good, cookie=cookie, origin="http://evil.example")).status == 403
    assert (await house.ask("/login", {**good, "csrf": "x"}, cookie=cookie)).status == 403
    assert (await house.ask("/login", {**good, "csrf": ""}, cookie="cometmq_login_8082=")).status == 403
    assert (await house.ask("/login", good)).status == 403
    assert (await house.ask("/login", good, cookie=cookie, origin="null")).status == 403
    assert (await house.ask("/login", good, cookie=cookie, origin=f"http://{HOST}")).status == 303


async def test_too_many_failures_wait(house: House) -> None:
    statuses = [(await house.log_in(password="wrong")).status for _ in range(12)]

    assert statuses == [401] * 10 + [429] * 2
    assert (await house.log_in()).status == 429
    assert [entry["result"] for entry in house.audited()] == ["refused"] * 10


async def test_an_account_is_not_tried_from_everywhere(house: House) -> None:
    house.gate.by_address = Attempts(1000, 1.0)
    statuses = [(await house.log_in(password="wrong")).status for _ in range(22)]

    assert statuses == [401] * 20 + [429] * 2
    assert (await house.log_in("somebody", "wrong")).status == 401


async def test_strangers_keep_nobody_out_of_a_browser_that_is_known(house: House) -> None:
    known = (await house.log_in()).cookie("known").split(";")[0]
    for _ in range(21):
        house.gate.by_address = Attempts(10, 15.0)
        await house.log_in(password="wrong")

    assert (await house.log_in()).status == 429
    assert (await house.log_in(known=known)).status == 303
    assert (await house.log_in(known=known.replace("=", "=0"))).status == 429
    other = house.accounts.put("eve", Role.READER)
    house.gate.by_address = Attempts(10, 15.0)
    assert (await house.log_in("eve", other, known=known)).status == 303  # the cookie is of another account
    assert (await house.log_in("eve", "wrong", known=known)).status == 401
    house.accounts.put("admin", Role.ADMIN)
    assert (await house.log_in(known=known)).status == 429  # a new password invalidates the cookie


async def test_a_known_browser_may_not_try_for_ever(house: House) -> None:
    known = (await house.log_in()).cookie("known").split(";")[0]
    statuses = [(await house.log_in(password="wrong", known=known)).status for _ in range(21)]

    assert statuses == [401] * 20 + [429]


async def test_a_login_of_his_own_gives_nobody_more_tries(house: House) -> None:
    own = house.accounts.put("eve", Role.READER)
    statuses = []
    for number in range(15):
        statuses.append((await house.log_in(password="wrong")).status)
        if number % 5 == 4:
            await house.log_in("eve", own)

    assert statuses == [401] * 10 + [429] * 5


async def test_behind_a_proxy_with_tls_forms_and_cookies_are_of_its_name(house: House) -> None:
    shown = await house.ask("/login")
    cookie = shown.cookie("login").split(";")[0]
    form = {"csrf": cookie.partition("=")[2], "name": "admin", "password": house.password}
    answer = await house.ask("/login", form, cookie=cookie, origin=f"https://{HOST}")

    assert answer.status == 303
    assert "; Secure" in answer.cookie("session")
    assert "; Secure" in answer.cookie("known")
    for origin in ("https://evil.example", f"ftp://{HOST}", f"https://{HOST}.evil.example", "http://["):
        assert (await house.ask("/login", form, cookie=cookie, origin=origin)).status == 403


async def test_names_and_addresses_of_failures_are_short_in_the_audit_log(house: House) -> None:
    await house.log_in("\0" * 1000, "wrong")

    assert len(house.audit_path.read_bytes()) < 700


async def test_a_name_is_shown_as_text(house: House) -> None:
    answer = await house.ask('/login?next="><script>alert(1)</script>')

    assert b"<script" not in answer.body


@pytest.mark.parametrize("form", [b"\xff\xfe", b"x" * 9000, b"a=1&" * 100])
async def test_a_form_is_bounded(house: House, form: bytes) -> None:
    assert (await house.ask("/login", form)).status == 400


async def test_logout_needs_the_sessions_token_and_ends_it(house: House) -> None:
    session, cookie = await house.session()

    assert (await house.ask("/logout", {"csrf": "x"}, cookie=cookie)).status == 403
    assert not session.ended
    answer = await house.ask("/logout", {"csrf": session.csrf}, cookie=cookie)
    assert (answer.status, session.ended) == (303, True)
    assert "Max-Age=0" in answer.cookie("session")
    assert (await house.ask("/", cookie=cookie)).status == 303


async def test_a_new_login_has_a_new_session(house: House) -> None:
    session, _ = await house.session()
    other, _ = await house.session()

    assert other.id != session.id


async def test_a_link_of_another_site_is_asked_for_again(house: House) -> None:
    answer = await house.ask("/topics?q=a", sec_fetch_site="cross-site")

    assert answer.status == 200
    assert b'content="0;url=/topics?q=a"' in answer.body
    answer = await house.ask('/a"><script>x</script>', sec_fetch_site="cross-site")
    assert b"<script" not in answer.body


@pytest.mark.parametrize(
    "where",
    ["//evil.example", "https://evil.example", "/\\evil", "javascript:x", "", "/a\nb", "\\/x", "/" * 5000],
)
def test_a_login_leads_to_this_console_only(where: str) -> None:
    assert own_path(where) == "/"


async def test_an_account_that_is_removed_is_out(house: House) -> None:
    password = house.accounts.put("eve", Role.READER)
    cookie = (await house.log_in("eve", password)).cookie("session").split(";")[0]
    assert (await house.ask("/", cookie=cookie)).status == 200
    house.accounts.remove("eve")

    assert (await house.ask("/", cookie=cookie)).status == 303


async def test_the_framework_is_not_told_prefixes_by_strangers(house: House) -> None:
    _, cookie = await house.session()
    await house.ask("/", cookie=cookie, x_forwarded_prefix="/x")

    assert b"x-forwarded-prefix" not in dict(house.came[-1]["headers"])


class TestConnections:
    """The WebSocket connection of a page."""

    async def connect(
        self, house: House, page: str, **headers: str
    ) -> tuple[list[Message], asyncio.Queue[Message]]:
        scope = house.scope(f"{SOCKET}?client_id={page}", **headers)
        scope["type"] = "websocket"
        sent: list[Message] = []
        coming: asyncio.Queue[Message] = asyncio.Queue()
        coming.put_nowait({"type": "websocket.connect"})

        async def send(message: Message) -> None:
            sent.append(message)

        self.task = asyncio.create_task(house.gate(scope, coming.get, send))
        await until(lambda: sent or house.heard)
        return sent, coming

    @pytest.mark.parametrize(
        ("page", "changed"),
        [
            ("p1", {"origin": "http://evil.example"}),
            ("p1", {"origin": ""}),
            ("p1", {"cookie": "cometmq_session_8082=x"}),
            ("p1", {"cookie": ""}),
            ("p1", {"host": "evil.example"}),
            ("other", {}),
            ("", {}),
        ],
    )
    async def test_it_is_refused_unless_all_is_right(
        self, house: House, page: str, changed: dict[str, str]
    ) -> None:
        session, cookie = await house.session()
        session.add_page("p1")
        sent, _ = await self.connect(house, page, **{"origin": f"http://{HOST}", "cookie": cookie, **changed})

        assert [each["type"] for each in sent] == ["websocket.close"]
        assert house.came == []

    async def test_a_page_of_another_session_is_no_key(self, house: House) -> None:
        session, _ = await house.session()
        session.add_page("p1")
        _, cookie = await house.session()
        sent, _ = await self.connect(house, "p1", origin=f"http://{HOST}", cookie=cookie)

        assert sent[0]["type"] == "websocket.close"

    async def test_it_ends_with_its_session(self, house: House) -> None:
        session, cookie = await house.session()
        session.add_page("p1")
        sent, _ = await self.connect(house, "p1", origin=f"http://{HOST}", cookie=cookie)
        assert (sent, len(house.came)) == ([], 1)
        house.sessions.end(session)
        await asyncio.wait_for(self.task, 60)

        assert sent == [{"type": "websocket.close", "code": 4401}]
        assert house.heard[-1]["type"] == "websocket.disconnect"

    @pytest.mark.parametrize(
        "message",
        [
            {"bytes": b"x"}, {"text": ""}, {"text": "4"}, {"text": "42"}, {"text": "42x"}, {"text": "40/x,"},
            {"text": '451-["event",{"a":{"_placeholder":true,"num":0}}]'}, {"text": '42["event"]'},
            {"text": '42["event",null]'}, {"text": "42" + "[" * 100_000}, {"text": '43["x"]'},
        ],
    )  # fmt: skip
    async def test_what_no_browser_sends_ends_it(self, house: House, message: Message) -> None:
        session, cookie = await house.session()
        session.add_page("p1")
        sent, coming = await self.connect(house, "p1", origin=f"http://{HOST}", cookie=cookie)
        coming.put_nowait({"type": "websocket.receive", **message})
        await asyncio.wait_for(self.task, 60)

        assert sent == [{"type": "websocket.close", "code": 4400}]
        assert house.heard[-1]["type"] == "websocket.disconnect"

    async def test_clicks_keep_a_session_and_what_the_page_does_by_itself_does_not(
        self, house: House
    ) -> None:
        session, cookie = await house.session()
        session.add_page("p1")
        _, coming = await self.connect(house, "p1", origin=f"http://{HOST}", cookie=cookie)
        session.used_s = before = session.used_s - 10
        for text in ("3", '42["ack",{"client_id":"x"}]'):
            coming.put_nowait({"type": "websocket.receive", "text": text})
        await until(lambda: len(house.heard) >= 3)
        assert session.used_s == before
        coming.put_nowait({"type": "websocket.receive", "text": '42["event",{"id":1}]'})
        await until(lambda: session.used_s != before)
        coming.put_nowait({"type": "websocket.disconnect"})
        await asyncio.wait_for(self.task, 60)


def test_failures_are_forgiven_with_time_and_the_table_is_bounded() -> None:
    now = [0.0]
    attempts = Attempts(2, 10.0, max_keys=100, clock=lambda: now[0])
    attempts.failed("a")
    assert attempts.wait_s("a") == 0
    attempts.failed("a")
    assert attempts.wait_s("a") == 10.0
    now[0] = 10.0
    assert attempts.wait_s("a") == 0
    for number in range(1000):
        attempts.failed(str(number))

    assert len(attempts) == 100


def test_a_user_of_ipv6_has_one_address() -> None:
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff:1")
    assert address_key("2001:db8::1") != address_key("2001:db8:0:1::1")
    assert address_key("10.0.0.1") == address_key("::ffff:10.0.0.1") == "10.0.0.1"
