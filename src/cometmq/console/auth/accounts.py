"""Accounts of the console: names, roles and Argon2 hashes of passwords, in a file of mode 0600.

The file is JSON, `{"admin": {"hash": "$argon2id$...", "role": "admin"}}`. It is read again after each change,
so that accounts can be added and removed while a console runs.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from cometmq import logs
from cometmq.console.base.errors import ConsoleError
from cometmq.errors import CometError
from cometmq.private import lock_file, make_private_directory, replace_private

log = logs.logger(__name__)

FIRST_NAME = "admin"
MIN_PASSWORD_LENGTH = 12
MAX_PASSWORD_LENGTH = 256
"""Maximum length of a password. A limit is needed because the hashing of very long passwords is slow."""
MAX_ACCOUNTS = 1000
MAX_NAME_LENGTH = 64
_NAME = re.compile(rf"[A-Za-z0-9._@-]{{1,{MAX_NAME_LENGTH}}}")
_SECRET_BYTES = 15
_MAX_CONCURRENT_HASHES = 2  # The limit is low, because each hash takes 64 MiB of memory and 0.1 s.
_MAX_WAITING_LOGINS = 32
_LOCK_TRIES, _LOCK_INTERVAL_S = 50, 0.01  # attempts to lock the file, and seconds between two attempts


class Role(StrEnum):
    """What a user may do: view only, or view and change."""

    READER = "reader"
    ADMIN = "admin"


class Account(msgspec.Struct, frozen=True):
    """An account. `hash` is Argon2's text form, which contains its parameters and the salt."""

    hash: str
    role: Role


class AccountError(ConsoleError):
    """An account cannot be created or removed, or the file of accounts cannot be used."""


class AccountChanged(AccountError):
    """Another user has created, changed or removed the account meanwhile. `problem` is the account's name."""

    def __str__(self) -> str:
        return f"{self.problem!r} was changed by another user at the same time"


class TooBusy(CometError):
    """Too many logins are in progress at the same time."""

    def __str__(self) -> str:
        return "too many logins are in progress"


