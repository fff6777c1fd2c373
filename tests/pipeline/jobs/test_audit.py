"""Findings of the audit in stores with known faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.jobs.test_trace import after, before, pub
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.errors import ConfigError
from cometmq.pipeline.base.job_options import AuditOptions
from cometmq.pipeline.jobs.audit import AuditSummary, Finding, audit, closed_to
from cometmq.protocol.codes import TRACE_TOPIC
from cometmq.protocol.traces import SubAfter, encode_trace

MINUTE = START_MS - START_MS % 60_000


def put(files: StoreFiles, offset: int, msg_id: str, at_ms: int, born_ms: int | None = None) -> None:
    """Write a message of queue 0 of T."""
    files.add(
        b"x", queue_offset=offset, properties=b"UNIQ_KEY\x01" + msg_id.encode(),
        store_timestamp_ms=MINUTE + at_ms, born_timestamp_ms=MINUTE + (at_ms if born_ms is None else born_ms),
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Write a store with faults.

    Minute 0 has ten messages: offsets 3 and 4 are missing, "a" occurs twice, and one message is 20 s late and
    was born before its predecessors. Minute 1 has one message, and a message of minute 9 closes the windows.
    """
    files = StoreFiles(segment=65536)
    put(files, 0, "a", 1000)
    put(files, 1, "b", 2000)
    put(files, 2, "a", 3000)
    put(files, 5, "c", 25_000)
    put(files, 6, "d", 26_000, born_ms=5000)
    put(files, 7, "e", 70_000)
    put(files, 8, "f", 9 * 60_000)
    for name in "ab":
        (files.write(tmp_path / "copies" / name) / "broker.conf").write_text("brokerName=broker-a\n")
    return f"store:{tmp_path}/copies/*"


def run(spark: SparkSession, source: str, **given: Any) -> AuditSummary:
    return audit(spark, source, topics=["T"], **{"window_s": 60, "late_s": 15.0} | given)


