"""`cometmq doctor` finds each possible problem by its name, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.certificates import Certificates
from tests.kit.brokers import Peer
from tests.kit.fakes import FakeServer, Script
from tests.ports import free_port
from tests.store.background.test_full_disk import SmallDisk

from cometmq import MessageExt, MessageQueue, PushConsumer
from cometmq.admin import Admin, TopicSettings
from cometmq.admin.commands.formats import consumer_status
from cometmq.admin.doctor import Finding, connect_problem, examine
from cometmq.admin.groups import blocked_queues
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.cli.doctor import doctor, examine_settings
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumerRunningInfo,
    DataVersion,
    KVTable,
    ProcessQueueInfo,
    RegisterBrokerBody,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import RegisterBrokerRequestHeader
from cometmq.store import Clock, Disk
from cometmq.store.base.refusal import Flag


class Wrong(Clock):
    """A clock that is two minutes ahead."""

    def time_ms(self) -> int:
        return super().time_ms() + 120_000


@asynccontextmanager
async def name_server(path: Path) -> AsyncIterator[str]:
    files = {"kv_config_path": str(path / "kv"), "config_store_path": str(path / "namesrv")}
    server = NameServer(NamesrvConfig(listen_port=0, bind_address="127.0.0.1", **files))
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def broker(
    path: Path, namesrv: str, clock: Clock | None = None, disk: Disk | None = None
) -> AsyncIterator[Broker]:
    settings = {
        "brokerIP1": "127.0.0.1", "bindAddress": "127.0.0.1", "listenPort": "0", "brokerName": "broker-a",
        "mappedFileSizeCommitLog": "1048576", "storePathRootDir": str(path), "namesrvAddr": namesrv,
    }  # fmt: skip
    one = Broker(BrokerConfig.from_properties(settings), clock=clock, disk=disk)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


@asynccontextmanager
async def hostile_broker(path: Path, runtime: dict[str, str]) -> AsyncIterator[tuple[str, str]]:
    """Run a name server and a registered broker that returns arbitrary runtime values."""
    say: Script = lambda frame: frame.response(body=KVTable(table=runtime).encode())  # noqa: E731
    body = RegisterBrokerBody.of({}, DataVersion(timestamp=1, counter=1), []).encode(compressed=False)
    async with (
        FakeServer({RequestCode.GET_BROKER_RUNTIME_INFO: say}) as server,
        name_server(path) as namesrv,
        Peer(namesrv) as peer,
    ):
        header = RegisterBrokerRequestHeader(
            broker_name="broker-x", broker_addr=server.addr, cluster_name="C", broker_id=0, ha_server_addr="",
            compressed=False, body_crc32=0,
        )  # fmt: skip
        assert (await peer.call(RequestCode.REGISTER_BROKER, header, body)).code == 0
        yield namesrv, server.addr


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.representative
@pytest.mark.slow("a member that does not answer is waited for")
async def test_nothing_is_wrong_with_what_works(tmp_path: Path) -> None:
    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "a", namesrv) as one,
        Peer(one.addr) as peer,
    ):
        await peer.heartbeat(topics={"Orders": "*"})
        await peer.send()
        await one.parts.registrar.registered()
        assert await examine([namesrv], topic="Orders", group="G") == []


async def test_name_servers_that_do_not_answer_are_told_apart(tmp_path: Path) -> None:
    closed = f"127.0.0.1:{free_port()}"
    async with name_server(tmp_path) as namesrv, broker(tmp_path / "a", namesrv) as one:
        findings = await examine([closed, "nonsense", one.addr, namesrv])
    found = {each.where: each.problem for each in findings}
    assert "Connect call failed" in found[closed] or "refused" in found[closed].lower()
    assert "this is not an address" in found["nonsense"]
    assert "does not respond as a name server" in found[one.addr]
    assert namesrv not in found


async def test_name_servers_that_disagree_and_those_without_brokers(tmp_path: Path) -> None:
    async with name_server(tmp_path) as one, name_server(tmp_path) as two:
        assert "no broker is registered" in only(await examine([one])).problem
        async with broker(tmp_path / "a", one) as known:
            finding = only(await examine([one, two]))
    assert (finding.where, finding.serious) == (two, True)
    assert known.addr in finding.problem


async def test_a_broker_that_tells_a_wrong_address(tmp_path: Path) -> None:
    wrong = f"127.0.0.1:{free_port()}"
    header = RegisterBrokerRequestHeader(
        broker_name="broker-x", broker_addr=wrong, cluster_name="C", broker_id=1, ha_server_addr="",
        compressed=False, body_crc32=0,
    )  # fmt: skip
    body = RegisterBrokerBody.of({}, DataVersion(timestamp=1, counter=1), []).encode(compressed=False)
    async with name_server(tmp_path) as namesrv, Peer(namesrv) as peer:
        assert (await peer.call(RequestCode.REGISTER_BROKER, header, body)).code == 0
        findings = await examine([namesrv])
    problems = {each.where: each for each in findings}
    assert "brokerIP1" in problems[wrong].cure
    assert "no master of broker-x" in problems["broker-x"].problem


async def test_what_a_broker_says_of_itself(tmp_path: Path) -> None:
    async with name_server(tmp_path) as namesrv, broker(tmp_path / "a", namesrv, Wrong()) as one:
        one.parts.store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
        full, clock = await examine([namesrv])
        one.parts.store.flags.clear(Flag.DISK_FULL)
    assert (full.where, full.problem) == (one.addr, "the broker accepts no messages: the disk is full")
    assert not clock.serious
    assert "120 s ahead of" in clock.problem


async def test_two_brokers_with_one_name_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "a", namesrv) as one,
        broker(tmp_path / "b", namesrv) as other,
    ):
        assert await examine([namesrv]) == []  # the other may have taken the place of the first
        await one.parts.registrar.registered()
        finding = only(await examine([namesrv]))
        await other.stop()
        await one.parts.registrar.registered()
        assert await examine([namesrv]) == []
    rivals = f"{one.addr} and {other.addr} both register as broker broker-a with id 0"
    assert (finding.where, finding.serious) == (one.addr, True)
    assert rivals in finding.problem
    assert {each.name for each in caplog.records if rivals in each.getMessage()} == {
        "cometmq.namesrv.requests", "cometmq.broker.register",
    }  # fmt: skip


async def test_a_disk_without_room_for_a_segment_is_found_although_it_is_not_full(tmp_path: Path) -> None:
    disk = SmallDisk()
    disk.room = 5000
    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "a", namesrv, disk=disk) as one,
        Peer(one.addr) as peer,
    ):
        assert "No space left" in ((await peer.send()).remark or "")
        finding = only(await examine([namesrv]))
        disk.room = 1 << 30
        assert (await peer.send()).code == 0
        assert await examine([namesrv]) == []
    assert (finding.where, finding.serious) == (one.addr, True)
    assert "the log cannot grow: no space for a segment of 1.0 MiB (Total" in finding.problem


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ({"brokerRole": "SLAVE", "haProblem": "p"}, ["the slave does not follow its master: p"]),
        ({"brokerRole": "SYNC_MASTER", "haProblem": "p"}, ["no slave can follow: p"]),
        ({"brokerRole": "SLAVE", "raftRole": "follower", "haProblem": "p"}, ["group does not start: p"]),
        ({"brokerRole": "SLAVE", "raftRole": "follower", "raftSuspect": "true"}, ["has no vote in its"]),
        ({"brokerRole": "ASYNC_MASTER", "haProblem": "none", "raftSuspect": "false"}, []),
    ],
)
async def test_what_it_says_of_replication_is_told_by_its_role(
    tmp_path: Path, runtime: dict[str, str], said: list[str]
) -> None:
    async with hostile_broker(tmp_path, runtime) as (namesrv, _):
        found = await examine([namesrv])
    assert len(found) == len(said)
    for finding, words in zip(found, said, strict=True):
        assert words in finding.problem


@pytest.mark.parametrize(
    "runtime",
    [
        {"systemTimeMillis": "9" * 4_000},
        {"systemTimeMillis": "-1"},
        {"bootTimestamp": "9" * 400, "runtime": "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"},
        {"bootTimestamp": "1", "runtime": "9" * 300_000},
        {"bootTimestamp": "1", "runtime": "9" * 400 + " days, 1 hours, 1 minutes, 1 seconds"},
        {"commitLogDiskRatio": "nan"},
    ],
)
async def test_nonsense_of_a_hostile_broker_is_no_trouble(tmp_path: Path, runtime: dict[str, str]) -> None:
    async with hostile_broker(tmp_path, runtime) as (namesrv, _):
        assert await examine([namesrv]) == []


async def test_the_clock_of_a_broker_is_compared_when_its_answer_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other brokers that do not answer delay the findings by several seconds."""
    own = time.time
    async with name_server(tmp_path) as namesrv, broker(tmp_path / "a", namesrv) as one:

        async def later(addr: str) -> str:
            if addr == one.addr:
                monkeypatch.setattr("time.time", lambda: own() + 60)
            return await connect_problem(addr)

        await one.parts.registrar.registered()
        monkeypatch.setattr("cometmq.admin.doctor.connect_problem", later)
        assert await examine([namesrv]) == []


