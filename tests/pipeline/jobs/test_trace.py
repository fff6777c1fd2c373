"""Results of the trace job for a store of trace records with known times."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.errors import ConfigError
from cometmq.pipeline.jobs.trace import consumptions, sends, trace, traces
from cometmq.protocol.codes import TRACE_TOPIC
from cometmq.protocol.traces import ConsumeCode, Pub, SubAfter, SubBefore, encode_trace

MINUTE = START_MS - START_MS % 60_000


def pub(msg_id: str, at_ms: int, cost_ms: int, *, success: bool = True) -> str:
    return encode_trace(
        Pub(
            timestamp_ms=at_ms, region=None, group="producers", topic="T", msg_id=msg_id, tags=None,
            keys=None, store_host="h:1", body_length=1, cost_ms=cost_ms, message_type=0, offset_msg_id="o",
            success=success,
        )
    )  # fmt: skip


def before(msg_id: str, at_ms: int, request: str = "q", retries: int = 0, group: str = "readers") -> str:
    return encode_trace(
        SubBefore(
            timestamp_ms=at_ms, region=None, group=group, request_id=request, msg_id=msg_id,
            retry_times=retries, keys=None,
        )
    )  # fmt: skip


def after(msg_id: str, at_ms: int | None, cost_ms: int, request: str = "q", *, success: bool = True) -> str:
    code = ConsumeCode.SUCCESS if success else ConsumeCode.FAILED
    return encode_trace(
        SubAfter(
            request_id=request, msg_id=msg_id, cost_ms=cost_ms, success=success, keys=None, context_code=code,
            timestamp_ms=at_ms, group=None if at_ms is None else "readers",
        )
    )  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Write a store of trace records.

    The first minute has 100 messages, sent in 1 to 100 ms and delivered 10 ms after the middle of the send.
    The next minute has one message with retries, one in progress, one without a record of its send, and bad
    records.
    """
    files = StoreFiles(segment=65536)

    def add(*records: str) -> None:
        files.add("".join(records).encode(), TRACE_TOPIC, store_timestamp_ms=MINUTE + 200_000)

    for cost in range(1, 101):
        middle = MINUTE + cost // 2
        done = after(f"M{cost}", middle + 10 + cost, cost, success=cost % 50 != 0)
        add(pub(f"M{cost}", MINUTE, cost), before(f"M{cost}", middle + 10), done)
    late = MINUTE + 60_000
    add(pub("R", late, 4, success=False), before("R", late + 22, "q1"), after("R", None, 7, "q1"))
    add(before("R", late + 50_000, "q2", retries=1), after("R", late + 50_001, 1, "q2"))
    add(before("open", late, group="idle"), "Pub\x01half\x02", "nonsense")
    add(before("R", late + 22, "q1"))  # the message was sent twice
    add(pub("early", late + 40, 0), before("early", late + 35, "q3"))
    return f"store:{files.write(tmp_path / 'store')}"


def test_latencies_failures_and_bad_records_of_the_whole_time(source: str, spark: SparkSession) -> None:
    summary = trace(spark, source)

    assert summary.records == {"Pub": 102, "SubBefore": 105, "SubAfter": 102}
    assert (summary.bad, summary.first_ms) == (2, MINUTE)
    assert {bad.raw for bad in summary.bad_samples} == {"Pub\x01half", "nonsense"}
    (sent,) = summary.sends
    assert (sent.topic, sent.group, sent.sends, sent.failures) == ("T", "producers", 102, 1)
    assert (sent.cost_p50, sent.cost_p95, sent.cost_p99, sent.cost_max) == (49, 95, 99, 100)
    readers, idle = summary.groups
    assert (readers.topic, readers.group, readers.deliveries) == ("T", "readers", 103)
    assert (readers.redeliveries, readers.failures, readers.unfinished) == (1, 2, 1)
    assert (readers.delay_p50, readers.delay_max, readers.negative_delays) == (10, 20, 1)
    assert (readers.cost_p99, readers.cost_max) == (99, 100)
    assert (idle.topic, idle.group, idle.deliveries, idle.cost_p50) == ("", "idle", 1, None)


@pytest.mark.slow("several jobs")
def test_the_tables_have_a_row_for_each_window_and_are_written_anew(
    source: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = str(tmp_path / "report")
    trace(spark, source, output=output)
    trace(spark, source, output=output)

    sent = spark.read.parquet(f"{output}/sends").orderBy("window").collect()
    assert [(row.window.timestamp() * 1000, row.sends, row.cost_max) for row in sent] == [
        (MINUTE, 100, 100), (MINUTE + 60_000, 2, 4),
    ]  # fmt: skip
    consumed = spark.read.parquet(f"{output}/consumptions").filter("group = 'readers'").orderBy("window")
    assert [(row.deliveries, row.delay_p50) for row in consumed.collect()] == [(100, 10), (3, -5)]
    bad = spark.read.parquet(f"{output}/bad").orderBy("raw").collect()
    assert [row.raw for row in bad] == ["Pub\x01half", "nonsense"]


def test_a_batch_of_java_is_one_send_of_several_messages(tmp_path: Path, spark: SparkSession) -> None:
    files = StoreFiles(segment=65536)
    files.add((pub("A,B", MINUTE, 8) + before("B", MINUTE + 9)).encode(), TRACE_TOPIC)
    rows = traces(spark, f"store:{files.write(tmp_path / 'store')}")

    (sent,) = sends(rows).collect()
    assert (sent.sends, sent.messages, sent.failures, sent.cost_max) == (1, 2, 0, 8)
    (read,) = consumptions(rows).collect()
    assert (read.topic, read.delay_max) == ("T", 5)


def test_a_directory_with_other_files_is_refused(source: str, spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="output"):
        trace(spark, source, output=str(tmp_path))


def test_a_window_without_length_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match="window_s"):
        trace(spark, "store:/nowhere", window_s=0)
