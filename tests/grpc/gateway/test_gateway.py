"""The HTTP gateway with a broker behind it: sends, receives, leases, accounts, errors."""

from __future__ import annotations

import asyncio
import base64
import zlib
from typing import Any
from urllib.parse import unquote

import httpx
from tests.broker.access.test_files import write
from tests.broker.admin.test_metrics import METRICS, look
from tests.broker.rates.conftest import stopped_clock
from tests.grpc.gateway.conftest import port_of
from tests.grpc.service.caller import SETTINGS, message
from tests.kit.brokers import create
from tests.kit.waiting import until

from cometmq.grpc.rpc.enums import Code, Encoding
from cometmq.grpc.service import traces
from cometmq.grpc.service.receives import MAX_ACKS

ORDERS = "/v1/topics/Orders/messages"
GROUP = "/v1/topics/Orders/groups/G"
HEADERS = [
    ("x-mq-tag", "new"),
    ("x-mq-keys", "o1 o2"),
    ("x-mq-property", "Region=eu=50%"),
    ("x-mq-property", "caf%C3%A9=a\u00e9".encode().decode("latin-1")),
]


async def received(web: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    answer = await web.post(f"{GROUP}/messages", params={"max": 32, "wait": 5, **params})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["messages"]
    return found


async def test_a_sent_message_is_that_of_any_other_producer(cluster, web, connect):
    raw_headers = [(name, value.encode("latin-1")) for name, value in HEADERS]
    answer = await web.post(ORDERS, content=b"hello", headers=raw_headers)
    sent = answer.json()

    (found,) = await (await connect(cluster)).receive(poll_s=5)
    system = found.system_properties
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert sent == {"message_id": system.message_id, "queue": system.queue_id, "offset": system.queue_offset}
    assert (found.body, system.tag, list(system.keys)) == (b"hello", "new", ["o1", "o2"])
    assert dict(found.user_properties) == {"Region": "eu=50%", "café": "aé"}


async def test_a_message_is_received_given_back_and_acknowledged(cluster, web, connect):
    await (await connect(cluster)).send(message(body=b"\xff", message_group="g", message_id="id-7"))

    (first,) = await received(web)
    assert (await web.post(f"{GROUP}/nack", json={"handles": [first["handle"]]})).status_code == 200
    (second,) = await received(web)
    longer = {"handles": [second["handle"]], "invisible": 300}
    assert (await web.post(f"{GROUP}/extend", json=longer)).status_code == 200
    acked = await web.post(f"{GROUP}/ack", json={"handles": [second["handle"]]})
    again = await web.post(f"{GROUP}/ack", json={"handles": [second["handle"]]})

    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert (second["message_id"], second["group"], base64.b64decode(second["body_base64"])) == (
        "id-7",
        "g",
        b"\xff",
    )
    assert acked.json() == {"results": [{"handle": second["handle"], "code": "OK"}]}
    assert again.status_code == 400
    assert again.json()["field"] == "handles"
    assert await received(web, wait=0) == []


async def test_some_failed_handles_are_reported_one_by_one(web):
    await web.post(ORDERS, content=b"1")
    (found,) = await received(web)
    handle = found["handle"]
    other = base64.urlsafe_b64encode(base64.urlsafe_b64decode(handle + "==").replace(b"broker", b"BROKER"))

    for verb in ("extend", "ack"):
        body = {"handles": [handle, other.decode()], **({"invisible": 60} if verb == "extend" else {})}
        answer = await web.post(f"{GROUP}/{verb}", json=body)
        assert answer.status_code == 207
        assert [each["code"] for each in answer.json()["results"]] == ["OK", "INVALID_RECEIPT_HANDLE"]


async def test_a_batch_has_a_result_for_each_message(web):
    batch = [{"body": "a", "tag": "t", "keys": ["k"], "properties": {"p": "v"}}, {"body_base64": "/w=="}]
    answer = await web.post(
        "/v1/topics/Orders/batch", json={"messages": [*batch, {"body": "c", "delay": 600}]}
    )

    results = answer.json()["results"]
    found: list[Any] = []
    while len(found) < 2:
        found += await received(web)
    assert answer.status_code == 200
    assert len({each["message_id"] for each in results}) == 3
    assert "recall_handle" in results[2]
    by_id = {each["message_id"]: each for each in found}
    first, second = (by_id[each["message_id"]] for each in results[:2])
    assert (first["body"], first["tag"], first["keys"], first["properties"]) == ("a", "t", ["k"], {"p": "v"})
    assert second["body_base64"] == "/w=="


async def test_a_delayed_message_is_recalled(web):
    sent = (await web.post(ORDERS, content=b"x", headers={"x-mq-delay": "600"})).json()
    handle = {"recall_handle": sent["recall_handle"]}
    recalled = await web.post("/v1/topics/Orders/recall", json=handle)
    other = await web.post("/v1/topics/Orders/recall", json={"recall_handle": "x"})

    assert (recalled.status_code, recalled.json()) == (200, {"message_id": sent["message_id"]})
    assert (other.status_code, other.json()["field"]) == (409, "recall_handle")


async def test_a_single_message_is_its_body(web):
    await web.post(ORDERS, content=b"hello\n", headers={"x-mq-tag": "a", "x-mq-property": "caf%C3%A9=b c"})
    answer = await web.post(
        f"{GROUP}/messages",
        params={"wait": 5},
        headers={"accept": "text/html, application/octet-stream;q=0.5"},
    )

    empty = await web.post(f"{GROUP}/messages", headers={"accept": "application/octet-stream"})
    assert (empty.status_code, empty.content) == (204, b"")
    assert (answer.status_code, answer.content) == (200, b"hello\n")
    assert answer.headers["x-mq-property"] == "caf%C3%A9=b%20c"
    assert answer.headers["x-mq-tag"] == "a"
    acked = await web.post(f"{GROUP}/ack", json={"handles": [answer.headers["x-mq-handle"]]})
    assert acked.status_code == 200


async def test_any_stored_text_fits_into_headers(cluster, web, connect):
    sent = message(tag=" a\u00e9 ", keys=["k  1", "\u20ac"], message_group=" g ", message_id="i d")
    odd = {"\u00e9 =": " v ", "CE_contenttype": " ", "CE_specversion": "1.0", "CE_id": ' "', "CE_UP": "x"}
    sent.user_properties.update(odd)
    assert (await (await connect(cluster)).send(sent)).status.code == Code.OK
    accept = {"accept": "application/octet-stream"}
    answer = await web.post(f"{GROUP}/messages", params={"wait": 5}, headers=accept)

    assert answer.status_code == 200
    found = {name: unquote(value) for name, value in answer.headers.items()}
    assert (found["x-mq-tag"], found["x-mq-group"], found["x-mq-keys"]) == (" a\u00e9 ", " g ", "k 1 \u20ac")
    assert (found["ce-id"], found["x-mq-property"]) == (' "', "\u00e9 == v ")
    assert "content-type" not in found


async def test_compressed_bodies_are_plain_up_to_a_size(cluster, web, connect):
    caller = await connect(cluster)
    bomb = zlib.compress(b"0" * (5 << 20))
    for number, body in enumerate((zlib.compress(b"plain"), bomb)):
        await caller.send(message(body=body, message_id=f"id-{number}", body_encoding=Encoding.GZIP))

    found: list[Any] = []
    while len(found) < 2:
        found += await received(web)
    by_id = {each["message_id"]: each for each in found}
    assert by_id["id-0"]["body"] == "plain"
    assert by_id["id-1"]["body_encoding"] == "compressed"
    assert base64.b64decode(by_id["id-1"]["body_base64"]) == bomb


async def test_filters_select_messages(web):
    for tag in ("a", "b"):
        await web.post(ORDERS, content=tag, headers={"x-mq-tag": tag, "x-mq-property": f"n={tag}"})

    of_tag = [each for _ in range(4) for each in await received(web, tags="b||c", wait=0)]
    other = "/v1/topics/Orders/groups/Other"
    of_sql: list[Any] = []
    for _ in range(4):
        answer = await web.post(f"{other}/messages", params={"sql": "n = 'a'", "max": 32, "wait": 0})
        of_sql += answer.json()["messages"]
    assert [each["body"] for each in of_tag] == ["b"]
    assert [each["body"] for each in of_sql] == ["a"]


JSON = {"content-type": "application/json"}
BATCH = "/v1/topics/Orders/batch"
RECEIVE = f"{GROUP}/messages"


REFUSED: list[tuple[str, str, dict[str, Any], bytes, int, str]] = [
    ("GET", "/", {}, b"", 404, "path"),
    ("GET", ORDERS, {}, b"", 405, "method"),
    ("POST", "/v1/topics/a%2Fb/messages", {}, b"x", 400, "topic"),
    ("POST", "/v1/topics/%FF/messages", {}, b"x", 400, "path"),
    ("POST", "/v1/topics/%4/messages", {}, b"x", 400, "path"),
    ("POST", f"/v1/topics/{'x' * 200}/messages", {}, b"x", 400, "topic"),
    ("POST", "/v1/topics//messages", {}, b"x", 400, "topic"),
    ("POST", ORDERS, {}, b"", 400, "body"),
    ("POST", ORDERS, {"x-mq-delay": "nan"}, b"x", 400, "x-mq-delay"),
    ("POST", ORDERS, {"x-mq-delay": "1e9"}, b"x", 400, "x-mq-delay"),
    ("POST", ORDERS, {"x-mq-delay": "300000000"}, b"x", 400, "delay"),
    ("POST", ORDERS, {"x-mq-property": "KEYS=x"}, b"x", 400, "properties"),
    ("POST", ORDERS, {"x-mq-property": "x"}, b"x", 400, "x-mq-property"),
    ("POST", ORDERS, {"x-mq-property": "x=%01"}, b"x", 400, "properties"),
    ("POST", ORDERS, {"x-mq-tag": "a|b"}, b"x", 400, "tag"),
    ("POST", ORDERS, {"x-mq-tag": b"\xff"}, b"x", 400, "x-mq-tag"),
    ("POST", ORDERS, {"x-mq-group": "g" * 64}, b"x", 400, "group"),
    ("POST", ORDERS, {"content-encoding": "gzip"}, b"x", 415, "content-encoding"),
    ("POST", ORDERS, {"origin": "http://127.0.0.1"}, b"x", 403, "origin"),
    ("POST", ORDERS, {"content-type": "application/cloudevents+avro"}, b"x", 415, "content-type"),
    ("POST", ORDERS, {}, b"x" * ((4 << 20) + 1), 413, "body"),
    ("POST", ORDERS, {}, b"x" * ((16 << 20) + 1), 413, "body"),
    ("POST", BATCH, JSON, b'{"messages": []}', 400, "messages"),
    ("POST", BATCH, JSON, b'{"messages": [{"tag": 1}]}', 400, "tag"),
    ("POST", BATCH, JSON, b'{"messages": [{"body": "a", "body_base64": ""}]}', 400, "body"),
    ("POST", BATCH, JSON, b'{"messages": [{"body_base64": "*"}]}', 400, "body_base64"),
    ("POST", BATCH, JSON, b'{"messages": [{"body": "a", "priority": 99999999999}]}', 400, "priority"),
    ("POST", BATCH, JSON, b'{"x": 1}', 400, "x"),
    ("POST", BATCH, JSON, b'{"messages": ' + b"[" * 100_000, 400, "body"),
    ("POST", BATCH, JSON, b'{"messages": [{"body": "\\ud800"}]}', 400, "body"),
    ("POST", BATCH, JSON, b'{"messages": [' + b'{"body":"a"},' * 1024 + b'{"body":"a"}]}', 400, "messages"),
    ("POST", f"{RECEIVE}?max=33", {}, b"", 400, "max"),
    ("POST", f"{RECEIVE}?max=0x1", {}, b"", 400, "max"),
    ("POST", f"{RECEIVE}?max=1&max=1", {}, b"", 400, "path"),
    ("POST", f"{RECEIVE}?wait=21", {}, b"", 400, "wait"),
    ("POST", f"{RECEIVE}?invisible=9", {}, b"", 400, "invisible"),
    ("POST", f"{RECEIVE}?foo=1", {}, b"", 400, "foo"),
    ("POST", f"{RECEIVE}?sql=a&tags=b", {}, b"", 400, "sql"),
    ("POST", f"{RECEIVE}?{'&'.join(f'x{n}=1' for n in range(20))}", {}, b"", 400, "path"),
    ("POST", RECEIVE, {"accept": "image/png"}, b"", 406, "accept"),
    ("POST", "/v1/topics/Orders/groups/a%20b/messages", {}, b"", 400, "group"),
    ("POST", "/v1/topics/Missing/groups/G/messages", {}, b"", 404, "topic"),
    ("POST", f"{GROUP}/ack", JSON, b'{"handles": []}', 400, "handles"),
    ("POST", f"{GROUP}/ack", JSON, b'{"handles": ["x"]}', 400, "handles"),
    ("POST", f"{GROUP}/ack", JSON, b'{"handles": ["x"], "delay": 1}', 400, "delay"),
    ("POST", f"{GROUP}/ack", JSON, b'{"handles": [' + b'"x",' * MAX_ACKS + b'"x"]}', 400, "handles"),
    ("POST", f"{GROUP}/nack", JSON, b'{"handles": ["x"], "delay": -1}', 400, "delay"),
    ("POST", "/v1/topics/Orders/recall", JSON, b"{}", 400, "recall_handle"),
    ("POST", f"{GROUP}/extend", JSON, b'{"handles": ["x"]}', 400, "invisible"),
]


async def test_a_refused_request_names_the_field(web):
    wrong = []
    for verb, path, headers, body, status, field in REFUSED:
        answer = await web.request(verb, path, headers=headers, content=body)
        found = answer.json()
        kind = answer.headers["content-type"]
        is_right = (answer.status_code, found["status"], found.get("field")) == (status, status, field)
        if not is_right or kind != "application/problem+json" or not found["detail"]:
            wrong.append((path, headers, body[:80], answer.status_code, answer.text[:300]))

    assert wrong == []


async def test_a_header_may_not_be_repeated(web):
    for name in ("x-mq-tag", "content-type", "authorization"):
        answer = await web.post(ORDERS, content=b"x", headers=[(name, "a"), (name, "b")])
        assert (answer.status_code, answer.json()["field"]) == (400, name)
    headers = [("x-mq-property", "a=1"), ("x-mq-property", "%61=2")]
    answer = await web.post(ORDERS, content=b"x", headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (400, "x-mq-property")


async def test_a_send_above_a_rate_limit_is_to_be_repeated_later(cluster, web):
    await create(cluster.peer(), attributes="+rate.send.bytes=100")
    stopped_clock(cluster)
    assert (await web.post(ORDERS, content=bytes(310))).status_code == 200

    answer = await web.post(ORDERS, content=bytes(10))
    assert (answer.status_code, answer.json()["title"]) == (429, "TOO_MANY_REQUESTS")
    assert answer.json()["detail"].startswith("rate limit of topic Orders: 100 bytes per second")
    assert answer.headers["retry-after"] == "1"


async def test_a_repeated_send_with_an_idempotency_key_is_stored_once(cluster, web):
    await create(cluster.peer(), attributes="+dedup.window.ms=60000,+dedup.key=order")
    headers = {"X-Mq-Property": "order=7"}
    first, second = [(await web.post(ORDERS, content=b"x", headers=headers)).json() for _ in range(2)]

    assert first == second
    assert [each["message_id"] for each in await received(web)] == [first["message_id"]]


async def test_a_client_that_disconnects_takes_no_message(cluster, web):
    await web.post(ORDERS, content=b"first")
    await received(web)
    async with httpx.AsyncClient(base_url=web.base_url, trust_env=False) as other:
        waiting = asyncio.ensure_future(other.post(f"{GROUP}/messages", params={"wait": 20}, timeout=60))
        endpoint = cluster.broker.endpoint
        await until(lambda: any(client.polls for client in endpoint.clients.connected))
        waiting.cancel()
    await until(lambda: len(endpoint.clients.connected) == 1)

    await web.post(ORDERS, content=b"second")
    assert [each["body"] for each in await received(web)] == ["second"]


async def test_a_client_that_disconnects_behind_pipelined_requests_takes_no_message(cluster, web):
    await web.post(ORDERS, content=b"first")
    await received(web)
    endpoint = cluster.broker.endpoint
    _, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    head = "HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    writer.write(f"POST {GROUP}/messages?wait=20 {head}".encode())
    await until(lambda: any(client.polls for client in endpoint.clients.connected))
    (waiting,) = (
        each for client in endpoint.clients.connected if client.polls for each in client.connections
    )
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: waiting._backlog)  # noqa: SLF001 - nothing else shows that the request has arrived
    writer.close()
    await until(lambda: len(endpoint.clients.connected) == 1)

    await web.post(ORDERS, content=b"second")
    assert [each["body"] for each in await received(web)] == ["second"]


async def test_a_stop_ends_waiting_receives(cluster, web):
    await web.post(ORDERS, content=b"x")
    await received(web)
    waiting = asyncio.ensure_future(web.post(f"{GROUP}/messages", params={"wait": 20}))
    endpoint = cluster.broker.endpoint
    await until(lambda: any(client.polls for client in endpoint.clients.connected))
    await endpoint.stop(5.0)

    answer = await waiting
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_traces_and_metrics_are_those_of_the_rpcs(start_cluster, monkeypatch):
    monkeypatch.setattr(traces, "INTERVAL_S", 3600.0)
    cluster = await start_cluster(**SETTINGS, **METRICS, grpcTraceEnable="true")
    endpoint = cluster.broker.endpoint
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(cluster)}", trust_env=False) as web:
        await web.post(ORDERS, content=b"x")
        (found,) = await received(web)
        await web.post(f"{GROUP}/ack", json={"handles": [found["handle"]]})
        await web.get("/nowhere")

    assert sum(len(line) for line, _ in endpoint.traces.lines.values()) == 3  # Pub, SubBefore, SubAfter
    counted = (await look(cluster.broker.parts.metrics.port))["cometmq_grpc_calls_total"]
    assert {(labels["method"], labels["code"]): count for labels, count in counted} == {
        ("SendMessage", "OK"): 1,
        ("ReceiveMessage", "OK"): 1,
        ("AckMessage", "OK"): 1,
        ("Http", "NOT_FOUND"): 1,
    }