async def test_brokers_of_several_versions_are_named(tmp_path: Path) -> None:
    async with (
        hostile_broker(tmp_path, {"brokerVersionDesc": "V5_5_0"}) as (namesrv, _),
        broker(tmp_path / "a", namesrv) as one,
    ):
        await one.parts.registrar.registered()
        finding = only(await examine([namesrv]))
    assert (finding.where, finding.serious) == ("brokers", False)
    assert "they have several versions: V4_9_7" in finding.problem
    assert "V5_5_0" in finding.problem


async def test_what_a_hostile_broker_says_is_cut(tmp_path: Path) -> None:
    async with hostile_broker(tmp_path, {"storeFlags": "x" * 100_000, "commitLogDiskRatio": "1e308"}) as (
        namesrv, addr,
    ):  # fmt: skip
        findings = await examine([namesrv])
    assert {each.where for each in findings} == {addr}
    assert all(len(each.problem) < 3_000 for each in findings)


async def test_a_name_server_that_tells_of_too_many_brokers_is_not_followed(tmp_path: Path) -> None:
    def cluster(frame: Frame) -> Frame:
        table = {
            f"b{n}": BrokerData(cluster="C", broker_name=f"b{n}", broker_addrs={0: f"192.0.2.1:{n + 1}"})
            for n in range(1_001)
        }
        return frame.response(
            body=ClusterInfo(broker_addr_table=table, cluster_addr_table={"C": list(table)}).encode()
        )

    async with FakeServer({RequestCode.GET_BROKER_CLUSTER_INFO: cluster}) as server:
        assert "1001 brokers are registered" in only(await examine([server.addr])).problem


