"""What a consumer wants of a topic: everything, some tags, or an SQL92 expression."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cometmq.message import MessageExt
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.properties import tags_code

__all__ = ["Subscription", "Subscriptions", "as_subscription", "as_subscriptions", "sql92", "tags"]


@dataclass(frozen=True, slots=True)
class Subscription:
    """`version`: milliseconds of its making; a broker replaces what it knows only by a higher one."""

    topic: str
    expression: str
    expression_type: str = "TAG"
    tags: frozenset[str] = frozenset()
    """Empty: no filter by tag."""
    version: int = field(default_factory=lambda: int(time.time() * 1000))

    @classmethod
    def by_tags(cls, topic: str, expression: str | None = "*") -> Subscription:
        """`*`, "" and None mean everything, else tags divided by `||`.

        Raises ValueError for an expression of separators only, which would match nothing.
        """
        text = (expression or "").strip()
        if text in ("", "*"):
            return cls(topic, "*")
        wanted = frozenset(part.strip() for part in text.split("||") if part.strip())
        if not wanted:
            raise ValueError(f"subscription {expression!r} of {topic} names no tag and would match nothing")
        return cls(topic, text, tags=wanted)

    @classmethod
    def by_sql(cls, topic: str, expression: str) -> Subscription:
        return cls(topic, expression, expression_type="SQL92")

    def filter(self, messages: Sequence[MessageExt]) -> list[MessageExt]:
        """Drop what the broker let through because a tag's hash is equal (it never looks at the tag
        itself)."""
        if not self.tags:
            return list(messages)
        wanted = self.tags
        return [message for message in messages if message.tags in wanted]

    def data(self) -> SubscriptionData:
        """As heartbeats carry it."""
        names = sorted(self.tags)
        return SubscriptionData(
            topic=self.topic,
            sub_string=self.expression,
            expression_type=self.expression_type,
            tags_set=names,
            code_set=[tags_code(name) for name in names],
            sub_version=self.version,
        )


def tags(*names: str) -> str:
    """The expression for any of these tags."""
    return " || ".join(names) if names else "*"


@dataclass(frozen=True, slots=True)
class sql92:  # noqa: N801 (reads as a word in a subscription: {"Topic": sql92("a > 1")})
    """Marks a filter expression as SQL92."""

    expression: str


Subscriptions = str | Sequence[str] | Mapping[str, str | sql92]
"""A topic, several, or topic -> tags (`"TagA || TagB"`, `"*"`) or sql92("a > 1")."""


def as_subscription(topic: str, expression: str | sql92 | None) -> Subscription:
    if isinstance(expression, sql92):
        return Subscription.by_sql(topic, expression.expression)
    return Subscription.by_tags(topic, expression)


def as_subscriptions(given: Subscriptions) -> dict[str, Subscription]:
    if isinstance(given, str):
        given = {given: "*"}
    elif not isinstance(given, Mapping):
        given = dict.fromkeys(given, "*")
    return {topic: as_subscription(topic, expression) for topic, expression in given.items()}
