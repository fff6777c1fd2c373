"""Differences between the subscriptions of a group's members."""

from __future__ import annotations

import pytest

from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.bodies.subscriptions import (
    describe_differences,
    differences,
    setting_differences,
    wants_of,
)


def wants(*subscriptions: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """Build subscriptions from (topic, expression) or (topic, expression, type)."""
    return wants_of(
        SubscriptionData(topic=topic, sub_string=text, expression_type=kind[0] if kind else "TAG")
        for topic, text, *kind in subscriptions
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("*", ""),
        ("a || b", "b||a"),
        ("a", " a || a "),
        ("||a||", "a"),
    ],
)
def test_expressions_that_let_the_same_through_are_the_same(one: str, other: str) -> None:
    assert wants(("T", one)) == wants(("T", other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("T", "a"), ("T", "b")),
        (("T", "a"), ("T", "*")),
        (("T", "a"), ("T", "A")),
        (("T", "a"), ("U", "a")),
        (("T", "a", "TAG"), ("T", "a", "SQL92")),
        (("T", "a > 1", "SQL92"), ("T", "a > 2", "SQL92")),
    ],
)
def test_others_are_not(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert wants(one) != wants(other)


def test_the_type_of_an_expression_may_be_missing_and_the_retry_topic_does_not_count() -> None:
    assert wants(("T", "a", "")) == wants(("T", "a", "TAG"), ("%RETRY%G", "*"))


def test_filter_classes_are_not_tags() -> None:
    one = SubscriptionData(topic="T", sub_string="a", class_filter_mode=True)
    assert wants_of([one]) != wants(("T", "a"))


def test_members_that_agree_have_no_differences() -> None:
    assert differences({}) == {}
    assert differences({"c1": wants(("T", "a"))}) == {}
    assert differences({f"c{n}": wants(("T", "a"), ("U", "*")) for n in range(3)}) == {}


def test_each_topic_says_who_says_what() -> None:
    members = {
        "c1": wants(("T", "a"), ("Same", "*")),
        "c2": wants(("T", "b"), ("Same", "*"), ("Only", "*")),
        "c3": wants(("T", "a"), ("Same", "*")),
    }
    assert differences(members) == {
        "Only": {"*": ["c2"], "": ["c1", "c3"]},
        "T": {"a": ["c1", "c3"], "b": ["c2"]},
    }


def test_a_difference_in_a_sentence() -> None:
    assert (
        describe_differences({"a || b": ["c1", "c3", "c4"], "": ["c2"]})
        == "a || b (c1 and 2 more), not subscribed (c2)"
    )
    long = describe_differences({str(number) + "y" * 200_000: ["c"] for number in range(1_000)})
    assert "y... (200001 characters) (c)" in long
    assert long.endswith(", and 990 others")
    assert len(long) < 5_000


def test_settings_that_are_not_known_are_no_differences() -> None:
    known = {"c1": frozenset({("a", "1"), ("b", "1")}), "c2": frozenset({("a", "1")}), "c3": frozenset()}
    assert setting_differences(known) == {}
    assert setting_differences({**known, "c4": frozenset({("b", "2")})}) == {"b": {"1": ["c1"], "2": ["c4"]}}