async def test_who_speaks_tls_hears_of_ports_that_take_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(tmp_path / "certificates")
    files = {"kv_config_path": str(tmp_path / "kv"), "config_store_path": str(tmp_path / "conf")}
    monkeypatch.setenv("COMETMQ_TLS", str(certificates.file))
    for mode, plain in (("permissive", True), ("enforcing", False)):
        config = NamesrvConfig(
            listen_port=0, bind_address="127.0.0.1", tls_config_file=str(certificates.file),
            tls_server_mode=mode, **files,
        )  # fmt: skip
        server = NameServer(config)
        addr = f"127.0.0.1:{await server.start()}"
        problems = [each.problem for each in await examine([addr]) if each.where == addr]
        await server.stop()
        assert [True for each in problems if "accepts plain connections in addition to TLS" in each] == [
            True
        ] * plain


@pytest.mark.representative
@pytest.mark.slow("a member that does not answer is waited for")
async def test_topics_and_groups(tmp_path: Path) -> None:
    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "a", namesrv) as one,
        Peer(one.addr) as peer,
    ):
        assert "has no route" in only(await examine([namesrv], topic="Nobody")).problem
        async with Admin(namesrv) as admin:
            async for _ in admin.create_topic(TopicSettings(topic="ReadOnly", perm=4), broker_addr=one.addr):
                pass
        await one.parts.registrar.registered()
        assert "can be sent to" in only(await examine([namesrv], topic="ReadOnly")).problem
        unknown = only(await examine([namesrv], group="Nobody"))
        assert (unknown.where, "stored offsets" in unknown.cure) == ("Nobody", True)
        await peer.heartbeat("c1", "G", {"Orders": "*"})
        async with Peer(one.addr) as other:
            await other.heartbeat("c2", "G", {"Orders": "paid"})
            await one.parts.registrar.registered()
            finding = only(await examine([namesrv], group="G"))
        assert "members differ in Orders: c1 says *; c2 says paid" in finding.problem


