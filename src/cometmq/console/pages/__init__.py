"""All pages. Whoever writes one adds its module's `pages` here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cometmq.console.messages import dead, dead_group, message, search, timers, trace, transactions
from cometmq.console.pages import (
    access,
    brokers,
    group,
    groups,
    jobs,
    names,
    overview,
    people,
    producers,
    topic,
    topics,
)

if TYPE_CHECKING:
    from cometmq.console.app import Console

PAGES: tuple[Callable[[Console], None], ...] = (
    *(overview.pages, brokers.pages, names.pages, topics.pages, topic.pages, groups.pages, group.pages),
    producers.pages,
    *(search.pages, message.pages, trace.pages, dead.pages, dead_group.pages),
    *(timers.pages, transactions.pages, access.pages, jobs.pages, people.pages),
)
