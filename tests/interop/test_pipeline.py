"""The pipeline's connections with Apache's servers: planning, writing, reading, filters, times, groups."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheCluster, mqadmin
from tests.interop.processes import QUICK
from tests.kit.waiting import wait_until
from tests.long_form import long_form
from tests.pipeline import store_files
from tests.pipeline.feeding import Topic

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ReplicaBehindError
from cometmq.pipeline.base.offsets import LATEST
from cometmq.pipeline.base.options import Position, PullOptions, Topics, write_options
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.reading import read_parts
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.sink.sending import Sender
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.arrow import COLUMNS, arrow_schema


@pytest.fixture(scope="module", params=["4.9.7", "5.5.0"])
def cluster(request: pytest.FixtureRequest, apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    return apache_clusters(request.param)


@pytest.fixture(scope="module")
def topic(cluster: ApacheCluster) -> Topic:
    """A topic on Apache's broker with single messages, batches and a compressed message."""
    made = Topic(f"Pipeline{uuid.uuid4().hex[:8]}", cluster.namesrv)
    made.send(1)
    made.send(999)
    made.send_raw(zlib.compress(b"squeezed: " * 50), sys_flag=0x301)
    # Apache's broker acknowledges a message before the message is in its queue.
    wait_until("all are in queues", lambda: sum(held.maximum for held in made.bounds().values()) == 1001)
    return made


def rows(topic: Topic, **options: Any) -> list[dict[str, Any]]:
    ranges = [QueueRange(queue, held.minimum, held.maximum) for queue, held in sorted(topic.bounds().items())]
    parts = list(read_parts((topic.namesrv,), ranges, {}, arrow_schema(), PullOptions(**options)))
    assert not any(part.bad or part.lost for part in parts)
    return [row for part in parts for row in part.batch.to_pylist(maps_as_pydicts="strict")]


def test_every_message_with_its_fields(topic: Topic) -> None:
    found = rows(topic)
    by_key = {row["keys"]: row for row in found if row["keys"]}
    assert Counter(row["body"].decode() for row in by_key.values()) == Counter(topic.sent)
    assert len(found) == 1001
    for number in range(1000):
        row = by_key[f"k{number}"]
        assert (row["topic"], row["flag"], row["tags"]) == (topic.name, number % 7, "ABC"[number % 3])
        assert row["msg_id"] == f"{number:032X}"
        assert row["properties"]["parity"] == str(number % 2)
    (squeezed,) = [row for row in found if not row["keys"]]
    assert squeezed["body"] == b"squeezed: " * 50
    assert squeezed["sys_flag"] & 1


@pytest.mark.parametrize("slice_bytes", [50_000, 1 << 30])
def test_the_store_directory_gives_the_same_rows(
    topic: Topic, cluster: ApacheCluster, slice_bytes: int
) -> None:
    stored = store_files.rows(
        cluster.directory / "store",
        list(COLUMNS),
        topics=Topics(names=(topic.name,)),
        slice_bytes=slice_bytes,
    )
    pulled = sorted(rows(topic), key=lambda row: row["physical_offset"])
    assert len(stored) == 1001
    assert [row | {"broker_name": "broker-a"} for row in stored] == pulled


@pytest.mark.parametrize("depth", [1, 16])
def test_several_pulls_in_flight_change_nothing(topic: Topic, depth: int) -> None:
    places = [
        (row["queue_id"], row["queue_offset"])
        for row in rows(topic, pulls_in_flight=depth, pull_batch_size=7)
    ]
    assert places == sorted(places)
    assert len(set(places)) == 1001


def test_tags(topic: Topic) -> None:
    found = rows(topic, tags="A || B")
    assert {row["tags"] for row in found} == {"A", "B"}
    assert sum(bool(row["keys"]) for row in found) == 667


def test_an_expression(topic: Topic) -> None:
    found = rows(topic, sql="parity = '1' AND TAGS <> 'C'")
    numbers = sorted(int(row["keys"][1:]) for row in found)
    assert numbers == [number for number in range(1000) if number % 2 and number % 3 < 2]
    assert rows(topic, sql="parity = '7'") == []


def test_where_a_group_stands(topic: Topic) -> None:
    queues = sorted(topic.bounds())
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        cluster.write_queues(topic.name)
        cluster.commit("TOOLS_CONSUMER", dict.fromkeys(queues[:2], 7))
        position = Position(LATEST, group="TOOLS_CONSUMER")
        found = cluster.resolve(position, queues)
    assert [found[queue] for queue in queues[:2]] == [7, 7]


def test_times_of_all_queues_at_once(topic: Topic) -> None:
    stored = {(row["queue_id"], row["queue_offset"]): row["store_timestamp"] for row in rows(topic)}
    middle = sorted(stored.values())[500]
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        held = cluster.bounds(cluster.queues(Topics(names=(topic.name,))))
        found = cluster.offsets_at(dict.fromkeys(held, round(middle.timestamp() * 1000)), held)
    before = Counter(queue_id for (queue_id, _), at in stored.items() if at < middle)
    assert found == {queue: before[queue.queue_id] for queue in held}


