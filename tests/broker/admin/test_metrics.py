"""A broker's metrics compared with real events; the dashboard queries only metrics that exist."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.broker.pop.conftest import RETRY_TOPIC, PopClient
from tests.broker.rates.conftest import limit_group, stopped_clock
from tests.kit.brokers import Peer, create, records
from tests.kit.waiting import until

from cometmq import conf
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.metrics import port
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.bodies import HeartbeatData, ProducerData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import UpdateConsumerOffsetRequestHeader

LOCAL = {"brokerIP1": "127.0.0.1", "bindAddress": "127.0.0.1", "listenPort": "0", "brokerName": "broker-a"}
METRICS = {"metricsExporterType": "PROM", "metricsPromExporterPort": "0"}
Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable caching, so that each request returns current values."""
    monkeypatch.setattr(port, "KEEP_S", 0.0)
    monkeypatch.setattr(port, "REUSE_FACTOR", 0)


@asynccontextmanager
async def broker(path: Path, **settings: str) -> AsyncIterator[Broker]:
    small = {"mappedFileSizeCommitLog": "1048576", "storePathRootDir": str(path)}
    one = Broker(BrokerConfig.from_properties({**LOCAL, **METRICS, **small, **settings}))
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


async def text_of(port: int | None, path: str = "/metrics") -> str:
    def ask() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(ask)


async def look(port: int | None) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(await text_of(port)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    rows = [number for given, number in found[name] if labels.items() <= given.items()]
    assert len(rows) == 1, (name, labels, found[name])
    return rows[0]


async def commit(peer: Peer, queue_id: int, offset: int) -> None:
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group="G", topic="Orders", queue_id=queue_id, commit_offset=offset
    )
    await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)


async def test_numbers_are_those_of_what_happened(tmp_path: Path) -> None:
    async with broker(tmp_path) as one, Peer(one.addr) as peer:
        await peer.send_numbers(5)  # all go to queue 0
        await peer.heartbeat()
        assert len(records(await peer.pull())) == 5
        await commit(peer, 0, 2)
        found = await look(one.parts.metrics.port)
        group = {"consumer_group": "G", "topic": "Orders"}
        assert value(found, "rocketmq_messages_in_total", topic="Orders", is_system="false") == 5
        assert value(found, "rocketmq_producer_offset", topic="Orders", broker="broker-a") == 5
        assert value(found, "rocketmq_consumer_lag_messages", **group, is_retry="false") == 3
        assert 0 < value(found, "rocketmq_consumer_lag_latency_milliseconds", **group) < 600_000
        assert value(found, "cometmq_queue_lag_messages", **group, queue="0", node_id="broker-a") == 3
        labels = {"group": "G", "topic": "Orders", "countOfOnlineConsumers": "1", "msgModel": "1"}
        assert value(found, "rocketmq_group_diff", **labels) == 3
        assert value(found, "rocketmq_group_count", group="G") == 1
        assert value(found, "rocketmq_consumer_connections", consumer_group="G", language="python") == 1
        assert value(found, "rocketmq_messages_out_total", **group) == 5
        for name in ("half_messages", "timer_enqueue_lag", "timer_dequeue_latency_milliseconds"):
            assert value(found, f"rocketmq_{name}") == 0
        assert value(found, "cometmq_log_size_bytes") > 5 * 100
        assert value(found, "cometmq_store_writeable") == 1
        assert value(found, "cometmq_connections") == 1
        assert value(found, "rocketmq_brokeruntime_msg_put_total_today_now") == 5
        await commit(peer, 0, 5)
        found = await look(one.parts.metrics.port)
        assert value(found, "rocketmq_consumer_lag_messages", **group) == 0
        assert value(found, "rocketmq_consumer_lag_latency_milliseconds", **group) == 0


OF_BROKER = {"cluster", "broker", "brokerIP"}
OF_RUNTIME = OF_BROKER | {"brokerHost", "des", "boottime", "broker_version"}
OF_GROUP = {"cluster", "broker", "group", "topic"}
NODE = {"cluster", "node_type", "node_id"}
CLIENT = NODE | {"language", "version", "protocol_type"}
LAG = NODE | {"consumer_group", "topic", "is_retry", "is_system"}
DISK = NODE | {"storage_type", "storage_medium"}
LABELS = {
    "rocketmq_broker_tps": OF_BROKER,
    "rocketmq_broker_qps": OF_BROKER,
    "rocketmq_broker_commitlog_diff": OF_BROKER,
    "rocketmq_brokeruntime_commitlogdir_capacity_free": OF_RUNTIME,
    "rocketmq_brokeruntime_earliest_message_timestamp": OF_RUNTIME,
    "rocketmq_brokeruntime_put_message_average_size": OF_RUNTIME,
    "rocketmq_brokeruntime_put_tps10": OF_RUNTIME,
    "rocketmq_brokeruntime_remain_howmanydata_toflush": OF_RUNTIME,
    "rocketmq_producer_tps": {"cluster", "broker", "topic"},
    "rocketmq_producer_offset": {"cluster", "broker", "topic"},
    "rocketmq_producer_count": {"cluster", "broker", "group"},
    "rocketmq_topic_dlq_offset": {"cluster", "broker", "group"},
    "rocketmq_consumer_tps": OF_GROUP,
    "rocketmq_consumer_offset": OF_GROUP,
    "rocketmq_group_get_latency_by_storetime": OF_GROUP,
    "rocketmq_group_diff": OF_GROUP | {"countOfOnlineConsumers", "msgModel"},
    "rocketmq_messages_in_total": NODE | {"topic", "is_system"},
    "rocketmq_messages_out_total": LAG - {"is_retry"},
    "rocketmq_consumer_lag_messages": LAG,
    "rocketmq_consumer_lag_latency_milliseconds": LAG,
    "rocketmq_producer_connections": CLIENT,
    "rocketmq_consumer_connections": CLIENT | {"consumer_group", "consume_mode", "is_system"},
    "rocketmq_send_to_dlq_messages_total": NODE | {"consumer_group", "is_system"},
    "rocketmq_storage_size_bytes": DISK,
    "rocketmq_storage_flush_behind_bytes": DISK,
    "rocketmq_storage_message_reserve_time_milliseconds": DISK,
    "rocketmq_timer_dequeue_latency_milliseconds": DISK,
    "rocketmq_timing_messages": DISK | {"topic"},
    "rocketmq_processor_watermark": NODE | {"processor"},
}


