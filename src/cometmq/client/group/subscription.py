"""The subscription of a consumer to a topic: all messages, tags, an SQL92 expression, or a filter class."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cometmq.errors import ConfigError, MessageIllegal
from cometmq.message import LONE_BAR, MessageExt, check_tag, check_text, check_topic_name
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.properties.values import NAME_END, VALUE_END, tags_code

_TAGS_NAME = VALUE_END + b"TAGS" + NAME_END


@dataclass(frozen=True, slots=True)
class Subscription:
    """One subscription. A broker replaces it only by one with a higher `version`, a time in milliseconds."""

    topic: str
    expression: str
    expression_type: str = "TAG"
    tags: frozenset[str] = frozenset()
    """The tags. Empty: no filter by tag."""
    source: str | None = None
    """The source text of a filter class. If it is set, `expression` is the name of the class."""
    version: int = field(default_factory=lambda: int(time.time() * 1000))

    @classmethod
    def by_tags(cls, topic: str, expression: str | None = "*") -> Subscription:
        """Return a subscription by tags, separated by `||`. `*`, "" and None mean all messages.

        Raises ConfigError if the expression would match nothing, or has a misleading form.
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

    def filter(self, messages: Sequence[MessageExt]) -> list[MessageExt]:
        """Return the messages whose tag is subscribed. Brokers compare only the hashes of tags."""
        return with_tags(messages, self.tags) if self.tags else list(messages)

    def after(self, before: Subscription | None) -> Subscription:
        """Return this subscription with a higher version than `before`, even if the clock was set back."""
        if before is None or self.version > before.version:
            return self
        return replace(self, version=before.version + 1)

    def data(self) -> SubscriptionData:
        """Return the subscription in the form that heartbeats contain."""
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
    """Return the expression that matches any of the tags.

    Args:
        names: The tags.

    Raises:
        MessageIllegal: One of the texts cannot be the tag of a message.
    """
    for name in names:
        check_text(name, "tags", what="the tag")
        check_tag(name, "")
    return " || ".join(names) if names else "*"


@dataclass(frozen=True, slots=True)
class sql92:  # noqa: N801 (reads as a word in a subscription: {"Topic": sql92("a > 1")})
    """An SQL92 filter expression, such as `sql92("a > 1 AND b = 'x'")`."""

    expression: str


@dataclass(frozen=True, slots=True)
class filter_class:  # noqa: N801 (as sql92)
    """A Python class that the brokers' filter servers run. Its `match(self, message)` selects messages.

    Args:
        name: The name of the class.
        source: The text of a module that contains the class (docs/client.md, Filter classes).
    """

    name: str
    source: str


Expression = str | sql92 | filter_class
Subscriptions = str | Sequence[str] | Mapping[str, Expression]
"""The topics of a subscription: one topic, several topics, or a mapping from each topic to its filter."""


def _wrong(topic: str, expression: object, expected: str) -> ConfigError:
    return ConfigError(f"subscription of {topic}", str(expression), expected)


def as_subscription(topic: str, expression: Expression | None) -> Subscription:
    """Return a subscription. Raises MessageIllegal for a bad topic name, ConfigError for a bad expression."""
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
    return Subscription(topic, text, expression_type="SQL92")


def refuse_filter_class(subscription: Subscription) -> None:
    """Raise ConfigError for a filter class, which only pulls support."""
    if subscription.source is not None:
        expected = "tags or sql92(...), because filter servers do not lease messages"
        raise _wrong(subscription.topic, subscription.expression, expected)


def as_subscriptions(given: Subscriptions) -> dict[str, Subscription]:
    """Return the subscriptions by topic. Raises MessageIllegal or ConfigError for invalid ones."""
    if isinstance(given, str):
        given = [given]
    elif isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ConfigError("subscriptions", str(given), "a topic, several topics, or topic -> tags")
    pairs = given.items() if isinstance(given, Mapping) else [(topic, "*") for topic in given]
    return {topic: as_subscription(topic, expression) for topic, expression in pairs}


def with_tags(messages: Iterable[MessageExt], tags: Collection[str]) -> list[MessageExt]:
    """Return the messages that have one of the tags, without parsing their properties.

    Messages with other tags are parsed. They are rare, because brokers filter tags by their hashes.
    """
    encoded = {tag.encode() for tag in tags}
    found = []
    for message in messages:
        stored = message._stored  # noqa: SLF001
        if isinstance(stored, tuple):
            _, name, rest = (VALUE_END + stored[1]).rpartition(_TAGS_NAME)
            if name and rest.partition(VALUE_END)[0] in encoded:
                found.append(message)
                continue
        if message.tags in tags:
            found.append(message)
    return found
