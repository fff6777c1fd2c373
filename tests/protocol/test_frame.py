"""Frames of Java, C++, Go and our own client are parsed, and ours equal what they can parse."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict
from tests.protocol.cutting import mutations, never_escapes, truncations
from tests.protocol.frames import frames_of

from cometmq.errors import FrameError, HeaderError
from cometmq.protocol.codes import LANGUAGES, VERSION_4_9_7
from cometmq.protocol.frame import BINARY, JSON, Frame, decode_frame, encode_frame
from cometmq.protocol.headers import (
    EndTransactionRequestHeader,
    GetRouteInfoRequestHeader,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    encode_ext,
)

ROUTE_FROM_JAVA = bytes.fromhex("0000008400000080") + (
    b'{"code":105,"extFields":{"topic":"TBW102"},"flag":0,"language":"JAVA","opaque":0,'
    b'"serializeTypeCurrentRPC":"JSON","version":409}'
)
ROUTE_BINARY = bytes.fromhex("0069 00 0199 00000000 00000000 00000000 00000011 0005") + (
    b"topic\x00\x00\x00\x06TBW102"
)

SEND_EXT = {
    "a": "PG",
    "b": "TopicA",
    "c": "TBW102",
    "d": "4",
    "e": "3",
    "f": "0",
    "g": "1795170736693",
    "h": "7",
    "i": "KEYS\x01k\x02TAGS\x01TagA",
    "j": "0",
    "k": "false",
    "m": "false",
    "n": "broker-a",
}


def payload(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    """Build a frame without its length word."""
    return struct.pack(">I", kind << 24 | len(header)) + header + body


def json_frame(**fields: object) -> Frame:
    return decode_frame(payload(json.dumps(fields).encode()))


class TestExamplesOfTheReference:
    def test_a_route_query_of_the_java_client_is_read(self) -> None:
        (frame,) = frames_of(ROUTE_FROM_JAVA)

        assert (frame.code, frame.opaque, frame.flag) == (105, 0, 0)
        assert (frame.language, frame.version, frame.serialize_type) == ("JAVA", 409, JSON)
        assert frame.ext == {"topic": "TBW102"}
        assert frame.header(GetRouteInfoRequestHeader).topic == "TBW102"
        assert frame.body == b""
        assert not frame.is_response
        assert not frame.is_oneway

    def test_the_same_query_is_written_as_the_java_client_writes_it(self) -> None:
        frame = Frame.request(105, GetRouteInfoRequestHeader(topic="TBW102"), language="JAVA", version=409)

        assert encode_frame(frame) == ROUTE_FROM_JAVA

    def test_a_binary_header_is_read_and_written(self) -> None:
        frame = decode_frame(payload(ROUTE_BINARY, kind=1))

        assert (frame.code, frame.language, frame.version, frame.opaque) == (105, "JAVA", 409, 0)
        assert (frame.remark, frame.ext) == (None, {"topic": "TBW102"})
        assert frame.serialize_type == BINARY
        assert encode_frame(frame)[4:] == payload(ROUTE_BINARY, kind=1)


class TestResponses:
    def test_an_answer_repeats_opaque_and_serialisation(self) -> None:
        request = decode_frame(payload(ROUTE_BINARY, kind=1))
        request.opaque = -5

        answer = decode_frame(encode_frame(request.response(17, "no route"))[4:])

        assert (answer.code, answer.opaque, answer.remark) == (17, -5, "no route")
        assert answer.is_response
        assert answer.serialize_type == BINARY
        assert (answer.language, answer.version) == ("JAVA", VERSION_4_9_7)

    @pytest.mark.parametrize(
        ("ext", "written"), [(None, b""), ({}, b'"extFields":{},'), ({"a": "1"}, b'"extFields":{"a":"1"},')]
    )
    def test_an_empty_ext_is_not_an_absent_one(self, ext: dict[str, str] | None, written: bytes) -> None:
        request = json_frame(code=34, opaque=9)

        data = encode_frame(request.response(0, ext=ext))

        assert data[8:] == b'{"code":0,%b"flag":1,"language":"JAVA","opaque":9,' % written + (
            b'"serializeTypeCurrentRPC":"JSON","version":407}'
        )
        assert decode_frame(data[4:]).ext == ext

    def test_header_and_ext_join(self) -> None:
        frame = Frame.request(
            14, QueryConsumerOffsetRequestHeader("G", "T", 1), ext={"AccessKey": "ak"}, oneway=True
        )

        assert frame.ext == {"consumerGroup": "G", "topic": "T", "queueId": "1", "AccessKey": "ak"}
        assert frame.is_oneway


class TestTypedReading:
    """Headers of sends and pulls are parsed without a dictionary, with the same result."""

    @pytest.mark.parametrize("code", [310, 320])
    def test_a_send_of_the_java_client(self, code: int) -> None:
        header = json.dumps(
            {
                "code": code, "extFields": SEND_EXT, "flag": 0, "language": "JAVA", "opaque": 12,
                "serializeTypeCurrentRPC": "JSON", "version": 409,
            },
            separators=(",", ":"),
        )  # fmt: skip
        frame = decode_frame(payload(header.encode(), b"body"))

        send = frame.header(SendMessageRequestHeader)
        assert isinstance(frame.typed, SendMessageRequestHeaderV2)
        assert (send.producer_group, send.topic, send.queue_id, send.flag) == ("PG", "TopicA", 3, 7)
        assert (send.born_timestamp, send.unit_mode, send.batch) == (1795170736693, False, False)
        assert (send.max_reconsume_times, send.bname) == (None, "broker-a")
        assert frame.ext == SEND_EXT
        assert frame.body == b"body"
        assert encode_frame(frame)[8:-4] == header.replace("409", "409").encode()

    def test_fields_nobody_knows_are_in_ext(self) -> None:
        ext = {**SEND_EXT, "AccessKey": "ak", "Signature": "sig"}
        frame = decode_frame(payload(b'{"code":310,"extFields":%b}' % json.dumps(ext).encode()))

        assert frame.header(SendMessageRequestHeader).topic == "TopicA"
        assert frame.ext == ext

    @pytest.mark.parametrize("code", [11, 361])
    def test_a_pull(self, code: int) -> None:
        ext = {
            "consumerGroup": "G", "topic": "T", "queueId": "1", "queueOffset": "5", "maxMsgNums": "32",
            "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": "15000", "subscription": "*",
            "subVersion": "1795170736693",
        }  # fmt: skip
        frame = decode_frame(payload(b'{"code":%d,"extFields":%b}' % (code, json.dumps(ext).encode())))

        pull = frame.header(PullMessageRequestHeader)
        assert (pull.queue_offset, pull.max_msg_nums, pull.suspend_timeout_millis) == (5, 32, 15000)
        assert pull.expression_type is None

    def test_an_end_of_a_transaction(self) -> None:
        ext = {
            "commitLogOffset": "700", "commitOrRollback": "8", "fromTransactionCheck": "false", "msgId": "K",
            "producerGroup": "PG", "tranStateTableOffset": "5", "transactionId": "K", "AccessKey": "ak",
        }  # fmt: skip
        frame = decode_frame(payload(b'{"code":37,"extFields":%b}' % json.dumps(ext).encode()))

        assert frame.typed == EndTransactionRequestHeader("PG", 5, 700, 8, False, "K", "K")
        assert frame.ext == ext

    def test_a_sender_cannot_fill_what_is_no_part_of_a_header(self) -> None:
        extra = b'"#b":"eA==","#s":7,"#e":{"x":"y"},"#r":"eA==","body":"eA=="'
        frame = decode_frame(
            payload(b'{"code":310,"extFields":%b,%b}' % (json.dumps(SEND_EXT).encode(), extra), b"B")
        )

        assert (frame.body, frame.serialize_type) == (b"B", JSON)
        assert frame.ext == SEND_EXT

    @pytest.mark.parametrize(
        ("key", "value", "problem"),
        [
            ("e", "three", "whole number"),
            ("e", "4000000000", "32-bit"),
            ("g", "99999999999999999999", "64-bit"),
            ("h", " 1", "whole number"),
            ("e", None, "missing"),
            ("b", None, "missing"),
        ],
    )
    def test_a_bad_required_field_is_named(self, key: str, value: str | None, problem: str) -> None:
        ext = {name: text for name, text in {**SEND_EXT, key: value}.items() if text is not None}
        frame = decode_frame(payload(b'{"code":310,"extFields":%b}' % json.dumps(ext).encode()))

        with pytest.raises(HeaderError) as caught:
            frame.header(SendMessageRequestHeader)

        assert (caught.value.field, caught.value.value) == (key, value)
        assert problem in str(caught.value)

    @pytest.mark.parametrize("value", ["abc", "4000000000", ""])
    def test_a_bad_optional_number_counts_as_absent_as_in_java(self, value: str) -> None:
        ext = {**SEND_EXT, "j": value, "d": value}
        frame = decode_frame(payload(b'{"code":310,"extFields":%b}' % json.dumps(ext).encode()))

        send = frame.header(SendMessageRequestHeader)

        assert (send.reconsume_times, send.default_topic_queue_nums) == (None, None)

    def test_the_body_is_a_slice_of_the_buffer(self) -> None:
        buffer = bytearray(payload(b'{"code":310}', b"abc"))
        frame = decode_frame(memoryview(buffer))

        assert isinstance(frame.body, memoryview)
        buffer[-3:] = b"xyz"
        assert bytes(frame.body) == b"xyz"


class TestForeignDialects:
    """Frames of C++, Go and Node clients, and other forms that Apache's broker accepts.

    See docs/reference/remoting.md, JSON header.
    """

    @pytest.mark.parametrize("newline", [b"", b"\n", b"\r\n", b" \t\n"])
    def test_white_space_after_the_header(self, newline: bytes) -> None:
        for code in (105, 310):
            assert decode_frame(payload(b'{"code":%d,"opaque":3}' % code + newline)).opaque == 3

    def test_the_cpp_client(self) -> None:
        # Numbers and flags may be quoted or not, there is always a remark, and the header ends with a
        # newline.
        ext = (
            '{"a":"PG","b":"T","c":"TBW102","d":"4","e":"2","f":"0","g":1700000000000,"h":0,'
            '"i":"KEYS\\u0001k\\u0002","j":"0","k":"0","m":false}'
        )
        frame = decode_frame(
            payload(
                b'{"code":310,"extFields":%b,"flag":0,"language":"CPP","opaque":1,"remark":"","version":333}\n'
                % ext.encode()
            )
        )

        send = frame.header(SendMessageRequestHeader)
        assert (send.queue_id, send.born_timestamp, send.batch) == (2, 1700000000000, False)
        assert (frame.language, frame.remark) == ("CPP", "")

    def test_the_go_client_sends_code_10_with_whole_names(self) -> None:
        ext = {
            "producerGroup": "PG", "topic": "T", "queueId": "1", "sysFlag": "0", "flag": "0",
            "bornTimestamp": "1700000000000", "properties": "", "reconsumeTimes": "0", "unitMode": "false",
            "maxReconsumeTimes": "0", "batch": "false", "defaultTopic": "TBW102",
            "defaultTopicQueueNums": "4",
        }  # fmt: skip
        header = {"code": 10, "language": "GO", "version": 317, "opaque": 8, "flag": 0, "remark": ""}
        header["extFields"] = ext

        frame = json_frame(**header)

        send = frame.header(SendMessageRequestHeader)
        assert (send.topic, send.queue_id, send.max_reconsume_times) == ("T", 1, 0)
        assert frame.language == "GO"

    @pytest.mark.parametrize(
        ("written", "read"),
        [
            ('"7"', "7"),
            ("7", "7"),
            ("-7", "-7"),
            ("true", "true"),
            ("false", "false"),
            ('""', ""),
            ("1.5", "1.5"),
            ("1795170736693", "1795170736693"),
            ("9223372036854775807", "9223372036854775807"),
        ],
    )
    def test_ext_values_of_any_type_are_their_text(self, written: str, read: str) -> None:
        frame = decode_frame(payload(b'{"code":14,"extFields":{"x":%b}}' % written.encode()))

        assert frame.ext == {"x": read}

    def test_null_fields_are_absent(self) -> None:
        frame = json_frame(code=14, extFields={"x": None, "y": "1"}, remark=None, flag=None)

        assert frame.ext == {"y": "1"}
        assert (frame.remark, frame.flag) == (None, 0)
        assert json_frame(code=14, extFields=None).ext is None

    @pytest.mark.parametrize(
        ("language", "read"),
        [
            *((name, name) for name in LANGUAGES),
            (1, "CPP"),
            (9, "GO"),
            (99, "OTHER"),
            ("KLINGON", "OTHER"),
            (None, "OTHER"),
        ],
    )
    def test_languages_by_name_or_ordinal(self, language: object, read: str) -> None:
        assert json_frame(code=34, language=language).language == read
        assert json_frame(code=310, extFields=SEND_EXT, language=language).language == read

    def test_a_missing_everything(self) -> None:
        frame = decode_frame(payload(b"{}"))

        assert (frame.code, frame.opaque, frame.flag, frame.version, frame.ext) == (0, 0, 0, 0, None)

    @pytest.mark.parametrize("opaque", [-1, -(2**31), 2**31 - 1])
    def test_opaque_may_be_negative(self, opaque: int) -> None:
        assert json_frame(code=105, opaque=opaque).opaque == opaque

    def test_single_quotes_and_bare_keys(self) -> None:
        frame = decode_frame(payload(b"{code:105,'opaque':7,extFields:{topic:'T',},}"))

        assert (frame.code, frame.opaque, frame.ext) == (105, 7, {"topic": "T"})

    def test_text_that_is_no_utf8_is_replaced_as_java_does(self) -> None:
        frame = decode_frame(payload(b'{"code":105,"extFields":{"topic":"T\xff"}}'))

        assert frame.ext == {"topic": "T\ufffd"}

    def test_half_a_surrogate_pair_goes_through(self) -> None:
        frame = decode_frame(
            payload(b'{"code":105,"extFields":{"topic":"a\\ud800b"},"remark":"\\ud83d\\ude00"}')
        )

        assert frame.ext == {"topic": "a\ufffdb"}
        assert frame.remark == "\U0001f600"
        data = encode_frame(Frame.request(105, ext={"topic": "\ud800"}, remark="\udfff"))
        assert decode_frame(data[4:]).ext == {"topic": "?"}


class TestHostileFrames:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "at least 4"),
            (b"\0\0\0", "at least 4"),
            (payload(b"{}")[:-1], "but the frame has only"),
            (struct.pack(">I", 100) + b"{}", "but the frame has only"),
            (payload(b"{}", kind=2), "type 2"),
            (payload(b"{}", kind=255), "type 255"),
            (payload(b""), "JSON header"),
            (payload(b"[]"), "not an object"),
            (payload(b"null"), "not an object"),
            (payload(b'{"code":105} x'), "there is text after the JSON value"),
            (payload(b'{"code":105'), "expected"),
            (payload(b'{"code":"abc"}'), "code"),
            (payload(b'{"code":{}}'), "code"),
            (payload(b'{"code":4294967296}'), "code is out of range"),
            (payload(b'{"opaque":1e400}'), "opaque"),
            (payload(b'{"code":1,"extFields":[]}'), "extFields is not an object"),
            (payload(b'{"code":1,"extFields":"x"}'), "extFields is not an object"),
            (payload(b'{"code":310,"extFields":7}'), "extFields is not an object"),
            (payload(b"\0" * 20, kind=1), "at least 21"),
        ],
    )
    def test_it_is_refused_with_a_reason(self, data: bytes, words: str) -> None:
        with pytest.raises(FrameError, match=words):
            decode_frame(data)

    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    @pytest.mark.parametrize(
        "prefix", [b'{"code":1,"extFields":', b'{"code":310,"x":', b'{"code":310,"extFields":']
    )
    def test_deep_nesting(self, opening: bytes, prefix: bytes) -> None:
        with pytest.raises(FrameError, match=r"deep|JSON"):
            decode_frame(payload(prefix + opening * 200_000))

    def test_nesting_within_the_limit_is_no_error(self) -> None:
        deep = b"[" * 60 + b"]" * 60

        assert decode_frame(payload(b'{"code":310,"x":%b,}' % deep)).code == 310

    def test_too_many_ext_fields(self) -> None:
        ext = {f"k{number}": "v" for number in range(257)}
        with pytest.raises(FrameError, match="257 ext fields"):
            json_frame(code=105, extFields=ext)
        with pytest.raises(FrameError, match="257 ext fields"):
            decode_frame(payload(b"{code:105,extFields:%b}" % json.dumps(ext).encode()))
        with pytest.raises(FrameError, match="256 ext fields"):
            decode_frame(encode_frame(Frame(code=1, ext_fields=ext, serialize_type=BINARY))[4:])
        del ext["k0"]
        assert len(json_frame(code=105, extFields=ext).ext or ()) == 256

    def test_a_long_header_is_only_read_if_it_is_standard_json(self) -> None:
        long = b"v" * (300 << 10)

        assert decode_frame(payload(b'{"code":1,"remark":"%b"}' % long)).remark == long.decode()
        with pytest.raises(FrameError, match="not standard JSON"):
            decode_frame(payload(b'{code:1,"remark":"%b"}' % long))

    def test_a_number_of_a_million_digits(self) -> None:
        with pytest.raises(FrameError):
            decode_frame(payload(b'{"code":1,"extFields":{"x":%b}}' % (b"9" * 1_000_000)))

    @pytest.mark.parametrize(
        ("start", "words"),
        [
            ("0069 00 0199 00000000 00000000 7fffffff 00000000", "remark"),
            ("0069 00 0199 00000000 00000000 ffffffff 00000000", "remark"),
            ("0069 00 0199 00000000 00000000 00000000 7fffffff", "extFields"),
            ("0069 00 0199 00000000 00000000 00000000 ffffffff", "extFields"),
            ("0069 00 0199 00000000 00000000 00000000 00000001 00", "length of a key"),
            ("0069 00 0199 00000000 00000000 00000000 00000002 0005", "key of extFields"),
            ("0069 00 0199 00000000 00000000 00000000 00000002 ffff", "key of extFields"),
            ("0069 00 0199 00000000 00000000 00000000 00000004 0001 41 00", "length of a value"),
            ("0069 00 0199 00000000 00000000 00000000 00000007 0001 41 00000009", "value of extFields"),
            ("0069 00 0199 00000000 00000000 00000000 00000007 0001 41 ffffffff", "value of extFields"),
        ],
    )
    def test_lengths_that_lie_in_a_binary_header(self, start: str, words: str) -> None:
        with pytest.raises(FrameError, match=words):
            decode_frame(payload(bytes.fromhex(start), kind=1))

    @pytest.mark.parametrize("header", [ROUTE_FROM_JAVA[8:], ROUTE_BINARY])
    def test_every_cut_and_every_changed_byte_is_read_or_refused(self, header: bytes) -> None:
        kind = int(header[:1] != b"{")
        for data in (payload(header, kind=kind), payload(header, b"body", kind=kind)):
            assert never_escapes(decode_frame, truncations(data))[1] > 0
            assert never_escapes(decode_frame, mutations(data))[1] > 0

    def test_what_a_binary_header_cannot_hold_is_refused(self) -> None:
        with pytest.raises(FrameError, match="200050"):
            encode_frame(Frame(code=200050, serialize_type=BINARY))
        with pytest.raises(FrameError, match="40000 bytes"):
            encode_frame(Frame(code=1, ext_fields={"k" * 40_000: "v"}, serialize_type=BINARY))

    def test_a_header_beyond_24_bits_is_refused(self) -> None:
        with pytest.raises(FrameError, match="the header has"):
            encode_frame(Frame(code=1, remark="x" * (1 << 24)))


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
int32 = st.integers(-(2**31), 2**31 - 1)
frames = st.builds(
    Frame,
    code=st.integers(-(2**15), 2**15 - 1),
    opaque=int32,
    flag=st.integers(0, 3),
    language=st.sampled_from(LANGUAGES),
    version=st.integers(0, 2**15 - 1),
    remark=st.none() | texts.filter(bool),
    body=st.binary(max_size=50),
    serialize_type=st.sampled_from([JSON, BINARY]),
    ext_fields=st.dictionaries(texts, texts, min_size=1, max_size=10),
)


@settings(max_examples=60)
@given(st.lists(frames, max_size=4))
def test_frames_survive_being_written(sent: list[Frame]) -> None:
    received = frames_of(b"".join(map(encode_frame, sent)))

    assert list(map(asdict, received)) == list(map(asdict, sent))


@given(st.binary(max_size=200), st.sampled_from([b'{"code":310,', b'{"code":105,', b""]))
def test_any_bytes_are_a_frame_or_a_frame_error(junk: bytes, start: bytes) -> None:
    for kind in (JSON, BINARY, 7):
        never_escapes(decode_frame, iter([payload(start + junk, kind=kind), junk]))


sends = st.builds(
    SendMessageRequestHeaderV2,
    topic=texts,
    queue_id=int32,
    sys_flag=int32,
    born_timestamp=st.integers(-(2**63), 2**63 - 1),
    flag=int32,
    producer_group=st.none() | texts,
    default_topic=st.none() | texts,
    default_topic_queue_nums=st.none() | int32,
    properties=st.none() | texts,
    reconsume_times=st.none() | int32,
    unit_mode=st.none() | st.booleans(),
    max_reconsume_times=st.none() | int32,
    batch=st.none() | st.booleans(),
    bname=st.none() | texts,
)


@given(sends, st.booleans())
def test_a_send_is_the_same_by_every_way(send: SendMessageRequestHeaderV2, usual: bool) -> None:
    if usual:  # the fast path without a dictionary needs these fields
        send.producer_group, send.default_topic, send.default_topic_queue_nums = "PG", "TBW102", 4
        send.properties, send.reconsume_times, send.unit_mode, send.batch = "p\x01v", 0, False, True
    direct = encode_frame(Frame.request(310, send, b"b"))
    by_dict = encode_frame(Frame(code=310, ext_fields=encode_ext(send), body=b"b"))

    frame = decode_frame(direct[4:])

    assert json.loads(direct[8:-1]) == json.loads(by_dict[8:-1])
    assert list(json.loads(direct[8:-1])["extFields"]) == sorted(encode_ext(send))
    assert frame.header(SendMessageRequestHeader) == send
    assert frame.ext == encode_ext(send)
    binary = Frame(code=310, ext_fields=encode_ext(send), serialize_type=BINARY)
    assert decode_frame(encode_frame(binary)[4:]).header(SendMessageRequestHeader) == send
