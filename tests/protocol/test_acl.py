"""Signatures: Apache's worked examples, and the fields that they cover."""

from __future__ import annotations

import pytest

from cometmq.errors import ConfigError
from cometmq.protocol.acl import Credentials, credentials_of, is_signed, sign, signature
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame, decode_frame, encode_frame
from cometmq.protocol.headers import GetRouteInfoRequestHeader

SECRET = "12345678"
ME = Credentials("rocketmq2", SECRET)


@pytest.mark.parametrize(
    ("ext", "wanted"),
    [
        ({}, "Ou1T58RIcyZWaTIwzkhJZWn/Zvs="),
        ({"topic": "TBW102"}, "/u5P/wZUbhjanu4LM/UzEdo2u2I="),
    ],
)
def test_signatures_are_those_of_apaches_clients(ext: dict[str, str], wanted: str) -> None:
    frame = Frame.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, None, ext=dict(ext))
    sign(frame, ME)

    assert frame.ext == {**ext, "AccessKey": "rocketmq2", "Signature": wanted}


def signed(body: bytes = b"body") -> Frame:
    frame = Frame.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteInfoRequestHeader(topic="T"), body)
    sign(frame, Credentials("rocketmq2", SECRET, "token"))
    return decode_frame(memoryview(encode_frame(frame))[4:])


def test_a_signed_request_is_known_again_by_its_secret_alone() -> None:
    frame = signed()

    assert frame.ext is not None
    assert frame.ext["SecurityToken"] == "token"
    assert is_signed(SECRET, frame.ext, frame.body)
    assert not is_signed("87654321", frame.ext, frame.body)


@pytest.mark.parametrize(
    "change",
    [
        {"topic": "U"},
        {"AccessKey": "rocketmq3"},
        {"SecurityToken": ""},
        {"more": "x"},
        {"Signature": "ü\ud800"},
    ],
)
def test_a_change_of_any_field_breaks_the_signature(change: dict[str, str]) -> None:
    frame = signed()

    assert not is_signed(SECRET, {**(frame.ext or {}), **change}, frame.body)


def test_a_change_of_the_body_breaks_the_signature() -> None:
    frame = signed()

    assert not is_signed(SECRET, frame.ext or {}, b"bodY")
    assert not is_signed(SECRET, {"AccessKey": "rocketmq2"}, b"")


@pytest.mark.parametrize("all_fields", [False, True])
def test_both_readings_of_a_query_by_unique_key_are_taken(all_fields: bool) -> None:
    ext = {"AccessKey": "rocketmq2", "_UNIQUE_KEY_QUERY": "true", "key": "K"}
    ext["Signature"] = signature(SECRET, ext, b"", all_fields=all_fields)

    assert is_signed(SECRET, ext, b"")


def test_signing_twice_is_signing_once() -> None:
    frame = signed()
    before = dict(frame.ext or {})
    sign(frame, Credentials("rocketmq2", SECRET, "token"))

    assert frame.ext == before


def test_half_of_an_account_is_refused_without_telling_the_secret() -> None:
    assert credentials_of(None, "", None) is None
    for key, secret in ((None, "a-secret"), ("somebody", None), ("somebody", "s" * 2000)):
        with pytest.raises(ConfigError) as caught:
            credentials_of(key, secret)
        assert "a-secret" not in str(caught.value)
        assert "sss" not in str(caught.value)
    assert "a-secret" not in repr(credentials_of("somebody", "a-secret", "a-token"))
    assert "a-token" not in str(credentials_of("somebody", "a-secret", "a-token"))
