"""The producers that are connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.console.cluster import Found, ProducerRow
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState
from cometmq.protocol.codes import version_name

if TYPE_CHECKING:
    from cometmq.console.app import Console


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/producers", "producers.title", menu=60, icon="outbox")
    async def producers(view: View) -> None:
        view.title(view.t("producers.title"))
        listing = Listing(
            view, _columns(), lambda row: f"{row.group} {row.client.client_id}", empty="producers.none",
            default=ListState(sort="group"),
        )  # fmt: skip
        missing = ui.element("div")

        def pick(found: Found[ProducerRow]) -> list[ProducerRow]:
            missing.clear()
            with missing:
                missing_note(view, found.missing)
            return found.rows

        await listing.follow(view.cluster.producers(), pick)


def _columns() -> list[Column[ProducerRow]]:
    return [
        Column("group", "producers.group", lambda row: row.group, searched=True),
        Column("client", "group.client", lambda row: row.client.client_id, searched=True),
        Column("addr", "group.addr", lambda row: row.client.remote_ip, searched=True),
        Column("language", "producers.language", lambda row: row.client.language),
        Column("version", "group.version", lambda row: version_name(row.client.version)),
        Column("brokers", "producers.brokers", lambda row: ", ".join(row.brokers), searched=True),
        Column("last", "producers.last", lambda row: row.client.last_update_timestamp, "ago"),
    ]
