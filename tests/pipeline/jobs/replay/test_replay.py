"""Replays: message order, preserved fields, and continuation after a stop or a kill."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row, SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.replay.test_state import begun
from tests.pipeline.s3_server import BUCKET, KEY, S3
from tests.pipeline.store_files import START_MS, StoreFiles
from tests.pipeline.test_jobs_killed import start_job

from cometmq.errors import ConfigError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import JobStopped, ReplayError, SinkRowError
from cometmq.pipeline.base.options import write_options
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.inputs import group_offsets, messages
from cometmq.pipeline.jobs.rebuild import rebuild
from cometmq.pipeline.jobs.replay import task as task_module
from cometmq.pipeline.jobs.replay.replay import (
    ReplayQueue,
    ReplaySummary,
    replay,
    share_out,
    shares,
    target_queue,
)
from cometmq.pipeline.jobs.replay.state import ReplayState, reached
from cometmq.pipeline.jobs.replay.task import Pace, ReplayTask, Sending, Share, replayed
from cometmq.pipeline.jobs.results import own_directory
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import compress
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.one import body_crc


def sent_to(spark: SparkSession, topic: Topic, name: str) -> list[Row]:
    """Return the messages of a target topic, queue by queue."""
    return messages(spark, f"live:{topic.namesrv}", [name]).orderBy("queue_id", "queue_offset").collect()


def origins(rows: list[Row]) -> dict[str, list[int]]:
    """Return the offsets of each source queue in their order in the target."""
    found = defaultdict(list)
    for row in rows:
        found[row.properties["REPLAY_QUEUE"]].append(int(row.properties["REPLAY_OFFSET"]))
    return found


@pytest.fixture
def archived(topic: Topic, output: str, spark: SparkSession) -> str:
    """Create an archive of 600 messages."""
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


@long_form("kills a JVM")
def test_a_killed_run_is_continued_and_only_the_batch_under_way_comes_twice(
    topic: Topic, output: str, spark: SparkSession, tmp_path: Path
) -> None:
    topic.send(12_000)
    archive(spark, topic.namesrv, [topic.name], output)
    state = str(tmp_path / "state")
    given = {"source": output, "namesrv": topic.namesrv, "topics": [topic.name], "state": state}
    with start_job("replay", rate=3000, **given) as process:
        assert process.stdout is not None
        sent = next(line for line in process.stdout if line.startswith("progress") and " 0 " not in line)
        process.send_signal(signal.SIGKILL)
    assert int(sent.split()[1]) < 12_000
    summary = replay(spark, **given)
    assert summary.complete
    assert summary.sent_before > 0
    rows = sent_to(spark, topic, f"{topic.name}-replay")
    unique = {row.msg_id: row for row in rows}
    assert sorted(unique[key].body for key in unique) == sorted(body.encode() for body in topic.sent)
    assert len(rows) - len(unique) <= 2 * 4096
    assert len({row.properties["REPLAY_OFFSET"] + row.properties["REPLAY_QUEUE"] for row in rows}) == 12_000


@pytest.mark.slow("a replay at a limited rate")
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


def test_a_stop_while_it_counts_or_reads_ends_it_at_once(
    topic: Topic, archived: str, spark: SparkSession, tmp_path: Path
) -> None:
    state = tmp_path / "state"

    class OnceBegun(threading.Event):
        def is_set(self) -> bool:
            return (state / "owner").exists()

    def run(stop: threading.Event | None) -> ReplaySummary:
        return replay(spark, archived, topic.namesrv, topics=[topic.name], state=str(state), stop=stop)

    stop = threading.Event()
    stop.set()
    with pytest.raises(JobStopped, match="replay: counting was stopped"):
        run(stop)
    assert not state.exists()
    summary = run(OnceBegun())
    assert (summary.left, summary.complete) == (600 - summary.messages, summary.messages == 600)
    assert run(None).messages == summary.left
    assert len(sent_to(spark, topic, f"{topic.name}-replay")) == 600


@pytest.mark.slow("a live replay")
def test_what_a_live_replay_sends_to_is_not_read_again(
    topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    topic.send(10)
    port = topic.namesrv.rpartition(":")[2]

    def run(**given: Any) -> ReplaySummary:
        given = {"state": str(tmp_path / "state"), "pattern": f"{topic.name}.*"} | given
        return replay(spark, f"live:localhost:{port}", topic.namesrv, **given)

    assert (run().messages, run().targets_read) == (10, [f"{topic.name}-replay"])
    topic.send(5)
    again = run()
    assert (again.messages, again.targets_read, again.complete) == (5, [f"{topic.name}-replay"], True)
    assert len(sent_to(spark, topic, f"{topic.name}-replay")) == 15
    other = run(state=str(tmp_path / "other"), into=f"{topic.name}-all")
    assert (other.messages, other.targets_read) == (30, [])
    assert run(state=str(tmp_path / "other"), into=f"{topic.name}-all").targets_read == [f"{topic.name}-all"]
    for given in (
        {"into": "{topic}"},
        {"pattern": None, "topics": [topic.name, f"{topic.name}-replay"]},
        {"pattern": None, "topics": [topic.name], "into": topic.name},
    ):
        with pytest.raises(ConfigError, match=f"into = .*{topic.name}"):
            run(state=str(tmp_path / "third"), **given)
    assert not (tmp_path / "third").exists()


def test_what_a_replay_sent_itself_is_not_sent_again(
    topic: Topic, archived: str, spark: SparkSession, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"into": "{topic}", "state": str(tmp_path / "state"), "topics": [topic.name]}
    assert replay(spark, archived, topic.namesrv, **given).messages == 600
    archive(spark, topic.namesrv, [topic.name], archived)
    again = replay(spark, archived, topic.namesrv, **given)
    assert (again.planned, again.messages, again.own, again.complete) == (600, 0, 600, True)


def test_on_an_object_store_no_key_is_shown(
    topic: Topic, s3: S3, spark: SparkSession, tmp_path: Path
) -> None:
    topic.send(20)
    output, state = s3.uri(f"{topic.name}/archive"), s3.uri(f"{topic.name}/state")
    archive(spark, topic.namesrv, [topic.name], output)
    for sent in (20, 0):
        summary = replay(spark, output, topic.namesrv, state=state)
        assert (summary.messages, summary.complete) == (sent, True)
        assert KEY not in repr(summary)
    assert ReplayState(state).bad_path == s3.uri(f"{topic.name}/state/bad")
    absent = replay(spark, output, topic.namesrv, topics=[topic.name, "nosuch"], dry_run=True)
    assert (absent.planned, absent.absent) == (20, ["nosuch"])
    paths = s3.paths(f"{topic.name}/state")
    assert len(paths) > 2
    for path in paths:
        with s3.files.open_input_stream(f"{BUCKET}/{topic.name}/state/{path}") as stream:
            assert KEY.encode() not in stream.read()
    refused: list[Callable[[], object]] = [
        lambda: messages(spark, s3.uri("nothing")),
        lambda: group_offsets(spark, s3.uri("nothing")),
        lambda: own_directory(output, "dlq"),
        lambda: rebuild(spark, str(tmp_path), output),
    ]
    for ask in refused:
        with pytest.raises(ConfigError) as raised:
            ask()
        assert KEY not in str(raised.value)


def test_another_run_is_named_without_a_key(
    topic: Topic, s3: S3, at: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.send(5)
    monkeypatch.setattr(ReplayState, "owned_by", lambda *_: False)  # affects this process, not the tasks
    with pytest.raises(ReplayError, match="another run has taken over") as raised:
        replay(spark, f"live:{topic.namesrv}", topic.namesrv, topics=[topic.name], state=s3.uri(at))
    assert KEY not in str(raised.value)


def test_ten_thousand_queues(topic: Topic, spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles(segment=1 << 22)
    for number in range(10_000):
        files.add(b"x", topic="T", queue_id=number)
    source = f"store:{files.write(tmp_path / 'store', queues=False)}"
    summary = replay(spark, source, topic.namesrv, into=topic.name, state=str(tmp_path / "state"))
    assert (len(summary.queues), summary.messages, summary.complete) == (10_000, 10_000, True)
    assert replay(spark, source, topic.namesrv, into=topic.name, state=str(tmp_path / "state")).planned == 0


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

    def committed() -> dict[str, list[int]]:
        return {group: sorted(filter(None, target.committed(group).values())) for group in ("g", "other")}

    assert committed() == {"g": [7, 10], "other": [3]}
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        cluster.write_queues(target.name)
        on = {queue: 10 for queue, offset in target.committed("g").items() if offset}
        cluster.commit("g", on)  # the group continues to consume
    again = replay(
        spark, source, topic.namesrv, into=target.name, state=str(tmp_path / "state"), positions=stood
    )
    assert (again.messages, again.positions, again.positions_before) == (0, 0, 3)
    assert committed() == {"g": [10, 10], "other": [3]}, "run again, it sets nobody back"


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


def test_a_queue_that_began_anew_between_two_runs_is_refused(
    topic: Topic, spark: SparkSession, tmp_path: Path
) -> None:
    first, second = StoreFiles(), StoreFiles()
    for number in range(6):
        first.add(b"x", queue_offset=number)
    for offset in (*range(6), 0, 1):
        second.add(b"x", queue_offset=offset)
    given: dict[str, Any] = {"into": topic.name, "state": str(tmp_path / "state")}
    source = f"store:{first.write(tmp_path / 'store')}"
    assert replay(spark, source, topic.namesrv, **given).messages == 6
    second.write(tmp_path / "store")
    with pytest.raises(ReplayError, match="began anew"):
        replay(spark, source, topic.namesrv, **given)


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


class Sink:
    """A sender that stores its messages."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.messages = self.bytes = 0

    def send(self, message: RowMessage, queue: MessageQueue) -> None:
        self.sent.append(message.body)

    def flush(self) -> None:
        self.messages = len(self.sent)


