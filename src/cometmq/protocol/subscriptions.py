"""In what the subscriptions and settings of a group's members differ.

A broker filters a group's pulls by what one member's heartbeat said last
(docs/reference/storage.md, Subscriptions of a group), so members that want other things lose messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TypeAlias

from cometmq.protocol.bodies_client import SubscriptionData
from cometmq.protocol.codes import RETRY_PREFIX

Wants: TypeAlias = frozenset[tuple[str, str]]
"""(topic, expression as it is compared) of what a member subscribes, without its retry topic."""


Settings: TypeAlias = frozenset[tuple[str, str]]
"""(name, value) of what all members of a group should have set alike, by the names in heartbeats."""
MOST_RETRIES = "maxReconsumeTimes"


def wants_of(subscriptions: Iterable[SubscriptionData]) -> Wants:
    """What a member wants. Two members want the same exactly if these are equal."""
    return frozenset(
        (each.topic, expression_of(each)) for each in subscriptions if not each.topic.startswith(RETRY_PREFIX)
    )


def expression_of(subscription: SubscriptionData) -> str:
    """The expression of a subscription: tags in order, whatever order and blanks they came in; other types
    with their name."""
    text = subscription.sub_string or "*"
    if subscription.class_filter_mode:
        return f"class {text}"
    if subscription.expression_type not in ("TAG", ""):
        return f"{subscription.expression_type} {text.strip()}"
    return " || ".join(sorted({tag.strip() for tag in text.split("||")} - {""}))


def differences(members: Mapping[str, Wants]) -> dict[str, dict[str, list[str]]]:
    """Topic -> expression -> the client ids that say so, for each topic in which members differ. The
    expression of those who do not subscribe the topic is ""."""
    alike: dict[Wants, list[str]] = {}
    for client_id, wants in members.items():
        alike.setdefault(wants, []).append(client_id)
    if len(alike) < 2:
        return {}
    by_topic: dict[str, dict[str, list[str]]] = {}
    for wants, clients in alike.items():
        for topic, expression in wants:
            by_topic.setdefault(topic, {}).setdefault(expression, []).extend(clients)
    for said in by_topic.values():
        silent = members.keys() - {each for clients in said.values() for each in clients}
        if silent:
            said[""] = sorted(silent)
    return {topic: said for topic, said in sorted(by_topic.items()) if len(said) > 1}


def setting_differences(members: Mapping[str, Settings]) -> dict[str, dict[str, list[str]]]:
    """Setting -> value -> client ids, for each setting in which members differ; those whose value is not
    known are left out."""
    found = {
        name: {value: clients for value, clients in said.items() if value}
        for name, said in differences(members).items()
    }
    return {name: said for name, said in found.items() if len(said) > 1}


_MOST_TOLD = 10  # expressions
_LONGEST_TOLD = 200  # characters of one


def told(said: Mapping[str, Collection[str]]) -> str:
    """The first expressions of a topic in a sentence, the long ones shortened, each with one of its clients:
    `a || b (c1 and 3 more), not subscribed (c2)`."""
    more = len(said) - _MOST_TOLD
    parts = [
        f"{_short(expression) or 'not subscribed'} ({next(iter(clients))}"
        + (f" and {len(clients) - 1} more)" if len(clients) > 1 else ")")
        for expression, clients in islice(said.items(), _MOST_TOLD)
    ]
    return ", ".join(parts) + (f", and {more} others" if more > 0 else "")


def _short(expression: str) -> str:
    if len(expression) <= _LONGEST_TOLD:
        return expression
    return f"{expression[:_LONGEST_TOLD]}... ({len(expression)} characters)"
