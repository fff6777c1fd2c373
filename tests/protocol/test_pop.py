"""Texts, headers and bodies of POP consumption: Apache's formats, round trips, and hostile input."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import BodyError, HeaderError
from cometmq.protocol.bodies.pop import (
    MAX_ACK_SPAN,
    MAX_ACKS_PER_BATCH,
    AckMsg,
    BatchAck,
    BatchAckMessageRequestBody,
    BatchAckMsg,
    LiteSubscriptionCtlRequestBody,
    PopCheckPoint,
    pack_acks,
)
from cometmq.protocol.ext import decode_ext
from cometmq.protocol.headers import PopMessageResponseHeader
from cometmq.protocol.pop import (
    MAX_HANDLE_LENGTH,
    MAX_INFO_LENGTH,
    MAX_RECENT_HANDLES,
    PopFormatError,
    ReceiptHandle,
    TopicKind,
    _recent_handles,
    decode_order_counts,
    decode_start_offsets,
    encode_message_offsets,
    encode_order_counts,
    encode_start_offsets,
)

NORMAL, V1, V2 = TopicKind

longs = st.integers(0, 2**63 - 1)
ints = st.integers(0, 2**31 - 1)
kinds = st.sampled_from(TopicKind)
keys = st.tuples(kinds, ints)
broker_names = st.text("abcXYZ019-_%", min_size=1, max_size=60)
handles = st.builds(
    ReceiptHandle, longs, longs, longs, ints, kinds, broker_names, ints, st.none() | longs, st.none()
) | st.builds(ReceiptHandle, longs, longs, longs, ints, kinds, broker_names, ints, longs, longs)


class TestTopics:
    @pytest.mark.parametrize(
        ("kind", "name"), [(NORMAL, "T"), (V1, "%RETRY%g_T"), (V2, "%RETRY%g+T")], ids=lambda each: str(each)
    )
    def test_names_are_apaches_and_tell_their_kind(self, kind, name):
        assert kind.topic("T", "g") == name
        assert TopicKind.of(name) is kind


class TestReceiptHandles:
    # A handle that Apache's broker 5.5.0 accepts.
    GOLDEN = "0 1795937951469 10000 0 0 broker-a 3 1"

    def test_the_text_is_apaches(self):
        handle = ReceiptHandle(0, 1_795_937_951_469, 10_000, 0, NORMAL, "broker-a", 3, 1)
        assert handle.encode() == self.GOLDEN
        assert ReceiptHandle.decode(self.GOLDEN) == handle

    @given(handles)
    def test_a_handle_is_read_as_it_was_written(self, handle):
        assert ReceiptHandle.decode(handle.encode()) == handle

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "it has 1 words instead of 7 to 9"),
            ("0 1 2 3 0 b", "it has 6 words"),
            ("0 1 2 3 0 b 1 2 3 4", "it has 10 words"),
            ("x 1 2 3 0 b 1 2", "start offset 'x': not a whole number"),
            ("0 -1 2 3 0 b 1 2", "pop time -1 is negative"),
            (f"0 1 {2**63} 3 0 b 1 2", "invisible time '9223372036854775808': the value is out of range"),
            (f"0 1 2 {2**31} 0 b 1 2", "revive queue id '2147483648': the value is out of range"),
            ("0 1 2 3 3 b 1 2", "the kind of topic '3' is not 0, 1 or 2"),
            ("0 1 2 3 0  1 2", "the broker name is empty"),
            ("0 1 2 3 0 b 1_0 2", "queue id '1_0': not a whole number"),
            ("0 1 2 3 0 b 1 " + "9" * 500, "offset '99999"),
            ("0" * (MAX_HANDLE_LENGTH + 1), f"the length {MAX_HANDLE_LENGTH + 1} exceeds"),
        ],
    )
    def test_an_invalid_handle_is_refused_with_the_reason(self, text, problem):
        with pytest.raises(PopFormatError) as caught:
            ReceiptHandle.decode(text)
        assert problem in str(caught.value)
        assert len(str(caught.value)) < 300

    def test_a_bounded_number_of_parsed_handles_is_kept(self):
        for offset in range(3 * MAX_RECENT_HANDLES):
            assert ReceiptHandle.decode(f"0 1 2 0 0 b 3 {offset}").offset == offset
            assert len(_recent_handles) <= MAX_RECENT_HANDLES
        handle = ReceiptHandle.decode(self.GOLDEN)
        assert ReceiptHandle.decode(self.GOLDEN) is handle


class TestResponseFields:
    # Fields of a response of Apache's broker 5.5.0 with six messages.
    STARTS = "0 3 0;0 2 0;0 1 0;0 0 0"
    OFFSETS = "0 3 0,1;0 2 0;0 1 0;0 0 0,1"

    def test_the_texts_are_apaches(self):
        starts = {(NORMAL, 3): 0, (NORMAL, 2): 0, (NORMAL, 1): 0, (NORMAL, 0): 0}
        offsets = {(NORMAL, 3): [0, 1], (NORMAL, 2): [0], (NORMAL, 1): [0], (NORMAL, 0): [0, 1]}
        assert decode_start_offsets(self.STARTS) == starts
        assert encode_start_offsets(starts) == self.STARTS
        assert encode_message_offsets(offsets) == self.OFFSETS
        counts = {(NORMAL, 1, None): 2, (V2, 0, 17): 3}
        assert encode_order_counts(counts) == "0 1 2;2 qo0%17 3"
        assert decode_order_counts("0 1 2;2 qo0%17 3") == counts

    @pytest.mark.parametrize("text", [None, ""])
    def test_an_absent_field_has_no_entries(self, text):
        assert decode_start_offsets(text) == decode_order_counts(text) == {}

    @given(
        st.dictionaries(keys, longs),
        st.dictionaries(st.tuples(kinds, ints, st.none() | longs), ints),
    )
    def test_fields_are_read_as_they_were_written(self, starts, counts):
        assert decode_start_offsets(encode_start_offsets(starts)) == starts
        assert decode_order_counts(encode_order_counts(counts)) == counts

    @pytest.mark.parametrize("decode", [decode_start_offsets, decode_order_counts])
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("0 1", "the entry has 2 words instead of 3"),
            ("0 1 2;", "the entry has 1 words instead of 3"),
            ("0 1 2;0 1 3", "the entry occurs twice"),
            ("7 1 2", "the kind of topic '7' is not 0, 1 or 2"),
            ("0 x 2", "queue id 'x': not a whole number"),
            ("0 1 -2", "-2 is negative"),
            ("0 1 ", "not a whole number"),
            (f"0 1 {2**63}", "the value is out of range"),
            ("0 1 2;" * MAX_INFO_LENGTH, f"exceeds {MAX_INFO_LENGTH} characters"),
        ],
    )
    def test_an_invalid_field_is_refused_with_the_reason(self, decode, text, problem):
        with pytest.raises(PopFormatError) as caught:
            decode(text)
        assert problem in str(caught.value)
        assert len(str(caught.value)) < 300

    @pytest.mark.parametrize("text", ["0 qo1 2", "0 1%5 2"])
    def test_a_count_names_a_queue_or_a_message(self, text):
        with pytest.raises(PopFormatError, match="the entry names neither a queue nor a message"):
            decode_order_counts(text)

    @given(st.text(max_size=80))
    def test_any_text_is_read_or_refused(self, text):
        for decode in (
            ReceiptHandle.decode,
            decode_start_offsets,
            decode_order_counts,
        ):
            try:
                decode(text)
            except PopFormatError:
                pass

    def test_a_response_without_pop_time_is_refused(self):
        with pytest.raises(HeaderError, match="popTime"):
            decode_ext(PopMessageResponseHeader, {"invisibleTime": "1", "reviveQid": "0"})


LITE_NAMES = b'{"subscriptionSet":[{"liteTopicSet":["a",%b]}]}'


class TestBatches:
    HANDLE = ReceiptHandle(5, 1_700_000_000_000, 60_000, 3, V1, "broker-a", 1, 5)

    def test_the_messages_of_a_checkpoint_share_a_bit_set(self):
        second = self.HANDLE._replace(offset=14)
        other = self.HANDLE._replace(queue_id=2)
        acks = pack_acks("g", "T", [self.HANDLE, other, second])
        body = BatchAckMessageRequestBody("broker-a", acks).encode()
        assert body == (
            b'{"acks":[{"b":"AQI=","c":"g","it":60000,"pt":1700000000000,"q":1,"r":"1","rq":3,"so":5,"t":"T"},'
            b'{"b":"AQ==","c":"g","it":60000,"pt":1700000000000,"q":2,"r":"1","rq":3,"so":5,"t":"T"}],'
            b'"brokerName":"broker-a"}'
        )
        assert [each.offsets() for each in BatchAckMessageRequestBody.decode(body).acks] == [[5, 14], [5]]

    @pytest.mark.parametrize(
        ("body", "part"),
        [(BatchAckMessageRequestBody, b'{"acks":[%b]}'), (LiteSubscriptionCtlRequestBody, LITE_NAMES)],
    )
    def test_the_number_of_decoded_values_is_limited(self, body, part):
        byte, most = body.MAX_OCCURRENCES
        values = {b"{": b"{},", b",": b'"a",'}[byte] * (most + 1)
        with pytest.raises(BodyError, match=f"at most {most}"):
            body.decode(part % values.rstrip(b","))

    @given(st.integers(0, 2**62), st.sets(st.integers(0, MAX_ACK_SPAN - 1), min_size=1, max_size=32))
    def test_acknowledged_offsets_are_read_as_they_were_written(self, start, steps):
        handle = self.HANDLE._replace(start_offset=start)
        (ack,) = pack_acks("g", "T", [handle._replace(offset=start + step) for step in steps])
        assert ack.offsets() == sorted(start + step for step in steps)

    @pytest.mark.parametrize("step", [-1, MAX_ACK_SPAN])
    def test_an_offset_far_from_its_checkpoint_is_refused(self, step):
        with pytest.raises(BodyError, match="is not near"):
            pack_acks("g", "T", [self.HANDLE._replace(offset=5 + step)])

    @pytest.mark.parametrize(
        ("bits", "problem"),
        [
            ("?", "not Base64"),
            ("é", "not Base64"),
            ("A" * (MAX_ACK_SPAN // 4), "the bit set has"),
            (base64.b64encode(b"\xff" * (MAX_ACKS_PER_BATCH // 8 + 1)).decode(), "bits are set"),
        ],
    )
    def test_a_hostile_bit_set_is_refused(self, bits, problem):
        with pytest.raises(BodyError, match=problem):
            BatchAck(bit_set=bits).offsets()


class TestReviveRecords:
    # Bodies and unique keys of records that Apache's broker 5.5.0 wrote.
    @pytest.mark.parametrize(
        ("text", "record", "key"),
        [
            (
                b'{"bm":0,"bn":"broker-a","c":"CapG","d":[0,1],"it":10000,"n":2,"pt":1795937951469,"q":3,'
                b'"reviveTime":1795937961469,"ro":0,"so":0,"sp":false,"t":"CapT"}',
                PopCheckPoint(
                    pop_time=1_795_937_951_469,
                    invisible_time=10_000,
                    num=2,
                    queue_id=3,
                    topic="CapT",
                    group="CapG",
                    revive_time=1_795_937_961_469,
                    queue_offset_diff=[0, 1],
                    broker_name="broker-a",
                ),
                "CapT@3@0@CapG@1795937951469@broker-a@ck",
            ),
            (
                b'{"ao":1,"bn":"broker-a","c":"CapG","pt":1795937951469,"q":3,"so":0,"t":"CapT"}',
                AckMsg(
                    ack_offset=1,
                    group="CapG",
                    topic="CapT",
                    queue_id=3,
                    pop_time=1_795_937_951_469,
                    broker_name="broker-a",
                ),
                "CapT@3@1@CapG@1795937951469@broker-a@ack",
            ),
            (
                b'{"ao":-1,"aol":[0],"bn":"broker-a","c":"CapG","pt":1795937951469,"q":2,"so":0,"t":"CapT"}',
                BatchAckMsg(
                    ack_offset=-1,
                    ack_offset_list=[0],
                    group="CapG",
                    topic="CapT",
                    queue_id=2,
                    pop_time=1_795_937_951_469,
                    broker_name="broker-a",
                ),
                "CapT@2@-1@CapG@1795937951469@broker-a@ack",
            ),
        ],
        ids=["checkpoint", "ack", "batch"],
    )
    def test_bodies_and_keys_are_apaches(self, text, record, key):
        assert type(record).decode(text) == record
        assert record.encode() == text
        assert record.unique_key == key

    def test_offsets_of_a_checkpoint(self):
        assert PopCheckPoint(start_offset=7, num=3).offsets() == [7, 8, 9]
        assert PopCheckPoint(start_offset=7, num=2, queue_offset_diff=[0, 40]).offsets() == [7, 47]
        assert PopCheckPoint(start_offset=7, num=-1).offsets() == []

    @pytest.mark.parametrize("record", [PopCheckPoint(num=10**9), PopCheckPoint(queue_offset_diff=[1] * 128)])
    def test_a_checkpoint_with_too_many_messages_is_refused(self, record):
        with pytest.raises(BodyError, match="128 messages instead of 127 at most"):
            record.offsets()
