"""Receipt handles of received messages."""

from __future__ import annotations

import pytest

from cometmq.client.simple.leases import attach_receipts, receipt_of
from cometmq.errors import MessageIllegal
from cometmq.message import MessageExt
from cometmq.protocol.headers import PopMessageResponseHeader
from cometmq.protocol.pop import PopFormatError, TopicKind


def header(**given: str) -> PopMessageResponseHeader:
    return PopMessageResponseHeader(1_000, 60_000, 2, **given)  # type: ignore[arg-type]


def received(message: MessageExt, **given: str) -> MessageExt:
    attach_receipts([message], header(**given), "T", "broker-a")
    return message


def message(topic: str = "T", **properties: str) -> MessageExt:
    return MessageExt(topic, b"", properties=properties, queue_id=1, queue_offset=9)


class TestHandles:
    @pytest.mark.parametrize(
        ("topic", "handle"),
        [
            ("T", "5 1000 60000 2 0 broker-a 1 9"),
            ("%RETRY%g_T", "6 1000 60000 2 1 broker-a 1 9"),
            ("%RETRY%g+T", "7 1000 60000 2 2 broker-a 1 9"),
        ],
    )
    def test_the_client_builds_the_handle_from_the_response(self, topic: str, handle: str) -> None:
        found = received(message(topic), start_offset_info="0 1 5;1 1 6;2 1 7")
        assert found.properties == {"POP_CK": handle, "1ST_POP_TIME": "1000"}
        assert found.topic == "T"
        assert receipt_of(found).kind is TopicKind.of(topic)

    def test_without_start_offsets_a_message_is_its_own_start(self) -> None:
        assert receipt_of(received(message())).start_offset == 9

    def test_a_handle_in_a_record_from_a_retry_topic_is_kept(self) -> None:
        given = "3 1000 60000 2 1 broker-a 1 9"
        found = received(message(POP_CK=given, **{"1ST_POP_TIME": "500"}), start_offset_info="1 1 3")
        assert found.properties == {"POP_CK": given, "1ST_POP_TIME": "500"}

    @pytest.mark.parametrize(
        "given",
        [
            "nonsense",
            "3 1000 60000 2 0 broker-a 1 9",  # a producer can set a handle that names no retry topic
            "3 1001 60000 2 1 broker-a 1 9",
            "3 1000 60000 2 1 broker-b 1 9",
            "3 1000 60000 2 1 broker-a 2 9",
            "3 1000 60000 2 1 broker-a 1 8",
            "3 1000 60000 2 1 broker-a 1",
        ],
    )
    def test_a_handle_that_a_producer_has_set_is_replaced(self, given: str) -> None:
        assert receipt_of(received(message(POP_CK=given))).encode() == "9 1000 60000 2 0 broker-a 1 9"

    def test_an_invalid_field_of_the_response_is_an_error(self) -> None:
        with pytest.raises(PopFormatError, match="startOffsetInfo"):
            received(message(), start_offset_info="0 1")

    @pytest.mark.parametrize("given", [None, "nonsense", "3 1000 60000 2 1 broker-a 1"])
    def test_a_message_without_a_handle_cannot_be_acknowledged(self, given: str | None) -> None:
        properties = {} if given is None else {"POP_CK": given}
        with pytest.raises(MessageIllegal, match="has no receipt handle") as caught:
            receipt_of(message(**properties))
        assert caught.value.field == "POP_CK"


class TestDeliveries:
    @pytest.mark.parametrize(
        ("counts", "times"),
        [
            (None, 3),  # the count in the record, which retry topics have
            ("0 1 2", 2),
            ("0 1 2;0 qo1%9 5", 5),
            ("0 2 2;0 qo1%8 5", 3),
            ("0 1 0", 3),
        ],
    )
    def test_earlier_deliveries_are_counted(self, counts: str | None, times: int) -> None:
        given = message()
        given.reconsume_times = 3
        fields = {} if counts is None else {"order_count_info": counts}
        assert received(given, **fields).reconsume_times == times
