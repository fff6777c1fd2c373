"""Access control of brokers: accounts and white lists, what an account may do, and why."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import Admin
from cometmq.admin.acl import Accounts, AclVersion
from cometmq.console.frame.listing import Listing, RowAction
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState
from cometmq.console.pages.access_changes import ask_account, ask_deletion, ask_white
from cometmq.errors import CometError
from cometmq.protocol.acl import MAX_KEY_LENGTH
from cometmq.protocol.bodies import AclAccount

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 20.0
ACTIONS = {"pub": "access.pub", "sub": "access.sub", "admin": "access.admin_action"}
RESOURCE_MAX, HOST_MAX = 300, 64
FEED = "access"


@dataclass(frozen=True)
class BrokerAccess:
    """What a broker says of its accounts. versions: of its files, None where it has no access control or
    does not answer; accounts: None where it does not list them, as Apache's; problem: why."""

    cluster: str
    name: str
    addr: str
    versions: list[AclVersion] | None
    accounts: list[AclAccount] | None
    white: dict[str, list[str]] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class AccountRow:
    """An account as the brokers have it. differs: they do not have the same, or not all have it."""

    account: AclAccount
    brokers: tuple[str, ...]
    differs: bool


async def ask(admin: Admin) -> list[BrokerAccess]:
    """All brokers, slaves too, side by side."""
    info = await admin.cluster_info()
    places = [
        (cluster, name, addr)
        for cluster, names in sorted(info.cluster_addr_table.items())
        for name in sorted(names)
        if (data := info.broker_addr_table.get(name)) is not None
        for _, addr in sorted(data.broker_addrs.items())
    ]
    return list(await asyncio.gather(*(_ask_one(admin, *place) for place in places)))


async def _ask_one(admin: Admin, cluster: str, name: str, addr: str) -> BrokerAccess:
    accounts = Accounts(admin)
    try:
        versions = await accounts.versions(addr)
    except CometError as error:
        return BrokerAccess(cluster, name, addr, None, None, problem=str(error))
    try:
        listed = await accounts.listed(addr)
    except CometError as error:
        return BrokerAccess(cluster, name, addr, versions, None, problem=str(error))
    return BrokerAccess(cluster, name, addr, versions, listed.accounts, listed.global_white_remote_addresses)


def merged(brokers: Sequence[BrokerAccess]) -> list[AccountRow]:
    """Accounts by name, over the brokers that list theirs."""
    listing = [broker for broker in brokers if broker.accounts is not None]
    found: defaultdict[str, list[tuple[str, AclAccount]]] = defaultdict(list)
    for broker in listing:
        for account in broker.accounts or ():
            found[account.access_key].append((broker.addr, account))
    rows = []
    for _, held in sorted(found.items()):
        first = held[0][1]
        same = all(_rules(account) == _rules(first) for _, account in held)
        addrs = tuple(addr for addr, _ in held)
        rows.append(AccountRow(first, addrs, differs=not same or len(held) < len(listing)))
    return rows


def _rules(account: AclAccount) -> tuple[object, ...]:
    """What tells two accounts of a name apart: not the file, and not the order of permissions."""
    return (
        account.admin,
        account.white_remote_address,
        account.default_topic_perm,
        account.default_group_perm,
        frozenset(account.topic_perms),
        frozenset(account.group_perms),
    )


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/access", "access.title", menu=120, icon="key")
    async def access(view: View) -> None:
        view.title(view.t("access.title"))
        view.note(view.t("access.says"))
        feed = view.feeds.feed(FEED, partial(ask, view.admin), INTERVAL_S)
        if view.may_change:
            with ui.element("div").classes("actions"):
                view.button("access.add", lambda: ask_account(view, None), icon="person_add")
                view.button("access.set_white", lambda: ask_white(view), icon="checklist")
        notices = ui.element("div").props("aria-live=polite")
        with view.section("access.accounts"):
            changes = [
                RowAction[AccountRow]("change", "access.change", lambda row: ask_account(view, row.account)),
                RowAction[AccountRow](
                    "delete", "access.delete", lambda row: ask_deletion(view, row.account.access_key)
                ),
            ]
            listing = Listing(
                view, _account_columns(), lambda row: row.account.access_key,
                default=ListState(sort="account"), empty="access.none",
                actions=changes if view.may_change else (),
                classes=lambda row: {"differs": "warn"} if row.differs else {},
            )  # fmt: skip

            def pick(found: list[BrokerAccess]) -> list[AccountRow]:
                notices.clear()
                with notices:
                    _problems(view, found)
                return merged(found)

            await listing.follow(feed, pick)
        with view.section("access.explain"):
            _explain(view)
        with view.section("access.files"):
            files = Listing(
                view, _file_columns(), lambda row: f"{row.broker_addr} {row.file}", name="f",
                empty="access.no_files",
            )  # fmt: skip
            await files.follow(
                feed, lambda found: [each for broker in found for each in broker.versions or ()]
            )
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


