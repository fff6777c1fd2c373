"""Accounts: hashes, roles, the file's mode, changes while a console runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from argon2 import PasswordHasher

from cometmq.console.door.accounts import AccountError, Accounts, Role, TooBusy

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
    account = await accounts.check("admin", password)
    assert account is not None
    assert account.role is Role.ADMIN


async def test_wrong_passwords_and_unknown_names_are_alike(accounts: Accounts) -> None:
    accounts.make_first()

    assert await accounts.check("admin", "wrong") is None
    assert await accounts.check("nobody", "wrong") is None
    assert await accounts.check("admin", "x" * 100_000) is None


async def test_another_process_may_change_accounts(accounts: Accounts, path: Path) -> None:
    accounts.make_first()
    password = Accounts(path, FAST).put("eve", Role.READER)

    account = await accounts.check("eve", password)
    assert account is not None
    assert account.role is Role.READER
    Accounts(path, FAST).remove("eve")
    assert accounts.get("eve") is None


def test_the_last_admin_stays(accounts: Accounts) -> None:
    accounts.make_first()
    accounts.put("eve", Role.READER)

    with pytest.raises(AccountError, match="last admin"):
        accounts.remove("admin")
    with pytest.raises(AccountError, match="no account 'bob'"):
        accounts.remove("bob")


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "<b>", "a/b", "ä"])
def test_names_are_plain(accounts: Accounts, name: str) -> None:
    with pytest.raises(AccountError, match="is no name"):
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
        *(accounts.check("admin", "wrong") for _ in range(60)), return_exceptions=True
    )

    assert sum(isinstance(each, TooBusy) for each in found) == 60 - 32
    assert await accounts.check("admin", "wrong") is None
