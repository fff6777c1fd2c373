"""Whether a request is let in: the one place that decides, for the broker and for `cometmq acl explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from cometmq.broker.access.accounts import Account, Perm, Rule
from cometmq.broker.access.addresses import AddressPattern
from cometmq.broker.access.rights import Right, Rights, by_default, is_trace
from cometmq.protocol.codes import DLQ_PREFIX

HOSTS_MAX = 10_000
"""Addresses whose white list entries are remembered."""


class Verdict(NamedTuple):
    """reason: the rule that let it in, or what is missing, beginning with Apache's words."""

    allowed: bool
    reason: str


class Policy:
    """All accounts and white lists that are in force at a time. It never changes; a reload makes another."""

    def __init__(self, white: Iterable[AddressPattern], accounts: Iterable[Account]) -> None:
        self._white = list(white)
        self._accounts = {account.access_key: account for account in accounts}
        self._known: dict[tuple[str, str], Verdict | None] = {}

    def __len__(self) -> int:
        """Accounts."""
        return len(self._accounts)

    @property
    def remembered(self) -> int:
        """Entries of the memory of addresses."""
        return len(self._known)

    @property
    def first_admin(self) -> Account | None:
        """An account that may do everything."""
        return next((each for each in self._accounts.values() if each.admin and _unbounded(each)), None)

    def account(self, access_key: str) -> Account | None:
        return self._accounts.get(access_key)

    def decide(
        self,
        access_key: str | None,
        rights: Callable[[], Rights | None],
        host: str,
        is_signed: Callable[[Account], bool],
    ) -> Verdict:
        """Whether an account may do something from an address (without port).

        rights: what is needed, see rights.needed; asked for once the account is known. is_signed: whether the
        request carries the account's signature.
        """
        white = self._white_listed("", host)
        if white is not None:
            return white
        if not access_key:
            return Verdict(False, "No accessKey is configured")
        account = self._accounts.get(access_key)
        if account is None:
            return Verdict(False, f"No acl config for {access_key}")
        white = self._white_listed(access_key, host)
        if white is not None:
            return white
        if not is_signed(account):
            return Verdict(False, f"Check signature failed for accessKey={access_key}")
        return permitted(account, rights())

    def _white_listed(self, access_key: str, host: str) -> Verdict | None:
        """The entry of a white list that lets an address in: of the account, or with "" the global one."""
        key = access_key, host
        if key in self._known:
            return self._known[key]
        found = None
        if access_key:
            pattern = self._accounts[access_key].white
            if pattern is not None and pattern.matches(host):
                found = Verdict(True, f"whiteRemoteAddress: {pattern.text}")
        else:
            for pattern in self._white:
                if pattern.matches(host):
                    found = Verdict(True, f"globalWhiteRemoteAddresses: {pattern.text}")
                    break
        if len(self._known) >= HOSTS_MAX:
            self._known.clear()
        self._known[key] = found
        return found


def permitted(account: Account, rights: Rights | None) -> Verdict:
    """What the permissions of an account say, whose signature is good."""
    if rights is None:
        if account.admin:
            return Verdict(True, "admin: true")
        return Verdict(False, f"Need admin permission, but accessKey={account.access_key} is not")
    if not rights:
        return Verdict(True, "a good signature is all that it needs")
    if is_trace(rights):
        return Verdict(True, "every account may send traces")
    if account.admin and _unbounded(account):
        return Verdict(True, "admin: true")
    rules = []
    for right in rights:
        rule = _rule(account, right)
        if not rule.perm & right.perm:
            return Verdict(False, f"No default permission for {right} ({rule.text})")
        rules.append(rule.text)
    return Verdict(True, "; ".join(dict.fromkeys(rules)))


def _unbounded(account: Account) -> bool:
    return not account.topics and not account.groups


_NO_DEFAULT = Rule(Perm.DENY, "the system's own: only an entry that names it counts")


def _rule(account: Account, right: Right) -> Rule:
    own, default = account.topics, account.default_topic
    if right.group:
        own, default = account.groups, account.default_group
    elif right.name.startswith(DLQ_PREFIX):  # messages of whatever topics the group has
        default = account.groups.get(right.name.removeprefix(DLQ_PREFIX), account.default_group)
    return own.get(right.name, default if by_default(right) else _NO_DEFAULT)
