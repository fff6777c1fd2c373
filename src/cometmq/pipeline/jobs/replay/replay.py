"""The replay job: send the messages of an archive, of store directories or of live topics to topics again.

Spark reads and sorts the source, so that one task receives all messages of a source queue in the order of
their offsets, and sends them (task.py). Either all messages of a source queue go to one target queue,
or each message goes to the queue of its key. A state directory (state.py) records which messages were
sent and acknowledged; a later run continues after them.
"""

from __future__ import annotations

import heapq
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.admin.dead_letters import belongs_to_system
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.errors import ConfigError, MessageIllegal, NoRouteError
from cometmq.message import MessageQueue, check_topic_name
from cometmq.pipeline.base.declare import job
from cometmq.pipeline.base.engine import outcomes_in, run_action, slots
from cometmq.pipeline.base.errors import JobStopped, ReplayError
from cometmq.pipeline.base.job_options import ReplayOptions
from cometmq.pipeline.base.options import Topics, WriteOptions, parse_addresses, write_options
from cometmq.pipeline.base.wire import Access
from cometmq.pipeline.jobs.inputs import LIVE, group_offsets, messages
from cometmq.pipeline.jobs.replay.state import Asked, Progress, Replay, ReplayState, Sent, reached
from cometmq.pipeline.jobs.replay.task import COLUMNS, ReplayTask, Share, began_anew, in_task
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.table.objects import shown

QUEUES_MAX = 100_000
_LOOK_S = 1.0
_QUEUE = ("topic", "broker_name", "queue_id")


class ReplayQueue(msgspec.Struct):
    """The messages to send from a source queue (offsets `start` to `end`, inclusive), and their target topic.

    `target_queue` is "BROKER/NUMBER", or "" if keys determine the queue or the run is a dry run.
    """

    topic: str
    broker_name: str
    queue_id: int
    target: str
    start: int
    end: int
    messages: int
    bytes: int
    target_queue: str = ""

    @property
    def source(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker_name, self.queue_id)


class ReplaySummary(msgspec.Struct):
    """The result of a run, or a dry run, of the `replay` job."""

    source: str
    state: str = ""
    dry_run: bool = False
    planned: int = 0
    """Number of messages that remained to be sent when the run began."""
    planned_bytes: int = 0
    """Size of the planned messages in bytes, in the format of the source's store."""
    messages: int = 0
    """Number of messages that this run sent and a broker acknowledged."""
    bytes: int = 0
    """Bytes of the bodies of the messages that this run sent."""
    sent_before: int = 0
    """Number of messages that earlier runs sent."""
    bad: int = 0
    """Messages that could not be sent, over all runs. `state`/bad contains them, with the reasons."""
    doubled: int = 0
    """Number of rows that repeat a record of the source, for example in a copy of a store."""
    system: int = 0
    """Number of messages in topics that belong to brokers or groups. These messages are not sent."""
    own: int = 0
    """Number of messages in the source that this replay itself had written. They are not sent again."""
    targets_read: list[str] = []
    """Live topics that match the pattern but are not read, because this replay sends to them."""
    positions: int = 0
    """Number of consumer offsets that this run set in the target topics."""
    positions_before: int = 0
    """Offsets that an earlier run set. Set again, groups would receive consumed messages again."""
    absent: list[str] = []
    """Requested topics without messages in the requested time range."""
    left: int = 0
    """Number of planned messages that remain to be sent."""
    seconds: float = 0.0
    queues: list[ReplayQueue] = []

    @property
    def complete(self) -> bool:
        """Whether all messages of the requested time range were sent, and every requested topic has some."""
        return not (self.left or self.bad or self.absent)