@pytest.fixture
def task(tmp_path: Path) -> ReplayTask:
    state = ReplayState(str(tmp_path / "state"))
    replay = begun(state)
    target = replay.queues["T2"][0]
    ways = {MessageQueue("T", "broker-a", number): target for number in range(3)}
    options = write_options({"namesrv": "127.0.0.1:9"})
    return ReplayTask(options, state.path, "one", replay.id, ways, replay.queues, False, {})


def test_a_task_that_dies_and_runs_again_counts_each_row_once(
    task: ReplayTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "BATCH_MESSAGES", 2)
    queue, rows = MessageQueue("T", "broker-a", 1), list[dict[str, Any]]()
    for offset in range(8):
        body = None if offset in (2, 5) else b"%d" % offset
        own = [("REPLAY_ID", task.replay)] if offset == 6 else []
        row = ROW | {"queue_id": 1, "queue_offset": offset, "physical_offset": offset, "body": body}
        rows += [row | {"properties": own}] * 2  # duplicates from a store

    def until(count: int) -> Iterator[dict[str, Any]]:
        yield from rows[:count]
        raise ConnectionResetError("the worker dies")

    for died in range(len(rows) + 1):
        run = replace(task, run=f"run{died}")
        ReplayState(task.state).take_over(run.run)
        with pytest.raises(ConnectionResetError):
            Sending(run, 0).send_all(Sink(), until(died))  # type: ignore[arg-type]
        before = ReplayState(task.state).saved(run.run, 0)
        sink = Sink()
        progress = Sending(run, 0).send_all(sink, iter(rows))  # type: ignore[arg-type]
        assert (progress.rows, progress.messages, progress.bad) == (16, 5, 2)
        assert (progress.own, progress.doubled) == (1, 8)
        assert len(sink.sent) == 5 - before.messages
        assert reached([progress])[queue].offset == 7
        files = Path(task.state, "bad").glob(f"bad-{run.run}-*.parquet")
        assert sum(pq.read_metadata(file).num_rows for file in files) == 2, "none is written over"