class Accounts:
    """The accounts in a file that several processes may change."""

    def __init__(self, path: Path, hasher: PasswordHasher | None = None) -> None:
        self._path = path
        self._hasher = hasher if hasher is not None else PasswordHasher()
        self._known: dict[str, Account] = {}
        self._seen: tuple[int, int, int] | None = None
        self._gate = asyncio.Semaphore(_MAX_CONCURRENT_HASHES)
        self._waiting = 0
        # The password for an unknown name is compared with this hash, so that the time of the check does not
        # show whether a name exists.
        self._dummy_hash = self._hasher.hash(secrets.token_urlsafe(_SECRET_BYTES))

    # -- reading

    def get(self, name: str) -> Account | None:
        """Return an account from the file, or None for an unknown name. Raises AccountError."""
        self._read()
        return self._known.get(name)

    def names(self) -> list[str]:
        """Return the sorted names of all accounts. Raises AccountError if the file cannot be read."""
        self._read()
        return sorted(self._known)

    def browser_token(self, name: str) -> str:
        """Return the value of the cookie that shows that the account has logged in with this browser before.

        The value is computed from the account's entry in the file, so it changes with the password. Raises
        AccountError.
        """
        account = self.get(name)
        key = account.hash if account is not None else self._dummy_hash
        return hmac.digest(key.encode(), f"browser of {name}".encode(), "sha256").hex()

    async def check_password(self, name: str, password: str, *, known: bool = False) -> Account | None:
        """Return the account if the password is correct, else None. Raises TooBusy and AccountError.

        `known` means that the browser has the account's token. Logins from such browsers have priority when
        many logins are in progress.
        """
        account = self.get(name)
        stored_hash = account.hash if account is not None else self._dummy_hash
        if len(password) > MAX_PASSWORD_LENGTH:
            return None
        if self._waiting >= _MAX_WAITING_LOGINS * (2 if known else 1):
            raise TooBusy
        self._waiting += 1
        try:
            async with self._gate:
                right = await asyncio.to_thread(self._verify, stored_hash, password)
        finally:
            self._waiting -= 1
        return account if right else None

    def _verify(self, stored_hash: str, password: str) -> bool:
        try:
            return self._hasher.verify(stored_hash, password)
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
            log.warning("%s is readable by other users than its owner: run chmod 600", self._path)
        try:
            self._known = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Account])
        except (OSError, msgspec.MsgspecError) as error:
            raise AccountError(f"{self._path} cannot be read: {error}") from None
        self._seen = seen

    # -- changing

    def make_first(self) -> str | None:
        """Create an administrator's account if no account exists, and return the password of that account.

        Return None if there are accounts. Raises AccountError if the file cannot be read or written.
        """
        if self.names():
            return None
        password, account = self.prepare(FIRST_NAME, Role.ADMIN)
        try:
            self.replace(FIRST_NAME, None, account)
        except AccountChanged:
            return None  # Another console that started at the same time has created the account.
        return password

    def put(self, name: str, role: Role, password: str | None = None) -> str:
        """Create an account, or set its password and role. Return the password, which is not stored.

        If `password` is None, a password is generated. Raises AccountError.
        """
        password, account = self.prepare(name, role, password)
        with self._exclusive():
            self._change({**self._known, name: account})
        return password

    def prepare(self, name: str, role: Role, password: str | None = None) -> tuple[str, Account]:
        """Return the password and the account that `put` would write, but do not write the account.

        `replace` writes it. Hashing takes 0.1 s, so call `prepare` in a thread. Raises AccountError if the
        name or the password is not permitted.
        """
        if not _NAME.fullmatch(name):
            raise AccountError(f"{name!r} is not a valid name: 1 to {MAX_NAME_LENGTH} of A-Z a-z 0-9 . _ @ -")
        if password is not None and not MIN_PASSWORD_LENGTH <= len(password) <= MAX_PASSWORD_LENGTH:
            raise AccountError(
                f"a password must have {MIN_PASSWORD_LENGTH} to {MAX_PASSWORD_LENGTH} characters"
            )
        if password is None:
            password = secrets.token_urlsafe(_SECRET_BYTES)
        return password, Account(self._hasher.hash(password), role)

    def replace(self, name: str, before: Account | None, account: Account) -> None:
        """Write a prepared account in place of `before`, which is None for a new name.

        Raises AccountChanged if the account in the file differs from `before`, and AccountError.
        """
        with self._exclusive():
            if self._known.get(name) != before:
                raise AccountChanged(name)
            self._change({**self._known, name: account})

    def set_role(self, name: str, role: Role) -> None:
        """Change the role of an account, which ends the account's sessions.

        Raises AccountError for an unknown account, and if no administrator would remain.
        """
        with self._exclusive():
            self._change({**self._known, name: Account(self._existing(name).hash, role)})

    def remove(self, name: str) -> None:
        """Remove an account, which ends its sessions.

        Raises AccountError for an unknown account, and for the last administrator.
        """
        with self._exclusive():
            self._existing(name)
            self._change({each: account for each, account in self._known.items() if each != name})

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the file of accounts for the time of the `with` body, and read it before the body runs."""
        unlock = self._locked()
        try:
            self._read()
            yield
        finally:
            unlock()

    def _locked(self) -> Callable[[], None]:
        for left in reversed(range(_LOCK_TRIES)):
            try:
                make_private_directory(str(self._path.parent))
                return lock_file(f"{self._path}.lock")
            except BlockingIOError:
                if left:
                    time.sleep(_LOCK_INTERVAL_S)
            except OSError as error:
                raise AccountError(f"{self._path} cannot be written: {error.strerror}") from None
        raise AccountError(f"{self._path} is being changed by another process")

    def _existing(self, name: str) -> Account:
        if name not in self._known:
            raise AccountError(f"unknown account {name!r}; known: {', '.join(sorted(self._known)) or 'none'}")
        return self._known[name]

    def _change(self, accounts: dict[str, Account]) -> None:
        """Write the accounts to the file.

        Raises AccountError if no administrator would remain, or if there would be too many accounts.
        """
        if len(accounts) > max(MAX_ACCOUNTS, len(self._known)):
            raise AccountError(f"the limit of {MAX_ACCOUNTS} accounts is reached")
        admins = [name for name, account in self._known.items() if account.role is Role.ADMIN]
        if admins and not any(account.role is Role.ADMIN for account in accounts.values()):
            raise AccountError(f"{admins[0]!r} is the last admin: create another one first")
        try:
            replace_private(str(self._path), msgspec.json.format(msgspec.json.encode(accounts)))
        except OSError as error:
            raise AccountError(f"{self._path} cannot be written: {error.strerror}") from None
        self._read()
