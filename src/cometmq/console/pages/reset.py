"""Setting a group's offsets in a topic: what would happen first, queue by queue, then the reset itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from nicegui import ui

from cometmq.admin import QueueReset, Reset
from cometmq.admin.offsets import END
from cometmq.console.frame.actions import Action, PartlyDone, Progress, act, close, dialog
from cometmq.console.frame.forms import Form, millis
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column


async def ask_reset(view: View, *, topic: str = "", group: str = "", to_end: bool = False) -> None:
    """Ask for group or topic, whichever is not given, and the time; show the plan; reset. to_end: skip all
    that is there."""
    found = (await view.cluster.progress().fresh()).value
    pairs = found.pairs if found is not None else {}
    others = sorted(
        {pair[0] if topic else pair[1] for pair in pairs if pair[1 if topic else 0] == (topic or group)}
    )
    form = Form(view, view.t("reset.title"), [view.t("reset.says_end" if to_end else "reset.says")])
    chosen = form.choice("reset.group" if topic else "reset.topic", others, others[0] if others else None)
    moment = None if to_end else form.moment("reset.time", datetime.now() - timedelta(hours=1))
    if not await form.asked():
        return
    wanted = Reset(
        group=group or str(chosen.value),
        topic=topic or str(chosen.value),
        at_ms=END if moment is None else (millis(moment.value) or 0),
    )
    plan = await view.admin.plan_reset(wanted)
    if await _shown(view, wanted, plan):
        await _reset(view, wanted, plan)


async def _shown(view: View, wanted: Reset, plan: Sequence[QueueReset]) -> bool:
    """Show the plan: whether to go on."""
    says = view.t("reset.plan", group=wanted.group, topic=wanted.topic)
    with dialog(view, [says, view.t("reset.again", again=_again(plan), skipped=_skipped(plan))]) as (
        box,
        place,
    ):
        with place, ui.element("div").classes("full-width"):
            listing = Listing(view, _columns(), lambda row: f"{row.broker_name} {row.queue_id}", name="plan")
            listing.update(plan)
        with place, ui.row().classes("full-width justify-end"):
            ui.button(view.t("common.cancel"), on_click=lambda: box.submit(False)).props("flat no-caps")
            ui.button(view.t("common.go_on"), on_click=lambda: box.submit(True)).props("no-caps")
    go_on = bool(await box)
    close(box)
    return go_on


def _columns() -> list[Column[QueueReset]]:
    return [
        Column("broker", "topic.broker", lambda row: row.broker_name),
        Column("queue", "topic.queue", lambda row: row.queue_id, "number"),
        Column(
            "now",
            "reset.now",
            lambda row: row.consumer_offset if row.consumer_offset >= 0 else None,
            "number",
        ),
        Column("then", "reset.then", lambda row: row.rollback_offset, "number"),
        Column("end", "topic.max", lambda row: row.broker_offset, "number"),
    ]


def _again(plan: Sequence[QueueReset]) -> str:
    """Messages that would be consumed once more."""
    return f"{sum(max(0, each.consumer_offset - each.rollback_offset) for each in plan):,}"


def _skipped(plan: Sequence[QueueReset]) -> str:
    return f"{sum(max(0, each.rollback_offset - max(0, each.consumer_offset)) for each in plan):,}"


async def _reset(view: View, wanted: Reset, plan: Sequence[QueueReset]) -> None:
    async def work(progress: Progress) -> str:
        progress.say(view.t("reset.waiting"))
        done = await view.admin.reset_offset(wanted)
        problems = [f"{each.broker_name}:{each.queue_id}: {each.problem}" for each in done if each.problem]
        if problems:
            raise PartlyDone(view.t("reset.partly", problems="\n".join(problems[:20])))
        return view.t("reset.done", n=len(done))

    at = view.t("reset.end") if wanted.at_ms == END else view.shown("time", wanted.at_ms)
    says = view.t("reset.will", group=wanted.group, topic=wanted.topic, time=at)
    await act(
        view,
        Action(
            name="group.reset",
            target=wanted.group,
            work=work,
            danger=True,
            refresh=["progress", ("group", wanted.group), ("topic", wanted.topic)],
            says=[says, view.t("reset.again", again=_again(plan), skipped=_skipped(plan))],
            details={
                "topic": wanted.topic,
                "at": str(wanted.at_ms),
                "again": _again(plan),
                "skipped": _skipped(plan),
            },
        ),
    )
