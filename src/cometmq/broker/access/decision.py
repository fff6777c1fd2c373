"""The access decision about a request, for the broker itself and for `cometmq acl explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from cometmq.broker.access.accounts import Account, Perm, Rule
from cometmq.broker.access.addresses import AddressPattern
from cometmq.broker.access.rights import Right, Rights, by_default, group_right, is_trace, topic_right
from cometmq.errors import ConfigError
from cometmq.protocol.codes import DLQ_PREFIX

MAX_HOSTS = 10_000
"""The maximum number of cached white list decisions, one per client address and account."""


class Verdict(NamedTuple):
    """An access decision. `reason` is the rule that allows the request, or the refusal in Apache's words."""

    allowed: bool
    reason: str


class Policy:
    """The accounts and white lists in force at one time. Immutable: a reload creates a new policy."""

    def __init__(self, white: Iterable[AddressPattern], accounts: Iterable[Account]) -> None:
        self._white = list(white)
        self._accounts = {account.access_key: account for account in accounts}
        self.rates = {key: account.rates for key, account in self._accounts.items()}
        """The rate limits of each account, by its access key."""
        self._known: dict[tuple[str, str], Verdict | None] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def remembered(self) -> int:
        """The number of cached white list decisions."""
        return len(self._known)

    @property
    def first_admin(self) -> Account | None:
        """The first account that may do everything, or None."""
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
        """Decide whether an account may make a request.

        `rights` returns the rights that the request requires, as rights.needed does. It is called only if no
        white list allows the client's address `host`, and `is_signed` accepts the account's signature.
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
        """Return the decision of an account's white list ("": the global one), None if it allows nothing."""
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
        if len(self._known) >= MAX_HOSTS:
            self._known.clear()
        self._known[key] = found
        return found


def permitted(account: Account, rights: Rights | None) -> Verdict:
    """Decide whether an account, whose signature is valid, has the required rights."""
    if rights is None:
        if account.admin:
            return Verdict(True, "admin: true")
        return Verdict(False, f"Need admin permission, but accessKey={account.access_key} is not")
    if not rights:
        return Verdict(True, "a valid signature suffices")
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
    elif right.name.startswith(DLQ_PREFIX):  # Dead-letter topics are subject to their group's permissions
        default = account.groups.get(right.name.removeprefix(DLQ_PREFIX), account.default_group)
    return own.get(right.name, default if by_default(right) else _NO_DEFAULT)


ACTIONS = ("pub", "sub", "admin")


def explained(policy: Policy, user: str, action: str, resource: str, host: str = "") -> Verdict:
    """Return the decision about an action, one of `ACTIONS`, of the account `user`. Raises ConfigError.

    `resource` is `topic:NAME`, `group:NAME`, or NAME for a topic, and "" for the action `admin`.
    """
    if action not in ACTIONS:
        raise ConfigError("ACTION", action, ", ".join(ACTIONS))
    kind, _, name = resource.rpartition(":")
    if kind not in ("", "topic", "group") or bool(name) == (action == "admin"):
        raise ConfigError("RESOURCE", resource, "topic:NAME or group:NAME, and none with admin")
    rights: Rights | None = None
    if action != "admin":
        perm = Perm.PUB if action == "pub" else Perm.SUB
        rights = [group_right(name) if kind == "group" else topic_right(perm, name)]
    return policy.decide(user, lambda: rights, host, lambda _account: True)
