"""Who may log in to the console: names, roles and Argon2 hashes of passwords, in a file of mode 0600.

The file is JSON, `{"admin": {"hash": "$argon2id$...", "role": "admin"}}`, and is read again when it has
changed, so that accounts can be added and removed while a console runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from enum import StrEnum
from pathlib import Path

import msgspec
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from cometmq import logs
from cometmq.errors import CometError
from cometmq.private import make_private_directory, open_private

log = logs.logger(__name__)

FIRST_NAME = "admin"
PASSWORD_MIN = 12
PASSWORD_MAX = 256
"""Characters; a hash of more would only be work."""
ACCOUNTS_MAX = 1000
NAME_MAX = 64
_NAME = re.compile(rf"[A-Za-z0-9._@-]{{1,{NAME_MAX}}}")
_SECRET_BYTES = 15
_AT_ONCE = 2  # hashes that are computed; each takes 64 MiB and a tenth of a second
_WAITING_MAX = 32


class Role(StrEnum):
    """What somebody may do: look, or also change."""

    READER = "reader"
    ADMIN = "admin"


class Account(msgspec.Struct, frozen=True):
    """One who may log in. hash: Argon2's text form, with its parameters and salt."""

    hash: str
    role: Role


class AccountError(CometError):
    """An account cannot be made or removed, or the file of accounts cannot be used."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class TooBusy(CometError):
    """More logins are under way than there is room for."""

    def __str__(self) -> str:
        return "too many logins are under way"


class Accounts:
    """The accounts of one file. Methods that change it are for one process at a time."""

    def __init__(self, path: Path, hasher: PasswordHasher | None = None) -> None:
        self._path = path
        self._hasher = hasher if hasher is not None else PasswordHasher()
        self._known: dict[str, Account] = {}
        self._seen: tuple[int, int, int] | None = None
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0
        # An unknown name costs as much time as a known one.
        self._nobody = self._hasher.hash(secrets.token_urlsafe(_SECRET_BYTES))

    # -- reading

    def get(self, name: str) -> Account | None:
        """An account as the file has it now. Raises AccountError for a file that cannot be read."""
        self._read()
        return self._known.get(name)

    def names(self) -> list[str]:
        """All names, sorted. Raises AccountError."""
        self._read()
        return sorted(self._known)

    async def check(self, name: str, password: str) -> Account | None:
        """The account, if the password is right. Raises TooBusy, AccountError."""
        account = self.get(name)
        wanted = account.hash if account is not None else self._nobody
        if len(password) > PASSWORD_MAX:
            return None
        if self._waiting >= _WAITING_MAX:
            raise TooBusy
        self._waiting += 1
        try:
            async with self._gate:
                right = await asyncio.to_thread(self._verify, wanted, password)
        finally:
            self._waiting -= 1
        return account if right else None

    def _verify(self, wanted: str, password: str) -> bool:
        try:
            return self._hasher.verify(wanted, password)
        except (VerificationError, InvalidHashError):
            return False

    def _read(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._known, self._seen = {}, None
            return
        except OSError as error:
            raise AccountError(f"{self._path} cannot be read: {error.strerror}") from None
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return
        if status.st_mode & 0o077:
            log.warning("%s can be read by others than its owner: chmod 600", self._path)
        try:
            self._known = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Account])
        except (OSError, msgspec.MsgspecError) as error:
            raise AccountError(f"{self._path} cannot be read: {error}") from None
        self._seen = seen

    # -- changing

    def make_first(self) -> str | None:
        """Make the first account where there is none yet: its password, else None. Raises AccountError."""
        return None if self.names() else self.put(FIRST_NAME, Role.ADMIN)

    def put(self, name: str, role: Role, password: str | None = None) -> str:
        """Make an account, or give one a new password and role; returns the password, which is kept nowhere.
        password: None for one that is made here. Raises AccountError."""
        password, account = self.prepared(name, role, password)
        self.take(name, account)
        return password

    def prepared(self, name: str, role: Role, password: str | None = None) -> tuple[str, Account]:
        """The password and the account that `put` would make, for `take`. Hashing takes a tenth of a second:
        for a thread. Raises AccountError."""
        if not _NAME.fullmatch(name):
            raise AccountError(f"{name!r} is no name: 1 to {NAME_MAX} of A-Z a-z 0-9 . _ @ -")
        if password is not None and not PASSWORD_MIN <= len(password) <= PASSWORD_MAX:
            raise AccountError(f"a password has {PASSWORD_MIN} to {PASSWORD_MAX} characters")
        if password is None:
            password = secrets.token_urlsafe(_SECRET_BYTES)
        return password, Account(self._hasher.hash(password), role)

    def take(self, name: str, account: Account) -> None:
        """Write an account that `prepared` has made. Raises AccountError."""
        self._read()
        if len(self._known) >= ACCOUNTS_MAX and name not in self._known:
            raise AccountError(f"there are {ACCOUNTS_MAX} accounts already")
        self._change({**self._known, name: account})

    def set_role(self, name: str, role: Role) -> None:
        """Give an account another role; its sessions end. Raises AccountError as `remove` does."""
        self._read()
        self._change({**self._known, name: Account(self._there(name).hash, role)})

    def remove(self, name: str) -> None:
        """Remove an account; its sessions end. Raises AccountError for one that is not there, and for the
        last that may change things."""
        self._read()
        self._there(name)
        self._change({each: account for each, account in self._known.items() if each != name})

    def _there(self, name: str) -> Account:
        if name not in self._known:
            raise AccountError(f"there is no account {name!r}: {', '.join(sorted(self._known)) or 'none'}")
        return self._known[name]

    def _change(self, accounts: dict[str, Account]) -> None:
        """Write other accounts; the last that may change things stays."""
        admins = [name for name, account in self._known.items() if account.role is Role.ADMIN]
        if admins and not any(account.role is Role.ADMIN for account in accounts.values()):
            raise AccountError(f"{admins[0]!r} is the last admin: make another first")
        self._write(accounts)

    def _write(self, accounts: dict[str, Account]) -> None:
        path, fresh = str(self._path), f"{self._path}.new"
        try:
            make_private_directory(str(self._path.parent))
            with open_private(fresh) as file:
                file.write(msgspec.json.format(msgspec.json.encode(accounts)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)
        except OSError as error:
            raise AccountError(f"{path} cannot be written: {error.strerror}") from None
        self._read()
