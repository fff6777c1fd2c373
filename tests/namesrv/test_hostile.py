"""Hostile requests to a name server do no harm to other users' brokers and clients."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.kit.raw_peer import RawPeer
from tests.namesrv.conftest import (
    TOPIC_A,
    ask,
    config_in,
    identity,
    peer,
    refused,
    register,
    registration,
    route,
    running,
)
from tests.namesrv.test_tables import says

from cometmq import logs
from cometmq.errors import BodyError, CommandError
from cometmq.namesrv import kv, requests, tables
from cometmq.namesrv.kv import KvTables
from cometmq.namesrv.server import NameServer
from cometmq.namesrv.tables import RouteTables
from cometmq.protocol.bodies import RegisterBrokerBody

ORDER = "ORDER_TOPIC_CONFIG"


async def put(raw: Any, namespace: str, key: str, value: str) -> tuple[int, str]:
    header, _ = await ask(raw, 100, {"namespace": namespace, "key": key, "value": value})
    return header["code"], header.get("remark") or ""


class TestKeyValues:
    async def test_values_that_would_fill_the_answers_of_brokers_are_refused(self, raw: RawPeer) -> None:
        answers = [await put(raw, ORDER, f"t{n}", "x" * (9 << 20)) for n in range(2)]
        header, _ = await register(raw)
        found = await route(raw)

        assert [code for code, _ in answers] == [1, 1]
        assert all("value" in remark and "1048576" in remark for _, remark in answers)
        assert (header["code"], found[0]) == (0, 0)

    async def test_a_file_that_holds_too_much_keeps_no_broker_out(self, tmp_path: Path) -> None:
        table = {f"t{n}": "x" * (9 << 20) for n in range(2)}
        (tmp_path / "kvConfig.json").write_text(json.dumps({"configTable": {ORDER: table}}))
        async with running(tmp_path) as server, peer(server) as raw:
            _, body = await register(raw)
            found = await route(raw)
            listed, _ = await ask(raw, 219, {"namespace": ORDER})
            for key in table:
                await ask(raw, 102, {"namespace": ORDER, "key": key})
            put_again = await put(raw, ORDER, "TopicA", "broker-a:4")
            _, order = await register(raw, counter=2)

        assert (body, found[0]) == (b"", 0)
        assert (listed["code"], "16777216" in listed["remark"]) == (1, True)  # too long to be sent
        assert put_again == (0, "")
        assert json.loads(order) == {"table": {"TopicA": "broker-a:4"}}

    @pytest.mark.parametrize(
        ("namespace", "key", "field"),
        [("", "k", "namespace"), ("n" * 256, "k", "namespace"), ("n", "k\n", "key"), ("n", "k" * 256, "key")],
    )
    def test_names_are_short_and_printable(self, namespace: str, key: str, field: str) -> None:
        with pytest.raises(CommandError) as caught:
            KvTables().put(namespace, key, "v")

        assert (caught.value.remark or "").startswith(f"{field}: ")

    def test_namespaces_are_bounded_and_room_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kv, "MAX_NAMESPACES", 2)
        monkeypatch.setattr(kv, "MAX_NAMESPACE_BYTES", 10)
        values = KvTables({"a": {"k": "1"}, "b": {}})
        with pytest.raises(CommandError):
            values.put("c", "k", "1")
        values.put("b", "k", "123456789")
        values.put("b", "k", "987654321")  # replaces the other value
        with pytest.raises(CommandError):
            values.put("b", "l", "")
        values.delete("b", "k")
        values.put("b", "l", "123456789")

        assert values.namespace("b") == {"l": "123456789"}


class TestRegistrations:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("brokerAddr", "..:1"), ("brokerAddr", "10.0.0.1:10911\0"), ("brokerAddr", "x" * 64 + ":1"),
            ("brokerAddr", ""), ("brokerAddr", "10.0.0.1"), ("haServerAddr", "..:1"),
            ("brokerName", " "), ("brokerName", "a\nb"), ("clusterName", "c" * 256), ("zoneName", "z" * 256),
        ],
    )  # fmt: skip
    async def test_what_no_client_can_use_is_refused(self, raw: RawPeer, field: str, value: str) -> None:
        header, _ = await ask(raw, 103, {**identity(), field: value}, registration([TOPIC_A]))
        found = await route(raw)

        assert header["code"] == 1
        assert field in header["remark"]
        assert found[0] == 17

    @pytest.mark.parametrize(
        "change",
        [
            {"topicName": "a/../b"}, {"topicName": "a\0"}, {"topicName": "x" * 256},
            {"readQueueNums": 1_000_000_000}, {"writeQueueNums": -1},
        ],
    )  # fmt: skip
    async def test_topics_that_no_broker_may_have_are_left_out(
        self, raw: RawPeer, change: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = {**TOPIC_A, "topicName": "Bad", **change}
        await register(raw, TOPIC_A, bad)
        good, worse = await route(raw), await route(raw, bad["topicName"])
        alone = {"brokerName": "broker-a", "readQueueNums": 4, "writeQueueNums": 4, **change}
        header, _ = await ask(
            raw, 217, {"topic": bad["topicName"]}, json.dumps({"queueDatas": [alone]}).encode()
        )

        assert (good[0], worse[0], header["code"]) == (0, 17, 1)
        assert sum("is ignored" in record.message for record in caplog.records) == 1

    async def test_filter_servers_that_cannot_be_dialled_are_left_out(self, raw: RawPeer) -> None:
        body = json.loads(registration([TOPIC_A]))
        good = [f"10.0.0.2:{port}" for port in range(1, 101)]
        body["filterServerList"] = ["..:1", "a\0:1", *good]
        await ask(raw, 103, identity(), json.dumps(body).encode())
        _, found = await route(raw)

        (servers,) = found["filterServerTable"].values()
        assert servers == good[: requests.MAX_FILTER_SERVERS - 2]

    async def test_a_small_registration_cannot_become_a_large_one(self, raw: RawPeer) -> None:
        version = b'{"counter":1,"timestamp":3}'
        topic = b"T0 4 4 6 SINGLE_TAG"

        def of_topics(topic: bytes, count: int) -> bytes:
            head = struct.pack(">i", len(version)) + version + struct.pack(">i", count)
            return head + (struct.pack(">i", len(topic)) + topic) * count

        bombs = [
            ("number of topics", of_topics(topic, 100_001)),
            ("larger than 16777216 bytes", bytes((16 << 20) + 1)),
            ("not standard JSON", of_topics(topic + b" {" + b"a:1," * 3_000_000 + b"a:1}", 1)),
            ("not standard JSON", of_topics(topic + b" {" + b"a:1," * 30 + b"a:1}", 90_000)),
        ]
        for words, plain in bombs:
            header, _ = await ask(raw, 103, identity(compressed="true"), zlib.compress(plain, 9))
            assert (header["code"], words in header["remark"]) == (1, True), header

    def test_a_plain_one_has_the_same_bound(self) -> None:
        one = json.dumps(TOPIC_A)
        topics = ",".join(f'"T{n}":{one}' for n in range(100_001))
        with pytest.raises(BodyError, match="100001, at most 100000"):
            RegisterBrokerBody.decode(
                f'{{"topicConfigSerializeWrapper":{{"topicConfigTable":{{{topics}}}}}}}'.encode()
            )

    def test_a_small_one_cannot_keep_the_server_busy_with_the_other_dialect(self) -> None:
        def counted(text: bytes) -> bytes:
            return struct.pack(">i", len(text)) + text

        def compressed(topics: list[bytes], filters: bytes) -> RegisterBrokerBody:
            parts = [counted(b'{"timestamp":1,"counter":1}'), struct.pack(">i", len(topics))]
            plain = b"".join([*parts, *map(counted, topics), counted(filters)])
            return RegisterBrokerBody.decode(zlib.compress(plain), compressed=True)

        assert compressed([], b"['10.0.0.1:1']").filter_server_list == ["10.0.0.1:1"]
        assert compressed([], b"[,'" + b"','" * 100_000 + b"']").filter_server_list is None
        assert compressed([b'T 1 1 6 S {"a":"b"}'], b"[]").topics["T"].attributes == {"a": "b"}
        with pytest.raises(BodyError, match="topic attributes"):
            compressed([b"T 1 1 6 S [," + b"{}," * 40_000 + b"]"], b"[]")

    async def test_the_queues_of_one_topic_are_few(self, raw: RawPeer) -> None:
        body = b"{'queueDatas':[" + b"{}," * 50_000 + b"]}"
        refused(await ask(raw, 217, {"topic": "TopicA"}, body), 1, "150017 bytes")

    async def test_others_have_their_turn_while_many_brokers_are_removed(self, tmp_path: Path) -> None:
        known = []
        async with running(tmp_path) as server:
            async with peer(server) as raw:
                for n in range(5):
                    await register(raw, name=f"broker-{n}", addr=f"10.0.0.{n}:10911")
            for _ in range(1000):
                known.append(len(server.tables.live()))
                if not known[-1]:
                    break
                await asyncio.sleep(0)

        assert sorted(set(known), reverse=True) == [5, 4, 3, 2, 1, 0]

    def test_the_tables_have_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tables, "MAX_BROKERS", 2)
        monkeypatch.setattr(tables, "MAX_TOPICS", 3)
        routes = RouteTables()

        def register_broker(number: int, *topics: str) -> int:
            answer = routes.register(
                0, says(f"b{number}", f"10.0.0.{number}:1", topics=topics, version=number)
            )
            return answer.left_out

        assert register_broker(1, "a", "b") == 0
        assert register_broker(2, "b", "c", "d") == 1
        with pytest.raises(CommandError, match="the limit of 2 registered brokers is reached"):
            register_broker(3, "e")
        assert register_broker(1, "a", "b") == 0
        assert sorted(routes.topics()) == ["a", "b", "c"]

    def test_the_brokers_of_all_topics_are_bounded_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tables, "MAX_QUEUES", 5)
        routes = RouteTables()

        def left_out(number: int) -> int:
            said = says(f"b{number}", f"10.0.0.{number}:1", topics=tuple("abc"), version=number)
            return routes.register(0, said).left_out

        assert [left_out(1), left_out(2), left_out(3)] == [0, 1, 3]
        routes.unregister("10.0.0.1:1", "b1")
        assert left_out(4) == 0


async def test_a_step_of_the_clock_removes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NameServer(config_in(tmp_path, scanNotActiveBrokerInterval="10"))
    await server.start()
    try:
        async with peer(server) as raw:
            await register(raw)
            for step_ns in (10**18, -(10**18)):
                monkeypatch.setattr("time.time_ns", lambda step_ns=step_ns: 1_700_000_000 * 10**9 + step_ns)
                monkeypatch.setattr("time.time", lambda step_ns=step_ns: 1_700_000_000 + step_ns / 1e9)
                server.scan()
                assert (await route(raw))[0] == 0
    finally:
        await server.stop(1)


@pytest.mark.parametrize("allowed", [True, False])
async def test_brokers_that_replace_each_other_all_the_time_do_not_fill_the_log(
    raw: RawPeer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    monkeypatch.setattr(logs.LogLimiter, "allows", lambda _: allowed)
    for port in (1, 2, 1):
        header, _ = await register(raw, addr=f"10.0.0.9:{port}")
    assert "both register as broker" in header["remark"]
    assert ("both register as broker" in caplog.text) == allowed
