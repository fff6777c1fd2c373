"""Finds differences between the subscriptions and settings of a group's members.

A broker filters all pulls of a group by the subscription in the group's last heartbeat
(docs/reference/storage.md, Subscriptions of a group). Members with different subscriptions therefore lose
messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TypeAlias

from cometmq.protocol.bodies.client import SubscriptionData
from cometmq.protocol.codes import RETRY_PREFIX

Wants: TypeAlias = frozenset[tuple[str, str]]
"""A member's subscriptions as pairs of topic and normalised expression, without the group's retry topic."""


Settings: TypeAlias = frozenset[tuple[str, str]]
"""The settings that all members of a group should share, as pairs of name and value from heartbeats."""
MAX_RETRIES_KEY = "maxReconsumeTimes"


def wants_of(subscriptions: Iterable[SubscriptionData]) -> Wants:
    """Return a member's subscriptions in a normalised form, so that equal subscriptions compare equal."""
    return frozenset(
        (each.topic, expression_of(each)) for each in subscriptions if not each.topic.startswith(RETRY_PREFIX)
    )


def expression_of(subscription: SubscriptionData) -> str:
    """Return a subscription's expression in normalised form: sorted tags, or the expression with its type."""
    text = subscription.sub_string or "*"
    if subscription.class_filter_mode:
        return f"class {text}"
    if subscription.expression_type not in ("TAG", ""):
        return f"{subscription.expression_type} {text.strip()}"
    return " || ".join(sorted({tag.strip() for tag in text.split("||")} - {""}))


def differences(members: Mapping[str, Wants]) -> dict[str, dict[str, list[str]]]:
    """For each topic with different subscriptions, return the client ids by expression ("" for none)."""
    alike: dict[Wants, list[str]] = {}
    for client_id, wants in members.items():
        alike.setdefault(wants, []).append(client_id)
    if len(alike) < 2:
        return {}
    by_topic: dict[str, dict[str, list[str]]] = {}
    for wants, clients in alike.items():
        for topic, expression in wants:
            by_topic.setdefault(topic, {}).setdefault(expression, []).extend(clients)
    for difference in by_topic.values():
        silent = members.keys() - {each for clients in difference.values() for each in clients}
        if silent:
            difference[""] = sorted(silent)
    return {topic: difference for topic, difference in sorted(by_topic.items()) if len(difference) > 1}


def setting_differences(members: Mapping[str, Settings]) -> dict[str, dict[str, list[str]]]:
    """For each setting whose known values differ between members, return the client ids by value."""
    found = {
        name: {value: clients for value, clients in difference.items() if value}
        for name, difference in differences(members).items()
    }
    return {name: difference for name, difference in found.items() if len(difference) > 1}


_MAX_SHOWN = 10  # Maximum number of a topic's expressions that a description lists
_MAX_SHOWN_LENGTH = 200  # Maximum number of characters of an expression that are shown


def describe_differences(difference: Mapping[str, Collection[str]]) -> str:
    """Describe the different expressions for one topic, or the different values of one setting, in a phrase.

    `difference` has the client ids by expression or value. At most `_MAX_SHOWN` are listed, each with
    the id of one client and the number of the others: `a || b (c1 and 3 more), not subscribed (c2)`.
    """
    more = len(difference) - _MAX_SHOWN
    parts = [
        f"{_short(expression) or 'not subscribed'} ({next(iter(clients))}"
        + (f" and {len(clients) - 1} more)" if len(clients) > 1 else ")")
        for expression, clients in islice(difference.items(), _MAX_SHOWN)
    ]
    return ", ".join(parts) + (f", and {more} others" if more > 0 else "")


def _short(expression: str) -> str:
    if len(expression) <= _MAX_SHOWN_LENGTH:
        return expression
    return f"{expression[:_MAX_SHOWN_LENGTH]}... ({len(expression)} characters)"