@job(ReplayOptions)
def replay(spark: SparkSession, given: ReplayOptions) -> ReplaySummary:
    """Send the messages of a source to topics of a cluster, each source queue in order.

    Live topics that match the pattern and to which this replay sends are not read (`targets_read`).

    Returns:
        The counts of this run.

    Raises:
        ConfigError: An argument is invalid.
        ReplayError: The state is damaged or belongs to another replay, the source holds messages of both a
            deleted queue and its replacement, or another run has taken over.
        JobStopped: The run was stopped while it counted.
        NoRouteError: A topic has no route. Errors of sending are raised as they are when a broker stays
            unreachable.
    """
    _check(given)
    state, dry_run, positions = given.state, given.dry_run, given.positions
    options = write_options({"namesrv": given.namesrv, "timeoutMs": str(given.timeout_ms), "retries": "8"})
    asked = Asked(
        source=given.source, topics=sorted(set(given.topics)), pattern=given.pattern, begin_ms=given.begin_ms,
        end_ms=given.end_ms, into=given.into, mapping=dict(sorted((given.mapping or {}).items())),
        order=given.order,
    )  # fmt: skip
    stop = given.stop or threading.Event()
    kept = ReplayState(state) if state else None
    current = kept.begin(asked) if kept else Replay("", asked)
    # Read the source as given by the caller: the source stored in the state directory has no secrets.
    asked = msgspec.structs.replace(current.asked, source=given.source)
    stood = group_offsets(spark, positions) if isinstance(positions, str) else positions
    run, begun = uuid.uuid4().hex, bool(current.queues)
    if kept and begun and not dry_run:
        # Take over the state directory before the progress of earlier runs is read. Afterwards, no earlier
        # run can send messages that the progress read below lacks.
        kept.take_over(run)
    before = kept.all_saved() if kept else []
    after = reached(before)
    summary = ReplaySummary(shown(given.source), kept.shown if kept else "", dry_run)
    _count(spark, summary, asked, after, stop)
    _leave_targets(summary, asked, current.queues, options)
    _add_up(summary, before, [])
    if not dry_run and kept is not None:
        sending = _Run(spark, kept, current, options, run, given.on_progress, stop)
        if summary.queues:
            sending.start(summary.queues, begun=begun)
            sending.send(_rows(spark, asked, after, COLUMNS), summary.queues, (given.rate, given.byte_rate))
            _add_up(summary, before, kept.all_saved(run))
        if stood is not None and not summary.left and current.queues:
            sending.set_positions(stood, summary)
    return summary


def _count(
    spark: SparkSession,
    summary: ReplaySummary,
    asked: Asked,
    after: Mapping[MessageQueue, Sent],
    stop: threading.Event,
) -> None:
    """Enter the queues to send, with their offsets and numbers, and the absent topics in the summary."""
    counted = _rows(spark, asked, after, _COUNTED)
    planned = run_action(spark, "replay: counting", lambda: plan(counted, after), stop=stop)
    summary.queues = _choose(planned, asked, summary)
    there = {each.topic for each in planned} | {queue.topic for queue in after}
    summary.absent = sorted(set(asked.topics) - there)


_COUNTED = ("topic", "broker_name", "queue_id", "queue_offset", "physical_offset", "store_size")


def _check(given: ReplayOptions) -> None:
    if not given.state and not given.dry_run:
        raise ConfigError("state", "", "a directory for the progress, from which a killed replay continues")
    try:
        check_topic_name(given.into.replace("{topic}", "t"))
    except MessageIllegal as error:
        raise ConfigError(
            "into", given.into, f"the name of a topic, which may hold {{topic}} ({error.problem})"
        ) from None


def _rows(
    spark: SparkSession, asked: Asked, after: Mapping[MessageQueue, Sent], columns: Sequence[str]
) -> DataFrame:
    """Return the rows of the source that earlier runs have not sent.

    A row counts as sent if neither its offset nor its log position exceeds that of the last sent message of
    its queue. If only its log position is higher, its queue was deleted and created again.
    """
    rows = messages(
        spark, asked.source, asked.topics, asked.begin_ms, asked.end_ms, columns, pattern=asked.pattern
    )
    if not after:
        return rows
    done = [
        (*msgspec.structs.astuple(sent.queue), sent.offset, sent.physical_offset) for sent in after.values()
    ]
    schema = "topic string, broker_name string, queue_id int, after bigint, place bigint"
    left = rows.join(F.broadcast(spark.createDataFrame(done, schema)), list(_QUEUE), "left")
    more = "after IS NULL OR queue_offset > after OR physical_offset > place"
    return left.filter(more).drop("after", "place")