async def test_a_member_that_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.admin.groups.BLOCKED_MS", -1000)
    begun, end = asyncio.Event(), asyncio.Event()

    async def listener(_messages: Sequence[MessageExt]) -> None:
        begun.set()
        await end.wait()

    async with (
        name_server(tmp_path) as namesrv,
        broker(tmp_path / "a", namesrv) as one,
        Peer(one.addr) as peer,
    ):
        await peer.send()
        await one.parts.registrar.registered()
        async with PushConsumer("G", listener, {"Orders": "*"}, namesrv=namesrv):
            await begun.wait()
            finding = only(await examine([namesrv], group="G"))
            async with Admin(namesrv) as admin:
                found = await admin.subscriptions("G")
            end.set()
    assert (finding.where, finding.serious) == ("G", False)
    assert "has consumed none of its messages of Orders@broker-a:0 for 0 s" in finding.problem
    assert "Orders@broker-a:0 can't consume for a while, maybe blocked, " in [*consumer_status(found)][-1]


def test_a_queue_counts_as_blocked_after_a_minute_with_waiting_messages() -> None:
    def queue(number: int, count: int, consumed: int) -> tuple[MessageQueue, ProcessQueueInfo]:
        held = ProcessQueueInfo(cached_msg_count=count, last_consume_timestamp=consumed)
        return MessageQueue("T", "b", number), held

    info = ConsumerRunningInfo(
        mq_table=dict([queue(0, 1, 9_000), queue(1, 1, 10_000), queue(2, 0, 1), queue(3, 1, 0)])
    )
    assert blocked_queues(info, 70_000) == {"T@b:0": 61_000}


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ("listenPort=high", "broker.conf", "listenPort"),
        ("brokerIP1=0.0.0.0", "brokerIP1", "0.0.0.0"),
        ("brokerIP1=192.0.2.1", "brokerIP1", "not an address of this machine"),
        ("storePathRootDir=/dev/null/store", "storePathRootDir", "/dev/null is not a directory"),
        ("storePathIndex=/dev/null/index", "storePathIndex", "/dev/null is not a directory"),
        ("aclEnable=true", "aclEnable", "account"),
        ("", "namesrvAddr", "not set"),
    ],
)
async def test_a_settings_file(tmp_path: Path, settings: str, where: str, words: str) -> None:
    conf = tmp_path / "broker.conf"
    lines = {"listenPort": "0", "brokerIP1": "127.0.0.1", "storePathRootDir": str(tmp_path / "store")}
    if where != "namesrvAddr":
        lines["namesrvAddr"] = "127.0.0.1:9876"
    key, _, value = settings.partition("=")
    lines |= {key: value} if key else {}
    conf.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    finding = only([each for each in await examine_settings(conf) if each.where.endswith(where)])
    assert words in finding.problem


async def test_a_port_that_is_taken_and_a_store_of_another_user(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, ha_port = taken.getsockname()[1], free_port()
        conf.write_text(
            f"listenPort={port}\nhaListenPort={ha_port}\nbindAddress=127.0.0.1\nbrokerIP1=127.0.0.1\n"
            f"namesrvAddr=127.0.0.1:9876\nstorePathRootDir={tmp_path / 'store'}\n"
        )
        wanted = f"listenPort = '{port}': expected a port that can be listened on (Address already in use)"
        assert only(await examine_settings(conf)).problem == wanted
        text = conf.read_text().replace(f"={port}\n", "=0\n").replace(f"={ha_port}\n", f"={port}\n")
        conf.write_text(f"{text}brokerRole=SYNC_MASTER\n")
        assert only(await examine_settings(conf)).where == "haListenPort"
        conf.write_text(f"{text}brokerRole=SLAVE\nbrokerId=1\n")
        assert await examine_settings(conf) == []
        conf.write_text(text)
    if os.geteuid() == 0:
        return  # root can write everywhere
    (tmp_path / "store").mkdir(mode=0o500)
    assert "is not writable" in only(await examine_settings(conf)).problem


async def test_the_command_says_it_with_an_exit_code(tmp_path: Path) -> None:
    closed = f"127.0.0.1:{free_port()}"
    run = CliRunner().invoke
    told = await asyncio.to_thread(run, doctor, ["-n", closed])
    assert told.exit_code == 1
    assert told.output.startswith(f"wrong  {closed}: the name server cannot be reached")
    line = json.loads((await asyncio.to_thread(run, doctor, ["-n", closed, "--json"])).output)
    assert (line["serious"], line["where"]) == (True, closed)
    async with name_server(tmp_path) as namesrv, broker(tmp_path / "a", namesrv):
        sound = await asyncio.to_thread(run, doctor, ["-n", f"{namesrv}, {namesrv}"])
    assert (sound.exit_code, sound.output) == (0, "No problems found from this machine.\n")
