"""Console accounts: hashes, roles, the file's mode, and changes while a console runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from argon2 import PasswordHasher

from cometmq.console.auth.accounts import AccountChanged, AccountError, Accounts, Role, TooBusy
from cometmq.console.auth.attempts import Attempts
from cometmq.console.auth.audit import Audit
from cometmq.console.auth.sessions import Session, Sessions
from cometmq.console.pages.users import set_own_password
from cometmq.errors import CometError
from cometmq.private import lock_file

FAST = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "console" / "users.json"


@pytest.fixture
def accounts(path: Path) -> Accounts:
    return Accounts(path, FAST)


async def test_the_first_password_is_made_once_and_kept_nowhere(accounts: Accounts, path: Path) -> None:
    password = accounts.make_first()

    assert password is not None
    assert len(password) >= 20
    assert accounts.make_first() is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert password not in path.read_text()
    assert "$argon2id$" in path.read_text()
    account = await accounts.check_password("admin", password)
    assert account is not None
    assert account.role is Role.ADMIN


async def test_wrong_passwords_and_unknown_names_are_alike(accounts: Accounts) -> None:
    accounts.make_first()

    assert await accounts.check_password("admin", "wrong") is None
    assert await accounts.check_password("nobody", "wrong") is None
    assert await accounts.check_password("admin", "x" * 100_000) is None


async def test_another_process_may_change_accounts(accounts: Accounts, path: Path) -> None:
    accounts.make_first()
    password = Accounts(path, FAST).put("eve", Role.READER)

    account = await accounts.check_password("eve", password)
    assert account is not None
    assert account.role is Role.READER
    Accounts(path, FAST).remove("eve")
    assert accounts.get("eve") is None


def test_the_last_admin_stays(accounts: Accounts) -> None:
    accounts.make_first()
    accounts.put("eve", Role.READER)

    with pytest.raises(AccountError, match="last admin"):
        accounts.remove("admin")
    with pytest.raises(AccountError, match="unknown account 'bob'"):
        accounts.remove("bob")


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "<b>", "a/b", "ä"])
def test_names_are_plain(accounts: Accounts, name: str) -> None:
    with pytest.raises(AccountError, match="is not a valid name"):
        accounts.put(name, Role.READER)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {"hash": 1}}', '{"a": {"hash": "x", "role": "root"}}'])
def test_a_damaged_file_lets_nobody_in(accounts: Accounts, path: Path, text: str) -> None:
    accounts.make_first()
    path.write_text(text)
    os.utime(path, ns=(1, 1))

    with pytest.raises(AccountError, match=r"users\.json cannot be read"):
        accounts.get("admin")


async def test_logins_beyond_the_room_for_them_are_refused(accounts: Accounts) -> None:
    accounts.make_first()

    found = await asyncio.gather(
        *(accounts.check_password("admin", "wrong") for _ in range(60)), return_exceptions=True
    )

    assert sum(isinstance(each, TooBusy) for each in found) == 60 - 32
    assert await accounts.check_password("admin", "wrong") is None


# -- concurrent changes of the file


class Slow(PasswordHasher):
    """A hasher during whose work other code runs."""

    meanwhile: Any = None

    def hash(self, password: str | bytes, *, salt: bytes | None = None) -> str:
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()
        return super().hash(password, salt=salt)


def test_a_change_waits_for_that_of_another_process(
    accounts: Accounts, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts.make_first()
    unlock = lock_file(f"{path}.lock")
    waited: list[float] = []

    def wait(span_s: float) -> None:
        waited.append(span_s)
        if len(waited) == 3:
            Accounts(path, FAST)._change({**accounts._known, **other})  # noqa: SLF001
            unlock()

    monkeypatch.setattr("cometmq.console.auth.accounts.time.sleep", wait)
    _, made = accounts.prepare("bob", Role.READER)
    other = {"bob": made}
    accounts.put("eve", Role.READER)

    assert len(waited) == 3
    assert accounts.names() == ["admin", "bob", "eve"]


def test_a_file_that_stays_locked_is_said(accounts: Accounts, path: Path) -> None:
    accounts.make_first()
    unlock = lock_file(f"{path}.lock")
    try:
        with pytest.raises(AccountError, match="by another"):
            accounts.remove("admin")
    finally:
        unlock()


def test_of_two_consoles_that_start_one_makes_the_first_account(path: Path) -> None:
    slow = Slow(time_cost=1, memory_cost=8, parallelism=1)
    late = Accounts(path, slow)
    made: list[str | None] = []
    slow.meanwhile = lambda: made.append(Accounts(path, FAST).make_first())

    assert late.make_first() is None
    assert made[0] is not None


def somebody(path: Path, role: Role) -> tuple[Accounts, Slow, Session, Any]:
    """Create the account of Eve, with password `wordwordword`, and a session."""
    slow = Slow(time_cost=1, memory_cost=8, parallelism=1)
    accounts = Accounts(path, slow)
    accounts.make_first()
    accounts.put("eve", role, "wordwordword")
    sessions = Sessions(accounts)
    account = accounts.get("eve")
    assert account is not None
    session = sessions.begin("eve", account, "::1")
    services = SimpleNamespace(
        accounts=accounts,
        sessions=sessions,
        audit=Audit(path.parent / "audit.jsonl"),
        password_changes=Attempts(5, 30.0),
    )
    view = SimpleNamespace(services=services, session=session, t=lambda key: key, notify=lambda _text: None)
    return accounts, slow, session, view


async def test_a_new_password_of_his_own_gives_nobody_his_role_back(path: Path) -> None:
    accounts, slow, session, view = somebody(path, Role.ADMIN)
    slow.meanwhile = lambda: Accounts(path, FAST).set_role("eve", Role.READER)

    with pytest.raises(CometError):
        await set_own_password(view, "wordwordword", "another word")
    account = accounts.get("eve")
    assert account is not None
    assert (account.role, session.ended) == (Role.READER, True)


async def test_a_new_password_of_his_own_gives_nobody_his_account_back(path: Path) -> None:
    accounts, slow, session, view = somebody(path, Role.READER)
    slow.meanwhile = lambda: Accounts(path, FAST).remove("eve")

    with pytest.raises(CometError):
        await set_own_password(view, "wordwordword", "another word")
    assert (accounts.get("eve"), session.ended) == (None, True)


async def test_wrong_passwords_of_his_own_do_not_fill_the_audit_log(path: Path) -> None:
    _, _, _, view = somebody(path, Role.READER)
    for _ in range(50):
        with pytest.raises(CometError):
            await set_own_password(view, "wrong", "another word")

    assert len((path.parent / "audit.jsonl").read_text().splitlines()) == 2 * 5


def test_an_account_is_written_in_place_of_what_was_seen(accounts: Accounts) -> None:
    accounts.make_first()
    _, first = accounts.prepare("bob", Role.READER)
    _, second = accounts.prepare("bob", Role.ADMIN)
    accounts.replace("bob", None, first)

    with pytest.raises(AccountChanged):
        accounts.replace("bob", None, second)
    assert accounts.get("bob") == first