def plan(rows: DataFrame, after: Mapping[MessageQueue, Sent]) -> list[ReplayQueue]:
    """Return the remaining messages of each source queue, without a target. All rows are scanned once.

    `after` has the last message that earlier runs have finished. Raises ReplayError for too many queues, or
    if log positions do not ascend with offsets, because a queue was deleted and created again.
    """
    found = (
        rows.groupBy(*_QUEUE)
        .agg(
            F.min("queue_offset").alias("start"),
            F.max("queue_offset").alias("end"),
            F.count(F.lit(1)).alias("messages"),
            F.sum("store_size").alias("bytes"),
            F.min_by("physical_offset", "queue_offset").alias("first"),
            F.max_by("physical_offset", "queue_offset").alias("last"),
            F.min("physical_offset").alias("lowest"),
            F.max("physical_offset").alias("highest"),
        )
        .limit(QUEUES_MAX + 1)
        .collect()
    )
    if len(found) > QUEUES_MAX:
        raise ReplayError("the source", f"it has messages of more than {QUEUES_MAX} queues; choose topics")
    planned = []
    for row in found:
        place = (row.topic, row.broker_name, row.queue_id)
        queue = ReplayQueue(*place, "", row.start, row.end, row.messages, row.bytes)
        sent = after.get(queue.source, Sent(queue.source))
        anew = row.start <= sent.offset or row.lowest <= sent.physical_offset
        ordered = (row.first, row.last) == (row.lowest, row.highest)
        if (anew or not ordered) and not belongs_to_system(row.topic):
            raise began_anew(queue.source)
        planned.append(queue)
    return sorted(planned, key=lambda each: each.source)


def _choose(planned: Iterable[ReplayQueue], asked: Asked, summary: ReplaySummary) -> list[ReplayQueue]:
    """Return the queues to replay with their target topics. Raises ConfigError for an invalid target."""
    chosen = []
    for each in planned:
        topic = each.topic
        if belongs_to_system(topic) and topic not in asked.mapping:
            summary.system += each.messages
            continue
        each.target = target = asked.mapping.get(topic) or asked.into.replace("{topic}", topic)
        try:
            check_topic_name(target)
        except MessageIllegal as error:
            raise ConfigError("into", target, f"a topic's name for {topic} ({error.problem})") from None
        if belongs_to_system(target):
            raise ConfigError("into", target, f"a topic for {topic} that does not belong to the system")
        chosen.append(each)
    return chosen


def _leave_targets(
    summary: ReplaySummary, asked: Asked, targets: Iterable[str], options: WriteOptions
) -> None:
    """Leave out live topics that are targets, too. Raises ConfigError for a topic that was named."""
    read = {queue.topic: queue.target for queue in summary.queues}
    both = sorted(read.keys() & {*read.values(), *targets})
    if not both or not asked.source.startswith(LIVE):
        return
    source = parse_addresses(asked.source.removeprefix(LIVE), "source")
    if not same_cluster(source, options.namesrv, both[0], options.timeout_ms):
        return
    for topic in both:
        if asked.pattern is None or topic == read[topic] != asked.into:
            raise ConfigError("into", topic, "a topic that is not read itself")
    summary.targets_read = both
    summary.queues = [queue for queue in summary.queues if queue.topic not in both]


def same_cluster(one: Sequence[str], other: Sequence[str], topic: str, timeout_ms: int) -> bool:
    """Return whether two lists of name servers have one in common, or their routes of a topic a broker."""

    def brokers(namesrv: Sequence[str]) -> set[str]:
        with Cluster(namesrv, timeout_ms=timeout_ms, access=Access.of_environment()) as cluster:
            try:
                found = cluster.route(topic).data.broker_datas
            except NameServersUnreachable:
                raise
            except NoRouteError:
                return set()
        return {address for broker in found for address in broker.broker_addrs.values()}

    return not set(one).isdisjoint(other) or not brokers(one).isdisjoint(brokers(other))


def _target_queues(options: WriteOptions, names: Iterable[str]) -> dict[str, list[MessageQueue]]:
    with Cluster.of(options) as cluster:
        found = {name: sorted(cluster.write_queues(name)) for name in sorted(names)}
    for name, queues in found.items():
        if not queues:
            raise ReplayError(f"topic {name}", "no queue can be written to now")
    return found


def target_queue(source: MessageQueue, queues: Sequence[MessageQueue]) -> MessageQueue:
    """Return the target queue: the one of the same broker and number, or else one by the number."""
    same = [
        queue for queue in queues if queue == MessageQueue(queue.topic, source.broker_name, source.queue_id)
    ]
    return same[0] if same else queues[source.queue_id % len(queues)]


