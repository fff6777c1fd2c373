"""The name server over real sockets: every code, as brokers, clients and tools send it."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.kit.raw_peer import RawPeer, header_and_body, raw_frame
from tests.kit.waiting import until
from tests.namesrv.conftest import (
    TOPIC_A,
    Clock,
    ask,
    config_in,
    identity,
    key_value,
    peer,
    put_order,
    refused,
    register,
    registration,
    route,
    running,
    topics_named,
)

from cometmq.errors import BodyError
from cometmq.namesrv.server import NameServer
from cometmq.protocol.java_properties import parse_properties


def queue_data(queues: int) -> dict[str, Any]:
    counts = {"readQueueNums": queues, "writeQueueNums": queues}
    return {"brokerName": "broker-a", "perm": 6, "topicSysFlag": 0, **counts}


class TestRoutes:
    async def test_a_registered_topic_is_routed(self, raw: RawPeer) -> None:
        await register(raw)
        await register(raw, name="broker-a", addr="10.0.0.2:10911", broker_id=1)
        code, found = await route(raw)

        assert code == 0
        addrs = {"0": "10.0.0.1:10911", "1": "10.0.0.2:10911"}
        broker = {"brokerAddrs": addrs, "brokerName": "broker-a", "cluster": "DefaultCluster"}
        assert found == {"brokerDatas": [broker], "filterServerTable": {}, "queueDatas": [queue_data(4)]}

    @pytest.mark.parametrize(
        ("version", "ext", "form"),
        [
            (400, {}, b"{0:"),
            (401, {}, b'{"0":'),
            (513, {}, b'{"0":'),
            (317, {}, b"{0:"),
            (317, {"acceptStandardJsonOnly": "true"}, b'{"0":'),
        ],
    )
    async def test_the_form_of_broker_ids_follows_the_version(
        self, raw: RawPeer, version: int, ext: dict[str, str], form: bytes
    ) -> None:
        await register(raw)
        _, body = await ask(raw, 105, {"topic": "TopicA", **ext}, version=version)

        assert b'"brokerAddrs":' + form in body

    async def test_an_unknown_topic_is_answered_17(self, raw: RawPeer) -> None:
        header, body = await ask(raw, 105, {"topic": "Nowhere"})

        assert (header["code"], body) == (17, b"")
        assert header["remark"].startswith("No topic route info in name server for the topic: Nowhere")

    @pytest.mark.parametrize(("enabled", "expected"), [("true", "broker-a:8"), ("false", None)])
    async def test_order_configuration_is_optional(
        self, tmp_path: Path, enabled: str, expected: str | None
    ) -> None:
        async with running(tmp_path, orderMessageEnable=enabled) as server, peer(server) as raw:
            await register(raw)
            await put_order(raw)
            _, found = await route(raw)

        assert found.get("orderTopicConf") == expected

    async def test_filter_servers_are_routed(self, raw: RawPeer) -> None:
        await ask(raw, 103, identity(), registration([TOPIC_A], filter_servers=["10.0.0.1:30001"]))
        _, found = await route(raw)

        assert found["filterServerTable"] == {"10.0.0.1:10911": ["10.0.0.1:30001"]}

    async def test_cluster_info_has_bare_ids_for_everyone(self, raw: RawPeer) -> None:
        await register(raw)
        _, body = await ask(raw, 106, version=513)

        assert b'"brokerAddrs":{0:"10.0.0.1:10911"}' in body
        clusters = json.loads(body.replace(b"{0:", b'{"0":'))["clusterAddrTable"]
        assert clusters == {"DefaultCluster": ["broker-a"]}


class TestRegistration:
    async def test_a_slave_learns_its_master(self, raw: RawPeer) -> None:
        first, _ = await register(raw)
        header, _ = await register(raw, addr="10.0.0.2:10911", broker_id=1)

        assert first["extFields"] == {}
        assert header["extFields"] == {"haServerAddr": "10.0.0.1:10912", "masterAddr": "10.0.0.1:10911"}

    async def test_brokers_get_the_order_configuration(self, raw: RawPeer) -> None:
        _, nothing = await register(raw)
        await put_order(raw)
        _, body = await register(raw)

        assert nothing == b""
        assert json.loads(body) == {"table": {"TopicA": "broker-a:8"}}

    @pytest.mark.parametrize("attributes", ["", ' {"+delete":"x"}'], ids=["4.9 words", "5.x words"])
    async def test_a_compressed_registration_is_read(self, raw: RawPeer, attributes: str) -> None:
        def sized(data: bytes) -> bytes:
            return struct.pack(">i", len(data)) + data

        plain = (
            sized(b'{"counter":3,"timestamp":5}')
            + struct.pack(">i", 1)
            + sized(f"TopicZ 8 4 6 SINGLE_TAG{attributes}".encode())
            + sized(b'["10.0.0.1:30001"]')
            + (struct.pack(">i", 0) if attributes else b"")
        )
        body = zlib.compress(plain, 9)
        crc = zlib.crc32(body) & 0x7FFF_FFFF
        ext = identity(compressed="true", bodyCrc32=str(crc))
        header, _ = await ask(raw, 103, ext, body)
        _, found = await route(raw, "TopicZ")

        assert header["code"] == 0
        assert (found["queueDatas"][0]["readQueueNums"], found["queueDatas"][0]["writeQueueNums"]) == (8, 4)
        assert found["filterServerTable"] == {"10.0.0.1:10911": ["10.0.0.1:30001"]}

    async def test_a_wrong_checksum_is_refused(self, raw: RawPeer) -> None:
        header, _ = await ask(raw, 103, identity(bodyCrc32="1"), registration([TOPIC_A]))
        assert (await route(raw))[0] == 17

        assert (header["code"], header["remark"]) == (1, "crc32 not match")

    async def test_a_very_old_broker_sends_its_topics_without_a_wrapper(self, raw: RawPeer) -> None:
        inner = json.loads(registration([TOPIC_A]))["topicConfigSerializeWrapper"]
        header, _ = await ask(raw, 103, identity(), json.dumps(inner).encode(), version=36)
        assert header["code"] == 0
        assert (await route(raw))[0] == 0

    async def test_a_registration_without_body_registers_the_broker_alone(self, raw: RawPeer) -> None:
        header, _ = await ask(raw, 103, identity())
        _, info = await ask(raw, 106)

        assert header["code"] == 0
        assert b"10.0.0.1:10911" in info

    async def test_an_unknown_5x_broker_may_not_begin_with_one_topic(self, raw: RawPeer) -> None:
        header, _ = await ask(raw, 103, identity(), registration([TOPIC_A]), version=513)
        await register(raw, *topics_named("TopicA", "TopicB"), version=513)
        assert (await route(raw))[0] == 0

        assert (header["code"], header["remark"]) == (1, "register broker failed")

    async def test_unregistering_takes_the_routes_away(self, raw: RawPeer) -> None:
        await register(raw)
        header, _ = await ask(raw, 104, identity())
        assert header["code"] == 0
        assert (await route(raw))[0] == 17

    async def test_data_versions_are_compared(self, raw: RawPeer) -> None:
        version = {"counter": 1, "timestamp": 1795170712333}
        unknown, nothing = await ask(raw, 322, identity(), json.dumps(version).encode())
        await register(raw, counter=1)
        same, held = await ask(raw, 322, identity(), json.dumps(version).encode())
        other, _ = await ask(raw, 322, identity(), json.dumps({**version, "counter": 2}).encode())

        assert (unknown["extFields"], nothing) == ({"changed": "true"}, b"")
        assert (same["extFields"], other["extFields"]) == ({"changed": "false"}, {"changed": "true"})
        assert {key: json.loads(held)[key] for key in version} == version

    async def test_a_silent_broker_expires_and_its_connection_is_closed(self, tmp_path: Path) -> None:
        clock = Clock()
        async with (
            running(tmp_path, clock, scanNotActiveBrokerInterval="10") as server,
            peer(server) as broker,
            peer(server) as raw,
        ):
            await register(broker)
            clock.ms += 120_000
            assert (await route(raw))[0] == 0
            clock.ms += 1
            assert await broker.read_end() == b""
            assert (await route(raw))[0] == 17

    async def test_5x_heartbeats_keep_a_broker_alive(self, tmp_path: Path) -> None:
        clock = Clock()
        async with running(tmp_path, clock, scanNotActiveBrokerInterval="10") as server, peer(server) as raw:
            await register(
                raw, *topics_named("TopicA", "TopicB"), heartbeatTimeoutMillis="10000", version=513
            )
            for _ in range(3):
                clock.ms += 9_000
                header, _ = await ask(raw, 904, identity(), version=513)
                assert header["code"] == 0
            assert (await route(raw))[0] == 0
            clock.ms += 10_001
            assert await raw.read_end() == b""

    @pytest.mark.parametrize(("asked", "counts_as"), [("4611686018427387904", 3_600_000), ("-5", 0)])
    async def test_time_outs_of_brokers_are_bounded(self, tmp_path: Path, asked: str, counts_as: int) -> None:
        clock = Clock()
        async with running(tmp_path, clock) as server, peer(server) as raw:
            await register(raw, heartbeatTimeoutMillis=asked)
            clock.ms += counts_as
            assert list(server.tables.scan(clock.ms)) == []
            assert [addr for addr, _ in server.tables.scan(clock.ms + 1)] == ["10.0.0.1:10911"]

    async def test_a_closed_connection_removes_its_broker_now(self, server: NameServer, raw: RawPeer) -> None:
        async with peer(server) as broker:
            await register(broker)
            assert (await route(raw))[0] == 0
        await until(lambda: not server.tables.live())
        assert (await route(raw))[0] == 17

    async def test_several_name_servers_stand_side_by_side(self, tmp_path: Path) -> None:
        async with contextlib.AsyncExitStack() as stack:
            peers = []
            for n in range(3):
                (tmp_path / str(n)).mkdir()
                server = await stack.enter_async_context(running(tmp_path / str(n)))
                peers.append(await stack.enter_async_context(peer(server)))
            for raw in peers[:2]:
                await register(raw)

            assert [(await route(raw))[0] for raw in peers] == [0, 0, 17]
            await ask(peers[0], 104, identity())
            assert [(await route(raw))[0] for raw in peers] == [17, 0, 17]


class TestTopics:
    async def test_topic_lists(self, raw: RawPeer) -> None:
        flags = {"Plain": 0, "Unit": 1, "UnitSub": 2, "Both": 3}
        topics = [{**TOPIC_A, "topicName": name, "topicSysFlag": flag} for name, flag in flags.items()]
        await register(raw, *topics)
        asked = {
            "all": await ask(raw, 206),
            "cluster": await ask(raw, 224, {"cluster": "DefaultCluster"}),
            "no cluster": await ask(raw, 224, {"cluster": "x"}),
            "unit": await ask(raw, 311),
            "unit sub": await ask(raw, 312),
            "unit sub, not unit": await ask(raw, 313),
            "system": await ask(raw, 304),
        }

        bodies = {name: json.loads(body) for name, (_, body) in asked.items()}
        assert {name: sorted(body["topicList"]) for name, body in bodies.items()} == {
            "all": ["Both", "Plain", "Unit", "UnitSub"],
            "cluster": ["Both", "Plain", "Unit", "UnitSub"],
            "no cluster": [],
            "unit": ["Both", "Unit"],
            "unit sub": ["Both", "UnitSub"],
            "unit sub, not unit": ["UnitSub"],
            "system": ["DefaultCluster", "broker-a"],
        }
        assert bodies["system"]["brokerAddr"] == "10.0.0.1:10911"

    @pytest.mark.parametrize(
        ("key", "code", "ext"),
        [
            ("enableAllTopicList", 206, {}),
            ("enableTopicList", 224, {"cluster": "c"}),
            ("enableTopicList", 311, {}),
        ],
    )
    async def test_lists_can_be_switched_off(
        self, tmp_path: Path, key: str, code: int, ext: dict[str, str]
    ) -> None:
        async with running(tmp_path, **{key: "false"}) as server, peer(server) as raw:
            header, _ = await ask(raw, code, ext)

        assert (header["code"], header["remark"]) == (1, "disable")

    async def test_a_topic_is_deleted(self, raw: RawPeer) -> None:
        await register(raw)
        await ask(raw, 216, {"topic": "TopicA", "clusterName": "Other"})
        assert (await route(raw))[0] == 0
        header, _ = await ask(raw, 216, {"topic": "TopicA"})
        assert header["code"] == 0
        assert (await route(raw))[0] == 17

    async def test_a_topic_is_registered_alone(self, raw: RawPeer) -> None:
        await register(raw)
        queue = queue_data(2)
        body = json.dumps({"queueDatas": [queue], "brokerDatas": []}).encode()
        header, _ = await ask(raw, 217, {"topic": "TopicN"}, body, version=513)
        code, found = await route(raw, "TopicN")

        assert (header["code"], code, found["queueDatas"]) == (0, 0, [queue])

    async def test_write_permission_is_wiped_and_restored(self, raw: RawPeer) -> None:
        await register(raw, *topics_named("TopicA", "TopicB"))
        wiped, _ = await ask(raw, 205, {"brokerName": "broker-a"})
        _, found = await route(raw)
        assert found["queueDatas"][0]["perm"] == 4
        added, _ = await ask(raw, 327, {"brokerName": "broker-a"})
        _, found = await route(raw)
        assert found["queueDatas"][0]["perm"] == 6

        assert (wiped["extFields"], added["extFields"]) == ({"wipeTopicCount": "2"}, {"addTopicCount": "2"})

    async def test_a_member_group_has_bare_ids(self, raw: RawPeer) -> None:
        await register(raw)
        asked = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
        _, body = await ask(raw, 901, asked, version=513)

        addrs = {"0": "10.0.0.1:10911"}
        group = {"brokerAddrs": addrs, "brokerName": "broker-a", "cluster": "DefaultCluster"}
        assert json.loads(body.replace(b"{0:", b'{"0":')) == {"brokerMemberGroup": group}


class TestKeyValues:
    async def test_values_are_put_got_listed_and_deleted(self, raw: RawPeer) -> None:
        put = await key_value(raw, 100, "k", "v")
        got = await key_value(raw, 101, "k")
        _, listed = await ask(raw, 219, {"namespace": "n"})
        deleted = await key_value(raw, 102, "k")
        gone = await key_value(raw, 101, "k")
        again = await key_value(raw, 102, "k")
        unknown, _ = await ask(raw, 219, {"namespace": "x"})

        assert [put["code"], got["code"], deleted["code"], again["code"]] == [0, 0, 0, 0]
        assert (got["extFields"], json.loads(listed)) == ({"value": "v"}, {"table": {"k": "v"}})
        assert (gone["code"], gone["remark"]) == (22, "No config item, Namespace: n Key: k")
        assert gone["extFields"] == {}
        assert (unknown["code"], unknown["remark"]) == (22, "No config item, Namespace: x")

    async def test_acknowledged_values_are_stored_in_apaches_form(self, tmp_path: Path, raw: RawPeer) -> None:
        for n in range(20):
            await ask(raw, 100, {"namespace": "n", "key": f"k{n}", "value": "v"})
        on_disk = json.loads((tmp_path / "kvConfig.json").read_text())

        assert on_disk == {"configTable": {"n": {f"k{n}": "v" for n in range(20)}}}

    async def test_values_survive_a_restart(self, tmp_path: Path) -> None:
        async with running(tmp_path) as server, peer(server) as raw:
            await key_value(raw, 100, "k", "größer")
        async with running(tmp_path) as server, peer(server) as raw:
            got = await key_value(raw, 101, "k")

        assert got["extFields"] == {"value": "größer"}

    async def test_a_file_of_fastjson_and_the_backup_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "kvConfig.json").write_text("")
        (tmp_path / "kvConfig.json.bak").write_text("{configTable:{'n':{k:\"v\"}}}")
        async with running(tmp_path) as server, peer(server) as raw:
            got = await key_value(raw, 101, "k")

        assert got["extFields"] == {"value": "v"}

    async def test_a_broken_file_stops_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "kvConfig.json").write_text('{"configTable":[1,2]}')
        with pytest.raises(BodyError):
            await NameServer(config_in(tmp_path)).start()

    async def test_an_unwritable_value_is_not_acknowledged(self, tmp_path: Path, raw: RawPeer) -> None:
        (tmp_path / "kvConfig.json").mkdir()  # a file cannot replace a directory
        header = await key_value(raw, 100, "k", "v")
        (tmp_path / "kvConfig.json").rmdir()
        later = await key_value(raw, 100, "l", "w")
        on_disk = json.loads((tmp_path / "kvConfig.json").read_text())

        assert (header["code"], later["code"]) == (1, 0)
        assert "kvConfigPath" in header["remark"]
        assert on_disk == {"configTable": {"n": {"k": "v", "l": "w"}}}

    @pytest.mark.parametrize("missing", ["namespace", "key", "value"])
    async def test_missing_arguments_are_named(self, raw: RawPeer, missing: str) -> None:
        ext = {name: "x" for name in ("namespace", "key", "value") if name != missing}
        refused(await ask(raw, 100, ext), 1, missing)


class TestConfiguration:
    async def test_the_configuration_is_shown(self, tmp_path: Path) -> None:
        async with running(tmp_path, productEnvName="test") as server, peer(server) as raw:
            _, body = await ask(raw, 319)

        shown = parse_properties(body.decode())
        assert shown["kvConfigPath"] == str(tmp_path / "kvConfig.json")
        assert (shown["productEnvName"], shown["orderMessageEnable"]) == ("test", "false")

    async def test_a_change_takes_effect_and_is_written(self, tmp_path: Path, raw: RawPeer) -> None:
        await register(raw)
        await put_order(raw)
        header, _ = await ask(raw, 318, body=b"orderMessageEnable=true\nnobodyKnows=1\n")
        _, found = await route(raw)
        path = tmp_path / "namesrv.properties"

        assert (header["code"], found["orderTopicConf"]) == (0, "broker-a:8")
        assert path.read_text() == "orderMessageEnable=true\n"
        path.write_text("# ours\norderMessageEnable=true\n#end")
        assert (await ask(raw, 318, body=b"orderMessageEnable=false\n"))[0]["code"] == 0
        assert path.read_text() == "# ours\norderMessageEnable=false\n#end"

    @pytest.mark.parametrize(
        ("body", "code", "part"),
        [
            (b"kvConfigPath=/tmp/x", 16, "kvConfigPath"),
            (b"orderMessageEnable=true\nconfigStorePath=/tmp/x", 16, "configStorePath"),
            (b"configBlackList=", 16, "configBlackList"),
            (b"orderMessageEnable=maybe", 1, "orderMessageEnable = 'maybe': expected true or false"),
            (b"listenPort=19876", 16, "listenPort"),
            (b"bindAddress=10.0.0.1", 16, "bindAddress"),
            (b"rocketmqHome=/tmp", 16, "rocketmqHome"),
            (b"orderMessageEnable=true\nscanNotActiveBrokerInterval=0", 1, "scanNotActiveBrokerInterval"),
            (b"serverChannelMaxIdleTimeSeconds=" + b"9" * 400, 1, "serverChannelMaxIdleTimeSeconds"),
            (b"serverWorkerThreads=-1", 1, "serverWorkerThreads"),
            (b"productEnvName=" + b"x" * 5000, 1, "productEnvName"),
            (b"orderMessageEnable=true\n" * 3000, 1, "65536"),
            (b"a=\\u12", 1, "Properties"),
            (b"\xff\xfe", 1, "Properties"),
        ],
    )
    async def test_refused_changes_change_nothing(
        self, tmp_path: Path, server: NameServer, raw: RawPeer, body: bytes, code: int, part: str
    ) -> None:
        before = server.config
        header, _ = await ask(raw, 318, body=body)
        assert server.config == before
        assert not (tmp_path / "namesrv.properties").exists()

        assert header["code"] == code
        assert part in header["remark"]

    async def test_unknown_codes_are_answered_3(self, raw: RawPeer) -> None:
        refused(await ask(raw, 310, {}), 3, " request type 310 not supported")

    async def test_requests_with_binary_headers_are_answered(self, raw: RawPeer) -> None:
        key, value = b"topic", b"Nowhere"
        ext = struct.pack(">H", len(key)) + key + struct.pack(">i", len(value)) + value
        header = struct.pack(">hbhiiii", 105, 0, 409, 77, 0, 0, len(ext)) + ext
        await raw.send(struct.pack(">II", 4 + len(header), 1 << 24 | len(header)) + header)
        payload = await raw.read_payload()
        await raw.send(raw_frame(106, 5))
        after, _ = await raw.read()

        assert payload[0] == 1  # the response uses the same serialization
        answer, _ = header_and_body(payload)
        assert (answer["code"], answer["opaque"], answer["flag"] & 1) == (17, 77, 1)
        assert after["opaque"] == 5
