"""JSON that is fast to send and slow to decode is refused before it is decoded, so that others are served."""

from __future__ import annotations

from typing import Any

from tests.grpc.service.caller import message

from cometmq.grpc.gateway.events import BATCH, EVENT
from cometmq.grpc.rpc.enums import Code

MESSAGES = "/v1/topics/Orders/messages"
JSON = "/v1/topics/Orders/batch"
MANY = 20_000
MEMBERS = b",".join(b'"a%x":"0"' % number for number in range(MANY))
FEW = b",".join(b'"a%x":"0"' % number for number in range(129))
REQUIRED = b'"specversion":"1.0","id":"1","source":"s","type":"t"'
KEYS = b",".join([b'"k"'] * 1_024)
OBJECT, ARRAY = "Expected `object` of length <= 128", "Expected `array` of length <= 1024"
ONE = b'{"messages":[{"body":"x",%b}]}'
ACK = "/v1/topics/Orders/groups/G/ack"
BOMBS: list[tuple[str, str, bytes, int, str]] = [
    (JSON, "", ONE % (b'"properties":{%b}' % MEMBERS), 431, "properties: more than 131072 bytes of JSON"),
    (JSON, "", ONE % (b'"properties":{%b}' % FEW), 400, f"properties: {OBJECT}"),
    (JSON, "", ONE % (b'"keys":[%b,"k"]' % KEYS), 400, f"keys: {ARRAY}"),
    (JSON, "", b'{"messages":[%b{}]}' % (b"{}," * 1_024), 400, f"messages: {ARRAY}"),
    (MESSAGES, EVENT, b"{%b,%b}" % (REQUIRED, MEMBERS), 431, "beside its data, at most 65536"),
    (MESSAGES, EVENT, b"{%b,%b}" % (REQUIRED, FEW), 431, "body: 133, at most 128"),
    (MESSAGES, BATCH, b"[%b{}]" % (b"{}," * 1_024), 400, "messages: 1025, at most 1024"),
    (ACK, "", b'{"handles":["%b"]}' % (b"x" * 2_200_000), 413, "body: 2200016 bytes"),
]


async def test_json_that_takes_long_to_decode_is_refused(web: Any) -> None:
    wrong = []
    for path, kind, body, status, detail in BOMBS:
        answer = await web.post(path, content=body, headers={"content-type": kind or "application/json"})
        if answer.status_code != status or detail not in answer.json()["detail"]:
            wrong.append((body[:60], answer.status_code, answer.text[:200]))
    assert wrong == []


async def test_the_data_of_an_event_may_have_many_members(web: Any) -> None:
    body = b'{%b,"data":{%b}}' % (REQUIRED, MEMBERS)
    assert (await web.post(MESSAGES, content=body, headers={"content-type": EVENT})).status_code == 200
    answer = await web.post("/v1/topics/Orders/groups/G/messages", headers={"accept": EVENT})
    assert answer.content == body


async def test_the_keys_of_a_request_are_limited(cluster: Any, connect: Any) -> None:
    caller = await connect(cluster)
    given = [message(message_id=f"id-{number}", keys=["k"] * 1_024) for number in range(17)]
    response = await caller.send(*given)
    assert (response.status.code, response.status.message) == (
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "keys: 17408, at most 16384",
    )
    assert (await caller.send(*given[:2])).status.code == Code.OK