def share_out(queues: Sequence[ReplayQueue], tasks: int) -> list[list[ReplayQueue]]:
    """Divide the queues among tasks with about equal numbers of messages."""
    groups: list[list[ReplayQueue]] = [[] for _ in range(max(1, min(tasks, len(queues))))]
    load = [(0, number) for number in range(len(groups))]
    for queue in sorted(queues, key=lambda each: -each.messages):
        least, number = heapq.heappop(load)
        groups[number].append(queue)
        heapq.heappush(load, (least + queue.messages, number))
    return groups


def shares(
    groups: Sequence[Sequence[ReplayQueue]], rate: float | None, byte_rate: float | None
) -> dict[int, Share]:
    """Return each task's share of the rate limits, in proportion to its work, so that all end together."""
    total = sum(queue.messages for group in groups for queue in group)
    parts = [sum(queue.messages for queue in group) / total for group in groups]
    return {
        number: Share(rate and rate * part, byte_rate and byte_rate * part)
        for number, part in enumerate(parts)
    }


@dataclass(slots=True)
class _Run:
    spark: SparkSession
    state: ReplayState
    replay: Replay
    options: WriteOptions
    run: str
    on_progress: Callable[[int, int | None], None] | None
    stop: threading.Event
    # Set to cancel the Spark job when no task has sent a message.
    unread: threading.Event = field(default_factory=threading.Event)
    total: int | None = None
    looked_s: float = field(default_factory=time.monotonic)
    stopped: bool = False

    def start(self, queues: list[ReplayQueue], *, begun: bool) -> None:
        """Find the target queues and own the state directory. Raises ReplayError if another run does."""
        known = self.replay.queues
        known |= _target_queues(self.options, {queue.target for queue in queues} - set(known))
        self.state.start(self.replay, self.run, begun=begun)

    def set_positions(self, stood: DataFrame, summary: ReplaySummary) -> None:
        """Set the groups' offsets once: later, groups that have consumed would receive messages again."""
        before = self.state.positions_set()
        if before is not None:
            summary.positions_before = before
            return
        summary.positions = self._set_groups(stood)
        self.state.save_positions(summary.positions)

    def _set_groups(self, stood: DataFrame) -> int:
        """Store the groups' offsets, and return their number. Raises BrokerError and ReplayError."""
        options, targets = self.options, sorted(self.replay.queues)
        columns = (*_QUEUE, "queue_offset", "properties")
        sent = messages(self.spark, f"{LIVE}{';'.join(options.namesrv)}", targets, columns=columns)
        groups: dict[str, dict[MessageQueue, int]] = {}
        wanted = target_offsets(sent, stood, self.replay.id)
        for row in run_action(self.spark, "replay: positions", wanted.collect, stop=self.stop):
            queue = MessageQueue(row.topic, row.broker_name, row.queue_id)
            groups.setdefault(row.group, {})[queue] = row.offset
        with Cluster.of(options) as cluster:
            cluster.queues(Topics(names=tuple(targets)))
            for group, offsets in groups.items():
                for refusal in cluster.commit(group, offsets):
                    raise refusal
                # Read the offsets back, because `commit` skips unreachable brokers. `committed` retries while
                # brokers are unreachable.
                stored = cluster.committed(group, sorted(offsets))
                if stored != offsets:
                    away = {queue.broker_name for queue in offsets if stored.get(queue) != offsets[queue]}
                    named = ", ".join(sorted(away))
                    problem = f"not stored at {named}; run again when these brokers are reachable"
                    raise ReplayError(f"offsets of group {group}", problem)
        return sum(map(len, groups.values()))

    def send(
        self, rows: DataFrame, queues: list[ReplayQueue], limits: tuple[float | None, float | None]
    ) -> None:
        self.total = sum(queue.messages for queue in queues)
        ways = {}
        for queue in queues:
            way = ways[queue.source] = target_queue(queue.source, self.replay.queues[queue.target])
            if self.replay.asked.order == "queue":
                queue.target_queue = f"{way.broker_name}/{way.queue_id}"
        groups = share_out(queues, slots(self.spark))
        by_key = self.replay.asked.order == "key"
        place = (self.state.path, self.run, self.replay.id)
        task = ReplayTask(self.options, *place, ways, self.replay.queues, by_key, shares(groups, *limits))
        # Each source queue belongs to one task. The sort order makes a task alternate between its queues, so
        # that several target queues receive messages concurrently.
        ends = [
            (queue.topic, queue.broker_name, queue.queue_id, number, queue.start, queue.end)
            for number, group in enumerate(groups)
            for queue in group
        ]
        schema = "topic string, broker_name string, queue_id int, task int, first bigint, last bigint"
        ordered = (
            rows.join(F.broadcast(self.spark.createDataFrame(ends, schema)), list(_QUEUE))
            .filter("queue_offset BETWEEN first AND last")
            .repartitionById(len(groups), "task")
            .sortWithinPartitions(F.expr("queue_offset - first"), *_QUEUE, "physical_offset")
            .drop("first", "last")
        )
        sent = ordered.mapInArrow(partial(in_task, task), "outcome binary")
        try:
            outcomes_in(run_action(self.spark, "replay", sent.collect, on_look=self._look, stop=self.unread))
        except JobStopped:
            pass  # the Spark job was cancelled before any task sent a message
        if not self.state.owned_by("" if self.stopped else self.run):
            raise ReplayError(self.state.shown, "another run has taken over the replay")
        if self.on_progress:
            self.on_progress(self._sent(), self.total)

    def _look(self) -> None:
        """Report the tasks' progress. After a request to stop, end each task after its batch."""
        if self.stop.is_set() and not self.stopped:
            self.stopped = self.state.owned_by(self.run)
            if self.stopped:
                self.state.take_over("")
                if not self.state.all_saved(self.run):
                    # No task has sent a message, so cancel the Spark job. No task can begin to send now,
                    # because tasks send only while their run owns the state directory.
                    self.unread.set()
        if self.on_progress and time.monotonic() - self.looked_s >= _LOOK_S:
            self.on_progress(self._sent(), self.total)
            self.looked_s = time.monotonic()

    def _sent(self) -> int:
        return sum(progress.messages for progress in self.state.all_saved(self.run))


