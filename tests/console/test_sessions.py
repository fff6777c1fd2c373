"""Beginning and end of sessions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from argon2 import PasswordHasher

from cometmq.console.auth.accounts import Account, Accounts, Role
from cometmq.console.auth.attempts import Attempts
from cometmq.console.auth.audit import Audit
from cometmq.console.auth.sessions import MAX_PAGES, MAX_SESSIONS_PER_ACCOUNT, Session, Sessions
from cometmq.console.pages.users import set_own_password
from cometmq.console.widgets.page import delete_unopened

FAST = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


class Now:
    s = 1000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def accounts(tmp_path: Path) -> Accounts:
    made = Accounts(tmp_path / "users.json", FAST)
    made.make_first()
    return made


@pytest.fixture
def sessions(accounts: Accounts, now: Now) -> Sessions:
    return Sessions(accounts, idle_s=100, life_s=1000, clock=now)


def begun(accounts: Accounts, sessions: Sessions, name: str = "admin") -> Session:
    account = accounts.get(name)
    assert account is not None
    return sessions.begin(name, account, "127.0.0.1")


def test_ids_are_long_and_never_the_same(accounts: Accounts, sessions: Sessions) -> None:
    one, two = begun(accounts, sessions), begun(accounts, sessions)

    assert len({one.id, two.id, one.csrf, two.csrf}) == 4
    assert len(one.id) >= 43
    assert sessions.find(one.id) is one
    assert sessions.find("") is None


def test_an_idle_session_ends_and_a_used_one_does_not(
    accounts: Accounts, sessions: Sessions, now: Now
) -> None:
    idle, used = begun(accounts, sessions), begun(accounts, sessions)
    now.s += 90
    assert sessions.find(idle.id) is idle  # this look-up does not count as use
    sessions.find(used.id, used=True)
    now.s += 20

    assert sessions.find(idle.id) is None
    assert sessions.find(used.id) is used


def test_the_busiest_session_ends_too(accounts: Accounts, sessions: Sessions, now: Now) -> None:
    session = begun(accounts, sessions)
    for _ in range(20):
        now.s += 50
        sessions.find(session.id, used=True)
    now.s += 1

    assert sessions.find(session.id) is None


def test_whoever_hangs_on_a_session_is_told_once_of_its_end(
    accounts: Accounts, sessions: Sessions, now: Now
) -> None:
    session = begun(accounts, sessions)
    told: list[int] = []
    session.on_end["x"] = lambda: told.append(1)
    session.add_page("page")
    now.s += 101
    sessions.end_expired()
    sessions.end(session)

    assert told == [1]
    assert not session.pages
    assert session.ended


@pytest.mark.parametrize("change", ["remove", "password"])
def test_a_changed_account_has_no_sessions(accounts: Accounts, sessions: Sessions, change: str) -> None:
    accounts.put("eve", Role.READER)
    session = begun(accounts, sessions, "eve")
    if change == "remove":
        accounts.remove("eve")
    else:
        accounts.put("eve", Role.READER)

    assert sessions.find(session.id) is None


def test_sessions_and_pages_are_bounded(accounts: Accounts, sessions: Sessions) -> None:
    made = [begun(accounts, sessions) for _ in range(MAX_SESSIONS_PER_ACCOUNT + 5)]
    for number in range(MAX_PAGES + 5):
        made[-1].add_page(str(number))

    assert sum(not each.ended for each in made) == MAX_SESSIONS_PER_ACCOUNT
    assert made[0].ended
    assert len(made[-1].pages) == MAX_PAGES
    assert "0" not in made[-1].pages


def test_an_account_that_never_was_has_no_session(sessions: Sessions) -> None:
    session = sessions.begin("ghost", Account("x", Role.ADMIN), "")

    assert sessions.find(session.id) is None


async def test_who_changes_his_password_ends_his_other_sessions_at_once(
    accounts: Accounts, sessions: Sessions, tmp_path: Path
) -> None:
    password = accounts.put("ben", Role.READER)
    own, other, admin = (begun(accounts, sessions, name) for name in ("ben", "ben", "admin"))
    ends: list[str] = []
    other.on_end["a page"] = lambda: ends.append("other")
    services = SimpleNamespace(
        accounts=accounts,
        sessions=sessions,
        audit=Audit(tmp_path / "audit.jsonl"),
        password_changes=Attempts(5, 30.0),
    )
    view: Any = SimpleNamespace(session=own, services=services, t=str, notify=str)
    await set_own_password(view, password, "a password of my own")
    assert ends == ["other"]
    assert sessions.is_valid(own)
    assert sessions.is_valid(admin)


def test_a_page_that_is_forgotten_goes_if_no_browser_came(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    pages = {
        "alone": SimpleNamespace(environ=None, delete=lambda: gone.append("alone")),
        "open": SimpleNamespace(environ={}, delete=lambda: gone.append("open")),
    }
    monkeypatch.setattr("cometmq.console.widgets.page.Client", SimpleNamespace(instances=pages))
    for page_id in ("alone", "open", "other", None):
        delete_unopened(page_id)

    assert gone == ["alone"]
