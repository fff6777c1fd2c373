"""Console accounts, managed by administrators, and the change of a user's own password."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from nicegui import ui

from cometmq.console.auth.accounts import (
    MAX_NAME_LENGTH,
    MAX_PASSWORD_LENGTH,
    MIN_PASSWORD_LENGTH,
    Account,
    AccountChanged,
    AccountError,
    Accounts,
    Role,
)
from cometmq.console.base.errors import NotAllowed
from cometmq.console.widgets.actions import Action, ActionProgress, show_secret
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing, RowAction
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState
from cometmq.console.widgets.services import page

INTERVAL_S = 30.0
FEED = "users"


@dataclass(frozen=True)
class User:
    """An account of the console."""

    name: str
    role: Role


async def ask(accounts: Accounts) -> list[User]:
    """Return all accounts. Raises AccountError."""
    found = ((name, accounts.get(name)) for name in accounts.names())
    return [User(name, account.role) for name, account in found if account is not None]


@page("/accounts", "users.title", menu=140, icon="manage_accounts")
async def users_page(view: View) -> None:
    view.title(view.t("users.title"))
    view.facts([("users.you", view.session.name), ("users.role", _role(view, view.session.role))])
    with ui.element("div").classes("list-tools"):
        view.button("users.own", lambda: ask_own_password(view), icon="password")
        if view.may_change:
            view.button("users.add", lambda: add(view), icon="person_add")
    if not view.may_change:
        view.note(view.t("users.reader"))
        return
    columns: list[Column[User]] = [
        Column("name", "users.name", lambda row: row.name, searched=True),
        Column("role", "users.role", lambda row: _role(view, row.role)),
    ]
    actions: list[RowAction[User]] = [
        RowAction("new", "users.new", lambda row: reset_password(view, row)),
        RowAction("role", "users.other_role", lambda row: change_role(view, row)),
        RowAction("remove", "users.remove", lambda row: remove(view, row)),
    ]
    listing = Listing(view, columns, lambda row: row.name, default=ListState(sort="name"), actions=actions)
    feed = view.feeds.feed(FEED, lambda: ask(view.services.accounts), INTERVAL_S)
    await listing.follow(feed, lambda found: found)


def _role(view: View, role: Role) -> str:
    return view.t("frame.admin" if role is Role.ADMIN else "frame.reader")


async def add(view: View) -> None:
    """Ask the user for a new account, create it, and show its password once."""
    form = Form(view, view.t("users.add"), [view.t("users.add_says")])
    name = form.text("users.name", max_length=MAX_NAME_LENGTH, required=True)
    roles = {role.value: _role(view, role) for role in (Role.READER, Role.ADMIN)}
    role = form.choice("users.role", roles, Role.READER.value)
    if not await form.submitted():
        return
    user = User(str(name.value).strip(), Role(role.value))
    if user.name in view.services.accounts.names():
        raise AccountError(view.t("users.there", name=user.name))
    effect = view.t("users.will_add", name=user.name, role=_role(view, user.role))
    await _set_generated_password(view, "account.add", user, effect, new=True)


async def reset_password(view: View, user: User) -> None:
    """Set a generated password for an account and show it once."""
    effect = view.t("users.will_new", name=user.name)
    await _set_generated_password(view, "account.new_password", user, effect)


async def _set_generated_password(
    view: View, name: str, user: User, effect: str, *, new: bool = False
) -> None:
    """Generate a password, set it for an account, and show it.

    `new` means that the account must not exist yet.
    """
    passwords: list[str] = []

    async def work(_progress: ActionProgress) -> None:
        before = view.services.accounts.get(user.name)
        if (before is None) != new:
            raise AccountChanged(user.name)
        role = before.role if before else user.role
        passwords.append(await _replace_password(view, user.name, before, role))

    action = Action(
        name, user.name, [effect], work, {"role": user.role.value}, refresh=[FEED], of_console=True
    )
    if await action.run(view):
        await show_secret(view, view.t("users.password_of", name=user.name), passwords[0])


async def change_role(view: View, user: User) -> None:
    """Change the role of an account from reader to administrator, or from administrator to reader."""
    _check_other(view, user)
    role = Role.READER if user.role is Role.ADMIN else Role.ADMIN

    async def work(_progress: ActionProgress) -> None:
        view.services.accounts.set_role(user.name, role)
        view.services.sessions.end_expired()

    await Action(
        "account.role", user.name, [view.t("users.will_role", name=user.name, role=_role(view, role))],
        work, {"role": role.value}, refresh=[FEED], of_console=True,
    ).run(view)  # fmt: skip


async def remove(view: View, user: User) -> None:
    """Remove an account."""
    _check_other(view, user)

    async def work(_progress: ActionProgress) -> None:
        view.services.accounts.remove(user.name)
        view.services.sessions.end_expired()

    await Action(
        "account.remove", user.name, [view.t("users.will_remove", name=user.name)], work, danger=True,
        refresh=[FEED], of_console=True,
    ).run(view)  # fmt: skip


def _check_other(view: View, user: User) -> None:
    """Raise AccountError if the account is that of the logged-in user."""
    if user.name == view.session.name:
        raise AccountError(view.t("users.oneself"))


async def _replace_password(
    view: View, name: str, before: Account | None, role: Role, new: str | None = None
) -> str:
    """Write an account with a new password in place of `before`, and return the password.

    If it is the account of the logged-in user, the current session continues. All other sessions of the
    account end. Raises NotAllowed, AccountChanged and AccountError.
    """
    accounts, sessions, session = view.services.accounts, view.services.sessions, view.session
    password, account = await asyncio.to_thread(accounts.prepare, name, role, new)
    # While a thread hashed the password, the user may have lost the permission or the account.
    if not sessions.is_valid(session):
        raise NotAllowed(view.t("users.over"))
    accounts.replace(name, before, account)
    if name == session.name:
        session.account = account
    sessions.end_expired()
    return password


async def ask_own_password(view: View) -> None:
    """Ask the logged-in user, of any role, for a new password, and set it."""

    def check_length(text: str) -> str | None:
        enough = len(text) >= MIN_PASSWORD_LENGTH
        return None if enough else view.t("users.short", least=MIN_PASSWORD_LENGTH)

    def check_same(text: str) -> str | None:
        return None if text == str(new.value or "") else view.t("users.differs")

    form = Form(view, view.t("users.own"), [view.t("users.own_says")])
    current = form.text("users.present", max_length=MAX_PASSWORD_LENGTH, required=True)
    new = form.text("users.wanted", max_length=MAX_PASSWORD_LENGTH, required=True, check=check_length)
    again = form.text("users.again", max_length=MAX_PASSWORD_LENGTH, required=True, check=check_same)
    current.props("type=password autocomplete=current-password")
    for field in (new, again):
        field.props("type=password autocomplete=new-password")
    if await form.submitted():
        await set_own_password(view, str(current.value), str(new.value))


async def set_own_password(view: View, current: str, new: str) -> None:
    """Check the user's current password and set a new one. Raises NotAllowed."""
    session, services = view.session, view.services
    attempts = services.password_changes
    if attempts.wait_s(session.name) > 0:
        raise NotAllowed(view.t("login.too_often"))
    who = session.name, session.address, "account.own_password", session.name
    services.audit.record(*who)
    result = "refused"
    try:
        if not services.sessions.is_valid(session):
            raise NotAllowed(view.t("users.over"))
        attempts.failed(session.name)
        if await services.accounts.check_password(session.name, current) is None:
            raise NotAllowed(view.t("users.wrong"))
        attempts.passed(session.name)
        await _replace_password(view, session.name, session.account, session.role, new)
        result = "ok"
    finally:
        services.audit.try_record(*who, result=result)
    view.notify(view.t("users.own_done"))
