"""Actions that change something: permission, confirmation, execution, audit log.

Each action of a page is an Action. A user without the permission is refused, even if the page shows the
action's button. A dialog describes the effect before anything happens; for a dangerous action, the user must
also type the name of its target. The audit log records the start and the outcome.
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
from typing import Any, TypeVar

from nicegui import ui

from cometmq import logs
from cometmq.admin.operations import Operation
from cometmq.console.auth.audit import AuditError
from cometmq.console.base.errors import NotAllowed, PartlyDone, TargetsChanged
from cometmq.console.widgets.page import View, text_element
from cometmq.errors import CometError

log = logs.logger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 2.0
"""Maximum time, in seconds, for which a step in progress continues after the user has stopped the action."""


class ActionProgress:
    """The progress of an action, shown in its dialog and passed to the function that executes the action.

    `outcome` holds facts about the result for the audit log.
    """

    def __init__(self, view: View) -> None:
        self.outcome: dict[str, str] = {}
        self._view = view
        self._stop = asyncio.Event()
        self._bar = ui.linear_progress(show_value=False, size="6px").props("indeterminate")
        self._bar.props["aria-label"] = view.t("common.working")
        self._text = text_element("p", view.t("common.working")).classes("note").props("role=status")
        self._button = ui.button(view.t("common.stop"), icon="stop", on_click=self._stop.set)
        self._button.props("outline no-caps").set_visibility(False)

    def report(self, text: str, share: float | None = None) -> None:
        """Show the current step.

        `share` is the finished part from 0 to 1, or None if the total is unknown.
        """
        self._text.set_text(text)
        if share is not None:
            self._bar.props(remove="indeterminate")
            self._bar.set_value(min(max(share, 0.0), 1.0))

    def check_targets(self, shown: Operation, now: Operation) -> None:
        """Raise TargetsChanged if an operation's steps or servers have changed since the user saw them."""
        then_steps, now_steps = (
            [(step.deed, sorted(step.addrs)) for step in each.steps] for each in (shown, now)
        )
        if then_steps != now_steps:
            servers = ", ".join(sorted({addr for step in now.steps for addr in step.addrs}))
            nothing = self._view.t("common.nothing")
            raise TargetsChanged(self._view.t("common.targets_changed", servers=servers or nothing))

    async def execute(self, operation: Operation, accepted: list[str] | None = None) -> list[Any]:
        """Run an operation, show its progress, and return the results of its requests.

        The addresses of the servers that executed a request are added to `accepted`.

        Raises PartlyDone with the errors of the servers that failed.
        """
        count, results, problems = sum(len(step.addrs) for step in operation.steps), [], []
        async for _, addr, result in operation.run(keep_going=True):
            if isinstance(result, CometError):
                problems.append(str(result))
                continue
            results.append(result)
            if accepted is not None:
                accepted.append(addr)
            self.report(self._view.t("common.done_at", addr=addr), len(results) / count)
        if problems:
            raise PartlyDone("; ".join(problems))
        return results

    @property
    def stopped(self) -> bool:
        """Whether the user has stopped the action."""
        return self._stop.is_set()

    async def until_stopped(self, results: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Yield results until the user clicks the stop button or closes the page."""
        self._button.set_visibility(True)
        self._view.client.on_delete(self._stop.set)
        async with aclosing(until(results, self._stop)) as some:
            async for result in some:
                yield result
        self._button.set_visibility(False)


async def until(results: AsyncIterator[T], stop: asyncio.Event) -> AsyncGenerator[T]:
    """Yield results until `stop` is set.

    A result that is pending at that time is still yielded if it arrives within STOP_TIMEOUT_S.
    """
    stopping = asyncio.ensure_future(stop.wait())
    pending: asyncio.Future[T] | None = None
    try:
        while not stop.is_set():
            pending = asyncio.ensure_future(anext(results))
            await asyncio.wait({pending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                await asyncio.wait({pending}, timeout=STOP_TIMEOUT_S)
            if not pending.done():
                return
            try:
                result = pending.result()
            except StopAsyncIteration:
                return
            yield result
    finally:
        stopping.cancel()
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


@dataclass(frozen=True)
class Action:
    """A change that is executed after the user has confirmed it.

    Attributes:
        name: Name in the audit log, for example `topic.delete`.
        target: Name of the object that is changed.
        effects: Sentences in the user's language that describe what will happen.
        work: Executes the action; returns a text about the result, or None.
        details: Parameters for the audit log, without secrets.
        danger: Whether the user must type the target's name.
        refresh: Keys of the feeds whose values are requested again after the action.
        then: Path of the page to open after the action.
        of_console: Whether the action changes the console, not the cluster.
    """

    name: str
    target: str
    effects: Sequence[str]
    work: Callable[[ActionProgress], Awaitable[str | None]]
    details: Mapping[str, str] = field(default_factory=dict)
    danger: bool = False
    refresh: Sequence[Hashable] = ()
    then: str = ""
    of_console: bool = False

    @classmethod
    def of(
        cls,
        operation: Operation,
        effects: Sequence[str],
        details: Mapping[str, str] | None = None,
        *,
        again: Callable[[], Awaitable[Operation]] | None = None,
        accepted: list[str] | None = None,
        result: Callable[[list[Any]], str | None] = lambda _results: None,
        **how: Any,
    ) -> Action:
        """Return the action that runs an operation.

        Args:
            operation: The operation. Its name, its target and its default for `danger` become the action's.
            effects: As in Action.
            details: As in Action.
            again: Creates the operation once more after the confirmation, for the servers that exist then.
                The action is refused if these servers differ from the servers of `operation`, because servers
                may join or leave while the dialog is open. None only if the page itself names the servers.
            accepted: Receives the addresses of the servers that executed a request, even if others failed.
            result: Returns a text about the results of the requests, or None.
            how: Values for further fields of Action: `danger`, `refresh`, `then` and `of_console`.
        """

        async def work(progress: ActionProgress) -> str | None:
            current = operation if again is None else await again()
            progress.check_targets(operation, current)
            return result(await progress.execute(current, accepted))

        how = {"danger": operation.danger, **how}
        return cls(operation.name, operation.target, effects, work, details or {}, **how)

    async def run(self, view: View) -> bool:
        """Ask for confirmation, execute the action, and show the result.

        Return whether the action succeeded.
        """
        check_permission(view, self.name, self.target)
        clusters = self._changed_cluster(view).values()
        effects = [*self.effects, *(view.t("clusters.in_cluster", name=name) for name in clusters)]
        with dialog(view, effects) as (box, place):
            typed = None
            if self.danger:
                typed = ui.input(view.t("common.type_name", name=self.target)).classes("full-width")
                typed.props("outlined dense autocomplete=off autofocus")
            started: list[bool] = []

            async def confirmed() -> None:
                if started:
                    return  # ignore a second click that arrives before the browser has removed the button
                if typed is not None and str(typed.value or "").strip() != self.target:
                    typed.props["error"] = True
                    typed.props["error-message"] = view.t("common.type_exactly")
                    return
                started.append(True)
                buttons.set_visibility(False)
                with place:
                    progress = ActionProgress(view)
                box.submit(await self.execute(view, progress))

            buttons = dialog_buttons(view, box, "common.do", confirmed, danger=self.danger)
        done = bool(await result_of(box))
        if done and self.then:
            view.open(self.then)
        return done

    async def execute(self, view: View, progress: ActionProgress) -> bool:
        """Execute the confirmed action and show the result. Return whether it succeeded.

        The audit log gets an entry before and another entry after the execution. If the first entry cannot be
        written, the action is not executed.
        """
        session, audit, result, done = view.session, view.services.audit, "ok", False
        who = session.name, session.address, self.name, self.target
        details = {**self.details, **self._changed_cluster(view)}
        try:
            check_permission(view, self.name, self.target)
            self._check_cluster(view)
            audit.record(*who, details)
        except AuditError as error:
            view.notify_error(view.t("common.not_noted", problem=str(error)))
            return False
        except CometError as error:
            view.notify_error(str(error))
            return False
        try:
            with view.client:
                outcome = await self.work(progress)
            done = True
            view.notify(view.t("common.done") if outcome is None else outcome)
        except Exception as error:
            result = str(error) or repr(error)
            if not isinstance(error, CometError):
                log.exception("action %s failed", self.name)
            view.notify_error(view.error_text(error))
        finally:
            # A cancelled action is recorded as well, because a part of it may have been executed.
            result = result if done or result != "ok" else "cut off"
            recorded = audit.try_record(*who, details={**details, **progress.outcome}, result=result)
        if not recorded:
            view.notify_error(view.t("common.outcome_not_noted"))
        view.feeds.refresh(*self.refresh)
        return done

    def _changed_cluster(self, view: View) -> dict[str, str]:
        """Return the name of the cluster that the action changes, for the audit log.

        The result is empty if the console shows only one cluster.
        """
        if self.of_console:
            return {}
        named = view.services.clusters.several or view.connection.ended
        return {"cluster": view.connection.name} if named else {}

    def _check_cluster(self, view: View) -> None:
        """Raise NotAllowed if the page's cluster was removed or changed after the page was opened.

        The refusal is recorded in the audit log.
        """
        if not self.of_console and view.connection.ended:
            who = view.session.name, view.session.address, self.name, self.target
            details = self._changed_cluster(view)
            view.services.audit.try_record(*who, details=details, result="refused")
            raise NotAllowed(view.t("clusters.ended", name=view.connection.name))


async def run_operation(
    view: View,
    create: Callable[[], Awaitable[Operation]],
    effects: Sequence[str],
    details: Mapping[str, str],
    **how: Any,
) -> bool:
    """Ask for confirmation, then run the operation that `create` returns. Return whether it succeeded.

    Servers may join and leave while the dialog is open. Therefore `create` is called again after the
    confirmation. The operation is refused if its servers then differ from those that the dialog named. The
    other arguments are those of `Action.of`.
    """
    return await Action.of(await create(), effects, details, again=create, **how).run(view)


def check_permission(view: View, action: str, target: str) -> None:
    """Raise NotAllowed if the user may only view, or if the session has ended.

    The refusal is recorded in the audit log.
    """
    if not (view.services.sessions.is_valid(view.session) and view.may_change):
        who = view.session.name, view.session.address
        view.services.audit.try_record(*who, action, target, result="refused")
        raise NotAllowed(view.t("common.refused_role"))


@contextmanager
def dialog(view: View, sentences: Sequence[str]) -> Iterator[tuple[ui.dialog, ui.card]]:
    """Open a dialog with sentences. The `with` body adds further content. `result_of` returns the result."""
    with view.client.content, ui.dialog().props("persistent") as box, ui.card().classes("dialog") as place:
        place.props("role=alertdialog").props["aria-label"] = sentences[0] if sentences else ""
        for sentence in sentences:
            text_element("p", sentence).style("margin: 0; overflow-wrap: anywhere")
        yield box, place
    box.open()


def dialog_buttons(
    view: View, box: ui.dialog, key: str, on_click: Callable[[], object], *, danger: bool = False
) -> ui.row:
    """Add a "Cancel" button and a second button to a dialog. `key` is the key of the second button's text."""
    with ui.row().classes("full-width justify-end") as row:
        ui.button(view.t("common.cancel"), on_click=lambda: box.submit(False)).props("flat no-caps")
        color = "negative" if danger else "primary"
        ui.button(view.t(key), on_click=on_click, color=color).props("no-caps")
    return row


async def result_of(box: ui.dialog) -> object:
    """Return the result of a dialog, or None if the user closed it without a result. Delete the dialog."""
    result: object = await box
    if not box.is_deleted:  # closing the page has already deleted the dialog
        box.delete()
    return result


async def show_secret(view: View, text: str, secret: str) -> None:
    """Show a secret until the dialog is closed. The secret is not in any feed, log or address."""
    with dialog(view, [text, view.t("secret.once")]) as (box, place), place:
        text_element("code", secret).classes("body secret")
        with ui.row().classes("full-width justify-end"):
            ui.button(view.t("secret.kept"), on_click=lambda: box.submit(True)).props("no-caps")
    await result_of(box)