def test_a_task_that_waits_for_its_turn_looks_whether_it_may_go_on(task: ReplayTask) -> None:
    state, now = ReplayState(task.state), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds <= task_module.BATCH_S
        now += seconds
        if now > 10:
            state.take_over("two")

    slow, sink = replace(task, shares={0: Share(bytes=100.0)}), Sink()
    small = ROW | {"queue_id": 1}
    large = small | {"queue_offset": 10, "physical_offset": 2, "body": bytes(100_000)}
    progress = Sending(slow, 0, clock=lambda: now, sleep=sleep).send_all(sink, iter([small, large]))  # type: ignore[arg-type]
    assert (sink.sent, now) == ([b"x"], pytest.approx(12, abs=5))
    assert state.saved("one", 0) == progress, "what was sent before is written down"
    assert (progress.messages, [sent.offset for sent in progress.queues]) == (1, [9])


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
    bomb = compress(bytes((64 << 20) + 1))
    with pytest.raises(SinkRowError, match="67108864"):
        replayed(ROW | {"body": bomb, "body_crc": body_crc(bomb), "sys_flag": 1}, "T2", "NEW", "R")
    with pytest.raises(SinkRowError, match="an archive without bodies"):
        replayed(ROW | {"body": None}, "T2", "NEW", "R")
