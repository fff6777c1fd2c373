"""One message: its fields and body, its consumption by each group, and the actions on it."""

from __future__ import annotations

from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import MessageTrack, TrackType
from cometmq.console.base.cluster_feeds import kind_of
from cometmq.console.base.errors import ConsoleError
from cometmq.console.messages.search import messages_of
from cometmq.console.widgets.actions import Action, ActionProgress
from cometmq.console.widgets.body import MAX_HEX_BYTES, MAX_TEXT_LENGTH, as_hex, as_json, as_text, is_text
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing, RowAction
from cometmq.console.widgets.page import View, live_area, text_element
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.message import MessageExt, SendResult

SUCCESS = "CR_SUCCESS"
TRACKS = {
    TrackType.CONSUMED: ("one_message.consumed", "good"),
    TrackType.CONSUMED_BUT_FILTERED: ("one_message.filtered", "warn"),
    TrackType.PULL: ("one_message.pulls", ""),
    TrackType.NOT_CONSUME_YET: ("one_message.not_yet", "warn"),
    TrackType.NOT_ONLINE: ("one_message.not_online", "bad"),
    TrackType.UNKNOWN: ("one_message.unknown", "bad"),
}
"""The key of the displayed text and the CSS class for each state that a message can have in a group."""


class ListenerFailed(ConsoleError):
    """A member received a message, but its listener did not process it successfully."""


@page("/messages/{msg_id:path}", "messages.title", under="/messages")
async def message_page(view: View, msg_id: str) -> None:
    view.title(view.t("one_message.title", id=msg_id))
    place = live_area()
    topic = view.query.get("topic") or None

    async def find() -> None:
        await view.load(place, view.admin.message_by_id(msg_id, topic), lambda found: _draw(view, found))

    ui.timer(0.01, lambda: view.run(find), once=True)


def _draw(view: View, message: MessageExt) -> None:
    with ui.element("div").classes("list-tools"):
        view.link(view.t("one_message.trace"), f"/trace?{urlencode({'id': message.msg_id})}")
        view.link(view.t("one_message.others"), messages_of(message.topic))
    if view.may_change and kind_of(message.topic) == "normal":
        with ui.element("div").classes("actions"):
            view.button("one_message.again", lambda: resend(view, message), icon="replay")
    view.facts(_facts(view, message))
    with view.section("one_message.properties"):
        columns: list[Column[tuple[str, str]]] = [
            Column("name", "one_message.property", lambda row: row[0], searched=True),
            Column("value", "one_message.value", lambda row: row[1], searched=True),
        ]
        properties = Listing(
            view, columns, lambda row: row[0], name="p", default=ListState(sort="name"),
            empty="one_message.no_properties",
        )  # fmt: skip
        properties.update(list(message.properties.items()))
    with view.section("one_message.body"):
        _body(view, message)
    with view.section("one_message.tracks"):
        tracks = live_area()
        view.button("common.refresh", lambda: _load_tracks(view, message, tracks), icon="refresh")
        ui.timer(0.01, lambda: view.run(_load_tracks, view, message, tracks), once=True)


def _facts(view: View, message: MessageExt) -> list[tuple[str, str]]:
    place = f"{message.store_host} {view.t('messages.queue')} {message.queue_id} @ {message.queue_offset:,}"
    return [
        ("messages.topic", message.topic),
        ("messages.id", message.msg_id),
        ("one_message.offset_id", message.offset_msg_id),
        ("messages.tag", message.tags or view.t("common.nothing")),
        ("messages.keys", " ".join(message.keys) or view.t("common.nothing")),
        ("messages.stored", view.format("time", message.store_timestamp_ms)),
        ("one_message.born", f"{view.format('time', message.born_timestamp_ms)}  {message.born_host}"),
        ("one_message.place", place),
        ("messages.size", view.format("size", message.store_size)),
        ("one_message.tries", view.format("number", message.reconsume_times)),
        ("one_message.flags", f"flag {message.flag}, sysFlag {message.sys_flag}"),
        ("one_message.crc", f"{message.body_crc:08x}"),
        ("one_message.prepared", view.format("number", message.prepared_transaction_offset)),
    ]


