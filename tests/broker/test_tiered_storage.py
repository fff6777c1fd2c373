"""A broker whose old segments are in an object store: requests for old messages, outages, restarts."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.broker.timers.kit import now_ms
from tests.kit.brokers import Peer, commit, running
from tests.kit.waiting import until

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.object_store import object_store_of
from cometmq.broker.server import Broker
from cometmq.errors import ConfigError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    GetConsumeStatsRequestHeader,
    PopMessageRequestHeader,
    QueryMessageRequestHeader,
    QueueRequestHeader,
    SearchOffsetRequestHeader,
    TopicRequestHeader,
    ViewMessageRequestHeader,
)
from cometmq.protocol.record.one import iter_records
from cometmq.store import SMALL_FILES, ObjectStoreFailed, RestoreReport, restore_store

MESSAGES = 200
SMALL = {"mappedFileSizeCommitLog": "65536", "cleanResourceInterval": "20", "deleteWhen": "99"}
Q: dict[str, Any] = {"topic": "Orders", "queue_id": 0}


def tiered(root: Path, **settings: str) -> AbstractAsyncContextManager[tuple[Broker, Peer]]:
    settings = {**SMALL, "tieredStoreUri": f"file://{root / 'objects'}", **settings}
    return running(root / "store", tieredLocalReservedTime="0", **settings)


@asynccontextmanager
async def offloaded(root: Path, **settings: str) -> AsyncIterator[tuple[Broker, Peer]]:
    """Run a broker with 200 messages of 2 KiB, of which the local log has only the last few."""
    async with tiered(root, **settings) as (broker, peer):
        for number in range(MESSAGES):
            await peer.send(body=b"%d" % number + bytes(2000), properties={"KEYS": f"k{number}"})
        await until(lambda: len(broker.parts.store.log.segments) == 1)
        yield broker, peer


def records(answer: Frame) -> list[bytes]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [bytes(message.body) for message in iter_records(answer.body)]


METRICS = (
    "size_bytes", "upload_behind_bytes", "uploaded_bytes_total", "reads_total", "read_bytes_total",
    "failures_total", "damaged_total", "lost_segments_total",
)  # fmt: skip


def metrics_of(broker: Broker) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.parts.metrics.port}/metrics", timeout=60) as got:
        return str(got.read().decode())


async def all_of(peer: Peer, count: int = MESSAGES) -> list[int]:
    """Pull the whole queue, beginning at its first offset, and return the numbers in the bodies."""
    first = await peer.call(RequestCode.GET_MIN_OFFSET, QueueRequestHeader(**Q))
    found, offset = [], int(first.ext["offset"])
    while len(found) < count:
        answer = await peer.pull(offset=offset)
        found += [int(body.rstrip(b"\0")) for body in records(answer)]
        offset = int(answer.ext["nextBeginOffset"])
    return found


def restored(root: Path, uri: str) -> RestoreReport:
    """Delete the directory of the broker's store, and restore it."""
    shutil.rmtree(root / "store")
    settings = {"storePathRootDir": str(root / "store"), "brokerName": "broker-a", "tieredStoreUri": uri}
    config = BrokerConfig.from_properties(settings)
    objects = object_store_of(config)
    assert objects is not None
    segment = {"mapped_file_size_commit_log": 65536}
    return restore_store(config.store.replace(**(SMALL_FILES | segment)), objects)


async def test_everything_is_consumed_in_order_from_the_first_offset_on_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with offloaded(tmp_path) as (broker, peer):
        assert broker.parts.store.log.min_position > 0
        assert await all_of(peer) == list(range(MESSAGES))
    async with tiered(tmp_path) as (_, peer):
        assert await all_of(peer) == list(range(MESSAGES))


async def test_tables_from_before_the_loss_may_be_newer_than_the_restored_log(tmp_path: Path) -> None:
    async with tiered(tmp_path) as (broker, peer):
        due = {"TIMER_DELIVER_MS": str(now_ms() + 600_000)}
        assert (await peer.send("Later", b"later", properties=due)).code == 0
        for _ in range(MESSAGES):
            await peer.send(body=bytes(2000))
        await until(lambda: len(broker.parts.store.log.segments) == 1)  # the timer message was moved
        await commit(peer, 0, MESSAGES, topic="Orders")
    shutil.copytree(tmp_path / "store" / "config", tmp_path / "config")
    restored(tmp_path, f"file://{tmp_path / 'objects'}")
    for name in ("topics.json", "consumerOffset.json", "timers.json"):
        shutil.copy(tmp_path / "config" / name, tmp_path / "store" / "config")

    async with tiered(tmp_path) as (broker, peer):
        await until(lambda: len(broker.parts.timers.pending) == 1)
        assert broker.parts.tables.timers.counts == {"Later": 1}
        end = broker.parts.store.max_offset("Orders", 0)
        assert 0 < end < MESSAGES
        assert broker.parts.tables.offsets.query("G", "Orders", 0) == end


