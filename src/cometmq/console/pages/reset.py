"""The reset of a group's consumer offsets in a topic: show the effect on each queue, then reset."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from nicegui import ui

from cometmq.admin import QueueReset, Reset
from cometmq.admin.offsets import END
from cometmq.console.base.errors import PartlyDone
from cometmq.console.widgets.actions import Action, ActionProgress, dialog, dialog_buttons, result_of
from cometmq.console.widgets.forms import TIME_FORMAT, Form, millis
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column

MAX_PROBLEMS_SHOWN = 20


async def reset_offsets(view: View, *, topic: str = "", group: str = "", to_end: bool = False) -> None:
    """Reset the consumer offsets of a group in a topic to a time, after the user has seen the effect.

    The caller passes either the topic or the group. The user chooses the other one, and the time. With
    `to_end`, all unconsumed messages are skipped, and the user chooses no time.
    """
    lags = (await view.cluster.lags().fresh()).value
    pairs = lags.pairs if lags is not None else {}
    others = sorted(
        {pair[0] if topic else pair[1] for pair in pairs if pair[1 if topic else 0] == (topic or group)}
    )
    form = Form(view, view.t("reset.title"), [view.t("reset.says_end" if to_end else "reset.says")])
    chosen = form.choice("reset.group" if topic else "reset.topic", others, others[0] if others else None)
    hour_ago = (datetime.now() - timedelta(hours=1)).strftime(TIME_FORMAT)
    moment = None if to_end else form.moment("reset.time", hour_ago)
    if not await form.submitted():
        return
    reset = Reset(
        group=group or str(chosen.value),
        topic=topic or str(chosen.value),
        at_ms=END if moment is None else (millis(moment.value) or 0),
    )
    plan = await view.admin.plan_reset(reset)
    again = f"{sum(max(0, each.consumer_offset - each.rollback_offset) for each in plan):,}"
    skipped = f"{sum(max(0, each.rollback_offset - max(0, each.consumer_offset)) for each in plan):,}"
    effect = view.t("reset.again", again=again, skipped=skipped)
    if await _plan_accepted(view, reset, plan, effect):
        await _execute(view, reset, effect, {"again": again, "skipped": skipped})


async def _plan_accepted(view: View, reset: Reset, plan: Sequence[QueueReset], effect: str) -> bool:
    """Show the new offset of each queue, and return whether the user continues."""
    columns: list[Column[QueueReset]] = [
        Column("broker", "topic.broker", lambda row: row.broker_name),
        Column("queue", "topic.queue", lambda row: row.queue_id, "number"),
        Column("now", "reset.now", lambda row: row.consumer_offset if row.consumer_offset >= 0 else None,
               "number"),
        Column("then", "reset.then", lambda row: row.rollback_offset, "number"),
        Column("end", "topic.max", lambda row: row.broker_offset, "number"),
    ]  # fmt: skip
    with dialog(view, [view.t("reset.plan", group=reset.group, topic=reset.topic), effect]) as (box, place):
        with place, ui.element("div").classes("full-width"):
            Listing(view, columns, lambda row: f"{row.broker_name} {row.queue_id}", name="plan").update(plan)
        with place:
            dialog_buttons(view, box, "common.go_on", lambda: box.submit(True))
    return bool(await result_of(box))


async def _execute(view: View, reset: Reset, effect: str, counts: dict[str, str]) -> None:
    async def work(progress: ActionProgress) -> str:
        progress.report(view.t("reset.waiting"))
        done = await view.admin.reset_offset(reset)
        problems = [f"{each.broker_name}:{each.queue_id}: {each.problem}" for each in done if each.problem]
        if problems:
            raise PartlyDone(view.t("reset.partly", problems="\n".join(problems[:MAX_PROBLEMS_SHOWN])))
        return view.t("reset.done", n=len(done))

    at = view.t("reset.end") if reset.at_ms == END else view.format("time", reset.at_ms)
    await Action(
        "group.reset", reset.group,
        [view.t("reset.will", group=reset.group, topic=reset.topic, time=at), effect], work,
        {"topic": reset.topic, "at": str(reset.at_ms), **counts}, danger=True,
        refresh=["lags", ("group", reset.group), ("topic", reset.topic)],
    ).run(view)  # fmt: skip
