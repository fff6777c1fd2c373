"""Positions of consumer groups stored with an archive, up to the archive's end."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic

from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.base.options import Topics
from cometmq.pipeline.jobs import archive as archive_module
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import archived, group_positions
from cometmq.pipeline.jobs.inputs import group_offsets
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.table import groups


def commit(topic: Topic, group: str, **offsets: int) -> None:
    """Store a group's offsets: q0=5 is offset 5 of queue 0."""
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        queues = cluster.queues(Topics(names=(topic.name,)))
        names = {queue: f"q{queue.queue_id}" for queue in queues}
        cluster.commit(group, {queue: offsets[name] for queue, name in names.items() if name in offsets})


class Positions:
    def __init__(self, spark: SparkSession, topic: Topic, output: str) -> None:
        self.spark, self.topic, self.output = spark, topic, output

    def run(self, *groups: str, **options: Any) -> int | None:
        return archive(
            self.spark, self.topic.namesrv, [self.topic.name], self.output, groups=groups, **options
        ).resumed_behind_batch

    def kept(self) -> list[tuple[int, str, int, int]]:
        rows = group_positions(self.spark, self.output).collect()
        assert all(row.topic == self.topic.name and row.time for row in rows)
        return sorted((row.batch, row.group, row.queue_id, row.offset) for row in rows)


@pytest.fixture
def positions(spark: SparkSession, topic: Topic, output: str) -> Positions:
    return Positions(spark, topic, output)


@pytest.mark.parametrize("table_format", ["parquet", "delta"])
def test_where_named_groups_stood(positions: Positions, topic: Topic, table_format: str) -> None:
    topic.send(64)
    commit(topic, "reader", q0=3, q1=2)
    commit(topic, "other", q0=1)
    positions.run("reader", "nobody", table_format=table_format)
    assert positions.kept() == [(1, "reader", 0, 3), (1, "reader", 1, 2)]
    commit(topic, "reader", q0=4)
    topic.send(64)
    positions.run("reader", table_format=table_format)
    assert positions.kept()[2:] == [(2, "reader", 0, 4), (2, "reader", 1, 2)]
    newest = group_offsets(positions.spark, positions.output).collect()
    assert sorted((row.group, row.topic, row.queue_id, row.offset) for row in newest) == [
        ("reader", topic.name, 0, 4), ("reader", topic.name, 1, 2),
    ]  # fmt: skip


def test_all_groups_of_the_topics(positions: Positions, topic: Topic) -> None:
    topic.send(64)
    commit(topic, "reader", q0=3)
    commit(topic, "other", q0=1)
    positions.run("*")
    assert positions.kept() == [(1, "other", 0, 1), (1, "reader", 0, 3)]


def test_no_position_is_beyond_the_archive(positions: Positions, topic: Topic) -> None:
    topic.send(64)
    commit(topic, "reader", q0=10_000)
    positions.run("reader")
    ends = {queue.queue_id: bounds.maximum for queue, bounds in topic.bounds().items()}
    assert positions.kept() == [(1, "reader", 0, ends[0])]


def test_positions_move_without_new_messages(positions: Positions, topic: Topic, output: str) -> None:
    topic.send(64)
    commit(topic, "reader", q0=1)
    positions.run("reader")
    commit(topic, "reader", q0=2)
    positions.run("reader")
    assert positions.kept() == [(1, "reader", 0, 2)]
    assert len(list(Path(output, "_cometmq/groups").iterdir())) == 1


def test_nothing_is_kept_unless_asked_for(positions: Positions, topic: Topic) -> None:
    topic.send(16)
    commit(topic, "reader", q0=1)
    positions.run()
    assert positions.kept() == []


def test_groups_have_an_end(positions: Positions, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "MOST_GROUPS", 2)
    topic.send(64)
    for group in ("c", "b", "a"):
        commit(topic, group, q0=3)
    summary = archive(positions.spark, topic.namesrv, [topic.name], positions.output, groups=["c", "*"])
    assert [row[1] for row in positions.kept()] == ["a", "c"], "those that were named come first"
    assert summary.groups_left_out == 1


def test_a_full_disk_is_named(
    positions: Positions, topic: Topic, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(groups, "replace_json", full)
    topic.send(64)
    commit(topic, "reader", q0=3)
    with pytest.raises(ArchiveError, match="positions of groups cannot be kept: No space left on device"):
        positions.run("reader")
    assert archived(positions.spark, output).count() == 64
