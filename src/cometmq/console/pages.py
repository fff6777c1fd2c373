"""All pages. Whoever writes one adds its module's `pages` here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cometmq.console import (
    access,
    brokers,
    dead,
    dead_group,
    group,
    groups,
    jobs,
    message,
    messages,
    names,
    overview,
    people,
    producers,
    timers,
    topic,
    topics,
    trace,
    transactions,
)

if TYPE_CHECKING:
    from cometmq.console.app import Console

PAGES: tuple[Callable[[Console], None], ...] = (
    *(overview.pages, brokers.pages, names.pages, topics.pages, topic.pages, groups.pages, group.pages),
    producers.pages,
    *(messages.pages, message.pages, trace.pages, dead.pages, dead_group.pages),
    *(timers.pages, transactions.pages, access.pages, jobs.pages, people.pages),
)
