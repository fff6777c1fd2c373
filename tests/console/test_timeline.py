"""Traces as spans: related records are joined, and no time is invented."""

from __future__ import annotations

import msgspec
import pytest

from cometmq.admin import TraceView
from cometmq.console.messages import timeline
from cometmq.console.messages.timeline import Span, bars, spans
from cometmq.protocol.traces import AnyTrace, EndTransaction, Pub, Recall, SubAfter, SubBefore

SENT = Pub(
    timestamp_ms=1000, region=None, group="p", topic="t", msg_id="M", tags=None, keys="k", store_host="h:1",
    body_length=3, cost_ms=10, message_type=1, offset_msg_id="O", success=True,
)  # fmt: skip
BEFORE = SubBefore(
    timestamp_ms=1020, region=None, group="g", request_id="R", msg_id="M", retry_times=2, keys=None
)
AFTER = SubAfter(
    request_id="R", msg_id="M", cost_ms=30, success=False, keys=None, context_code=2, timestamp_ms=1050,
    group="g",
)  # fmt: skip


def found(*traces: AnyTrace) -> list[Span]:
    return spans(TraceView(trace=each, client_host="c", store_timestamp=1) for each in traces)


def test_a_send_and_a_call_of_two_records() -> None:
    sent, call = found(AFTER, BEFORE, SENT)

    assert (sent.kind, sent.group, sent.begin_ms, sent.end_ms, sent.state, sent.what) == (
        "send", "p", 1000, 1010, "SUCCESS", "HALF",
    )  # fmt: skip
    assert (call.group, call.begin_ms, call.end_ms, call.cost_ms, call.tries) == ("g", 1020, 1050, 30, 2)
    assert (call.state, call.good) == ("EXCEPTION", False)


def test_calls_of_other_requests_and_messages_are_others() -> None:
    other = msgspec.structs.replace(BEFORE, request_id="R2", group="a")
    assert [(each.group, each.good) for each in found(BEFORE, AFTER, other)] == [("a", None), ("g", False)]


def test_a_call_without_its_end_is_open_and_one_without_its_begin_has_none() -> None:
    (begun,) = found(BEFORE)
    (ended,) = found(AFTER)
    (timeless,) = found(msgspec.structs.replace(AFTER, timestamp_ms=None, group=None))

    assert (begun.begin_ms, begun.end_ms, begun.state, begun.good) == (1020, None, None, None)
    assert (ended.begin_ms, ended.end_ms) == (None, 1050)
    assert (timeless.group, timeless.begin_ms, timeless.end_ms) == (None, None, None)
    assert bars([timeless]) == ([], 0, 0)


def test_an_end_without_a_time_is_the_begin_and_the_cost() -> None:
    (call,) = found(BEFORE, msgspec.structs.replace(AFTER, timestamp_ms=None))
    assert (call.begin_ms, call.end_ms) == (1020, 1050)


def test_a_clock_that_was_set_back_gives_no_negative_span() -> None:
    (call,) = found(BEFORE, msgspec.structs.replace(AFTER, timestamp_ms=5))
    assert call.end_ms == call.begin_ms == 1020


@pytest.mark.parametrize(
    ("state", "good"), [("COMMIT_MESSAGE", True), ("ROLLBACK_MESSAGE", False), ("UNKNOW", None)]
)
def test_a_check_is_a_moment(state: str, good: bool | None) -> None:
    (check,) = found(
        EndTransaction(
            timestamp_ms=7,
            region=None,
            group="p",
            topic="t",
            msg_id="M",
            tags=None,
            keys=None,
            store_host=None,
            message_type=2,
            transaction_id="T",
            state=state,
            from_check=True,
        )
    )
    assert (check.begin_ms, check.end_ms, check.good, check.what, check.msg_id) == (7, 7, good, "check", "T")


def test_one_that_was_called_back() -> None:
    (recall,) = found(Recall(timestamp_ms=7, region=None, group=None, topic="t", msg_id="M", success=True))
    assert (recall.kind, recall.group, recall.state) == ("recall", None, "SUCCESS")


def test_numbers_of_later_versions_are_shown() -> None:
    (sent,) = found(msgspec.structs.replace(SENT, message_type=77))
    assert sent.what == "77"


def test_bars_lie_within_the_whole() -> None:
    drawn, first, last = bars(found(SENT, BEFORE, AFTER))
    assert (first, last) == (1000, 1050)
    assert [(each.left, each.width) for each in drawn] == [(0, 20), (40, 60)]
    (alone,), _, _ = bars(found(BEFORE))
    assert (alone.left, alone.width) == (0, 0)


def test_only_so_many_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 3)
    assert len(found(*[SENT] * 5)) == 3
