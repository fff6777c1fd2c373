"""Replays: order, what a message keeps, where a run goes on after it was stopped or killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from tests.pipeline.feeding import Topic
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.errors import ConfigError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import ReplayError, SinkRowError
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.inputs import messages
from cometmq.pipeline.jobs.replay import ReplayQueue, ReplaySummary, replay, share_out, shares, target_queue
from cometmq.pipeline.jobs.replay_state import Asked, Progress, ReplayState, Sent, reached
from cometmq.pipeline.jobs.replay_task import Pace, Share, replayed
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import compress
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.one import body_crc

ASKED = Asked(source="/data", into="{topic}-replay", order="queue")


def sent_to(spark: SparkSession, topic: Topic, name: str) -> list[Row]:
    """What a target topic holds, queue by queue."""
    return messages(spark, f"live:{topic.namesrv}", [name]).orderBy("queue_id", "queue_offset").collect()


def origins(rows: list[Row]) -> dict[str, list[int]]:
    """Of each source queue the offsets, in the order in which they lie in the target."""
    found = defaultdict(list)
    for row in rows:
        found[row.properties["REPLAY_QUEUE"]].append(int(row.properties["REPLAY_OFFSET"]))
    return found


@pytest.fixture
def archived(topic: Topic, output: str, spark: SparkSession) -> str:
    """An archive of 600 messages."""
    topic.send(600)
    archive(spark, topic.namesrv, [topic.name], output)
    return output


def test_an_archive_comes_back_in_order_with_all_that_users_wrote(
    topic: Topic, archived: str, spark: SparkSession, tmp_path: Path
) -> None:
    state, shown = str(tmp_path / "state"), []

    def run(**given: Any) -> ReplaySummary:
        return replay(spark, archived, topic.namesrv, topics=[topic.name], state=state, **given)

    dry = run(dry_run=True)
    assert (dry.planned, dry.messages, dry.left, dry.complete) == (600, 0, 600, False)
    assert not Path(state).exists()
    summary = run(on_progress=lambda done, total: shown.append((done, total)))
    assert (summary.messages, summary.left, summary.bad, summary.complete) == (600, 0, 0, True)
    assert shown[-1] == (600, 600)
    assert run().messages == 0, "run again, it sends nothing"
    rows = sent_to(spark, topic, f"{topic.name}-replay")
    source = {row.msg_id: row for row in messages(spark, archived).collect()}
    assert len(rows) == len(source) == 600
    for row in rows:
        old, origin = source[row.properties["REPLAY_MSG_ID"]], row.properties
        assert (row.body, row.tags, row["keys"], row.flag) == (old.body, old.tags, old["keys"], old.flag)
        assert origin["parity"] == old.properties["parity"]
        assert (origin["REPLAY_TOPIC"], int(origin["REPLAY_OFFSET"])) == (topic.name, old.queue_offset)
        assert int(origin["REPLAY_STORE_TIME"]) == int(old.store_timestamp.timestamp() * 1000)
        assert row.queue_id == old.queue_id
    assert all(offsets == sorted(offsets) for offsets in origins(rows).values())
    assert len({row.msg_id for row in rows}) == 600


def test_a_killed_run_is_continued_and_only_the_batch_under_way_comes_twice(
    topic: Topic, output: str, spark: SparkSession, tmp_path: Path
) -> None:
    topic.send(12_000)
    archive(spark, topic.namesrv, [topic.name], output)
    state = str(tmp_path / "state")
    job = Path(__file__).with_name("replay_job.py")
    arguments = [sys.executable, str(job), topic.namesrv, output, state, topic.name]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        sent = next(line for line in process.stdout if line.startswith("progress") and " 0 " not in line)
        process.send_signal(signal.SIGKILL)
    assert int(sent.split()[1]) < 12_000
    summary = replay(spark, output, topic.namesrv, topics=[topic.name], state=state)
    assert summary.complete
    assert summary.sent_before > 0
    rows = sent_to(spark, topic, f"{topic.name}-replay")
    unique = {row.msg_id: row for row in rows}
    assert sorted(unique[key].body for key in unique) == sorted(body.encode() for body in topic.sent)
    assert len(rows) - len(unique) <= 2 * 4096
    assert len({row.properties["REPLAY_OFFSET"] + row.properties["REPLAY_QUEUE"] for row in rows}) == 12_000


def test_a_stop_ends_a_slow_replay_after_its_batch(
    topic: Topic, archived: str, spark: SparkSession, tmp_path: Path
) -> None:
    state, stop = str(tmp_path / "state"), threading.Event()

    def run(rate: float | None, stop: threading.Event) -> ReplaySummary:
        return replay(
            spark, archived, topic.namesrv, topics=[topic.name], mapping={topic.name: f"{topic.name}-slow"},
            state=state, order="key", rate=rate, stop=stop,
            on_progress=lambda done, _: stop.set() if done else None,
        )  # fmt: skip

    summary = run(50.0, stop)
    assert 0 < summary.messages < 600
    assert (summary.left, summary.complete) == (600 - summary.messages, False)
    assert run(None, threading.Event()).messages == summary.left
    rows = sent_to(spark, topic, f"{topic.name}-slow")
    assert len(rows) == 600
    queues = defaultdict(set)
    for row in rows:
        queues[row["keys"]].add(row.queue_id)
    assert max(map(len, queues.values())) == 1
    assert len({row.queue_id for row in rows}) > 1


def test_groups_go_on_where_they_stood(topic: Topic, spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles()
    for number in range(20):
        files.add(b"x", topic="T", queue_id=number % 2)
    source = f"store:{files.write(tmp_path / 'store')}"
    stood = spark.createDataFrame(
        [("g", "T", "store", 0, 7), ("g", "T", "store", 1, 10), ("other", "T", "store", 0, 3)],
        "group string, topic string, broker_name string, queue_id int, offset bigint",
    )
    target = Topic(f"{topic.name}-groups", topic.namesrv)
    summary = replay(
        spark, source, topic.namesrv, into=target.name, state=str(tmp_path / "state"), positions=stood
    )
    assert (summary.messages, summary.positions) == (20, 3)
    found = {group: sorted(filter(None, target.committed(group).values())) for group in ("g", "other")}
    assert found == {"g": [7, 10], "other": [3]}


def test_copies_of_a_store_are_sent_once_and_what_cannot_be_sent_is_kept(
    topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    files = StoreFiles(segment=65536)
    for number in range(10):
        files.add(b"%d" % number, topic="T", store_timestamp_ms=START_MS + number)
    files.add(b"x", topic="T", properties=b"big\x01" + b"x" * 32_700)
    files.add(b"x", topic="%RETRY%g")
    (tmp_path / "copies").mkdir()
    for copy in "ab":
        (files.write(tmp_path / "copies" / copy) / "broker.conf").write_text("brokerName=broker-old\n")
    summary = replay(
        spark, f"store:{tmp_path}/copies/*", topic.namesrv, into=topic.name, state=str(tmp_path / "state"),
        begin_ms=START_MS + 2,
    )  # fmt: skip
    assert (summary.messages, summary.doubled, summary.bad, summary.system) == (8, 9, 1, 2)
    assert (summary.left, summary.complete) == (0, False)
    rows = sent_to(spark, topic, topic.name)
    assert [bytes(row.body) for row in rows] == [b"%d" % number for number in range(2, 10)]
    assert {row.properties["REPLAY_BROKER"] for row in rows} == {"broker-old"}
    (bad,) = spark.read.parquet(f"{tmp_path}/state/bad").collect()
    assert (bad.field, bad.topic) == ("properties", "T")


def test_a_queue_that_began_anew_is_refused(topic: Topic, spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles()
    for offset in (0, 1, 2, 0, 1):
        files.add(b"x", queue_offset=offset)
    source = f"store:{files.write(tmp_path / 'store')}"
    with pytest.raises(ReplayError, match="began anew"):
        replay(spark, source, topic.namesrv, into=topic.name, state=str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"into": "a b"}, "into"),
        ({"into": "%RETRY%g"}, "into"),
        ({"into": "{topic}", "source": "live"}, "into"),
        ({"order": "time"}, "order"),
        ({"state": None}, "state"),
        ({"rate": 0.0}, "rate"),
        ({"byte_rate": -1.0}, "byte_rate"),
    ],
)
def test_what_cannot_be_done_is_named(
    given: dict[str, Any], key: str, topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    files = StoreFiles()
    files.add(b"x")
    topic.send(1)
    source = f"store:{files.write(tmp_path / 'store')}"
    if given.pop("source", "") == "live":
        source, given["topics"] = f"live:{topic.namesrv}", [topic.name]
    with pytest.raises(ConfigError) as raised:
        replay(spark, source, topic.namesrv, **{"state": str(tmp_path / "state")} | given)
    assert raised.value.key == key


# -- without Spark


def test_a_state_directory_belongs_to_one_replay(tmp_path: Path) -> None:
    state = ReplayState(str(tmp_path / "state"))
    begun = state.begin(ASKED)
    state.write(begun)
    assert state.begin(ASKED).id == begun.id
    other = Asked(source="/other", into="{topic}-replay", order="queue")
    with pytest.raises(ReplayError, match="source /data"):
        state.begin(other)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    with pytest.raises(ReplayError, match="not the state directory"):
        ReplayState(str(tmp_path / "photos")).begin(ASKED)
    (tmp_path / "state" / "replay.json").write_text("{")
    with pytest.raises(ReplayError, match="cannot be read"):
        state.replay()


def test_the_newest_owner_sends_and_progress_adds_up(tmp_path: Path) -> None:
    state, queue = ReplayState(str(tmp_path / "state")), MessageQueue("T", "broker-a", 1)
    state.take_over("one")
    state.save("one", 0, Progress([Sent(queue, 7)], messages=8))
    state.take_over("two")
    assert (state.owned_by("one"), state.owned_by("two")) == (False, True)
    state.save("two", 0, Progress([Sent(queue, 9)], messages=2))
    assert reached(state.all_saved()) == {queue: 9}
    assert [progress.messages for progress in state.all_saved("one")] == [8]
    assert state.saved("two", 5) == Progress()


def test_a_pace_lets_no_more_through_than_its_share() -> None:
    pace, now = Pace(Share(messages=100), 0.0), 0.0
    for _ in range(500):
        now += pace.wait_s(now, 10)
    assert 4.8 < now < 5.0
    pace, now = Pace(Share(messages=1e9, bytes=1000), 0.0), 0.0
    for _ in range(50):
        now += pace.wait_s(now, 100)
    assert 4.8 < now <= 5.0


def queue_of(number: int, count: int) -> ReplayQueue:
    return ReplayQueue("T", "broker-a", number, "T2", 0, count - 1, count, count * 100)


def test_tasks_get_equal_work_and_limits_in_proportion_to_it() -> None:
    groups = share_out([queue_of(0, 60), queue_of(1, 30), queue_of(2, 20), queue_of(3, 10)], 2)
    assert [sum(queue.messages for queue in group) for group in groups] == [60, 60]
    assert len(share_out([queue_of(0, 1)], 8)) == 1
    assert shares([[queue_of(0, 30)], [queue_of(1, 10)]], 100.0, None) == {0: Share(75.0), 1: Share(25.0)}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("broker-b", 1), ("broker-b", 1)),
        (("broker-c", 1), ("broker-a", 1)),
        (("broker-a", 7), ("broker-b", 0)),
    ],
)
def test_a_queue_goes_to_its_namesake_or_by_its_number(
    source: tuple[str, int], target: tuple[str, int]
) -> None:
    queues = [MessageQueue("T", broker, number) for broker in ("broker-a", "broker-b") for number in (0, 1)]
    chosen = target_queue(MessageQueue("S", *source), [*queues, MessageQueue("T", "broker-b", 2)])
    assert (chosen.broker_name, chosen.queue_id) == target


ROW = {
    "topic": "T", "broker_name": "broker-a", "queue_id": 3, "queue_offset": 9, "physical_offset": 1,
    "store_timestamp": 20, "born_timestamp": 10, "msg_id": "OLD", "tags": "A", "keys": "k1 k2", "flag": 4,
    "sys_flag": 0, "body": b"x", "body_crc": 0,
    "properties": [
        ("UNIQ_KEY", "OLD"), ("DELAY", "3"), ("TIMER_DELIVER_MS", "5"), ("RETRY_TOPIC", "T"),
        ("color", "red"), ("TAGS", "A"), ("BUYER_ID", "b"), ("__SHARDINGKEY", "s"),
    ],
}  # fmt: skip


def test_a_message_loses_what_brokers_wrote_and_keeps_what_users_did() -> None:
    message = replayed(ROW, "T2", "NEW", "R")
    assert (message.topic, message.flag, message.sharding_key, message.delay_level) == ("T2", 4, "s", 0)
    assert decode_properties(message.properties) == {
        "UNIQ_KEY": "NEW", "WAIT": "true", "KEYS": "k1 k2", "TAGS": "A", "color": "red", "BUYER_ID": "b",
        "__SHARDINGKEY": "s", "REPLAY_ID": "R", "REPLAY_TOPIC": "T", "REPLAY_BROKER": "broker-a",
        "REPLAY_QUEUE": "3", "REPLAY_OFFSET": "9", "REPLAY_MSG_ID": "OLD", "REPLAY_BORN_TIME": "10",
        "REPLAY_STORE_TIME": "20",
    }  # fmt: skip


def test_a_body_as_stored_is_sent_plain_and_one_that_is_not_there_is_not_sent() -> None:
    stored = compress(b"plain")
    for body, crc in ((stored, body_crc(stored)), (b"plain", body_crc(stored))):
        row = ROW | {"body": body, "body_crc": crc, "sys_flag": int(SysFlag.COMPRESSED)}
        assert replayed(row, "T2", "NEW", "R").body == b"plain"
    with pytest.raises(SinkRowError, match="an archive without bodies"):
        replayed(ROW | {"body": None}, "T2", "NEW", "R")