async def test_names_and_labels_are_those_of_rocketmqs_own_monitoring(tmp_path: Path) -> None:
    async with broker(tmp_path) as one, Peer(one.addr) as peer:
        await peer.send_numbers(5)
        await peer.send(topic="%DLQ%G")
        await peer.send(properties={"TIMER_DELAY_SEC": "600"})
        await until(lambda: one.parts.timers.pending.followed >= 1)
        await peer.heartbeat()
        await peer.heartbeat(producers=("P",))
        await commit(peer, 0, 2)
        found = await look(one.parts.metrics.port)
        addr = one.addr
    assert {name: {key for given, _ in found[name] for key in given} for name in LABELS} == LABELS
    labels = {"brokerIP": addr, "des": "V4_9_7", "broker_version": "407", "brokerHost": ""}
    assert value(found, "rocketmq_brokeruntime_put_message_average_size", **labels) > 100
    assert 0 <= value(found, "rocketmq_storage_message_reserve_time_milliseconds") < 600_000
    mode = {"consume_mode": "push", "protocol_type": "remoting", "is_system": "false", "version": "v4_9_7"}
    assert value(found, "rocketmq_consumer_connections", consumer_group="G", **mode) == 1
    assert value(found, "rocketmq_timing_messages", topic="Orders") == 1
    assert value(found, "rocketmq_producer_count", group="P") == 1
    assert value(found, "rocketmq_broker_tps", brokerIP=addr) > 0
    assert value(found, "rocketmq_producer_tps", topic="Orders") > 0


async def test_a_group_that_pops_has_leased_and_ready_messages(tmp_path: Path) -> None:
    async with broker(tmp_path) as one, Peer(one.addr) as peer:
        await peer.send_numbers(5)
        await peer.heartbeat(consume_type="CONSUME_POP")
        consumer = PopClient(peer)
        popped = await consumer.pop(3, queue_id=0)
        await consumer.ack(popped.handles[1])
        found = await look(one.parts.metrics.port)
        labels = {"consumer_group": "G", "topic": "Orders", "is_retry": "false", "is_system": "false"}
        assert value(found, "rocketmq_consumer_lag_messages", **labels) == 5
        assert value(found, "rocketmq_consumer_inflight_messages", **labels) == 2
        assert value(found, "rocketmq_consumer_ready_messages", **labels) == 2
        assert 0 < value(found, "rocketmq_consumer_queueing_latency_milliseconds", **labels) < 600_000
        assert value(found, "cometmq_pop_leases") == 2
        assert value(found, "cometmq_pop_waiting") == value(found, "rocketmq_pop_checkpoint_buffer_size") == 0
        assert value(found, "rocketmq_consumer_connections", consume_mode="pop") == 1
        for handle in popped.handles[::2]:
            await consumer.renew(handle, 1)
        await until(lambda: len(one.parts.pops.leases) == 0)
        found = await look(one.parts.metrics.port)
        copies = {"consumer_group": "G", "topic": "Orders", "put_status": "PUT_OK"}
        assert value(found, "rocketmq_pop_revive_retry_messages_total", **copies) == 2
        assert value(found, "rocketmq_consumer_inflight_messages", **labels) == 0
        retries = labels | {"topic": RETRY_TOPIC, "is_retry": "true"}
        assert value(found, "rocketmq_consumer_ready_messages", **retries) == 2
        assert {name for name in found if name.startswith("rocketmq_proxy")} == set()


async def test_members_that_pull_have_neither(tmp_path: Path) -> None:
    async with broker(tmp_path) as one, Peer(one.addr) as peer:
        await peer.send()
        await peer.heartbeat()
        await commit(peer, 0, 0)
        found = await look(one.parts.metrics.port)
    assert "rocketmq_consumer_lag_messages" in found
    assert {"rocketmq_consumer_inflight_messages", "rocketmq_consumer_ready_messages"} - found.keys()


