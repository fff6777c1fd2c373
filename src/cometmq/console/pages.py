"""All pages. Whoever writes one adds its module's `pages` here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cometmq.console import (
    brokers,
    dead,
    dead_group,
    group,
    groups,
    message,
    messages,
    names,
    overview,
    producers,
    topic,
    topics,
    trace,
)

if TYPE_CHECKING:
    from cometmq.console.app import Console

PAGES: tuple[Callable[[Console], None], ...] = (
    *(overview.pages, brokers.pages, names.pages, topics.pages, topic.pages, groups.pages, group.pages),
    producers.pages,
    *(messages.pages, message.pages, trace.pages, dead.pages, dead_group.pages),
)
