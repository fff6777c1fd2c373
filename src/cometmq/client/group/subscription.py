"""What a consumer wants of a topic: everything, some tags, an SQL92 expression, or what a class takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cometmq.errors import ConfigError, MessageIllegal
from cometmq.message import LONE_BAR, MessageExt, check_tag, check_text
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.codes import check_topic_name
from cometmq.protocol.properties.values import tags_code

__all__ = [
    "Expression", "Subscription", "Subscriptions", "as_subscription", "as_subscriptions", "filter_class",
    "sql92", "tags",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subscription:
    """`version`: milliseconds of its making; a broker replaces what it knows only by a higher one."""

    topic: str
    expression: str
    expression_type: str = "TAG"
    tags: frozenset[str] = frozenset()
    """Empty: no filter by tag."""
    source: str | None = None
    """Of the class that filter servers run; its name is the expression then."""
    version: int = field(default_factory=lambda: int(time.time() * 1000))

    @classmethod
    def by_tags(cls, topic: str, expression: str | None = "*") -> Subscription:
        """`*`, "" and None mean everything, else tags divided by `||`.

        Raises ConfigError for what would match nothing, or something else than it seems to.
        """
        if not isinstance(expression, str | None):
            raise _wrong(topic, expression, 'tags as one str, "a || b" or tags("a", "b"), or sql92("a > 1")')
        text = (expression or "").strip()
        if text in ("", "*"):
            return cls(topic, "*")
        wanted = frozenset(part.strip() for part in text.split("||") if part.strip())
        if not wanted:
            raise _wrong(topic, expression, "a tag: this one would match nothing")
        for tag in wanted:
            if LONE_BAR.search(tag):
                raise _wrong(topic, expression, "|| between tags, not |")
            try:
                check_text(tag, "tags", topic, "the tag")
            except MessageIllegal as error:
                raise _wrong(topic, expression, f"a tag that a message can have: {error}") from None
        return cls(topic, text, tags=wanted)

    @classmethod
    def by_sql(cls, topic: str, expression: str) -> Subscription:
        return cls(topic, expression, expression_type="SQL92")

    def filter(self, messages: Sequence[MessageExt]) -> list[MessageExt]:
        """Drop the messages whose tags have only the same hash: brokers compare nothing else."""
        if not self.tags:
            return list(messages)
        wanted = self.tags
        return [message for message in messages if message.tags in wanted]

    def after(self, before: Subscription | None) -> Subscription:
        """This one, with a higher version than the one it replaces, also when the clock was set back."""
        if before is None or self.version > before.version:
            return self
        return replace(self, version=before.version + 1)

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
            class_filter_mode=self.source is not None,
        )


def tags(*names: str) -> str:
    """The expression for any of these tags. Raises MessageIllegal for what no message can have as its tag."""
    for name in names:
        check_text(name, "tags", what="the tag")
        check_tag(name, "")
    return " || ".join(names) if names else "*"


@dataclass(frozen=True, slots=True)
class sql92:  # noqa: N801 (reads as a word in a subscription: {"Topic": sql92("a > 1")})
    """Marks a filter expression as SQL92."""

    expression: str


@dataclass(frozen=True, slots=True)
class filter_class:  # noqa: N801 (as sql92)
    """A Python class that the brokers' filter servers run: `match(self, message)` says whether it is wanted.

    name: of the class; source: the text of a module that has it (docs/client.md, Filter classes).
    """

    name: str
    source: str


Expression = str | sql92 | filter_class
Subscriptions = str | Sequence[str] | Mapping[str, Expression]
"""A topic, several, or topic -> tags (`"TagA || TagB"`, `"*"`), sql92("a > 1") or filter_class(...)."""


def _wrong(topic: str, expression: object, expected: str) -> ConfigError:
    return ConfigError(f"subscription of {topic}", str(expression), expected)


def as_subscription(topic: str, expression: Expression | None) -> Subscription:
    """Raises MessageIllegal for a bad topic name, ConfigError for a bad expression."""
    check_topic_name(topic)
    if isinstance(expression, filter_class):
        name, source = expression.name, expression.source
        if not (isinstance(name, str) and name.isidentifier() and isinstance(source, str)):
            raise _wrong(topic, name, "filter_class(the name of a class, its source as text)")
        return Subscription(topic, name, source=source)
    if not isinstance(expression, sql92):
        return Subscription.by_tags(topic, expression)
    text = expression.expression
    if not isinstance(text, str) or not text.strip():
        raise _wrong(topic, expression, 'an expression as text: sql92("a > 1")')
    return Subscription.by_sql(topic, text)


def as_subscriptions(given: Subscriptions) -> dict[str, Subscription]:
    """Raises as `as_subscription`, and ConfigError for what is none of the three."""
    if isinstance(given, str):
        given = [given]
    elif isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ConfigError("subscriptions", str(given), "a topic, several topics, or topic -> tags")
    pairs = given.items() if isinstance(given, Mapping) else [(topic, "*") for topic in given]
    return {topic: as_subscription(topic, expression) for topic, expression in pairs}
