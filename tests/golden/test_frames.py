"""Every recorded frame of Apache's clients and servers is parsed correctly and written back unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from tests.golden.frames import load, recordings
from tests.golden.tap import Recorded
from tests.kit.raw_peer import header_and_body
from tests.protocol.frames import frames_of

from cometmq.protocol import headers as h
from cometmq.protocol.ext import plan_of
from cometmq.protocol.frame import BINARY, Frame, decode_frame, encode_frame
from cometmq.protocol.headers import Header, encode_ext

REQUESTS: dict[int, type[Header]] = {
    11: h.PullMessageRequestHeader,
    12: h.QueryMessageRequestHeader,
    14: h.QueryConsumerOffsetRequestHeader,
    15: h.UpdateConsumerOffsetRequestHeader,
    17: h.CreateTopicRequestHeader,
    29: h.SearchOffsetRequestHeader,
    30: h.QueueRequestHeader,
    31: h.QueueRequestHeader,
    32: h.QueueRequestHeader,
    33: h.ViewMessageRequestHeader,
    35: h.UnregisterClientRequestHeader,
    36: h.ConsumerSendMsgBackRequestHeader,
    38: h.ConsumerGroupRequestHeader,
    40: h.ConsumerGroupRequestHeader,
    100: h.PutKVConfigRequestHeader,
    102: h.GetKVConfigRequestHeader,
    103: h.RegisterBrokerRequestHeader,
    104: h.UnregisterBrokerRequestHeader,
    105: h.GetRouteInfoRequestHeader,
    202: h.TopicRequestHeader,
    203: h.ConsumerGroupRequestHeader,
    204: h.GetProducerConnectionListRequestHeader,
    205: h.BrokerNameRequestHeader,
    207: h.DeleteSubscriptionGroupRequestHeader,
    208: h.GetConsumeStatsRequestHeader,
    215: h.DeleteTopicRequestHeader,
    216: h.DeleteTopicRequestHeader,
    222: h.ResetOffsetRequestHeader,
    300: h.TopicRequestHeader,
    307: h.GetConsumerRunningInfoRequestHeader,
    310: h.SendMessageRequestHeaderV2,
    317: h.GetBrokerConsumeStatsRequestHeader,
    320: h.SendMessageRequestHeaderV2,
    322: h.UnregisterBrokerRequestHeader,
    327: h.BrokerNameRequestHeader,
    361: h.PullMessageRequestHeader,
}
RESPONSES: dict[int, type[Header]] = {
    11: h.PullMessageResponseHeader,
    14: h.OffsetResponseHeader,
    29: h.OffsetResponseHeader,
    30: h.OffsetResponseHeader,
    31: h.OffsetResponseHeader,
    32: h.GetEarliestMsgStoretimeResponseHeader,
    103: h.RegisterBrokerResponseHeader,
    205: h.WipeWritePermOfBrokerResponseHeader,
    310: h.SendMessageResponseHeader,
    320: h.SendMessageResponseHeader,
    327: h.AddWritePermOfBrokerResponseHeader,
    361: h.PullMessageResponseHeader,
}
SUCCESS = 0


@pytest.fixture(
    params=recordings(), ids=lambda path: path.name.removesuffix(".json.gz").removeprefix("frames-")
)
def frames(request: pytest.FixtureRequest) -> list[Recorded]:
    return load(request.param)


def _parts(data: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Return (serialization, header fields, body), parsed without the code under test."""
    return data[4], *header_and_body(data[4:])


def _check(frame: Frame, data: bytes) -> None:
    kind, fields, body = _parts(data)
    assert frame.serialize_type == kind
    assert (frame.code, frame.opaque, frame.flag) == (fields["code"], fields["opaque"], fields["flag"])
    assert frame.version == fields["version"]
    assert frame.language == fields.get("language", "JAVA")
    assert (frame.remark or "") == (fields.get("remark") or "")
    assert (frame.ext or {}) == (fields.get("extFields") or {})
    assert bytes(frame.body) == body


def test_each_frame_is_read_as_what_it_is(frames: list[Recorded]) -> None:
    for each in frames:
        for form in (bytes, bytearray, memoryview):
            _check(decode_frame(form(each.data[4:])), each.data)


def test_each_frame_is_written_back_as_it_was(frames: list[Recorded]) -> None:
    for each in frames:
        again = encode_frame(decode_frame(each.data[4:]))
        assert int.from_bytes(again[:4]) == len(again) - 4
        kind, fields, body = _parts(again)
        was_kind, was_fields, was_body = _parts(each.data)
        assert (kind, body) == (was_kind, was_body)
        was_fields.pop("serializeTypeCurrentRPC", None)
        fields.pop("serializeTypeCurrentRPC", None)
        if kind == BINARY:
            assert len(again) == len(each.data)
        assert fields == was_fields


def test_a_stream_is_its_frames(frames: list[Recorded]) -> None:
    got = frames_of(b"".join(each.data for each in frames[:40]))
    for frame, each in zip(got, frames[:40], strict=True):
        _check(frame, each.data)


def test_every_ext_field_that_apache_sends_has_its_place_in_a_typed_header(frames: list[Recorded]) -> None:
    checked = 0
    for each in frames:
        frame = decode_frame(each.data[4:])
        known = (RESPONSES if each.response else REQUESTS).get(each.request)
        if known is None or (each.response and frame.code != SUCCESS):
            continue
        ext = frame.ext or {}
        written = encode_ext(frame.header(known))
        names = {wire_name for _, wire_name, _, _ in plan_of(known)}
        assert written == {name: value for name, value in ext.items() if name in names}, known
        assert not set(ext) - names - EXTRA, (known, set(ext) - names)
        checked += 1
    assert checked > 20


EXTRA = {"groupSysFlag", "topicSysFlag", "indexType", "ReqT"}
"""Fields beside the headers, from 5.x except the last: a server that behaves like 4.9.7 does not use them."""
