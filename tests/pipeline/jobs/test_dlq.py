"""Dead letters in bulk: grouping by cause, and selection for another send."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.test_trace import after
from tests.pipeline.store_files import START_MS, StoreFiles
from tests.pipeline.test_archive_disturbed import workers

from cometmq.admin.admin import Admin
from cometmq.errors import ConfigError, NoRouteError
from cometmq.message import Message
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.dlq import RedriveSummary, dlq, letters, redrive
from cometmq.pipeline.jobs.dlq_task import letter_of
from cometmq.pipeline.jobs.inputs import messages
from cometmq.protocol.codes import TRACE_TOPIC, SysFlag
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.record.one import body_crc

HOUR = START_MS - START_MS % 3_600_000


def die(topic: Topic, group: str, *deaths: tuple[bytes, dict[str, str]]) -> None:
    """Send messages that a group sends to its dead-letter topic immediately."""

    async def run() -> None:
        async with Admin(topic.namesrv) as admin:
            brokers = admin.client.brokers
            for body, properties in deaths:
                sent = await admin.send(Message(topic.name, body, properties=properties))
                (address,) = await admin.master_addrs("DefaultCluster")
                place = decode_offset_id(sent.offset_msg_id).physical_offset
                stored = await brokers.view_message(address, place)
                await brokers.send_message_back(address, stored, group, delay_level=-1)
            async with asyncio.timeout(60):
                while f"%DLQ%{group}" not in await admin.topics():
                    await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.slow("several jobs")
def test_what_is_chosen_is_sent_once_and_what_died_too_often_is_kept(
    topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    group, source, output = f"g{topic.name}", f"live:{topic.namesrv}", str(tmp_path / "dlq")
    deaths = [(b"%d" % number, {"error": "io" if number % 2 else "parse"}) for number in range(5)]
    die(topic, group, *deaths, (b"5", {"error": "io", "DLQ_RESEND_TIMES": "3"}))

    summary = dlq(spark, source, [group], reason="properties['error']", output=output)
    found = {(row.topic, row.reason): (row.messages, row.most_resends) for row in summary.counts}
    assert found == {(topic.name, "io"): (3, 3), (topic.name, "parse"): (3, 0)}
    assert (summary.messages, spark.read.parquet(f"{output}/triage").count()) == (6, len(summary.counts))

    def run(**given: Any) -> RedriveSummary:
        where = "properties['error'] = 'io'"
        return redrive(spark, source, topic.namesrv, [group], where=where, **given)

    dry = run(dry_run=True)
    assert (dry.chosen, dry.planned, dry.refused, dry.resent) == (3, 2, 1, 0)
    done = run(output=output)
    assert (done.resent, done.skipped, done.refused, done.failed, done.complete) == (2, 0, 1, 0, True)
    assert run(output=output, rate=1000.0).skipped == 2
    copies = messages(spark, source, [f"%RETRY%{group}"]).collect()
    assert sorted(bytes(row.body) for row in copies) == [b"1", b"3"]
    assert {row.properties["DLQ_RESEND_TIMES"] for row in copies} == {"1"}
    kept = spark.read.parquet(f"{output}/quarantine").filter(f"run = '{done.run}'").collect()
    assert [(bytes(row.body), row.problem) for row in kept] == [
        (b"5", "it was sent again 3 times and died each time")
    ]
    states = spark.read.parquet(f"{output}/redriven").groupBy("state").count().collect()
    assert {row.state: row["count"] for row in states} == {"RESENT": 2, "SKIPPED": 2}


@pytest.mark.slow("Spark repeats a task")
@pytest.mark.parametrize("again", [False, True])
def test_a_task_that_spark_repeats_sends_and_counts_each_letter_once(
    again: bool, topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    group, source = f"g{topic.name}", f"live:{topic.namesrv}"
    die(topic, group, *((b"%d" % number, {}) for number in range(40)))
    retries = Topic(f"%RETRY%{group}", topic.namesrv)
    given: dict[str, Any] = {"where": "true", "output": str(tmp_path / "dlq")}
    if again:
        redrive(spark, source, topic.namesrv, [group], **given)
    before, killed = copies(retries), threading.Event()

    def kill() -> None:
        wait_until("some are sent", lambda: copies(retries) >= before + 5)
        for worker in workers():
            worker.kill()
            killed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    summary = redrive(spark, source, topic.namesrv, [group], again=again, rate=20.0, **given)
    killer.join()
    assert killed.is_set()
    assert (summary.chosen, summary.resent, summary.skipped, summary.left) == (40, 40, 0, 0)
    assert copies(retries) == before + 40
    sent = messages(spark, source, [retries.name], columns=["body"]).collect()
    assert set(Counter(bytes(row.body) for row in sent).values()) == {1 + again}
    rows = spark.read.parquet(f"{tmp_path}/dlq/redriven").filter(f"run = '{summary.run}'")
    assert rows.filter("copy_offset_msg_id <> ''").count() == 40


def copies(retries: Topic) -> int:
    """Return the number of messages in a topic, which may not exist yet."""
    try:
        return sum(held.maximum for held in retries.bounds().values())
    except NoRouteError:
        return 0


@pytest.mark.slow("several jobs")
def test_letters_without_bodies_are_not_sent(topic: Topic, spark: SparkSession, tmp_path: Path) -> None:
    group = f"g{topic.name}"
    parsed = b'{"n": 1}'
    die(topic, group, (parsed, {}), (parsed, {}), (b"whole", {}), (parsed, {"DLQ_RESEND_TIMES": "3"}))
    output, dead = str(tmp_path / "archive"), f"%DLQ%{group}"
    given: dict[str, Any] = {"where": "true", "output": str(tmp_path / "dlq")}
    archive(spark, topic.namesrv, [dead], output, body_format="json", body_schema="n bigint", keep_body=False)
    assert dlq(spark, output).messages == 4
    summary = redrive(spark, output, topic.namesrv, **given)
    assert (summary.chosen, summary.refused, summary.without_body, summary.resent) == (4, 1, 2, 1)
    assert (summary.complete, summary.problems) == (
        False, [f"{group}: its body is not in the source, an archive without bodies"],
    )  # fmt: skip
    kept = spark.read.parquet(f"{tmp_path}/dlq/quarantine").groupBy("problem").count().collect()
    assert sorted(row["count"] for row in kept) == [1, 2]
    whole = redrive(spark, f"live:{topic.namesrv}", topic.namesrv, [group], **given)
    assert (whole.resent, whole.skipped, whole.without_body, whole.complete) == (2, 1, 0, True)


def test_letters_that_brokers_do_not_know_are_left(topic: Topic, spark: SparkSession, tmp_path: Path) -> None:
    topic.send(1)  # creates a cluster with a topic
    files = StoreFiles()
    for number in range(3):
        properties = f"RETRY_TOPIC\x01{topic.name}\x02UNIQ_KEY\x01K{number}"
        files.add(b"x", "%DLQ%strangers", properties=properties.encode())
    source = f"store:{files.write(tmp_path / 'store')}"
    given: dict[str, Any] = {"where": "true", "output": str(tmp_path / "dlq")}
    summary = redrive(spark, source, topic.namesrv, **given)
    assert (summary.chosen, summary.left, summary.resent, summary.complete) == (3, 3, 0, False)
    assert "strangers: " in summary.problems[0]
    again = redrive(spark, source, topic.namesrv, again=True, to_topic=True, **given)
    assert (again.resent, again.complete) == (3, True)


def test_the_reason_is_how_the_last_call_ended(spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles()
    for name in ("a", "b"):
        properties = f"RETRY_TOPIC\x01orders\x02ORIGIN_MESSAGE_ID\x01OLD\x02UNIQ_KEY\x01{name}".encode()
        files.add(b"x", "%DLQ%readers", properties=properties, reconsume_times=3)
    files.add(b"x", "%RETRY%readers")
    files.add(after("a", START_MS, 5, success=False).encode(), TRACE_TOPIC)
    source = f"store:{files.write(tmp_path / 'store')}"
    found = letters(spark, source, traces=source).orderBy("msg_id").collect()
    assert [(row.msg_id, row.failure, row.reason) for row in found] == [
        ("a", "FAILED", "FAILED"), ("b", None, "after 3 tries"),
    ]  # fmt: skip
    assert {(row.group, row.original_topic, row.origin_msg_id) for row in found} == {
        ("readers", "orders", "OLD")
    }
    (count,) = dlq(spark, source, where="msg_id = 'b' AND group = 'readers'").counts
    assert (count.group, count.hour_ms, count.sample_msg_id) == ("readers", HOUR, "b")
    assert dlq(spark, source, ["other"]).messages == 0


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"where": "nothing > 5"}, "where"),
        ({"where": "group ="}, "where"),
        ({"where": "true", "reason": "nothing"}, "reason"),
        ({"where": "true", "output": None}, "output"),
        ({"where": "true", "max_resends": 0}, "max_resends"),
        ({"where": "true", "rate": 0.0}, "rate"),
        ({"where": "true", "namesrv": "nowhere"}, "namesrv"),
    ],
)
def test_what_cannot_be_done_is_named(
    given: dict[str, Any], key: str, spark: SparkSession, tmp_path: Path
) -> None:
    files = StoreFiles()
    files.add(b"x", "%DLQ%g")
    source = f"store:{files.write(tmp_path / 'store')}"
    given = {"namesrv": "127.0.0.1:9", "output": str(tmp_path / "dlq")} | given
    with pytest.raises(ConfigError) as raised:
        redrive(spark, source, given.pop("namesrv"), **given)
    assert raised.value.key == key


@pytest.mark.parametrize("plain", [True, False])
def test_a_compressed_body_is_known_by_its_checksum(plain: bool) -> None:
    stored = zlib.compress(b"hello" * 100)
    row = {
        "topic": "%DLQ%g", "broker_name": "broker-a", "queue_id": 0, "queue_offset": 1, "physical_offset": 2,
        "flag": 0, "sys_flag": int(SysFlag.COMPRESSED), "born_host": "10.0.0.1:5", "reconsume_times": 16,
        "store_host": "10.0.0.2:10911", "body_crc": body_crc(stored), "properties": {"UNIQ_KEY": "K"},
        "body": b"hello" * 100 if plain else stored,
        "born_timestamp": datetime.fromtimestamp(1.5, UTC), "store_timestamp": datetime.fromtimestamp(2, UTC),
    }  # fmt: skip
    letter = letter_of(row)
    assert letter.sys_flag == (0 if plain else int(SysFlag.COMPRESSED))
    assert (letter.msg_id, letter.born_timestamp_ms, letter.store_timestamp_ms) == ("K", 1500, 2000)
    assert letter.offset_msg_id.endswith(f"{2:016X}")
