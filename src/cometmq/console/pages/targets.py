"""Fields and lookups that the pages of topics, groups and access control share."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nicegui import ui

from cometmq.console.widgets.forms import Fields
from cometmq.console.widgets.page import View
from cometmq.protocol.codes import is_legal_name


async def cluster_choice(view: View, fields: Fields) -> ui.select:
    """Add a field in which the user chooses a cluster."""
    clusters = sorted((await view.admin.cluster_info()).cluster_addr_table)
    return fields.choice("topics.cluster", clusters, clusters[0] if clusters else None)


def name_field(view: View, fields: Fields, key: str, max_length: int) -> ui.input | ui.textarea:
    """Add a field for the name of a new topic or group."""

    def check(text: str) -> str | None:
        return None if is_legal_name(text, max_length) else view.t("common.bad_name", most=max_length)

    return fields.text(key, max_length=max_length, required=True, check=check)


def broker_choice(view: View, fields: Fields, brokers: Iterable[str]) -> ui.select:
    """Add a choice between one broker and all brokers. `chosen_brokers` returns the result."""
    options = {"": view.t("topic.everywhere"), **{each: each for each in brokers}}
    return fields.choice("topic.broker", options, "")


def chosen_brokers(choice: ui.select, brokers: Collection[str]) -> list[str]:
    """Return the names of the chosen brokers."""
    return [str(choice.value)] if choice.value else list(brokers)
