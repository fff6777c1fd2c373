"""CloudEvents over HTTP, with CloudEvents' SDK and the properties of its RocketMQ binding."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from cloudevents.core.bindings.http import (
    HTTPMessage,
    from_http_event,
    to_binary_event,
    to_structured_event,
)
from cloudevents.core.v1.event import CloudEvent
from tests.grpc.service.caller import message

ORDERS = "/v1/topics/Orders/messages"
RECEIVE = "/v1/topics/Orders/groups/G/messages?wait=10"
BATCH = "application/cloudevents-batch+json"
EVENT = "application/cloudevents+json"
ATTRIBUTES = {
    "id": "7",
    "source": "/a b",
    "type": 'com.example "x"',
    "subject": "é %41",
    "myext": "v",
}


def event(data: Any = None, **attributes: Any) -> CloudEvent:
    given = {
        **ATTRIBUTES,
        **({"datacontenttype": "application/json"} if data is not None else {}),
        **attributes,
    }
    return CloudEvent(given, data)


async def posted(web: httpx.AsyncClient, sent: HTTPMessage, status: int = 200) -> Any:
    headers = {name: value.encode() for name, value in sent.headers.items()}
    answer = await web.post(ORDERS, content=sent.body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def received(web: httpx.AsyncClient, accept: str) -> CloudEvent:
    answer = await web.post(RECEIVE, headers={"accept": accept})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mq-handle"]
    return from_http_event(HTTPMessage(dict(answer.headers), answer.content))


@pytest.mark.parametrize("accept", [EVENT, "application/octet-stream"])
@pytest.mark.parametrize("encode", [to_binary_event, to_structured_event])
async def test_an_event_arrives_as_it_was_sent(web, encode, accept):
    await posted(web, encode(event({"total": 7})))
    found = await received(web, accept)

    assert found.get_data() == {"total": 7}
    attributes = found.get_attributes()
    assert {name: attributes[name] for name in ATTRIBUTES} == ATTRIBUTES
    assert attributes["datacontenttype"] == "application/json"


async def test_the_properties_are_those_of_the_sdk_for_rocketmq(cluster, web, connect):
    await posted(web, to_binary_event(event({"total": 7})))
    await posted(web, to_structured_event(event({"total": 8})))
    caller, found = await connect(cluster), []
    while len(found) < 2:
        found += await caller.receive(poll_s=5)

    binary, structured = sorted(found, key=lambda each: "CE_id" not in each.user_properties)
    properties = dict(binary.user_properties)
    assert properties.pop("CE_time").startswith("20")  # The SDK adds this attribute
    assert properties == {
        "CE_contenttype": "application/json",
        "CE_specversion": "1.0",
        **{f"CE_{name}": value for name, value in ATTRIBUTES.items()},
    }
    assert json.loads(binary.body) == {"total": 7}
    assert dict(structured.user_properties) == {"CE_contenttype": EVENT}
    assert json.loads(structured.body)["data"] == {"total": 8}


async def test_an_event_without_data(cluster, web, connect):
    await posted(web, to_binary_event(event()))
    found = await received(web, "application/octet-stream")
    assert found.get_data() in (None, "", b"")
    # As the SDK for RocketMQ sends it:
    properties = {"CE_specversion": "1.0", "CE_id": "1", "CE_source": "s", "CE_type": "t"}
    sent = message(body=b"\0", message_id="id-2")
    sent.user_properties.update(properties)
    await (await connect(cluster)).send(sent)
    assert (await received(web, EVENT)).get_data() is None


async def test_a_batch_of_events(web):
    batch = [json.loads(to_structured_event(event(number, id=str(number))).body) for number in range(3)]
    answer = await web.post(ORDERS, json=batch, headers={"content-type": BATCH, "x-mq-tag": "t"})
    assert [set(each) for each in answer.json()["results"]] == [{"message_id", "queue", "offset"}] * 3

    found: list[Any] = []
    while len(found) < 3:
        got = await web.post(f"{RECEIVE}&max=32&tags=t", headers={"accept": BATCH})
        assert got.headers["content-type"] == BATCH
        found += got.json()
    handles = [each.pop("cometmqhandle") for each in found]
    assert sorted(found, key=lambda each: each["id"]) == batch
    acked = await web.post("/v1/topics/Orders/groups/G/ack", json={"handles": handles})
    assert acked.status_code == 200


ODD: list[tuple[bytes, dict[str, str]]] = [
    (b"plain", {}),
    (b"\xff", {"CE_contenttype": "text/plain"}),
    (b"{broken", {"CE_contenttype": EVENT}),
    (b"[" * 100_000, {"CE_contenttype": "application/json"}),
    (b"x", {"CE_contenttype": "a\u00e9"}),
    (b'{"data": "\xff"}', {"CE_contenttype": EVENT}),
]


async def test_any_message_can_be_received_as_an_event(cluster, web, connect):
    caller = await connect(cluster)
    for number, (body, properties) in enumerate(ODD):
        sent = message(body=body, message_id=f"id-{number}")
        sent.user_properties.update(properties)
        await caller.send(sent)
        found = await received(web, EVENT)

        assert found.get_data() == body
        assert found.get_id() == f"id-{number}"
        assert (found.get_source(), found.get_type()) == ("/v1/topics/Orders", "cometmq.message")


INVALID: list[tuple[dict[str, str], bytes, str]] = [
    ({"ce-specversion": "1.0", "ce-id": "1", "ce-type": "t"}, b"", "ce-source"),
    ({"ce-specversion": "2.0", "ce-id": "1", "ce-type": "t", "ce-source": "s"}, b"", "ce-specversion"),
    ({"ce-specversion": "1.0", "ce-id": "", "ce-type": "t", "ce-source": "s"}, b"", "ce-id"),
    ({"ce-specversion": "1.0", "ce-a-b": "1"}, b"", "ce-a-b"),
    ({"ce-specversion": "1.0", "ce-id": "%ff"}, b"", "ce-id"),
    ({"content-type": EVENT}, b"[]", "body"),
    ({"content-type": EVENT}, b'{"specversion": "1.0"}', "id"),
    (
        {"content-type": EVENT},
        b'{"specversion": 1, "id": "1", "source": "s", "type": "t"}',
        "specversion",
    ),
    (
        {"content-type": EVENT},
        b'{"specversion": "1.0", "id": "1", "source": "s", "type": "t", "A": 1}',
        "A",
    ),
    ({"content-type": EVENT}, b'{"data": 1, "data_base64": ""}', "data_base64"),
    ({"content-type": EVENT}, b'{"data": ' + b"[" * 100_000, "body"),
    (
        {"content-type": EVENT},
        b'{"specversion": "1.0", "id": "1", "source": "s", "type": "t", "data": "\xff"}',
        "body",
    ),
    ({"content-type": BATCH}, b"{}", "body"),
    ({"content-type": BATCH}, b"[{}]", "specversion"),
    ({"content-type": BATCH}, b"[]", "messages"),
]


async def test_an_invalid_event_is_refused_with_its_field(web):
    for headers, body, field in INVALID:
        answer = await web.post(ORDERS, content=body, headers=headers)
        assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text
