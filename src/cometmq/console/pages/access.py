"""Access control of brokers: accounts, white lists, and checks of permissions."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import Admin, BrokerStatus
from cometmq.admin.servers import AclVersion
from cometmq.admin.values import broker_places
from cometmq.console.pages.access_changes import FEED, ask_account, ask_deletion, ask_white_list
from cometmq.console.widgets.forms import SearchFields
from cometmq.console.widgets.listing import Listing, RowAction
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState
from cometmq.console.widgets.services import page
from cometmq.errors import CometError
from cometmq.protocol.acl import MAX_KEY_LENGTH
from cometmq.protocol.bodies import AclAccount

INTERVAL_S = 20.0
ACTIONS = {"pub": "access.pub", "sub": "access.sub", "admin": "access.admin_action"}
MAX_RESOURCE_LENGTH, MAX_HOST_LENGTH = 300, 64


@dataclass(frozen=True)
class BrokerAccess:
    """The access control of a broker.

    Attributes:
        versions: Data versions of its ACL files; None if the broker has no access control or does not
            respond.
        accounts: Its accounts; None if the broker cannot list them. Apache's brokers cannot.
        white: Addresses on the white lists, by file.
        problem: Why versions or accounts are missing.
    """

    addr: str
    versions: list[AclVersion] | None
    accounts: list[AclAccount] | None
    white: dict[str, list[str]] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class AccountRow:
    """An account. `differs` is True if a broker lacks the account or has different permissions for it."""

    account: AclAccount
    brokers: tuple[str, ...]
    differs: bool


async def ask(admin: Admin) -> list[BrokerAccess]:
    """Request the access control of all brokers, including slaves, concurrently."""
    places = broker_places(await admin.cluster_info())
    return list(await asyncio.gather(*(_ask_one(admin, place) for place in places)))


async def _ask_one(admin: Admin, place: BrokerStatus) -> BrokerAccess:
    addr = place.broker_addr
    try:
        versions = await admin.acl_versions(addr)
    except CometError as error:
        return BrokerAccess(addr, None, None, problem=str(error))
    try:
        listed = await admin.accounts(addr)
    except CometError as error:
        return BrokerAccess(addr, versions, None, problem=str(error))
    return BrokerAccess(addr, versions, listed.accounts, listed.global_white_remote_addresses)


def merged(brokers: Sequence[BrokerAccess]) -> list[AccountRow]:
    """Return the accounts of all brokers that list theirs, sorted by name."""
    listing = [broker for broker in brokers if broker.accounts is not None]
    by_name: defaultdict[str, list[tuple[str, AclAccount]]] = defaultdict(list)
    for broker in listing:
        for account in broker.accounts or ():
            by_name[account.access_key].append((broker.addr, account))
    rows = []
    for _, pairs in sorted(by_name.items()):
        first = pairs[0][1]
        same = all(_rules(account) == _rules(first) for _, account in pairs)
        addrs = tuple(addr for addr, _ in pairs)
        rows.append(AccountRow(first, addrs, differs=not same or len(pairs) < len(listing)))
    return rows


def _rules(account: AclAccount) -> tuple[object, ...]:
    """Return the permissions of an account as a tuple that is equal for equal permissions.

    The order of the permissions and the file that contains the account make no difference.
    """
    return (
        *(account.admin, account.white_remote_address),
        *(account.default_topic_perm, account.default_group_perm),
        *(frozenset(account.topic_perms), frozenset(account.group_perms), frozenset(account.rate_limits)),
    )


@page("/access", "access.title", menu=120, icon="key")
async def access_page(view: View) -> None:
    view.title(view.t("access.title"))
    view.note(view.t("access.says"))
    feed = view.feeds.feed(FEED, partial(ask, view.admin), INTERVAL_S)
    if view.may_change:
        with ui.element("div").classes("actions"):
            view.button("access.add", lambda: ask_account(view, None), icon="person_add")
            view.button("access.set_white", lambda: ask_white_list(view), icon="checklist")
    with view.section("access.accounts"):
        actions: list[RowAction[AccountRow]] = [
            RowAction("change", "access.change", lambda row: ask_account(view, row.account)),
            RowAction("delete", "access.delete", lambda row: ask_deletion(view, row.account.access_key)),
        ]
        listing = Listing(
            view, _account_columns(), lambda row: row.account.access_key,
            default=ListState(sort="account"), empty="access.none",
            actions=actions if view.may_change else (),
            classes=lambda row: {"differs": "warn"} if row.differs else {},
        )  # fmt: skip
        await listing.follow(feed, merged, notes=lambda found: _problems(view, found))
    with view.section("access.explain"):
        _permission_check(view)
    with view.section("access.files"):
        columns: list[Column[AclVersion]] = [
            Column("broker", "access.broker", lambda row: row.broker_name, searched=True),
            Column("addr", "access.addr", lambda row: row.broker_addr, searched=True),
            Column("file", "access.file", lambda row: row.file, searched=True),
            Column("counter", "access.counter", lambda row: row.counter, "number"),
            Column("at", "access.at", lambda row: row.timestamp_ms, "time"),
        ]
        files = Listing(
            view, columns, lambda row: f"{row.broker_addr} {row.file}", name="f", empty="access.no_files"
        )
        await files.follow(feed, lambda found: [each for broker in found for each in broker.versions or ()])
    with view.section("access.white_lists"):
        await view.live(feed, lambda found: _white_lists(view, found), age=False)


def _problems(view: View, found: list[BrokerAccess]) -> None:
    for broker in found:
        if broker.versions is None:
            view.note(view.t("access.without", addr=broker.addr, problem=broker.problem), "problem")
        elif broker.accounts is None:
            view.note(view.t("access.unlisted", addr=broker.addr, problem=broker.problem), "problem")


def _account_columns() -> list[Column[AccountRow]]:
    return [
        Column("account", "access.account", lambda row: row.account.access_key, searched=True),
        Column("admin", "access.admin", lambda row: row.account.admin, "flag"),
        Column("topic", "access.default_topic", lambda row: row.account.default_topic_perm),
        Column("group", "access.default_group", lambda row: row.account.default_group_perm),
        Column("topics", "access.topics", lambda row: ", ".join(row.account.topic_perms), searched=True),
        Column("groups", "access.groups", lambda row: ", ".join(row.account.group_perms), searched=True),
        Column("white", "access.white", lambda row: row.account.white_remote_address, searched=True),
        Column("brokers", "access.brokers", lambda row: len(row.brokers), "number"),
        Column("differs", "access.differs", lambda row: row.differs, "flag"),
    ]


def _white_lists(view: View, found: list[BrokerAccess]) -> None:
    pairs = [
        (f"{broker.addr} {file}", ", ".join(patterns))
        for broker in found
        for file, patterns in broker.white.items()
        if patterns
    ]
    if pairs:
        view.facts(pairs, translated=True)
    else:
        known = any(broker.accounts is not None for broker in found)
        view.note(view.t("access.no_white" if known else "common.unknown"))


def _permission_check(view: View) -> None:
    """Add fields for an account, an action and a resource. Each broker then reports its decision."""
    view.note(view.t("access.explain_says"))

    async def find(place: Element) -> None:
        await view.load(place, verdicts(view.admin, fields), lambda found: _show_verdicts(view, found))

    fields = SearchFields(view, find, keep_query=True)
    fields.text("user", "access.account", MAX_KEY_LENGTH)
    fields.choice("action", "access.action", ACTIONS)
    fields.text("resource", "access.resource", MAX_RESOURCE_LENGTH)
    fields.text("host", "access.host", MAX_HOST_LENGTH)
    fields.add_button("access.ask", icon="gavel")


async def verdicts(admin: Admin, fields: SearchFields) -> list[tuple[str, bool | None, str]]:
    """Return for each broker its address, whether it permits the action, and the rule that decided.

    If a broker does not report its decision, the second value is None and the third is an error text.
    """
    user, action, resource, host = (fields.value(name) for name in ("user", "action", "resource", "host"))

    async def verdict(addr: str) -> tuple[str, bool | None, str]:
        try:
            allowed, reason = await admin.explain_access(addr, user, action, resource, host)
        except CometError as error:
            return addr, None, str(error)
        return addr, allowed, reason

    addrs = sorted(each.broker_addr for each in broker_places(await admin.cluster_info()))
    return list(await asyncio.gather(*(verdict(addr) for addr in addrs)))


def _show_verdicts(view: View, found: list[tuple[str, bool | None, str]]) -> None:
    texts = {
        True: ("access.allowed", "good"), False: ("access.denied", "bad"), None: ("common.unknown", "warn"),
    }  # fmt: skip
    for addr, allowed, reason in found:
        key, kind = texts[allowed]
        view.note(f"{view.t(key)}: {reason} ({addr})", kind)
