"""Times of timer messages, tags codes of their queue units, and recall handles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.properties.values import java_hash
from cometmq.protocol.timers import (
    CODES_BEGIN,
    BadHandle,
    RecallHandle,
    TimerCode,
    out_ms_of,
    timer_tags_code,
)


@given(st.integers(1_000_000_000_000, 3_000_000_000_000))
def test_a_message_goes_at_its_time_or_within_a_second_after(deliver_ms):
    due_ms = TimerCode(out_ms_of(deliver_ms), False, False).due_ms
    assert 0 <= due_ms - deliver_ms < 1_000


@given(st.builds(TimerCode, st.integers(1 << 31, (1 << 45) - 1), st.booleans(), st.booleans()))
def test_codes_are_what_they_were_and_no_hash_of_a_tag(code):
    assert TimerCode.unpack(code.pack()) == code
    assert CODES_BEGIN <= code.pack() < 1 << 63


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        (
            b"TIMER_OUT_MS\x011700000000000\x02TIMER_DELIVER_MS\x011",
            TimerCode(1_700_000_000_000, False, False),
        ),
        (b"TIMER_OUT_MS\x011700000000000\x02TIMER_DELAY_SEC\x019", TimerCode(1_700_000_000_000, True, False)),
        (
            b"TIMER_OUT_MS\x011700000000000\x02TIMER_DEL_UNIQKEY\x01k",
            TimerCode(1_700_000_000_000, False, True),
        ),
        (b"TIMER_OUT_MS\x01soon", None),
        (b"TIMER_OUT_MS\x011", None),
        (b"TIMER_OUT_MS\x01" + b"9" * 15, None),
        (b"TIMER_OUT_MS\x01" + b"9" * 5_000, None),
        (b"", None),
    ],
)
def test_what_the_properties_say(properties, code):
    assert TimerCode.of(properties) == code
    tagged = b"TAGS\x01A\x02" + properties
    assert timer_tags_code(tagged) == (code.pack() if code else java_hash("A"))


class TestHandles:
    def test_the_text_is_apaches(self):
        handle = RecallHandle("TopicA", "broker-a", 1_700_000_000_001, "KEY")
        assert handle.encode() == "djEgVG9waWNBIGJyb2tlci1hIDE3MDAwMDAwMDAwMDEgS0VZ"
        assert RecallHandle.decode(handle.encode()) == handle

    def test_padding_may_be_left_out(self):
        text = RecallHandle("T", "b", 1, "K").encode()
        assert text.endswith("=")
        assert RecallHandle.decode(text.rstrip("=")) == ("T", "b", 1, "K")

    @pytest.mark.parametrize("text", ["", "x", "djEg", "djIgYSBiIDEgYw", "\u00e9", "/+//", "djEgYSBiIDEg\n"])
    def test_what_is_no_handle(self, text):
        with pytest.raises(BadHandle):
            RecallHandle.decode(text)

    def test_a_time_that_is_no_number_is_one_that_has_passed(self):
        assert RecallHandle.decode("djEgYSBiIHggYw").deliver_ms == -1

    def test_a_time_may_have_a_plus_as_for_java(self):
        assert RecallHandle.decode("djEgYSBiICs1IGM").deliver_ms == 5
