"""haStatus, resetMasterFlushOffset, addBroker, removeBroker, and clusterList for a master with a slave."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from tests.kit.brokers import running
from tests.kit.fakes import FakeServer
from tests.kit.waiting import until

from cometmq.admin.commands import mqadmin
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers.admin import AddBrokerHeader, RemoveBrokerHeader

HOST = "127.0.0.1"


async def run(name, *words, namesrv=f"{HOST}:9"):
    arguments = [name, "-n", namesrv, *words]
    return await asyncio.to_thread(lambda: CliRunner().invoke(mqadmin, arguments))


async def output(name, *words, **more):
    result = await run(name, *words, **more)
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.fixture
async def pair(tmp_path):
    """Yield a name server's address, a master, and its slave with the master's whole log."""
    names = NameServer(
        NamesrvConfig(
            listen_port=0,
            bind_address=HOST,
            kv_config_path=str(tmp_path / "kvConfig.json"),
            config_store_path=str(tmp_path / "namesrv.properties"),
        )
    )
    namesrv = f"{HOST}:{await names.start()}"
    role = {"brokerRole": "SLAVE", "brokerId": "1"}
    async with (
        running(tmp_path / "master", namesrvAddr=namesrv, brokerRole="ASYNC_MASTER") as (master, peer),
        running(tmp_path / "slave", namesrvAddr=namesrv, **role) as (slave, _),
    ):
        await peer.send()
        follower = slave.parts.replication.slave
        await until(
            lambda: follower.core.master_end == master.parts.store.log.end == slave.parts.store.log.end, 20
        )
        yield namesrv, master, slave
    await names.stop()


async def test_both_sides_are_shown_as_by_apaches_tool(pair):
    namesrv, master, slave = pair
    end = master.parts.store.log.end
    lines = (await output("haStatus", "-c", "DefaultCluster", namesrv=namesrv)).splitlines()
    assert [line.split() for line in lines[:5]] == [
        [],
        ["#MasterAddr", master.addr],
        ["#MasterCommitLogMaxOffset", str(end)],
        ["#SlaveNum", "1"],
        ["#InSyncSlaveNum", "1"],
    ]
    assert lines[6].split()[1:3] == [str(end), "0"]
    assert lines[6].split()[4] == "OK"

    assert await output("resetMasterFlushOffset", "-b", slave.addr, "-o", "77") == (
        "reset master flush offset to 77 success\n"
    )
    lines = [line.split() for line in (await output("haStatus", "-b", slave.addr)).splitlines()]
    assert lines[1] == ["#MasterAddr", master.parts.registrar.address.ha_text]
    assert lines[2] == ["#CommitLogMaxOffset", str(end)]
    assert lines[-1] == ["#MasterFlushOffset", "77"]

    shown = json.loads(await output("haStatus", "-b", master.addr, "--json"))
    assert shown[master.addr]["haConnectionInfo"][0]["slaveAckOffset"] == end


async def test_roles_and_lags_are_listed(pair):
    namesrv, master, slave = pair
    listed = (await output("clusterList", namesrv=namesrv)).splitlines()
    assert [line.split()[-2:] for line in listed] == [
        ["#Role", "#Behind"],
        ["ASYNC_MASTER", "-"],
        ["SLAVE", "0"],
    ]
    brokers = json.loads(await output("brokerStatus", "-c", "DefaultCluster", "--json", namesrv=namesrv))
    assert [(each["brokerAddr"], each["role"], each["lag"]) for each in brokers] == [
        (master.addr, "ASYNC_MASTER", None),
        (slave.addr, "SLAVE", 0),
    ]
    text = await output("brokerStatus", "-b", slave.addr)
    facts = dict(line.split(": ", 1) for line in text.splitlines())
    facts = {key.strip(): value for key, value in facts.items()}
    assert (facts["brokerRole"], facts["haState"], facts["haLagBytes"]) == ("SLAVE", "following", "0")


@pytest.fixture
async def container():
    """Run a fake broker container of 5.x that records its requests and starts or stops no broker."""
    asked = []

    def add(frame):
        asked.append(frame.header(AddBrokerHeader).config_path)
        return frame.response()

    def remove(frame):
        header = frame.header(RemoveBrokerHeader)
        asked.append((header.broker_cluster_name, header.broker_name, header.broker_id))
        return frame.response()

    async with FakeServer({RequestCode.ADD_BROKER: add, RequestCode.REMOVE_BROKER: remove}) as server:
        yield server.addr, asked


async def test_a_container_of_apaches_adds_and_removes_brokers(container):
    addr, asked = container
    added = await output("addBroker", "-c", addr, "-b", "/etc/rocketmq/broker-b.conf")
    removed = await output("removeBroker", "-c", addr, "-b", " DefaultCluster:broker-b:2 ")
    assert asked == ["/etc/rocketmq/broker-b.conf", ("DefaultCluster", "broker-b", 2)]
    assert (added, removed) == (f"add broker to {addr} success\n", f"remove broker from {addr} success\n")


@pytest.mark.parametrize("identity", ["", "DefaultCluster:broker-b", "a:b:c", "a:b:-1", "a::1", "a:b:1:2"])
async def test_what_names_no_broker_is_refused(container, identity):
    addr, asked = container
    result = await run("removeBroker", "-c", addr, "-b", identity)
    assert result.exit_code == 2
    assert "is not CLUSTER:BROKER:ID" in result.output
    assert asked == []


@pytest.mark.parametrize(
    "words", [("addBroker", "-b", "/etc/passwd"), ("removeBroker", "-b", "DefaultCluster:broker-a:0")]
)
async def test_our_brokers_are_no_containers_and_say_what_to_do(tmp_path, words):
    async with running(tmp_path) as (broker, peer):
        result = await run(*words, "-c", broker.addr)
        assert result.exit_code == 1
        assert "no broker container" in str(result.exception)
        assert "mqbroker -c FILE" in str(result.exception)
        assert (await peer.send()).code == 0