def _file_columns() -> list[Column[AclVersion]]:
    return [
        Column("broker", "access.broker", lambda row: row.broker_name, searched=True),
        Column("addr", "access.addr", lambda row: row.broker_addr, searched=True),
        Column("file", "access.file", lambda row: row.file, searched=True),
        Column("counter", "access.counter", lambda row: row.counter, "number"),
        Column("at", "access.at", lambda row: row.timestamp_ms, "time"),
    ]


def _white_lists(view: View, found: list[BrokerAccess]) -> None:
    pairs = [
        (f"{broker.addr} {file}", ", ".join(patterns))
        for broker in found
        for file, patterns in broker.white.items()
        if patterns
    ]
    if pairs:
        view.facts(pairs)
    elif any(broker.accounts is not None for broker in found):
        view.note(view.t("access.no_white"))
    else:
        view.note(view.t("common.unknown"))


def _explain(view: View) -> None:
    """Whether USER may ACTION the RESOURCE, asked of every broker."""
    view.note(view.t("access.explain_says"))
    with ui.element("div").classes("list-tools"):
        user = ui.input(view.t("access.account"), value=view.query.get("user", "")[:MAX_KEY_LENGTH])
        user.props(f"dense outlined maxlength={MAX_KEY_LENGTH}")
        asked = view.query.get("action", "pub")
        action = ui.select(
            {name: view.t(key) for name, key in ACTIONS.items()},
            label=view.t("access.action"),
            value=asked if asked in ACTIONS else "pub",
        )
        action.props("dense outlined options-dense").style("min-width: 150px")
        resource = ui.input(view.t("access.resource"), value=view.query.get("resource", "")[:RESOURCE_MAX])
        resource.props(f"dense outlined maxlength={RESOURCE_MAX}").style("min-width: 260px")
        host = ui.input(view.t("access.host"), value=view.query.get("host", "")[:HOST_MAX])
        host.props(f"dense outlined maxlength={HOST_MAX}")
        place: ui.element

        async def show() -> None:
            values = {
                "user": user.value, "action": action.value, "resource": resource.value, "host": host.value,
            }  # fmt: skip
            given = {name: str(value or "").strip() for name, value in values.items()}
            kept = {name: value for name, value in view.query.items() if name not in given}
            view.query = {**kept, **{name: value for name, value in given.items() if value}}
            view.note_query()
            await view.fill(place, verdicts(view.admin, given), lambda found: _verdicts(view, found))

        view.button("access.ask", show, icon="gavel")
    place = ui.element("div").props("aria-live=polite")


async def verdicts(admin: Admin, given: dict[str, str]) -> list[tuple[str, bool | None, str]]:
    """(address, whether it is allowed, the rule that decides), None and the problem where a broker does not
    say."""
    info = await admin.cluster_info()
    addrs = sorted(addr for data in info.broker_addr_table.values() for addr in data.broker_addrs.values())

    async def one(addr: str) -> tuple[str, bool | None, str]:
        try:
            allowed, reason = await Accounts(admin).explain(
                addr, given["user"], given["action"], given["resource"], given["host"]
            )
        except CometError as error:
            return addr, None, str(error)
        return addr, allowed, reason

    return list(await asyncio.gather(*(one(addr) for addr in addrs)))


def _verdicts(view: View, found: list[tuple[str, bool | None, str]]) -> None:
    words = {
        True: ("access.allowed", "good"),
        False: ("access.denied", "bad"),
        None: ("common.unknown", "warn"),
    }
    for addr, allowed, reason in found:
        key, kind = words[allowed]
        view.note(f"{view.t(key)}: {reason} ({addr})", kind)
