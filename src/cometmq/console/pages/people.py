"""Who may log in to the console: accounts for administrators, and everybody's own password."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.console.door.accounts import (
    NAME_MAX,
    PASSWORD_MAX,
    PASSWORD_MIN,
    Account,
    AccountError,
    Accounts,
    Changed,
    Role,
)
from cometmq.console.door.attempts import Attempts
from cometmq.console.frame.actions import Action, NotAllowed, Progress, act
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing, RowAction
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState
from cometmq.console.frame.secret import show_secret

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 30.0
FEED = "people"
BURST, REFILL_S = 5, 30.0
"""Wrong passwords that somebody may give who wants to change his own."""


@dataclass(frozen=True)
class Person:
    """An account of the console."""

    name: str
    role: Role


async def ask(accounts: Accounts) -> list[Person]:
    """All accounts. Raises AccountError."""
    found = ((name, accounts.get(name)) for name in accounts.names())
    return [Person(name, account.role) for name, account in found if account is not None]


def pages(console: Console) -> None:
    """Put the page in."""
    attempts = Attempts(BURST, REFILL_S)

    @console.page("/accounts", "people.title", menu=140, icon="manage_accounts")
    async def people(view: View) -> None:
        view.title(view.t("people.title"))
        view.facts(
            [
                (view.t("people.you"), view.session.name),
                (view.t("people.role"), _role(view, view.session.role)),
            ]
        )
        with ui.element("div").classes("list-tools"):
            view.button("people.own", lambda: own_password(view, attempts), icon="password")
            if view.may_change:
                view.button("people.add", lambda: add(view), icon="person_add")
        if not view.may_change:
            view.note(view.t("people.reader"))
            return
        listing = Listing(
            view,
            [
                Column[Person]("name", "people.name", lambda row: row.name, searched=True),
                Column[Person]("role", "people.role", lambda row: _role(view, row.role)),
            ],
            lambda row: row.name,
            default=ListState(sort="name"),
            actions=[
                RowAction[Person]("new", "people.new", lambda row: new_password(view, row)),
                RowAction[Person]("role", "people.other_role", lambda row: other_role(view, row)),
                RowAction[Person]("remove", "people.remove", lambda row: remove(view, row)),
            ],
        )
        feed = view.feeds.feed(FEED, lambda: ask(console.accounts), INTERVAL_S)
        await listing.follow(feed, lambda found: found)


def _role(view: View, role: Role) -> str:
    return view.t("frame.admin" if role is Role.ADMIN else "frame.reader")


async def add(view: View) -> None:
    """Make an account, and show its password once."""
    form = Form(view, view.t("people.add"), [view.t("people.add_says")])
    name = form.text("people.name", most=NAME_MAX, needed=True)
    roles = {role.value: _role(view, role) for role in (Role.READER, Role.ADMIN)}
    role = form.choice("people.role", roles, Role.READER.value)
    if not await form.asked():
        return
    person = Person(str(name.value).strip(), Role(role.value))
    if person.name in view.console.accounts.names():
        raise AccountError(view.t("people.there", name=person.name))
    await _with_password(
        view, "account.add", person,
        [view.t("people.will_add", name=person.name, role=_role(view, person.role))], new=True,
    )  # fmt: skip


async def new_password(view: View, person: Person) -> None:
    """Give somebody who has forgotten his a new one."""
    await _with_password(view, "account.new_password", person, [view.t("people.will_new", name=person.name)])


async def _with_password(
    view: View, name: str, person: Person, says: list[str], *, new: bool = False
) -> None:
    """Give an account a password that is made here. new: it is not there yet."""
    made: list[str] = []

    async def work(_progress: Progress) -> None:
        before = view.console.accounts.get(person.name)
        if (before is None) != new:
            raise Changed(person.name)
        made.append(await _put(view, person.name, before, before.role if before else person.role))

    action = Action(
        name=name,
        target=person.name,
        says=says,
        work=work,
        refresh=[FEED],
        details={"role": person.role.value},
        of_console=True,
    )
    if await act(view, action):
        await show_secret(view, view.t("people.password_of", name=person.name), made[0])


async def other_role(view: View, person: Person) -> None:
    """Make a reader an administrator, or the other way round."""
    _not_oneself(view, person)
    role = Role.READER if person.role is Role.ADMIN else Role.ADMIN

    async def work(_progress: Progress) -> None:
        view.console.accounts.set_role(person.name, role)
        view.console.sessions.end_old()

    await act(
        view,
        Action(
            name="account.role",
            target=person.name,
            work=work,
            says=[view.t("people.will_role", name=person.name, role=_role(view, role))],
            refresh=[FEED],
            details={"role": role.value},
            of_console=True,
        ),
    )


async def remove(view: View, person: Person) -> None:
    """Remove an account."""
    _not_oneself(view, person)

    async def work(_progress: Progress) -> None:
        view.console.accounts.remove(person.name)
        view.console.sessions.end_old()

    await act(
        view,
        Action(
            name="account.remove",
            target=person.name,
            work=work,
            danger=True,
            says=[view.t("people.will_remove", name=person.name)],
            refresh=[FEED],
            of_console=True,
        ),
    )


def _not_oneself(view: View, person: Person) -> None:
    if person.name == view.session.name:
        raise AccountError(view.t("people.oneself"))


async def _put(view: View, name: str, before: Account | None, role: Role, wanted: str | None = None) -> str:
    """Write an account with a new password in place of what was there, and return the password. The session
    of one who changes his own goes on; his others end. Raises NotAllowed, Changed, AccountError."""
    accounts, session = view.console.accounts, view.session
    password, account = await asyncio.to_thread(accounts.prepared, name, role, wanted)
    # That took a while: somebody may have lost his role, or his account.
    if not view.console.sessions.valid(session):
        raise NotAllowed(view.t("people.over"))
    accounts.swap(name, before, account)
    if name == session.name:
        session.account = account
    view.console.sessions.end_old()
    return password


async def own_password(view: View, attempts: Attempts) -> None:
    """Everybody may change his own, readers too: who knows the present one."""
    form = Form(view, view.t("people.own"), [view.t("people.own_says")])
    present = form.text("people.present", most=PASSWORD_MAX, needed=True)
    wanted = form.text(
        "people.wanted", most=PASSWORD_MAX, needed=True,
        check=lambda said: None if len(said) >= PASSWORD_MIN else view.t("people.short", least=PASSWORD_MIN),
    )  # fmt: skip
    again = form.text(
        "people.again", most=PASSWORD_MAX, needed=True,
        check=lambda said: None if said == str(wanted.value or "") else view.t("people.differs"),
    )  # fmt: skip
    present.props("type=password autocomplete=current-password")
    for field in (wanted, again):
        field.props("type=password autocomplete=new-password")
    if await form.asked():
        await set_own(view, attempts, str(present.value), str(wanted.value))


async def set_own(view: View, attempts: Attempts, present: str, wanted: str) -> None:
    """Check the present password and set another. Raises NotAllowed."""
    session, console = view.session, view.console
    if attempts.wait_s(session.name) > 0:
        raise NotAllowed(view.t("login.too_often"))
    who = session.name, session.address, "account.own_password", session.name
    console.audit.must_add(*who)
    result = "refused"
    try:
        if not console.sessions.valid(session):
            raise NotAllowed(view.t("people.over"))
        attempts.failed(session.name)
        if await console.accounts.check(session.name, present) is None:
            raise NotAllowed(view.t("people.wrong"))
        attempts.passed(session.name)
        await _put(view, session.name, session.account, session.role, wanted)
        result = "ok"
    finally:
        console.audit.add(*who, result=result)
    view.say("people.own_done")