def test_messages_that_a_broker_refuses_are_set_aside_and_their_neighbours_arrive(topic: Topic) -> None:
    other = Topic(f"{topic.name}R", topic.namesrv)
    refused: list[tuple[int, int]] = []
    options = write_options({"namesrv": topic.namesrv, "topic": other.name, "batchBytes": str(12 << 20)})
    with Sender(options, 0, lambda row, refusal: refused.append((len(row.body), refusal.code))) as sender:
        for size in (1, 2, 5 << 20, 3, 4):
            sender.send(RowMessage(other.name, bytes(size), b"WAIT\x01true", 0, 0, "one queue"))
        sender.flush()
        assert sender.messages == 4
    assert refused == [(5 << 20, ResponseCode.MESSAGE_ILLEGAL)]
    wait_until("all are in queues", lambda: sum(held.maximum for held in other.bounds().values()) == 4)
    assert [len(row["body"]) for row in rows(other)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("attributes", "words"),
    [("+cleanup.policy=COMPACTION", "is compacted"), ("+message.type=LITE", "light topics")],
)
def test_topics_of_5x_that_have_other_offsets_are_refused_by_name(
    apache_5: ApacheCluster, attributes: str, words: str
) -> None:
    name = f"Special{uuid.uuid4().hex[:8]}"

    async def create() -> None:
        async with Admin(apache_5.namesrv) as admin:
            settings = TopicSettings(topic=name, attributes=attributes)
            assert [addr async for addr in admin.create_topic(settings, cluster="DefaultCluster")]

    asyncio.run(create())
    with (
        Cluster((apache_5.namesrv,), timeout_ms=10_000) as cluster,
        pytest.raises(ConfigError, match=f"{name}.*{words}"),
    ):
        cluster.queues(Topics(names=(name,)))


def test_a_static_topic_of_5x_is_refused_by_name(apache_5: ApacheCluster, tmp_path: Path) -> None:
    name = f"Static{uuid.uuid4().hex[:8]}"
    said = mqadmin(
        "5.5.0",
        tmp_path,
        "updateStaticTopic",
        "-n",
        apache_5.namesrv,
        "-t",
        name,
        "-qn",
        "4",
        "-c",
        "DefaultCluster",
    )
    with Cluster((apache_5.namesrv,), timeout_ms=10_000) as cluster:
        wait_until(f"the topic is there: {said}", lambda: name in cluster.topic_names())
        with pytest.raises(ConfigError, match=f"{name}.*is static"):
            cluster.queues(Topics(names=(name,)))


@long_form("a slave gets its topics minutes after its start")
def test_a_slave_is_read_while_its_master_is_away(names: str, tmp_path: Path) -> None:
    version = "4.9.7"
    small = ["-Xms128m", "-Xmx384m", *QUICK]
    master = ApacheBroker(version, tmp_path / "master", names, name="pair", jvm=small)
    settings = {"brokerId": "1", "brokerRole": "SLAVE"}
    slave = ApacheBroker(version, tmp_path / "slave", names, name=master.name, settings=settings, jvm=small)
    try:
        topic = Topic(f"Slave{uuid.uuid4().hex[:8]}", names)
        topic.send(200)
        held = topic.bounds()

        def copied() -> bool:
            if topic.name.encode() not in wire.call(slave.port, 21, {})[1]:
                return False
            return all(
                int(
                    wire.call(slave.port, 30, {"topic": topic.name, "queueId": str(queue.queue_id)})[0][
                        "extFields"
                    ]["offset"]
                )
                == bounds.maximum
                for queue, bounds in held.items()
            )

        wait_until("the slave has the topic and its messages", copied, 120)
        master.kill()
        wait_until("the master is gone", lambda: all(bounds.replica for bounds in topic.bounds().values()))
        assert {queue: bounds.maximum for queue, bounds in topic.bounds().items()} == {
            queue: bounds.maximum for queue, bounds in held.items()
        }
        assert Counter(row["body"].decode() for row in rows(topic)) == Counter(topic.sent)
        odd = rows(topic, sql="parity = '1'")
        assert len(odd) == 100
        for beyond in (0, 100):
            ends = [
                QueueRange(queue, bounds.maximum + beyond, bounds.maximum + beyond + 5)
                for queue, bounds in held.items()
            ]
            with pytest.raises(ReplicaBehindError):
                list(read_parts((names,), ends, {}, arrow_schema(), PullOptions(timeout_ms=1000)))
    finally:
        slave.kill()
        master.kill()


def test_offsets_by_time(topic: Topic) -> None:
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        for queue, held in topic.bounds().items():
            times = {
                row["queue_offset"]: int(row["store_timestamp"].timestamp() * 1000)
                for row in rows(topic)
                if row["queue_id"] == queue.queue_id
            }
            middle = times[held.maximum // 2]
            expected = min(offset for offset, stored in times.items() if stored >= middle)
            assert cluster.offset_at(queue, held, middle) == expected
            assert cluster.offset_at(queue, held, 0) == held.minimum
            assert cluster.offset_at(queue, held, max(times.values()) + 1) == held.maximum


def test_marks_are_what_the_records_say(topic: Topic) -> None:
    last = {queue: held.maximum - 1 for queue, held in topic.bounds().items()}
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        marks = cluster.marks({queue: offset for queue, offset in last.items() if offset >= 0})
        assert cluster.marks({queue: offset + 1 for queue, offset in last.items()}) == {}
    found = {(row["queue_id"], row["queue_offset"]): row for row in rows(topic)}
    assert len(marks) == sum(offset >= 0 for offset in last.values()) > 0
    for queue, mark in marks.items():
        row = found[queue.queue_id, last[queue]]
        stored_ms = round(row["store_timestamp"].timestamp() * 1000)
        assert mark == (row["physical_offset"], stored_ms)


def test_progress_of_a_group(topic: Topic) -> None:
    offsets = {queue: held.maximum // 2 for queue, held in topic.bounds().items()}
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        cluster.write_queues(topic.name)
        cluster.commit("TOOLS_CONSUMER", offsets)
        assert topic.name in cluster.topic_names()
    assert topic.committed("TOOLS_CONSUMER") == offsets