async def test_requests_of_tools_and_pops_find_the_old_messages(tmp_path: Path) -> None:
    async with offloaded(tmp_path) as (_, peer):
        key = QueryMessageRequestHeader(
            topic="Orders", key="k3", max_num=9, begin_timestamp=0, end_timestamp=1 << 60
        )
        assert records(await peer.call(RequestCode.QUERY_MESSAGE, key))[0].startswith(b"3\0")
        view = ViewMessageRequestHeader(offset=0)
        assert records(await peer.call(RequestCode.VIEW_MESSAGE_BY_ID, view))[0].startswith(b"0\0")
        search = SearchOffsetRequestHeader(timestamp=0, **Q)
        found = await peer.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, search)
        earliest = await peer.call(RequestCode.GET_EARLIEST_MSG_STORETIME, QueueRequestHeader(**Q))
        assert (found.ext["offset"], int(earliest.ext["timestamp"]) > 0) == ("0", True)
        status = await peer.call(RequestCode.GET_TOPIC_STATS_INFO, TopicRequestHeader(topic="Orders"))
        assert b'"minOffset":0' in status.body
        popped = await peer.call(
            RequestCode.POP_MESSAGE,
            PopMessageRequestHeader(
                consumer_group="P", max_msg_nums=4, invisible_time=60_000, poll_time=0, born_time=0,
                init_mode=0, exp_type="TAG", exp="*", order=False, **Q,
            ),
        )  # fmt: skip
        assert records(popped)[0].startswith(b"0\0")


async def test_the_status_of_the_broker_shows_what_is_where(tmp_path: Path) -> None:
    async with offloaded(tmp_path) as (broker, peer):
        status = await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = json.loads(status.body)["table"]
        segments = broker.parts.store.log.min_position // 65536
        assert table["tieredSegments"] == str(segments)
        assert (table["tieredMinOffset"], table["tieredUploadBehind"]) == ("0", "0 B")


async def test_during_an_outage_old_messages_are_busy_and_everything_else_works(tmp_path: Path) -> None:
    exporter = {"metricsExporterType": "PROM", "metricsPromExporterPort": "0"}
    async with offloaded(tmp_path, **exporter) as (broker, peer):
        (tmp_path / "objects").rename(tmp_path / "away")

        old = await peer.pull(offset=0)
        last = await peer.pull(offset=MESSAGES - 1)
        stats = await peer.call(
            RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequestHeader(consumer_group="G")
        )
        await peer.send(body=b"200")

        assert old.code == ResponseCode.SYSTEM_BUSY
        assert "try again" in str(old.remark)
        assert len(records(last)) == 1
        assert stats.code == ResponseCode.SUCCESS
        numbers = await asyncio.to_thread(metrics_of, broker)
        assert "cometmq_tiered_segments" in numbers
        assert all(f"cometmq_tiered_{name}" in numbers for name in METRICS), numbers
        (tmp_path / "away").rename(tmp_path / "objects")
        assert (await all_of(peer))[:MESSAGES] == [*range(MESSAGES)]


async def test_a_stop_does_not_wait_for_an_object_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> bytes:
        begun.set()
        assert go_on.wait(60)
        raise ObjectStoreFailed("planned")

    async with offloaded(tmp_path) as (broker, peer):
        assert broker.parts.store.tiered is not None
        monkeypatch.setattr(broker.parts.store.tiered.reads.objects, "get", hang)
        waiting = asyncio.create_task(peer.pull(offset=0))
        assert await asyncio.to_thread(begun.wait, 20)
        try:
            await asyncio.wait_for(broker.stop(), 20)
        finally:
            go_on.set()
        assert (await waiting).code == ResponseCode.SYSTEM_BUSY


async def test_a_broker_starts_without_its_object_store(tmp_path: Path) -> None:
    async with offloaded(tmp_path):
        pass
    (tmp_path / "objects").rename(tmp_path / "away")
    async with tiered(tmp_path) as (broker, peer):
        assert broker.parts.store.min_offset("Orders", 0) == 0
        assert len(records(await peer.pull(offset=MESSAGES - 1))) == 1
        assert (await peer.pull(offset=0)).code == ResponseCode.SYSTEM_BUSY


@pytest.mark.parametrize(
    "uri",
    ["http://host/x", "s3://key:secret@bucket/x", "s3://bucket/x?region=a", "s3://", "/tmp/x", "file:x"],
)
def test_a_uri_of_another_kind_or_with_a_key_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="tieredStoreUri"):
        BrokerConfig.from_properties({"tieredStoreUri": uri})


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"cometmq\[tiered\]"):
        object_store_of(BrokerConfig.from_properties({"tieredStoreUri": "s3://bucket/x"}))


class TestTheAdapter:
    """The operations on a directory. tests/broker/test_tiered_s3.py has those on S3."""

    def test_operations(self, tmp_path: Path) -> None:
        config = {"tieredStoreUri": f"file://{tmp_path}/a b".replace(" ", "%20"), "brokerName": "é b"}
        check_operations(BrokerConfig.from_properties(config))
        assert [path.name for path in tmp_path.iterdir()] == ["a b"]


def check_operations(config: BrokerConfig) -> None:
    """Check all operations of the adapter on an empty object store."""
    objects = object_store_of(config)
    assert objects is not None
    assert list(objects.names("id/")) == []
    assert objects.size("id/5.log") is None
    objects.put("id/5.log", iter([b"ab" * 4_000_000, b"cd" * 4_000_000]))
    objects.put("id/6.log", b"one")
    objects.put("id/6.log", b"three")
    objects.put("other/6.log", b"")
    assert (objects.size("id/5.log"), objects.get("id/5.log", 7_999_999, 3)) == (16_000_000, b"bcd")
    assert (objects.get("id/6.log", 0, 5), sorted(objects.names("id/"))) == (
        b"three",
        ["id/5.log", "id/6.log"],
    )

    def ends_early() -> Any:
        yield b"x" * 20_000_000
        raise ObjectStoreFailed("the segment is gone")

    with pytest.raises(ObjectStoreFailed, match="the segment is gone"):
        objects.put("id/7.log", ends_early())
    with pytest.raises(ObjectStoreFailed):
        objects.get("id/7.log", 0, 1)
    for _ in range(2):
        objects.delete("id/5.log")
    assert list(objects.names("id/")) == ["id/6.log"]
