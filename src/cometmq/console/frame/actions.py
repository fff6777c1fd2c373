"""What changes something: asked for, confirmed, done, told and noted.

Every action of every page goes through `act`: whoever may not do it is refused, whatever the page showed;
what it will do stands there before it is done; for dangerous ones the name is typed; and the audit log has
it, whether it succeeds or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from nicegui import ui

from cometmq import logs
from cometmq.console.door.audit import NotNoted
from cometmq.console.frame.page import TextElement, View, text_element
from cometmq.errors import CometError

log = logs.logger(__name__)

T = TypeVar("T")

STOP_S = 2.0


class NotAllowed(CometError):
    """Somebody tried what his role does not allow, or his session is over."""

    said: str

    def __str__(self) -> str:
        return self.said


class PartlyDone(CometError):
    """An action that did not come about everywhere, or was stopped; said: what did and what did not."""

    said: str

    def __str__(self) -> str:
        return self.said


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something to be done once it is confirmed.

    name: in the audit log, as `topic.delete`; target: the name of what is acted on; says: what will happen,
    one sentence each, in the user's language; work: does it, and may say what came out of it; details: for
    the audit log, never a secret; danger: the target's name has to be typed; refresh: keys of feeds to ask
    again; then: the path to go to afterwards; of_console: it changes the console and not the cluster.
    """

    name: str
    target: str
    says: Sequence[str]
    work: Callable[[Progress], Awaitable[str | None]]
    details: Mapping[str, str] = field(default_factory=dict)
    danger: bool = False
    refresh: Sequence[Hashable] = ()
    then: str = ""
    of_console: bool = False


class Progress:
    """How far a long action is; given to its `work`. outcome: what came out of it, for the audit log."""

    def __init__(self, view: View) -> None:
        self.outcome: dict[str, str] = {}
        self._view = view
        self._stop = asyncio.Event()
        self._bar = ui.linear_progress(show_value=False, size="6px").props("indeterminate")
        self._bar.props["aria-label"] = view.t("common.working")
        self._said: TextElement = text_element("p", view.t("common.working")).classes("note")
        self._said.props("role=status")
        self._button = ui.button(view.t("common.stop"), icon="stop", on_click=self._stop.set)
        self._button.props("outline no-caps").set_visibility(False)

    def say(self, said: str, share: float | None = None) -> None:
        """Where it is, in words; share: from 0 to 1, None where the end is not known."""
        self._said.say(said)
        if share is not None:
            self._bar.props(remove="indeterminate")
            self._bar.set_value(min(max(share, 0.0), 1.0))

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped it."""
        return self._stop.is_set()

    async def until_stopped(self, results: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Results that take long, with a button that stops them. Who leaves the page stops them, too: nobody
        would see how far they are. What is under way then may end within STOP_S."""
        view, stop = self._view, self._stop
        self._button.set_visibility(True)
        view.client.on_delete(stop.set)
        async with aclosing(until(results, stop)) as some:
            async for result in some:
                yield result
        self._button.set_visibility(False)


async def until(results: AsyncIterator[T], stop: asyncio.Event) -> AsyncGenerator[T]:
    """Results until `stop`; the one that is under way then may come within STOP_S."""
    stopping = asyncio.ensure_future(stop.wait())
    coming: asyncio.Future[T] | None = None
    try:
        while not stop.is_set():
            coming = asyncio.ensure_future(anext(results))
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                await asyncio.wait({coming}, timeout=STOP_S)
            if not coming.done():
                return
            try:
                result = coming.result()
            except StopAsyncIteration:
                return
            yield result
    finally:
        stopping.cancel()
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def act(view: View, action: Action) -> bool:
    """Ask, do, tell and note an action; whether it was done."""
    check_allowed(view, action.name, action.target)
    where = _where(view, action)
    says = [*action.says, *(view.t("clusters.in_cluster", name=name) for name in where.values())]
    with dialog(view, says) as (box, place):
        typed = None
        if action.danger:
            typed = ui.input(view.t("common.type_name", name=action.target)).classes("full-width")
            typed.props("outlined dense autocomplete=off autofocus")
        with ui.row().classes("full-width justify-end") as buttons:
            ui.button(view.t("common.cancel"), on_click=lambda: box.submit(False)).props("flat no-caps")
            do = ui.button(view.t("common.do"), color="negative" if action.danger else "primary")
            do.props("no-caps")

    begun: list[bool] = []

    async def confirmed() -> None:
        if begun:
            return  # clicked twice before the first click has taken the button away
        if typed is not None and str(typed.value or "").strip() != action.target:
            typed.props["error"] = True
            typed.props["error-message"] = view.t("common.type_exactly")
            return
        begun.append(True)
        buttons.set_visibility(False)
        with place:
            progress = Progress(view)
        box.submit(await carry_out(view, action, progress))

    do.on_click(confirmed)
    done = bool(await box)
    close(box)
    if done and action.then:
        view.open(action.then)
    return done