@pytest.mark.slow("the first Spark jobs of a session, which are slow")
def test_without_traces_offsets_ids_and_times_are_compared(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    summary = run(spark, store, output=str(tmp_path / "audit"))
    counts = summary.missing, summary.doubled, summary.out_of_order, summary.late, summary.anew
    assert (summary.messages, *counts) == (6, 2, 1, 1, 1, 0), "the copy of the store is not counted"
    assert (summary.windows, summary.open_windows, summary.complete) == (3, 1, False)
    assert summary.closed_to_ms == MINUTE + 8 * 60_000
    (topic,) = summary.topics
    assert (topic.topic, topic.messages, topic.sent, topic.lost) == ("T", 6, None, None)
    assert [(item.kind, item.queue_offset, item.msg_id, item.value) for item in summary.samples] == [
        ("doubled", 2, "a", 1), ("late", 6, "d", 21_000), ("missing", 5, "c", 2),
        ("out_of_order", 6, "d", 20_000),
    ]  # fmt: skip
    assert summary.samples[0] == Finding("doubled", MINUTE, "T", None, "broker-a", 0, 2, "a", 1)
    table = spark.read.parquet(f"{tmp_path}/audit/topics").orderBy("window").collect()
    assert [(row.messages, row.open) for row in table] == [(5, False), (1, False), (1, True)]
    assert spark.read.parquet(f"{tmp_path}/audit/findings").count() == 4


@pytest.mark.slow("several audits, each of several Spark jobs")
def test_only_messages_of_the_span_count_but_their_neighbours_are_seen(
    spark: SparkSession, store: str
) -> None:
    summary = run(spark, store, begin_ms=MINUTE + 60_000, end_ms=MINUTE + 120_000, delay_s=100)
    assert (summary.messages, summary.missing, summary.open_windows) == (1, 0, 0)
    late = run(spark, store, begin_ms=MINUTE + 3000, disorder_ms=30_000, late_s=30.0)
    assert (late.messages, late.doubled, late.missing, late.late, late.out_of_order) == (4, 1, 2, 0, 0)


@pytest.mark.parametrize(
    ("end_ms", "newest_ms", "now_ms", "closed_to_ms"),
    [
        (None, 5000, 9000, 4000),
        (None, None, 9000, None),
        (None, 99_000, 9000, 8000),  # a broker's clock was ahead
        (7000, 5000, 8000, 7000),  # the given end is long ago, whatever was stored since
        (7000, None, 8000, 7000),
        (7000, 5000, 7999, 4000),
        (7000, None, 7999, None),
    ],
)
def test_windows_are_closed_by_what_was_stored_or_by_an_end_in_the_past(
    end_ms: int | None, newest_ms: int | None, now_ms: int, closed_to_ms: int | None
) -> None:
    given = AuditOptions("live:", end_ms=end_ms, delay_s=1)
    assert closed_to(given, newest_ms, now_ms) == closed_to_ms


@long_form("two jobs more")
def test_a_window_that_the_end_cuts_is_closed_with_it(spark: SparkSession, store: str) -> None:
    summary = run(spark, store, end_ms=MINUTE + 60_000 + 10_001, delay_s=100)
    assert (summary.messages, summary.windows, summary.open_windows) == (6, 2, 0)
    assert summary.closed_to_ms == MINUTE + 70_001


@pytest.mark.slow("several audits, each of several Spark jobs")
def test_topics_of_brokers_and_groups_are_audited_only_by_name(spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles(segment=65536)
    for topic in ("T", TRACE_TOPIC, "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "%RETRY%g", "%DLQ%g"):
        files.add(b"x", topic, queue_offset=0)
        files.add(b"x", topic, queue_offset=7, store_timestamp_ms=START_MS + 600_000)
    source = f"store:{files.write(tmp_path / 'store')}"
    assert [each.topic for each in audit(spark, source, end_ms=START_MS + 10**6).topics] == ["T"]
    dead = audit(spark, source, topics=["%DLQ%g"], end_ms=START_MS + 10**6)
    assert [(each.topic, each.missing) for each in dead.topics] == [("%DLQ%g", 6)]


def test_a_queue_that_began_anew_is_no_gap(spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles(segment=65536)
    for number, offset in enumerate((0, 1, 2, 0, 1)):
        put(files, offset, f"m{number}", number)
    put(files, 3, "end", 9 * 60_000)
    summary = run(spark, f"store:{files.write(tmp_path / 'store')}")
    assert (summary.anew, summary.missing, summary.doubled, summary.complete) == (2, 0, 0, True)


@long_form("a job more")
def test_a_topic_without_messages_and_traces_is_named(
    spark: SparkSession, store: str, traced: str, tmp_path: Path
) -> None:
    names = ["nosuch", "T"]
    assert audit(spark, store, topics=names).absent == ["nosuch"]
    nothing = audit(spark, store, topics=["nosuch"])
    assert (nothing.windows, nothing.complete) == (0, False)
    files = StoreFiles(segment=65536)
    files.add(b"x", "U")
    other = f"store:{files.write(tmp_path / 'other')}"
    assert audit(spark, other, topics=["T"], traces=traced).absent == []


@pytest.fixture
def traced(tmp_path: Path, store: str) -> str:
    """Write the traces of a store.

    Producers report a, b, c, d and "gone" as stored. The group `readers` consumed a once and b twice; c
    succeeded after a failure, 40 s after its birth; d was never consumed.
    """
    files = StoreFiles(segment=65536)

    def add(record: str) -> None:
        files.add(record.encode(), TRACE_TOPIC, store_timestamp_ms=MINUTE + 9 * 60_000)

    for name, at in (("a", 1000), ("b", 2000), ("c", 25_000), ("d", 26_000), ("gone", 30_000)):
        add(pub(name, MINUTE + at, 2))
    add(pub("refused", MINUTE + 30_000, 2, success=False))
    for name, at, request, success in (
        ("a", 1010, "q1", True), ("b", 2010, "q2", True), ("b", 3010, "q3", True),
        ("c", 26_000, "q4", False), ("c", 65_000, "q5", True),
    ):  # fmt: skip
        add(before(name, MINUTE + at, request))
        add(after(name, MINUTE + at, 5, request, success=success))
    return f"store:{files.write(tmp_path / 'traces')}"


@pytest.mark.slow("several audits of one topic")
def test_with_traces_and_positions_losses_are_named(spark: SparkSession, store: str, traced: str) -> None:
    at = spark.createDataFrame(
        [("readers", "T", "broker-a", 0, 8)],
        "group string, topic string, broker_name string, queue_id int, offset bigint",
    )
    summary = run(spark, store, traces=traced, positions=at)
    (topic,), (group,) = summary.topics, summary.groups
    assert (topic.sent, topic.lost, summary.lost) == (5, 1, 1)
    assert (group.group, group.messages, group.acknowledged, group.consumed, group.again) == (
        "readers", 5, 5, 3, 1,
    )  # fmt: skip
    assert (group.unconsumed, group.lost, group.late, summary.group_lost) == (2, 2, 1, 2)
    found = [(item.kind, item.msg_id) for item in summary.samples if "lost" in item.kind]
    assert sorted(found) == [("lost", "gone"), ("lost_in_group", "d"), ("lost_in_group", "e")]
    late = [(item.msg_id, item.value) for item in summary.samples if item.kind == "late_in_group"]
    assert late == [("c", 40_000)]


@pytest.mark.slow("several audits of one topic")
def test_positions_alone_say_what_was_acknowledged(spark: SparkSession, store: str, tmp_path: Path) -> None:
    columns = "sampled_ms bigint, group string, topic string, broker_name string, queue_id int"
    rows = [(1, "g", "T", "broker-a", 0, 1), (2, "g", "T", "broker-a", 0, 6)]
    samples = spark.createDataFrame(rows, f"{columns}, group_offset bigint").coalesce(1)
    samples.write.parquet(str(tmp_path / "written"))
    (tmp_path / "lag" / "samples").mkdir(parents=True)
    (file,) = (tmp_path / "written").glob("part-*.parquet")
    file.rename(tmp_path / "lag" / "samples" / "lag-0000000000002.parquet")
    (group,) = run(spark, store, positions=str(tmp_path / "lag")).groups
    assert (group.messages, group.acknowledged, group.consumed, group.lost) == (5, 3, None, None)
    assert group.again is None


def test_offsets_of_damaged_records_end_no_audit(spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles(segment=65536)
    for queue in range(4):
        files.add(b"x", queue_id=queue, queue_offset=0)
        files.add(b"x", queue_id=queue, queue_offset=2**63 - 1)
    summary = run(spark, f"store:{files.write(tmp_path / 'store')}", end_ms=START_MS + 10**6)
    assert summary.missing == 4 << 40


def test_positions_without_a_column_are_refused(spark: SparkSession, store: str) -> None:
    with pytest.raises(ConfigError, match="positions"):
        run(spark, store, positions=spark.range(1))


@long_form("a job more")
def test_names_that_anybody_wrote_into_the_trace_topic_do_not_multiply_rows(
    spark: SparkSession, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.pipeline.jobs.audit.GROUPS_MAX", 3)
    files = StoreFiles(segment=65536)

    def add(group: str, msg_id: str, request: str) -> None:
        done = SubAfter(request_id=request, msg_id=msg_id, cost_ms=1, success=True, keys=None, context_code=0,
                        timestamp_ms=MINUTE, group=group)  # fmt: skip
        record = before(msg_id, MINUTE, request, group=group) + encode_trace(done)
        files.add(record.encode(), TRACE_TOPIC, store_timestamp_ms=MINUTE + 9 * 60_000)

    for number in range(20):
        add(f"forged-{number}", "a", f"f{number}")
        add(f"no group {number}\n", "a", f"n{number}")
    for msg_id in "bc":
        add("readers", msg_id, msg_id)
    positions = spark.createDataFrame(
        [("placed", "T", "broker-a", 0, 1)],
        "group string, topic string, broker_name string, queue_id int, offset bigint",
    )
    traces = f"store:{files.write(tmp_path / 'traces')}"
    summary = run(spark, store, traces=traces, positions=positions)
    assert [each.group for each in summary.groups] == ["forged-0", "placed", "readers"]
    assert (summary.left_out, summary.bad_traces) == (19, 40)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"window_s": 0}, "window_s"),
        ({"window_s": 10**30}, "window_s"),
        ({"delay_s": -1}, "delay_s"),
        ({"late_s": float("nan")}, "late_s"),
        ({"begin_ms": MINUTE + 1, "end_ms": MINUTE}, "end"),
        ({"begin_ms": -1}, "begin"),
        ({"end_ms": 10**30}, "end"),
        ({"late_s": -1.0}, "late_s"),
        ({"topics": [], "source": "live:h:1"}, "topics"),
    ],
)
def test_what_cannot_be_done_is_named(given: dict[str, Any], key: str, spark: SparkSession) -> None:
    with pytest.raises(ConfigError) as raised:
        audit(spark, given.pop("source", "/nowhere"), **given)
    assert raised.value.key == key