ACL = """
accounts:
- accessKey: program
  secretKey: "secret:of-program"
  topicPerms: [Orders=PUB|SUB, In=SUB]
  groupPerms: [G=SUB]
"""


def basic(key: str, secret: str) -> str:
    return "Basic " + base64.b64encode(f"{key}:{secret}".encode()).decode()


RIGHT = basic("program", "secret:of-program")


ACCESS = [
    (RIGHT, ORDERS, 200),
    (RIGHT.replace("Basic", "basic"), RECEIVE, 200),
    (RIGHT, "/v1/topics/In/messages", 403),
    (RIGHT, "/v1/topics/Orders/groups/Other/messages", 403),
    (basic("program", "wrong"), ORDERS, 401),
    (basic("program", ""), ORDERS, 401),
    (basic("nobody", "secret:of-program"), ORDERS, 401),
    ("Basic x", ORDERS, 401),
    ("Basic", ORDERS, 401),
    ("Bearer x", RECEIVE, 401),
    ("", f"{GROUP}/ack", 401),
    ("", "/healthz", 405),
]


async def test_requests_need_an_account_with_the_right(start_cluster, tmp_path):
    write(tmp_path / "home" / "conf" / "plain_acl.yml", ACL)
    guarded = await start_cluster(**SETTINGS, aclEnable="true", rocketmqHome=str(tmp_path / "home"))
    wrong = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(guarded)}", trust_env=False) as web:
        for authorization, path, status in ACCESS:
            headers = {"authorization": authorization} if authorization else {}
            answer = await web.post(path, content=b"x", headers=headers)
            asks = "www-authenticate" in answer.headers
            if answer.status_code != status or asks is not (status == 401):
                wrong.append((authorization, path, answer.status_code, answer.text))

    assert wrong == []


async def test_the_gateway_can_be_switched_off(start_cluster):
    cluster = await start_cluster(**SETTINGS, httpGatewayEnable="false")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(cluster)}", trust_env=False) as web:
        answer = await web.get("/healthz")

    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/plain")