async def carry_out(view: View, action: Action, progress: Progress) -> bool:
    """Do a confirmed action: note it, before and afterwards, and tell what came out of it. Whether it
    succeeded. What the audit log does not take is not done."""
    session, audit, result, done = view.session, view.console.audit, "ok", False
    who = session.name, session.address, action.name, action.target
    details = {**action.details, **_where(view, action)}
    try:
        check_allowed(view, action.name, action.target)
        _check_cluster(view, action)
        audit.must_add(*who, details)
    except NotNoted as error:
        view.complain(view.t("common.not_noted", problem=str(error)))
        return False
    except CometError as error:
        view.complain(str(error))
        return False
    try:
        with view.client:
            said = await action.work(progress)
        done = True
        view.say("common.done") if said is None else view.tell(said)
    except Exception as error:
        result = str(error) or repr(error)
        if not isinstance(error, CometError):
            log.exception("action %s failed", action.name)
        view.complain(view.why(error))
    finally:
        # Also for one that is cut off: what it had done by then is done.
        what = {**details, **progress.outcome}
        noted = audit.add(*who, what, result if done or result != "ok" else "cut off")
    if not noted:
        view.complain(view.t("common.outcome_not_noted"))
    view.feeds.refresh(*action.refresh)
    return done


def _where(view: View, action: Action) -> dict[str, str]:
    """Return the name of the cluster that an action changes, if the console shows several."""
    if action.of_console:
        return {}
    named = view.console.clusters.several or view.connection.ended
    return {"cluster": view.connection.name} if named else {}


def _check_cluster(view: View, action: Action) -> None:
    """Raise NotAllowed if the page's cluster was removed or changed after the page was opened; audit it."""
    if not action.of_console and view.connection.ended:
        who = view.session.name, view.session.address, action.name, action.target
        view.console.audit.add(*who, _where(view, action), "refused")
        raise NotAllowed(view.t("clusters.ended", name=view.connection.name))


def check_allowed(view: View, name: str, target: str) -> None:
    """Raises NotAllowed for one who may only look, or whose session is over; it is noted."""
    if not (view.console.sessions.valid(view.session) and view.may_change):
        view.console.audit.add(view.session.name, view.session.address, name, target, result="refused")
        raise NotAllowed(view.t("common.refused_role"))


def close(box: ui.dialog) -> None:
    """Take a dialog away, which may have gone with its page already."""
    if not box.is_deleted:
        box.delete()


@contextmanager
def dialog(view: View, says: Sequence[str]) -> Iterator[tuple[ui.dialog, ui.card]]:
    """An open dialog with sentences, to be filled within the block: it and its content. `await` gives what
    was submitted, None if it was closed; the caller closes it."""
    with view.client.content, ui.dialog().props("persistent") as box, ui.card().classes("dialog") as place:
        place.props("role=alertdialog")
        place.props["aria-label"] = says[0] if says else ""
        for said in says:
            text_element("p", said).style("margin: 0; overflow-wrap: anywhere")
        yield box, place
    box.open()
