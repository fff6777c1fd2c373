"""The pipeline's connections against Apache's servers: planning, writing, reading, filters, times, groups."""

from __future__ import annotations

import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.interop.apache import ApacheCluster
from tests.pipeline import store_files
from tests.pipeline.feeding import Topic, wait_for

from cometmq.pipeline.cluster import Cluster
from cometmq.pipeline.options import PullOptions, Topics
from cometmq.pipeline.plan import QueueRange
from cometmq.pipeline.reading import read_parts
from cometmq.protocol.record.arrow import COLUMNS, arrow_schema


@pytest.fixture(scope="module", params=["4.9.7", "5.5.0"])
def cluster(request: pytest.FixtureRequest, apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    return apache_clusters(request.param)


@pytest.fixture(scope="module")
def topic(cluster: ApacheCluster) -> Topic:
    """Messages on Apache's broker, single ones, batches and a compressed one among them."""
    made = Topic(f"Pipeline{uuid.uuid4().hex[:8]}", cluster.namesrv)
    made.send(1)
    made.send(999)
    made.send_raw(zlib.compress(b"squeezed: " * 50), sys_flag=0x301)
    # Apache's broker acknowledges before it has put a message into its queue.
    wait_for(lambda: sum(held.maximum for held in made.bounds().values()) == 1001, "all are in queues")
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
