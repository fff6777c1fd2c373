"""Messages in queues that became unreadable because their topic got fewer read queues.

They are reported and counted, and no run counts as complete without them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.cli.pipeline.job import finish
from cometmq.cli.pipeline.writing import report_archive as report
from cometmq.errors import CometError, ConnectError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import UnreadableError
from cometmq.pipeline.base.offsets import from_tree
from cometmq.pipeline.base.options import Topics, read_options
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.jobs.archive import Job, archive
from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.dlq import dlq
from cometmq.pipeline.jobs.lag import sample
from cometmq.pipeline.jobs.replay.replay import replay
from cometmq.pipeline.jobs.run.run import run
from cometmq.pipeline.live import cluster
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.source import CometReader, CometStreamReader, ReadTask, full_schema
from cometmq.pipeline.live.unreadable import UnreadableQueue, UnreadableQueues
from cometmq.pipeline.table.task import TaskResult
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.compression import Compression, compress
from cometmq.protocol.frame import Frame

QUEUE_MESSAGES = 16  # messages per queue and call of Topic.send


def set_queues(topic: Topic, read: int, write: int, perm: int = 6) -> None:
    """Change the topic and wait until the name server has the change."""

    async def change() -> None:
        settings = TopicSettings(topic=topic.name, read_queue_nums=read, write_queue_nums=write, perm=perm)
        async with Admin(topic.namesrv) as admin:
            async for _ in admin.create_topic(settings, cluster="DefaultCluster"):
                pass

    def shown() -> bool:
        with Cluster((topic.namesrv,), timeout_ms=10_000) as asked:
            (item,) = asked.route(topic.name).data.queue_datas
            return (item.read_queue_nums, item.write_queue_nums, item.perm) == (read, write, perm)

    asyncio.run(change())
    wait_until("the route shows the change", shown)


@pytest.fixture
def shrunk(topic: Topic) -> Topic:
    """A topic with messages in four queues, two of which are readable."""
    set_queues(topic, 4, 4)
    topic.send(4 * QUEUE_MESSAGES)
    set_queues(topic, 2, 2)
    return topic


def unread(topic: Topic, *queue_ids: int, count: int = QUEUE_MESSAGES) -> list[UnreadableQueue]:
    (broker,) = {queue.broker_name for queue in topic.bounds()} or {"broker-a"}
    return [UnreadableQueue(topic.name, broker, queue_id, count) for queue_id in queue_ids]


def planned(topic: Topic, **options: str) -> list[tuple[int, int]]:
    """Return queue and number of messages of each range of a batch read."""
    tasks = CometReader(full_schema(), read_options(topic.options | options, streaming=False)).partitions()
    ranges = [item for task in tasks if isinstance(task, ReadTask) for item in task.ranges]
    counted: dict[int, int] = {}
    for item in ranges:
        counted[item.queue.queue_id] = counted.get(item.queue.queue_id, 0) + item.count
    return sorted(counted.items())


@pytest.fixture
def stream(topic: Topic) -> Iterator[CometStreamReader]:
    options = topic.options | {"startingOffsets": "earliest"}
    reader = CometStreamReader(full_schema(), read_options(options, streaming=True))
    yield reader
    reader.stop()


class TestFinding:
    @pytest.mark.parametrize(
        ("counts", "perm", "queue_ids"),
        [
            ((4, 4), 6, ()),
            ((2, 4), 6, (2, 3)),  # as after `updateTopic -r 2`
            ((2, 2), 6, (2, 3)),  # the queues are in no route
            ((4, 4), 2, (0, 1, 2, 3)),  # the topic has no read permission
        ],
    )
    def test_what_cannot_be_read_is_found(
        self, topic: Topic, counts: tuple[int, int], perm: int, queue_ids: tuple[int, ...]
    ) -> None:
        set_queues(topic, 4, 4)
        topic.send(4 * QUEUE_MESSAGES)
        wanted = unread(topic, *queue_ids)
        set_queues(topic, *counts, perm)
        with Cluster((topic.namesrv,), timeout_ms=10_000) as asked:
            finder = UnreadableQueues(asked, Topics(names=(topic.name,)))
            assert finder.find({}) == finder.find({}) == wanted
            read = {MessageQueue(item.topic, item.broker_name, item.queue_id): 11 for item in wanted}
            assert [item.messages for item in finder.find(read)] == [5] * len(wanted)

    @pytest.mark.parametrize("lenient", [True, False])
    def test_a_broker_that_does_not_answer_is_asked_again(
        self, shrunk: Topic, lenient: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: Cluster, address: str, frames: Sequence[Frame]) -> list[Frame]:
            raise ConnectError(address, "the broker restarts")

        with Cluster((shrunk.namesrv,), timeout_ms=10_000) as asked:
            asked.route(shrunk.name)
            finder = UnreadableQueues(asked, Topics(names=(shrunk.name,)), ask=False, lenient=lenient)
            with monkeypatch.context() as away:
                away.setattr(Cluster, "_call", fail)
                away.setattr(asked, "_timeout_s", 0.1)
                with nullcontext() if lenient else pytest.raises(CometError):
                    assert finder.find({}) == []
            asked.route(shrunk.name)
            assert finder.find({}) == unread(shrunk, 2, 3)

    def test_many_queues_behind_the_last_one(self, topic: Topic) -> None:
        set_queues(topic, 40, 40)
        topic.send(40 * 16)
        set_queues(topic, 1, 1)
        with Cluster((topic.namesrv,), timeout_ms=10_000) as asked:
            found = UnreadableQueues(asked, Topics(pattern=f"{topic.name}.*")).find({})
        assert found == unread(topic, *range(1, 40), count=16)


class TestBatchSource:
    def test_they_end_the_read_with_their_names_and_number(self, shrunk: Topic) -> None:
        with pytest.raises(
            UnreadableError, match=rf"32 messages lie in 2 .*{shrunk.name} \S+/2 \(16\), .*/3"
        ):
            planned(shrunk)

    def test_without_fail_on_data_loss_a_warning_names_them(
        self, shrunk: Topic, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert planned(shrunk, failOnDataLoss="false") == [(0, 16), (1, 16)]
        assert "32 messages lie in 2 queues that cannot be read" in caplog.text

    def test_an_assigned_one_is_no_exception(self, shrunk: Topic) -> None:
        assigned = json.dumps({shrunk.name: {unread(shrunk, 2)[0].broker_name: [0, 2]}})
        options = {"namesrv": shrunk.namesrv, "assign": assigned}
        with pytest.raises(UnreadableError, match="16 messages lie in 1 queues"):
            CometReader(full_schema(), read_options(options, streaming=False)).partitions()
        options["failOnDataLoss"] = "false"
        (task,) = CometReader(full_schema(), read_options(options, streaming=False)).partitions()
        assert isinstance(task, ReadTask)
        assert {item.queue.queue_id for item in task.ranges} == {0}

    def test_a_group_that_has_consumed_them_needs_none(self, shrunk: Topic) -> None:
        group = f"G{shrunk.name}"
        with Cluster((shrunk.namesrv,), timeout_ms=10_000) as asked:
            asked.route(shrunk.name)
            asked.commit(group, {item.queue: 16 for item in unread(shrunk, 0, 2, 3)})
        assert planned(shrunk, startingGroup=group) == [(1, 16)]
        with Cluster((shrunk.namesrv,), timeout_ms=10_000) as asked:
            asked.route(shrunk.name)
            asked.commit(group, {item.queue: 15 for item in unread(shrunk, 2)})
        with pytest.raises(UnreadableError, match="1 messages lie in 1 queues"):
            planned(shrunk, startingGroup=group)

    def test_a_broker_that_is_away_for_a_moment_is_asked_when_it_is_back(
        self, shrunk: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call, refused = Cluster._call, list[str]()  # noqa: SLF001

        def refuse_once(self: Cluster, address: str, frames: Sequence[Frame]) -> list[Frame]:
            if frames[0].code == RequestCode.GET_MIN_OFFSET and not refused:
                refused.append(address)
                raise ConnectError(address, "the broker restarts")
            return call(self, address, frames)

        monkeypatch.setattr(Cluster, "_call", refuse_once)
        with pytest.raises(UnreadableError, match="32 messages lie in 2"):
            planned(shrunk)
        assert refused


class TestStreamSource:
    def test_they_keep_their_positions_and_are_read_once_they_can_be(
        self,
        topic: Topic,
        stream: CometStreamReader,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cluster, "_ROUTE_S", 0.0)  # disable the cache of routes
        set_queues(topic, 4, 4)
        start = stream.initialOffset()
        topic.send(4 * QUEUE_MESSAGES)
        set_queues(topic, 2, 2)

        end = stream.latestOffset(start, ReadAllAvailable())

        assert [from_tree(end)[queue] for queue in sorted(from_tree(end))] == [16, 16, 0, 0]
        assert stream.partitions(start, end)
        assert "32 messages lie in 2 queues that cannot be read" in caplog.text
        set_queues(topic, 4, 4)
        assert set(from_tree(stream.latestOffset(end, ReadAllAvailable())).values()) == {16}

    def test_a_run_of_available_now_leaves_them_and_does_not_blame_a_broker(
        self, topic: Topic, stream: CometStreamReader, caplog: pytest.LogCaptureFixture
    ) -> None:
        set_queues(topic, 4, 4)
        start = stream.initialOffset()
        topic.send(4 * QUEUE_MESSAGES)
        set_queues(topic, 2, 2)
        stream.prepareForTriggerAvailableNow()

        end = stream.latestOffset(start, ReadAllAvailable())

        assert [from_tree(end)[queue] for queue in sorted(from_tree(end))] == [16, 16, 0, 0]
        assert "32 messages lie in 2 queues that cannot be read" in caplog.text
        assert "have no reachable broker" not in caplog.text


class TestJobs:
    @pytest.mark.parametrize("known", [True, False], ids=["shrunk between runs", "shrunk before the first"])
    def test_an_archive_without_them_is_not_complete(
        self, spark: SparkSession, topic: Topic, output: str, known: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        set_queues(topic, 4, 4)
        topic.send(4 * QUEUE_MESSAGES)
        if known:
            assert archive(spark, topic.namesrv, [topic.name], output).complete
            topic.send(4 * QUEUE_MESSAGES)
        set_queues(topic, 2, 2)

        summary = archive(spark, topic.namesrv, [topic.name], output)

        assert (summary.records, summary.away) == (2 * QUEUE_MESSAGES, [])
        assert summary.unreadable == unread(topic, 2, 3)
        assert not summary.complete
        with pytest.raises(Exception, match="1"):
            finish(summary, False, report)
        assert f"16 messages of topic {topic.name} in" in capsys.readouterr().err
        set_queues(topic, 4, 4)
        last = archive(spark, topic.namesrv, [topic.name], output)
        assert (last.records, last.complete) == (2 * QUEUE_MESSAGES, True)

    @pytest.mark.parametrize(("counts", "perm"), [((2, 2), 6), ((4, 4), 2)], ids=["fewer", "no permission"])
    def test_a_change_during_an_archive_leaves_out_what_became_unreadable(
        self, spark: SparkSession, topic: Topic, output: str, counts: tuple[int, int], perm: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        set_queues(topic, 4, 4)
        topic.send(4 * QUEUE_MESSAGES)
        read, changes = Job.read_batch, [lambda: set_queues(topic, *counts, perm)]

        def change(self: Job, batch: int, ranges: list[QueueRange]) -> list[TaskResult]:
            if changes:
                changes.pop()()
            return read(self, batch, ranges)

        monkeypatch.setattr(Job, "read_batch", change)
        left = (2, 3) if perm == 6 else (0, 1, 2, 3)
        wanted = unread(topic, *left)
        summary = archive(spark, topic.namesrv, [topic.name], output)
        assert summary.records == (4 - len(left)) * QUEUE_MESSAGES
        assert (summary.unreadable, summary.complete) == (wanted, False)

    @pytest.mark.slow("several audits, each of several Spark jobs")
    def test_an_audit_with_traces_names_those_of_both(self, spark: SparkSession, shrunk: Topic) -> None:
        live = f"live:{shrunk.namesrv}"
        summary = audit(spark, live, topics=[shrunk.name], traces=live, trace_topic=shrunk.name)
        assert (summary.unreadable, summary.complete) == (2 * unread(shrunk, 2, 3), False)

    def test_dead_letters_that_may_not_be_read_are_not_taken_for_none(
        self, spark: SparkSession, topic: Topic
    ) -> None:
        """RocketMQ 3.2.4 created these topics without read permission (docs/reference/storage.md)."""
        group, name = topic.name, f"%DLQ%{topic.name}"
        letters = Topic(name, topic.namesrv)
        set_queues(letters, 1, 1)
        letters.send(3)
        wanted = unread(letters, 0, count=3)
        set_queues(letters, 1, 1, perm=2)
        summary = dlq(spark, f"live:{topic.namesrv}", [group])
        assert (summary.messages, summary.unreadable, summary.complete) == (0, wanted, False)

    def test_a_replay_does_not_go_without_them(self, spark: SparkSession, shrunk: Topic) -> None:
        with pytest.raises(Exception, match="32 messages lie in 2 queues that cannot be read"):
            replay(spark, f"live:{shrunk.namesrv}", shrunk.namesrv, topics=[shrunk.name], dry_run=True)

    def test_lag_counts_what_a_group_cannot_consume(self, topic: Topic) -> None:
        set_queues(topic, 4, 4)
        topic.send(4 * QUEUE_MESSAGES)
        group = f"G{topic.name}"
        held = topic.bounds()
        retries = Topic(f"%RETRY%{group}", topic.namesrv)
        set_queues(retries, 1, 1)
        with Cluster((topic.namesrv,), timeout_ms=10_000) as asked:
            asked.route(topic.name)
            asked.commit(group, dict.fromkeys(held, 5))
        set_queues(topic, 2, 2)

        rows, problems = sample(topic.namesrv, [group])

        assert [row.lag for row in rows if row.topic == topic.name] == [11] * 4
        assert len(problems) == 2
        assert f"group {group}: 11 messages of {topic.name} lie in" in problems[0]

    @pytest.mark.parametrize("loss", ["true", "false"])
    def test_a_pipeline_of_a_file_is_not_complete(
        self, spark: SparkSession, shrunk: Topic, tmp_path: Path, loss: str
    ) -> None:
        file = tmp_path / "f.yml"
        file.write_text(
            "sources:\n  orders:\n    format: cometmq\n    columns: tags string\n"
            f"    options: {{namesrv: '{shrunk.namesrv}', topic: {shrunk.name}, failOnDataLoss: {loss}}}\n"
            f"sinks:\n  out: {{from: orders, format: parquet, path: {tmp_path}/out}}\n"
        )
        if loss == "true":
            with pytest.raises(Exception, match="32 messages lie in 2 queues"):
                run(spark, str(file))
            return
        summary = run(spark, str(file))
        assert (summary.sinks[0].rows, summary.unreadable) == (32, unread(shrunk, 2, 3))
        assert not summary.complete


# -- Malicious messages are bad records, and all other messages of the topic are read


BOMBS = 9


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """Return 8 KB that inflate to 255 MiB."""
    made = compress(bytes(255 << 20), Compression.ZSTD)
    assert len(made) < 10_000
    return made


@pytest.fixture
def attacked(topic: Topic, bomb: bytes) -> Topic:
    topic.send(50)
    for _ in range(BOMBS):
        topic.send_raw(bomb, Compression.ZSTD.sys_flag)
    for born_ms in (2**62, -(2**63)):
        topic.send_raw(b"never", 0, born_ms)
    topic.send(50)
    return topic


def test_a_read_names_the_first_or_leaves_them_out(spark: SparkSession, attacked: Topic) -> None:
    reader = spark.read.format("cometmq").options(**attacked.options)
    with pytest.raises(
        PythonException, match=rf"bad record at {attacked.name} broker-a 0 offset \d+ \(body\)"
    ):
        reader.load().collect()
    rows = reader.option("onBadRecord", "skip").load().collect()
    assert Counter(bytes(row.body).decode() for row in rows) == Counter(attacked.sent)


def test_an_archive_puts_them_into_quarantine(spark: SparkSession, attacked: Topic, output: str) -> None:
    summary = archive(spark, attacked.namesrv, [attacked.name], output)
    assert (summary.records, summary.bad, summary.lost) == (100, BOMBS + 2, 0)
    rows = spark.read.parquet(f"{output}/_cometmq/quarantine").collect()
    assert Counter(row.stage for row in rows) == {"body": BOMBS, "time": 2}
    assert all(row.topic == attacked.name and row.queue_id == 0 for row in rows)
    assert archive(spark, attacked.namesrv, [attacked.name], output).records == 0
