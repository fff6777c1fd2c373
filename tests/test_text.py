"""External text is shown as one short line without characters that control a terminal."""

from __future__ import annotations

import json
import logging

import pytest

from cometmq import logs
from cometmq.text import counted, is_utf8, printable, printable_json, printable_lines, rate, seconds


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("TopicTest", "TopicTest"),
        ("订单　主题", "订单　主题"),
        ("a\nERROR forged", "a\\nERROR forged"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u2028b\u202ec", "a\\u2028b\\u202ec"),
        ("\ud800", "\\ud800"),
        ("x" * 300, "x" * 256 + "... (300 characters)"),
    ],
)
def test_text_from_outside_is_made_harmless(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("span", "shown"),
    [(3.0, "3 s"), (4.99921, "5 s"), (0.25, "0.25 s"), (0.00471, "0.0047 s"), (120, "120 s"), (0.0, "0 s")],
)
def test_times_are_shown_as_a_sentence_has_them(span: float, shown: str) -> None:
    assert seconds(span) == shown


def test_without_a_limit_nothing_is_cut() -> None:
    assert printable("x" * 1_000, limit=None) == "x" * 1_000


class TestLogLines:
    def line(self, caplog: pytest.LogCaptureFixture, *args: object, exc: BaseException | None = None) -> str:
        logs.logger("cometmq.of_a_test").warning(*args, exc_info=exc)
        return logging.Formatter("%(levelname)s %(message)s").format(caplog.records[-1])

    def test_a_name_can_neither_forge_a_line_nor_fill_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        line = self.line(caplog, "group %s has %d of %.1f", "a\nERROR b" + "x" * 5_000_000, 3, 1.5)

        assert line.startswith("WARNING group a\\nERROR bxxx")
        assert line.endswith("... (5000009 characters) has 3 of 1.5")
        assert len(line) < 700

    def test_so_is_the_text_of_an_error(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.line(caplog, "failed: %s", ValueError("\x1b[2J")) == "WARNING failed: \\x1b[2J"

    def test_a_traceback_is_indented_and_bounded(self, caplog: pytest.LogCaptureFixture) -> None:
        error = ValueError("x\nERROR forged" + "\ny" * 5_000)

        head, *rest = self.line(caplog, "failed", exc=error).splitlines()

        assert head == "WARNING failed"
        assert all(line.startswith("  | ") for line in rest)
        assert "  | ERROR forged" in rest
        assert len(rest) <= 101


class TestForTerminals:
    def test_lines_and_tabs_of_a_text_may_stay(self) -> None:
        assert printable_lines("a\n\tb\x1b[2J\r\n\u2028") == "a\n\tb\\x1b[2J\\r\n\\u2028"

    @pytest.mark.parametrize(
        "text",
        ["plain", "\x1b\x07\x7f\x9b2J", "\u202e\u2028\ufeff", "订单　", "\U000e0001\U0001f600", 'a"\\b'],
    )
    def test_json_keeps_its_value_and_loses_what_a_terminal_obeys(self, text: str) -> None:
        for indent in (None, 1):
            data = json.dumps({text: [text]}, ensure_ascii=False, indent=indent).encode()
            shown = printable_json(data).decode()

            assert json.loads(shown) == {text: [text]}
            assert shown.replace("\n", "").replace("\u3000", "").isprintable()

    @pytest.mark.parametrize(
        ("number", "said"), [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (-1, "-1 messages")]
    )
    def test_a_number_is_said_with_its_noun(self, number: int, said: str) -> None:
        assert counted(number, "message") == said

    @pytest.mark.parametrize(("word", "is_so"), [(b"a", True), ("é日".encode(), True), (b"a\xff", False)])
    def test_an_argument_that_was_no_utf8_is_told_from_one_that_was(self, word: bytes, is_so: bool) -> None:
        assert is_utf8(word.decode("utf-8", "surrogateescape")) is is_so


@pytest.mark.parametrize(("count", "span_s", "shown"), [(3000, 2.0, "1,500/s"), (0, 2.0, "-"), (3, 0.0, "-")])
def test_a_rate_of_nothing_is_no_number(count: int, span_s: float, shown: str) -> None:
    assert rate(count, span_s) == shown
