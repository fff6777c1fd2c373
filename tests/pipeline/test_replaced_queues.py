"""Queues that were deleted and created again, with offsets that look like a continuation.

A stream never continues in them unnoticed, never stalls, and omits none of their messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from tests.pipeline.fake_servers import MINUTES, QUEUE, TOPIC, FakeCluster, Stream, position
from tests.pipeline.feeding import Topic
from tests.pipeline.test_stream import Job

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.live.marks import CLOCKS_MS, Mark, mark_of, marks_in


@pytest.fixture
def stream(fake: FakeCluster) -> Iterator[Stream]:
    made = Stream(fake)
    yield made
    made.reader.stop()


@pytest.fixture
def tolerant(fake: FakeCluster) -> Iterator[Stream]:
    made = Stream(fake, failOnDataLoss="false")
    yield made
    made.reader.stop()


def test_a_position_carries_the_mark_of_the_record_before_it(stream: Stream) -> None:
    end = stream.next(position(10))
    assert end == {"@last": {TOPIC: {"broker-a": {"0": [3900, MINUTES[-1]]}}}, **position(40)}
    assert stream.next(end) is end
    assert stream.ranges(position(10), end) == [(10, 40)]


def test_a_queue_that_only_grew_is_read_on(fake: FakeCluster, stream: Stream) -> None:
    end = stream.next(position(10))
    fake.stored_ms.append(MINUTES[-1] + 1)
    later = stream.next(end)
    assert later == {"@last": {TOPIC: {"broker-a": {"0": [4000, MINUTES[-1] + 1]}}}, **position(41)}
    assert stream.ranges(end, later) == [(40, 41)]


def test_where_a_stream_begins_is_marked_though_nothing_was_read(fake: FakeCluster, stream: Stream) -> None:
    start = stream.reader.initialOffset()
    end = stream.next(start)
    assert (end["@start"], end[TOPIC]) == (position(40), position(40)[TOPIC])
    fake.make_anew(60)
    with pytest.raises(DataLossError):
        stream.next(end)


@pytest.mark.parametrize("count", [41, 60, 5, 0])
def test_a_topic_made_anew_is_an_error_that_names_both(fake: FakeCluster, stream: Stream, count: int) -> None:
    end = stream.next(position(10))
    fake.make_anew(count)
    with pytest.raises(DataLossError) as caught:
        stream.next(end)
    assert caught.value.queue == QUEUE
    assert (caught.value.start, caught.value.maximum) == (40, count)
    if count > 40:
        assert f"log position 3900, stored at {MINUTES[-1]}" in str(caught.value)
        assert "log position 1003900" in str(caught.value)


@pytest.mark.parametrize("count", [41, 60, 5, 0])
def test_without_fail_on_data_loss_all_of_the_new_one_is_read(
    fake: FakeCluster, tolerant: Stream, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    end = tolerant.next(position(10))
    fake.make_anew(count)
    later = tolerant.next(end)
    assert later["@start"] == position(0)
    assert tolerant.ranges(end, later) == ([(0, count)] if count else [])
    assert ["reading continues at offset 0" in record.getMessage() for record in caplog.records] == [True]
    assert tolerant.next(later) == later  # reported only once
    fake.stored_ms.append(MINUTES[-1] + 10**6)
    last = tolerant.next(later)
    assert tolerant.ranges(later, last) == [(count, count + 1)]
    assert "@start" not in last


def test_one_of_the_same_length_is_seen_when_the_stream_is_to_end(fake: FakeCluster, stream: Stream) -> None:
    end = stream.next(position(10))
    fake.make_anew(40)
    assert stream.next(end) == end  # nothing of it would be read
    stream.reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLossError):
        stream.next(end)


def test_after_a_crash_the_last_minute_is_read_again(fake: FakeCluster, tolerant: Stream) -> None:
    end = tolerant.next(position(10))
    fake.cut_and_grow(35, 50)
    assert MINUTES[-1] - CLOCKS_MS == MINUTES[38]
    later = tolerant.next(end)
    assert tolerant.ranges(end, later) == [(35, 50)]  # all messages stored since, including 35 to 39 again


def test_a_checkpoint_without_marks_is_read_on_and_gets_them(fake: FakeCluster, stream: Stream) -> None:
    end = stream.next(position(39))
    assert marks_in(end) == {QUEUE: Mark(3900, MINUTES[-1])}
    assert marks_in(position(39)) == {}


def test_a_record_deleted_by_retention_proves_nothing(fake: FakeCluster, stream: Stream) -> None:
    end = stream.next(position(10))
    fake.minimum, fake.stored_ms = 40, [MINUTES[-1] + 1]
    assert stream.ranges(end, stream.next(end)) == [(40, 41)]


def test_a_logged_batch_is_compared_when_it_is_planned_again(
    fake: FakeCluster, stream: Stream, tolerant: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    first = stream.next(position(10))
    fake.stored_ms.append(MINUTES[-1] + 1)
    second = stream.next(first)
    again = Stream(fake)
    assert again.ranges(first, second) == [(40, 41)]
    fake.make_anew(60)
    with pytest.raises(DataLossError, match="log position"):
        again.ranges(first, second)
    again.reader.stop()
    assert tolerant.ranges(first, second) == [(40, 41)]
    assert "log position" in caplog.text
    assert tolerant.next(second)["@start"] == position(0)


@pytest.mark.slow("two streams, and a topic that is created again")
def test_spark_streams_read_all_of_a_topic_made_anew(
    spark: SparkSession, topic: Topic, tmp_path: Path
) -> None:
    topic.send(40)
    job = Job(spark, topic, tmp_path, startingOffsets="earliest")
    job.run()
    topic.delete()
    again = Topic(topic.name, topic.namesrv)
    again.send(100)
    query = job.start(availableNow=True)
    with pytest.raises(StreamingQueryException, match=r"log position \d+"):
        query.awaitTermination(60)
    Job(spark, topic, tmp_path, failOnDataLoss="false").run()
    job.check(topic.sent + again.sent)


class TestMarks:
    def test_they_are_read_from_the_head_of_any_record(self, fake: FakeCluster) -> None:
        assert mark_of(fake.record(7)) == (7, Mark(700, MINUTES[7]))
        v6 = bytes(15) + b"\1" + b"\0\0\x2a\x9f"
        assert mark_of(fake.record(7, born_host=v6, sys_flag=0x10)) == (7, Mark(700, MINUTES[7]))

    @pytest.mark.parametrize("record", [b"x", b"x" * 30, b"\0" * 200])
    def test_a_damaged_record_has_none(
        self, fake: FakeCluster, stream: Stream, monkeypatch: pytest.MonkeyPatch, record: bytes
    ) -> None:
        monkeypatch.setattr(fake, "record", lambda _: record)
        assert stream.next(position(10)) == position(40)

    @pytest.mark.parametrize("tree", [3, {"T": 3}, {"T": {"b": {"x": [1, 2]}}}, {"T": {"b": {"0": [1]}}}])
    def test_what_is_none_is_named(self, tree: Any) -> None:
        with pytest.raises(ConfigError, match="@last"):
            marks_in({"@last": tree})
