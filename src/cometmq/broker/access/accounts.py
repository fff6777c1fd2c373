"""A strict parser for plain_acl.yml files with accounts and white lists (docs/reference/remoting.md, ACL).

Apache's broker treats an unknown permission as DENY and skips values that it cannot parse. This parser
refuses unknown keys, permissions and patterns, so that a broker with a typing error in a file does not start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import IntFlag
from typing import Any, NamedTuple, TypeGuard

import msgspec

from cometmq import yaml_file
from cometmq.broker.access.addresses import AddressPattern
from cometmq.broker.base.attributes import RATE_FORM, RATES, parse_rate
from cometmq.errors import ConfigError, YamlError
from cometmq.protocol.acl import MAX_KEY_LENGTH, MIN_KEY_LENGTH
from cometmq.protocol.bodies import DataVersion
from cometmq.settings import show_value
from cometmq.text import shortened
from cometmq.yaml_file import Node

MAX_FILE_BYTES = 1 << 20
MAX_YAML_NODES = 50_000
"""The maximum number of YAML nodes in one file: enough for 3,500 accounts with a few permissions each."""
_SHOWN = 80  # Maximum number of characters of an invalid value in an error text


class Perm(IntFlag):
    """The permissions of an account for a topic or group."""

    DENY = 0
    PUB = 1
    SUB = 2


PERMS = {
    "DENY": Perm.DENY, "PUB": Perm.PUB, "SUB": Perm.SUB,
    "PUB|SUB": Perm.PUB | Perm.SUB, "SUB|PUB": Perm.PUB | Perm.SUB,
}  # fmt: skip


class Rule(NamedTuple):
    """A permission from a line of an ACL file. `text` is that line, for explanations of decisions."""

    perm: Perm
    text: str


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """An account.

    `white` holds the addresses from which requests of this account are allowed without a signature. As in
    Apache's broker, an admin without topic and group permissions may do everything, and an admin with topic
    or group permissions may use only the topics and groups that they allow.
    """

    access_key: str
    secret_key: str
    white: AddressPattern | None = None
    admin: bool = False
    default_topic: Rule = Rule(Perm.DENY, "no defaultTopicPerm, which is DENY")
    default_group: Rule = Rule(Perm.DENY, "no defaultGroupPerm, which is DENY")
    topics: dict[str, Rule] = {}
    groups: dict[str, Rule] = {}
    rates: dict[str, str] = {}
    """The rate limits by name: see `rates/rate_limits.py`."""

    def __repr__(self) -> str:
        return f"Account({self.access_key!r})"


class AclFile(msgspec.Struct, frozen=True):
    """The content of one ACL file: its global white list, its accounts, and its data version."""

    white: list[AddressPattern] = []
    accounts: list[Account] = []
    version: DataVersion | None = None


def read_acl(path: str, data: bytes) -> AclFile:
    """Parse an ACL file. Raises ConfigError, which names the file and line, and never contains a secret."""
    try:
        root = yaml_file.load(data, MAX_FILE_BYTES, MAX_YAML_NODES)
        return _Reader().file(root)
    except YamlError as error:
        raise ConfigError(
            "aclEnable", "true", f"a valid file: {error.problem}", f"{path} line {error.line}"
        ) from None


def account_of(plain: dict[str, Any]) -> Account:
    """Create an account from a dict of `to_plain`, with the checks of ACL files. Raises ConfigError."""
    nodes = {
        name: Node([Node(item, 0) for item in value] if isinstance(value, list) else show_value(value), 0)
        for name, value in plain.items()
    }
    try:
        return _Reader().account(Node(nodes, 0))
    except YamlError as error:
        raise ConfigError("account", str(plain.get("accessKey", "")), error.problem) from None


def parse_perm(text: str) -> Perm | None:
    """Return the permission that a text such as PUB|SUB stands for, or None for an unknown text."""
    return PERMS.get(text.replace(" ", ""))


def check_key(name: str, key: str) -> str:
    """Return why an access key or a secret key is invalid, or "" if it is valid."""
    if not MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH:
        return f"{name} needs {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} characters"
    return (
        f"{name} must not have blanks or control characters" if re.search(r"[\s\x00-\x1f\x7f]", key) else ""
    )


_TOP = ("globalWhiteRemoteAddresses", "accounts", "dataVersion")
ACCOUNT_KEYS = (
    "accessKey", "secretKey", "whiteRemoteAddress", "admin",
    "defaultTopicPerm", "defaultGroupPerm", "topicPerms", "groupPerms", "rateLimits",
)  # fmt: skip


class _Reader:
    """Converts YAML nodes to accounts and white lists. Raises YamlError for an invalid node."""

    def file(self, root: Node) -> AclFile:
        top = self._pairs(root, "the file", _TOP)
        white = [self._pattern(item) for item in self._items(top.get("globalWhiteRemoteAddresses"))]
        accounts: dict[str, Account] = {}
        for item in self._items(top.get("accounts")):
            account = self.account(item)
            if account.access_key in accounts:
                raise YamlError(item.line, f"account {account.access_key!r} occurs twice")
            accounts[account.access_key] = account
        return AclFile(white, list(accounts.values()), self._version(top.get("dataVersion")))

    def account(self, node: Node) -> Account:
        pairs = self._pairs(node, "an account", ACCOUNT_KEYS)
        keys = {}
        for name in ("accessKey", "secretKey"):
            if name not in pairs:
                raise YamlError(node.line, f"an account has no {name}")
            keys[name] = self._text(pairs[name], name)
            if problem := check_key(name, keys[name]):
                raise YamlError(pairs[name].line, problem)
        white = pairs.get("whiteRemoteAddress")
        admin = self._text(pairs["admin"], "admin").lower() if "admin" in pairs else ""
        if admin not in ("true", "false", ""):
            raise YamlError(pairs["admin"].line, f"admin must be true or false, not {admin[:_SHOWN]!r}")
        return Account(
            access_key=keys["accessKey"],
            secret_key=keys["secretKey"],
            white=self._pattern(white) if _is_given(white) else None,
            admin=admin == "true",
            default_topic=self._default("defaultTopicPerm", pairs.get("defaultTopicPerm")),
            default_group=self._default("defaultGroupPerm", pairs.get("defaultGroupPerm")),
            topics=dict(self._perms("topicPerms", pairs.get("topicPerms"))),
            groups=dict(self._perms("groupPerms", pairs.get("groupPerms"))),
            rates=self._rates(pairs.get("rateLimits")),
        )

    def _default(self, name: str, node: Node | None) -> Rule:
        if not _is_given(node):
            return Rule(Perm.DENY, f"no {name}, which is DENY")
        text = self._text(node, name)
        return Rule(self._perm(node, name, text), f"{name}: {text.strip()}")

    def _perms(self, name: str, node: Node | None) -> Iterator[tuple[str, Rule]]:
        seen = set()
        for item in self._items(node):
            text = self._text(item, name)
            resource, found, perm = (word.strip() for word in text.partition("="))
            if not found or not resource:
                raise YamlError(
                    item.line, f"{name} must contain NAME=PERMISSION, not {shortened(text, _SHOWN)!r}"
                )
            if resource in seen:
                raise YamlError(item.line, f"{name}: {shortened(resource, _SHOWN)!r} occurs twice")
            seen.add(resource)
            yield resource, Rule(self._perm(item, name, perm), f"{name}: {resource}={perm}")

    def _rates(self, node: Node | None) -> dict[str, str]:
        rates: dict[str, str] = {}
        for item in self._items(node):
            text = self._text(item, "rateLimits")
            name, _, number = (word.strip() for word in text.partition("="))
            if name not in RATES or name in rates or parse_rate(number) is None:
                raise YamlError(
                    item.line,
                    f"rateLimits: {shortened(text, _SHOWN)!r} is not NAME=NUMBER with one of "
                    f"{', '.join(RATES)}, each at most once, and {RATE_FORM}",
                )
            rates[name] = number
        return rates

    def _perm(self, node: Node, name: str, text: str) -> Perm:
        perm = parse_perm(text)
        if perm is None:
            problem = f"{name}: {shortened(text, _SHOWN)!r} is none of DENY, PUB, SUB, PUB|SUB"
            raise YamlError(node.line, problem)
        return perm

    def _pattern(self, node: Node) -> AddressPattern:
        try:
            return AddressPattern(self._text(node, "an address"))
        except ConfigError as error:
            raise YamlError(
                node.line, f"{shortened(error.value, _SHOWN)!r}: expected {error.expected}"
            ) from None

    def _version(self, node: Node | None) -> DataVersion | None:
        for item in self._items(node):
            pairs = self._pairs(item, "dataVersion", ("counter", "timestamp", "stateVersion"))
            numbers = {}
            for name in ("counter", "timestamp"):
                text = self._text(pairs[name], name) if name in pairs else "0"
                if not re.fullmatch(r"[0-9]{1,18}", text):
                    raise YamlError(item.line, f"dataVersion: {name} must be a number")
                numbers[name] = int(text)
            return DataVersion(timestamp=numbers["timestamp"], counter=numbers["counter"])
        return None

    def _pairs(self, node: Node, what: str, known: Sequence[str]) -> dict[str, Node]:
        if not isinstance(node.value, dict):
            raise YamlError(node.line, f"{what} must be a mapping of {', '.join(known)}")
        for name, item in node.value.items():
            if name not in known:
                from difflib import get_close_matches  # Imported here, because it is rarely needed

                near = get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                # Show only the first word of the key: because of a typing error, the rest may be a secret, as
                # in `secretKey:x`.
                word = re.split(r"[^A-Za-z]", name, maxsplit=1)[0]
                raise YamlError(item.line, f"{what}: unknown key {shortened(word, _SHOWN)!r}{hint}")
        return node.value

    def _items(self, node: Node | None) -> list[Node]:
        if not _is_given(node):
            return []
        if not isinstance(node.value, list):
            raise YamlError(node.line, "expected a list, whose lines begin with -")
        return node.value

    def _text(self, node: Node, what: str) -> str:
        if not isinstance(node.value, str):
            raise YamlError(node.line, f"{what} must be text")
        return node.value


def _is_given(node: Node | None) -> TypeGuard[Node]:
    return node is not None and node.value not in ("", "null", "~")


def to_plain(account: Account) -> dict[str, Any]:
    """Return an account as a dict with the keys of an ACL file."""
    return {
        "accessKey": account.access_key,
        "secretKey": account.secret_key,
        "whiteRemoteAddress": account.white.text if account.white else "",
        "admin": account.admin,
        "defaultTopicPerm": _word(account.default_topic.perm),
        "defaultGroupPerm": _word(account.default_group.perm),
        "topicPerms": [f"{name}={_word(rule.perm)}" for name, rule in account.topics.items()],
        "groupPerms": [f"{name}={_word(rule.perm)}" for name, rule in account.groups.items()],
        # Written only if given, so that other programs that read the file need not know the key
        **({"rateLimits": rate_list(account)} if account.rates else {}),
    }


def rate_list(account: Account) -> list[str]:
    """Return the rate limits of an account as in an ACL file."""
    return [f"{name}={number}" for name, number in account.rates.items()]


def _word(perm: Perm) -> str:
    return next(word for word, value in PERMS.items() if value == perm)
