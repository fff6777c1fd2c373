"""What the pages of topics and of groups ask alike: a name, where to make it, which brokers to change."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nicegui import ui

from cometmq.admin import Admin, UnknownNameError
from cometmq.console.frame.forms import Form
from cometmq.console.frame.page import View
from cometmq.protocol.codes import MASTER_ID, is_legal_name


async def clusters_of(admin: Admin) -> list[str]:
    """All clusters, sorted."""
    return sorted((await admin.cluster_info()).cluster_addr_table)


def ask_new(view: View, form: Form, key: str, most: int, clusters: list[str]) -> tuple[ui.input, ui.select]:
    """Fields for a name that brokers take, and for the cluster. key: of the name's label."""

    def legal(said: str) -> str | None:
        return None if is_legal_name(said, most) else view.t("common.bad_name", most=most)

    name = form.text(key, most=most, needed=True, check=legal)
    return name, form.choice("topics.cluster", clusters, clusters[0] if clusters else None)


def ask_brokers(view: View, form: Form, brokers: Iterable[str]) -> ui.select:
    """A field for one of these brokers, or all; see chosen."""
    return form.choice(
        "topic.broker", {"": view.t("topic.everywhere"), **{each: each for each in brokers}}, ""
    )


def chosen(where: ui.select, brokers: Collection[str]) -> list[str]:
    """The brokers that are meant."""
    return [str(where.value)] if where.value else list(brokers)


async def masters(admin: Admin, names: Iterable[str]) -> dict[str, str]:
    """Broker name -> address of its master, who alone changes anything. Raises UnknownNameError where there
    is none just now: a slave stands in for what is read."""
    table = (await admin.cluster_info()).broker_addr_table
    known = {
        name: data.broker_addrs[MASTER_ID] for name, data in table.items() if MASTER_ID in data.broker_addrs
    }
    found = {}
    for name in names:
        if name not in known:
            raise UnknownNameError("master of broker", name, sorted(known))
        found[name] = known[name]
    return found