def _body(view: View, message: MessageExt) -> None:
    body = bytes(message.body)
    json = as_json(body)
    forms = {"text": as_text, "json": lambda _body: json or "", "hex": as_hex}
    names = {name: view.t(key) for name, key in
             (("text", "one_message.text"), ("json", "one_message.json"), ("hex", "one_message.hex"))
             if name != "json" or json is not None}  # fmt: skip
    with ui.element("div").classes("list-tools"):
        choice = ui.toggle(names, value="text" if is_text(body) else "hex").props("no-caps")
        choice.props["aria-label"] = view.t("one_message.shown_as")
        view.button("one_message.download", lambda: ui.download.content(body, "body.bin"), icon="download")
    note = view.note("")
    text = text_element("pre", "").classes("body")
    text.props["tabindex"] = "0"

    def show() -> None:
        text.set_text(forms[str(choice.value)](body))
        cut = len(body) > (MAX_HEX_BYTES if choice.value == "hex" else MAX_TEXT_LENGTH)
        size = view.format("size", len(body))
        note.set_text(view.t("one_message.cut" if cut else "one_message.whole", size=size))

    choice.on_value_change(show)
    show()


async def _load_tracks(view: View, message: MessageExt, place: Element) -> None:
    await view.load(place, view.admin.tracks(message), lambda found: _tracks(view, message, found))


def _tracks(view: View, message: MessageExt, found: list[MessageTrack]) -> None:
    columns: list[Column[MessageTrack]] = [
        Column("group", "one_message.group", lambda row: row.consumer_group, searched=True,
               link=lambda row: path_of("groups", row.consumer_group)),
        Column("state", "one_message.state", lambda row: view.t(TRACKS[row.track_type][0])),
        Column("why", "one_message.why", lambda row: row.exception_desc),
    ]  # fmt: skip
    actions: list[RowAction[MessageTrack]] = [
        RowAction("direct", "one_message.direct", lambda row: deliver(view, message, row.consumer_group))
    ]
    Listing(
        view, columns, lambda row: row.consumer_group, name="g", empty="one_message.no_groups",
        default=ListState(sort="group"), actions=actions if view.may_change else (),
        classes=lambda row: {"state": TRACKS[row.track_type][1]},
    ).update(found)  # fmt: skip


# -- actions


async def deliver(view: View, message: MessageExt, group: str) -> None:
    """Deliver the message to a member of a group now."""
    members = [each.client_id for each in (await view.admin.subscriptions(group)).members]
    form = Form(view, view.t("one_message.direct_of", group=group), [view.t("one_message.direct_says")])
    choice = form.choice("one_message.member", members, members[0] if members else None)
    if not await form.submitted():
        return
    member = str(choice.value)

    async def work(_progress: ActionProgress) -> str:
        response = await view.admin.consume_directly(group, member, message.offset_msg_id)
        result = response.consume_result or "null"
        if result != SUCCESS:
            raise ListenerFailed(view.t("one_message.refused", result=result, remark=response.remark or ""))
        return view.t("one_message.taken", n=response.spent_time_mills)

    await Action(
        "message.direct", group,
        [view.t("one_message.will_direct", group=group, member=member, id=message.msg_id)], work,
        {"message": message.offset_msg_id, "topic": message.topic, "member": member},
    ).run(view)  # fmt: skip


async def resend(view: View, message: MessageExt) -> None:
    """Send the message to its topic once more, as a new message."""

    async def work(_progress: ActionProgress) -> str:
        return sent_text(view, await view.admin.send_again(message))

    effects = [view.t("one_message.will_again", name=message.topic), view.t("one_message.again_says")]
    await Action(
        "message.again", message.topic, effects, work, {"message": message.offset_msg_id},
        refresh=[("topic", message.topic)],
    ).run(view)  # fmt: skip


def sent_text(view: View, sent: SendResult) -> str:
    """Return a text with the id, position and status of a sent message."""
    where = f"{sent.queue.broker_name}:{sent.queue.queue_id} @ {sent.queue_offset}"
    return view.t("topic.sent", id=sent.msg_id, where=where, status=sent.status.name)