async def test_unknown_languages_are_one_label(tmp_path: Path) -> None:
    async with broker(tmp_path) as one, Peer(one.addr) as first, Peer(one.addr) as second:
        body = HeartbeatData(client_id="c", producer_data_set=[ProducerData(group_name="P")]).encode()
        for peer, language in ((first, "KLINGON"), (second, "ELVISH")):
            assert (await peer.call(RequestCode.HEART_BEAT, None, body, language=language)).code == 0
        found = await look(one.parts.metrics.port)
    assert value(found, "rocketmq_producer_connections", language="other") == 2


async def test_the_dashboard_asks_for_what_there_is(tmp_path: Path) -> None:
    page = Path(conf.__path__[0]) / "grafana" / "cometmq.json"
    board = json.loads(page.read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    names = set(re.findall(r"\b(?:rocketmq|cometmq|process)_\w+", asked))
    async with broker(tmp_path) as one, Peer(one.addr) as peer:
        await peer.send(topic="%DLQ%G")
        await peer.send()
        await peer.heartbeat()
        await commit(peer, 0, 0)
        found = await look(one.parts.metrics.port)
    assert names - found.keys() == set()
    for name, labels in re.findall(r"(\w+)\{([^}]*)\}", asked):
        assert {"cluster"} <= {key for given, _ in found[name] for key in given}, (name, labels)
    shown = {key for panel in board["panels"] for key in re.findall(r"{{(\w+)}}", str(panel["targets"]))}
    assert shown <= {key for rows in found.values() for given, _ in rows for key in given} | {"instance"}


async def test_many_topics_and_groups_are_cut_at_the_limit(tmp_path: Path) -> None:
    async with broker(tmp_path, metricsOtelCardinalityLimit="100") as one, Peer(one.addr) as peer:
        for number in range(60):
            await peer.send(topic=f"Topic{number:02}")
        found = await look(one.parts.metrics.port)
    samples = sum(len(rows) for name, rows in found.items() if not name.startswith("process_"))
    assert samples == 100
    assert "rocketmq_broker_tps" in found, "what concerns the whole broker is never cut"


async def test_a_broker_without_a_name_server_is_not_ready(tmp_path: Path) -> None:
    config = NamesrvConfig(
        listen_port=0, bind_address="127.0.0.1", kv_config_path=str(tmp_path / "kv"),
        config_store_path=str(tmp_path / "namesrv"),
        metrics_exporter_type="PROM", metrics_prom_exporter_port=0,
    )  # fmt: skip
    server = NameServer(config)
    port = await server.start()
    try:
        async with broker(tmp_path / "a", namesrvAddr=f"127.0.0.1:{port}") as one:
            assert await text_of(one.parts.metrics.port, "/readyz") == "ok\n"
            found = await look(server.metrics.port if server.metrics else None)
            assert value(found, "cometmq_namesrv_brokers") == 1
            assert value(found, "cometmq_namesrv_topics") > 5
            assert value(found, "cometmq_namesrv_broker_silent_seconds", broker=one.addr) < 60
    finally:
        await server.stop()
    async with broker(tmp_path / "a", namesrvAddr=f"127.0.0.1:{port}") as one:
        numbers = await look(one.parts.metrics.port)
        assert value(numbers, "cometmq_name_servers") == 1
        assert value(numbers, "cometmq_name_servers_registered") == 0
        problem = await asyncio.to_thread(one.parts.metrics.why_not_ready)
        assert problem == "registered with none of 1 name servers"


async def test_nobody_is_shown_a_collectors_token(tmp_path: Path) -> None:
    secret = {"metricsGrpcExporterHeader": "token:hidden"}
    async with broker(tmp_path, **secret) as one, Peer(one.addr) as peer:
        answer = await peer.call(RequestCode.GET_BROKER_CONFIG)
    assert b"metricsGrpcExporterHeader=***" in answer.body
    assert b"hidden" not in answer.body


async def test_rate_limits_are_counted_by_topic_and_group(tmp_path: Path) -> None:
    async with broker(tmp_path) as one, Peer(one.addr) as peer:
        stopped_clock(one)
        await create(peer, attributes="+rate.send.messages=20")
        await asyncio.gather(*(peer.send() for _ in range(22)))
        await create(peer, attributes="+rate.send.messages=0,+rate.send.bytes=10")
        await peer.send(body=bytes(1_000))
        assert (await peer.send(body=b"refused")).code == ResponseCode.SERVICE_NOT_AVAILABLE
        await limit_group(peer, bytes=1)
        await peer.pull(max_msg_nums=1)
        await peer.pull(offset=1)
        found = await look(one.parts.metrics.port)
        topic = {"topic": "Orders", "limit": "topic"}
        assert value(found, "cometmq_rate_limit_delayed_sends_total", **topic) == 2
        assert value(found, "cometmq_rate_limit_refused_sends_total", **topic) == 1
        group = {"consumer_group": "G", "limit": "group"}
        assert value(found, "cometmq_rate_limit_delayed_receives_total", **group) >= 1