def target_offsets(sent: DataFrame, positions: DataFrame, replay: str) -> DataFrame:
    """Return the next offset to consume for each group and queue of the target topics.

    Columns are group, topic, broker_name, queue_id and offset. `sent` has the messages of the targets with
    their properties; `positions` has the same columns as the result, for the source. Each group continues
    before the first message that it had not consumed in the source. If several source queues went to one
    target queue, the result is the lowest of their offsets, so that the group may receive messages twice but
    misses none.
    """
    origin = sent.filter(F.expr(f"properties['REPLAY_ID'] = '{replay}'")).select(
        *_QUEUE,
        "queue_offset",
        F.expr("properties['REPLAY_TOPIC']").alias("from_topic"),
        F.expr("properties['REPLAY_BROKER']").alias("from_broker"),
        F.expr("try_cast(properties['REPLAY_QUEUE'] AS int)").alias("from_queue"),
        F.expr("try_cast(properties['REPLAY_OFFSET'] AS bigint)").alias("from_offset"),
    )
    stood = positions.select(
        "group",
        F.col("topic").alias("from_topic"),
        F.col("broker_name").alias("from_broker"),
        F.col("queue_id").alias("from_queue"),
        F.col("offset").alias("stood_at"),
    )
    joined = origin.join(F.broadcast(stood), ["from_topic", "from_broker", "from_queue"])
    first = F.min(F.when(F.col("from_offset") >= F.col("stood_at"), F.col("queue_offset")))
    behind = F.max("queue_offset") + 1
    return joined.groupBy("group", *_QUEUE).agg(F.coalesce(first, behind).alias("offset"))


def _add_up(summary: ReplaySummary, before: Sequence[Progress], now: Sequence[Progress]) -> None:
    summary.planned = sum(queue.messages for queue in summary.queues)
    summary.planned_bytes = sum(queue.bytes for queue in summary.queues)
    summary.sent_before = sum(progress.messages for progress in before)
    summary.messages = sum(progress.messages for progress in now)
    summary.bytes = sum(progress.bytes for progress in now)
    summary.doubled = sum(progress.doubled for progress in now)
    summary.bad = sum(progress.bad for progress in (*before, *now))
    summary.own = sum(progress.own for progress in now)
    summary.left = summary.planned - sum(progress.rows for progress in now)
