"""One message: what it says, what became of it in each group, and sending it again."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import MessageTrack, TrackType
from cometmq.console.cluster import kind_of
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.body import HEX_MAX, TEXT_MAX, as_hex, as_json, as_text, is_text
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing, RowAction
from cometmq.console.frame.page import View, text_element
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.messages.search import messages_of
from cometmq.errors import CometError
from cometmq.message import MessageExt

if TYPE_CHECKING:
    from cometmq.console.app import Console

SUCCESS = "CR_SUCCESS"
TRACKS = {
    TrackType.CONSUMED: ("one_message.consumed", "good"),
    TrackType.CONSUMED_BUT_FILTERED: ("one_message.filtered", "warn"),
    TrackType.PULL: ("one_message.pulls", ""),
    TrackType.NOT_CONSUME_YET: ("one_message.not_yet", "warn"),
    TrackType.NOT_ONLINE: ("one_message.not_online", "bad"),
    TrackType.UNKNOWN: ("one_message.unknown", "bad"),
}


class ListenerFailed(CometError):
    """A member got a message, and its listener did not take it."""

    said: str

    def __str__(self) -> str:
        return self.said


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/messages/{msg_id:path}", "messages.title", under="/messages")
    async def message(view: View, msg_id: str) -> None:
        view.title(view.t("one_message.title", id=msg_id))
        place = ui.element("div").props("aria-live=polite")
        topic = view.query.get("topic") or None

        async def look() -> None:
            await view.fill(place, view.admin.message_by_id(msg_id, topic), lambda found: _draw(view, found))

        ui.timer(0.01, lambda: view.run(look), once=True)


def _draw(view: View, message: MessageExt) -> None:
    with ui.element("div").classes("list-tools"):
        view.link(view.t("one_message.trace"), f"/trace?{urlencode({'id': message.msg_id})}")
        view.link(view.t("one_message.others"), messages_of(message.topic))
    if view.may_change and kind_of(message.topic) == "normal":
        with ui.element("div").classes("actions"):
            view.button("one_message.again", lambda: send_again(view, message), icon="replay")
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
        tracks = ui.element("div").props("aria-live=polite")
        view.button("common.refresh", lambda: _ask_tracks(view, message, tracks), icon="refresh")
        ui.timer(0.01, lambda: view.run(_ask_tracks, view, message, tracks), once=True)


def _facts(view: View, message: MessageExt) -> list[tuple[str, str]]:
    place = f"{message.store_host} {view.t('messages.queue')} {message.queue_id} @ {message.queue_offset:,}"
    return [
        (view.t("messages.topic"), message.topic),
        (view.t("messages.id"), message.msg_id),
        (view.t("one_message.offset_id"), message.offset_msg_id),
        (view.t("messages.tag"), message.tags or view.t("common.nothing")),
        (view.t("messages.keys"), " ".join(message.keys) or view.t("common.nothing")),
        (view.t("messages.stored"), view.shown("time", message.store_timestamp_ms)),
        (view.t("one_message.born"), f"{view.shown('time', message.born_timestamp_ms)}  {message.born_host}"),
        (view.t("one_message.place"), place),
        (view.t("messages.size"), view.shown("size", message.store_size)),
        (view.t("one_message.tries"), view.shown("number", message.reconsume_times)),
        (view.t("one_message.flags"), f"flag {message.flag}, sysFlag {message.sys_flag}"),
        (view.t("one_message.crc"), f"{message.body_crc:08x}"),
        (view.t("one_message.prepared"), view.shown("number", message.prepared_transaction_offset)),
    ]


# -- the body


def _body(view: View, message: MessageExt) -> None:
    body = bytes(message.body)
    ways = {"hex": view.t("one_message.hex")}
    said = as_json(body)
    if said is not None:
        ways = {"json": view.t("one_message.json"), **ways}
    ways = {"text": view.t("one_message.text"), **ways}
    first = "text" if is_text(body) else "hex"
    with ui.element("div").classes("list-tools"):
        way = ui.toggle(ways, value=first).props("no-caps")
        way.props["aria-label"] = view.t("one_message.shown_as")
        view.button("one_message.download", lambda: ui.download.content(body, "body.bin"), icon="download")
    note = view.note("")
    shown = text_element("pre", "").classes("body")
    shown.props["tabindex"] = "0"

    def show() -> None:
        text = {"text": lambda: as_text(body), "json": lambda: said or "", "hex": lambda: as_hex(body)}
        shown.say(text[str(way.value)]())
        cut = HEX_MAX if way.value == "hex" else TEXT_MAX
        size = view.shown("size", len(body))
        note.say(
            view.t("one_message.cut", size=size)
            if len(body) > cut
            else view.t("one_message.whole", size=size)
        )

    way.on_value_change(show)
    show()


# -- groups


async def _ask_tracks(view: View, message: MessageExt, place: Element) -> None:
    await view.fill(place, view.admin.tracks(message), lambda found: _tracks(view, message, found))


def _tracks(view: View, message: MessageExt, found: list[MessageTrack]) -> None:
    columns: list[Column[MessageTrack]] = [
        Column(
            "group", "one_message.group", lambda row: row.consumer_group,
            link=lambda row: path_of("groups", row.consumer_group), searched=True,
        ),
        Column("state", "one_message.state", lambda row: view.t(TRACKS[row.track_type][0])),
        Column("why", "one_message.why", lambda row: row.exception_desc),
    ]  # fmt: skip
    actions = [
        RowAction[MessageTrack]("direct", "one_message.direct", lambda row: direct(view, message, row))
    ]
    listing = Listing(
        view, columns, lambda row: row.consumer_group, name="g", empty="one_message.no_groups",
        default=ListState(sort="group"), actions=actions if view.may_change else (),
        classes=lambda row: {"state": TRACKS[row.track_type][1]},
    )  # fmt: skip
    listing.update(found)


async def direct(view: View, message: MessageExt, track: MessageTrack) -> None:
    """Have a member of a group process the message now."""
    group = track.consumer_group
    members = [each.client_id for each in (await view.admin.subscriptions(group)).members]
    form = Form(view, view.t("one_message.direct_of", group=group), [view.t("one_message.direct_says")])
    member = form.choice("one_message.member", members, members[0] if members else None)
    if not await form.asked():
        return

    async def work(_progress: Progress) -> str:
        said = await view.admin.consume_directly(group, str(member.value), message.offset_msg_id)
        result = said.consume_result or "null"
        if result != SUCCESS:
            raise ListenerFailed(view.t("one_message.refused", result=result, remark=said.remark or ""))
        return view.t("one_message.taken", n=said.spent_time_mills)

    await act(
        view,
        Action(
            name="message.direct",
            target=group,
            work=work,
            says=[view.t("one_message.will_direct", group=group, member=member.value, id=message.msg_id)],
            details={"message": message.offset_msg_id, "topic": message.topic, "member": str(member.value)},
        ),
    )


async def send_again(view: View, message: MessageExt) -> None:
    """Send the message as a new one to its topic."""

    async def work(_progress: Progress) -> str:
        sent = await view.admin.send_again(message)
        where = f"{sent.queue.broker_name}:{sent.queue.queue_id} @ {sent.queue_offset}"
        return view.t("topic.sent", id=sent.msg_id, where=where, status=sent.status.name)

    says = [view.t("one_message.will_again", name=message.topic), view.t("one_message.again_says")]
    await act(
        view,
        Action(
            name="message.again",
            target=message.topic,
            work=work,
            says=says,
            refresh=[("topic", message.topic)],
            details={"message": message.offset_msg_id},
        ),
    )
