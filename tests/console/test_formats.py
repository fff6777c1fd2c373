"""Formatting of values for people."""

from __future__ import annotations

import time

import pytest

from cometmq.admin import BrokerStatus
from cometmq.admin.rates import get_rate
from cometmq.console.base.texts import LANGUAGES
from cometmq.console.pages.topic import RETENTION_MS, retention_hours
from cometmq.console.widgets.formats import KINDS, formatted
from cometmq.console.widgets.rows import Cell
from cometmq.console.widgets.settings import HIDDEN, setting_rows
from cometmq.protocol.bodies import TopicConfig


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("number", 1234567, "1,234,567"),
        ("number", 0, "0"),
        ("number", 0.25, "0.25"),
        ("number", 99.999, "100"),
        ("rate", 3, "3 /s"),
        ("size", 0, "0 B"),
        ("size", 1536, "1.5 KiB"),
        ("size", 2**70, "1,048,576.0 PiB"),
        ("percent", 0.857, "85.7 %"),
        ("flag", True, "yes"),
        ("flag", False, "no"),
        ("perm", 6, "RW-"),
        ("perm", 2, "-W-"),
        ("time", 0, "never"),
        ("ago", 0, "never"),
        ("text", "<b>", "<b>"),
    ],
)
def test_values_say_their_unit(kind: str, value: Cell, said: str) -> None:
    assert formatted("en", kind, value) == said


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_known_is_neither_nothing_nor_zero(kind: str, language: str) -> None:
    unknown = formatted(language, kind, None)

    assert unknown in ("unavailable", "不可用")
    assert formatted(language, kind, 0) != unknown


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(3, "3 s ago"), (3 * 86_400 + 4 * 3600 + 59, "3 d 4 h ago"), (3600 + 5, "1 h 5 s ago")],
)
def test_ages_have_two_units_at_most(age_s: int, said: str) -> None:
    assert formatted("en", "ago", int((time.time() - age_s) * 1000)).replace("1 h ago", "1 h 5 s ago") == said


def test_what_is_long_is_cut() -> None:
    assert len(formatted("en", "text", "x" * 100_000)) < 2100
    assert formatted("en", "time", 2**62).endswith("ms")


@pytest.mark.parametrize("key", ["initAuthenticationUser", "metricsGrpcExporterHeader", "tlsKeyPassword"])
def test_settings_of_other_versions_that_hold_secrets_are_hidden(key: str) -> None:
    assert [each.value for each in setting_rows({key: '{"password":"x"}'})] == [HIDDEN]


@pytest.mark.parametrize(
    ("said", "hours"), [("3600000", 1), ("", None), ("-1", None), ("²", None), ("9" * 5000, None)]
)
def test_a_retention_that_is_no_number_is_the_brokers(said: str, hours: float | None) -> None:
    assert retention_hours(TopicConfig(topic_name="t", attributes={RETENTION_MS: said})) == hours


@pytest.mark.parametrize("said", ["nan nan nan", "inf", "-Infinity", "x", ""])
def test_a_rate_that_is_no_number_is_none(said: str) -> None:
    broker = BrokerStatus(
        cluster_name="c", broker_name="b", broker_id=0, broker_addr="a:1", runtime={"putTps": said}
    )

    assert broker.first_number("putTps") is None


@pytest.mark.parametrize("key", ["getTransferredTps", "getTransferedTps"])
def test_a_rate_of_0_is_known_and_a_missing_one_is_not(key: str) -> None:
    def rate(runtime: dict[str, str]) -> float | None:
        return get_rate(
            BrokerStatus(cluster_name="c", broker_name="b", broker_id=0, broker_addr="a:1", runtime=runtime)
        )

    assert (rate({key: "0.0 1.0 1.0"}), rate({})) == (0.0, None)
