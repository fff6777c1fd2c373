"""The metrics of a broker (docs/metrics.md).

A metric has the name that rocketmq-exporter or RocketMQ 5.x uses; metrics that neither has begin with
`cometmq_`. Metrics of the whole broker come first, then those of topics, groups and queues, so that the limit
on the number of samples drops the most detailed ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from cometmq.broker.admin.runtime import RuntimeAdmin
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.protection import Protection
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.turns import Turns
from cometmq.broker.groups.clients import ClientInfo, ConsumerGroup, ConsumerTable, ProducerTable
from cometmq.broker.pop.service import PopService
from cometmq.broker.rates.rate_limits import RateLimits
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.transactions.ledger import Ledger
from cometmq.metrics import Families
from cometmq.protocol import codes
from cometmq.protocol.bodies.client import CONSUME_TYPES, MESSAGE_MODELS
from cometmq.protocol.codes import is_system_group
from cometmq.store import Clock, MessageStore

MAX_LATENCIES = 2_000
"""The maximum number of messages, the oldest unconsumed one of each queue, whose age one collection reads."""
# The suffix of the metric name in rocketmq-exporter for each key of the broker's runtime table.
RUNTIME = {
    "msgPutTotalTodayNow": "msg_put_total_today_now",
    "msgGetTotalTodayNow": "msg_gettotal_today_now",
    "msgPutTotalTodayMorning": "msg_puttotal_todaymorning",
    "msgGetTotalTodayMorning": "msg_gettotal_todaymorning",
    "msgPutTotalYesterdayMorning": "msg_puttotal_yesterdaymorning",
    "msgGetTotalYesterdayMorning": "msg_gettotal_yesterdaymorning",
    "dispatchBehindBytes": "dispatch_behind_bytes",
    "dispatchMaxBuffer": "dispatch_maxbuffer",
    "earliestMessageTimeStamp": "earliest_message_timestamp",
    "putMessageTimesTotal": "putmessage_times_total",
    "putMessageSizeTotal": "put_message_size_total",
    "putMessageAverageSize": "put_message_average_size",
    "pageCacheLockTimeMills": "pagecache_lock_time_mills",
    "startAcceptSendRequestTimeStamp": "start_accept_sendrequest_time",
    "remainTransientStoreBufferNumbs": "remain_transientstore_buffer_numbs",
    "sendThreadPoolQueueSize": "send_threadpool_queue_size",
    "sendThreadPoolQueueCapacity": "send_threadpoolqueue_capacity",
    "sendThreadPoolQueueHeadWaitTimeMills": "send_threadpoolqueue_headwait_timemills",
    "pullThreadPoolQueueSize": "pull_threadpoolqueue_size",
    "pullThreadPoolQueueCapacity": "pull_threadpoolqueue_capacity",
    "pullThreadPoolQueueHeadWaitTimeMills": "pull_threadpoolqueue_headwait_timemills",
    "queryThreadPoolQueueSize": "query_threadpoolqueue_size",
    "queryThreadPoolQueueCapacity": "query_threadpool_queue_capacity",
    "queryThreadPoolQueueHeadWaitTimeMills": "query_threadpoolqueue_headwait_timemills",
    "commitLogDiskRatio": "commitlog_disk_ratio",
    "consumeQueueDiskRatio": "consumequeue_disk_ratio",
    "commitLogMaxOffset": "commitlog_maxoffset",
    "commitLogMinOffset": "commitlog_minoffset",
}
# Metric names by key of the runtime table, for the keys whose value has three rates: over 10, 60 and 600 s.
RATES = {
    "putTps": "put_tps",
    "getFoundTps": "getfound_tps",
    "getMissTps": "getmiss_tps",
    "getTotalTps": "gettotal_tps",
    "getTransferedTps": "gettransfered_tps",
}
# The names that RocketMQ 5.x's metrics use for consume types.
CONSUME_MODES = dict(zip(CONSUME_TYPES, ("pull", "push", "pop"), strict=True))
BROADCASTING, CLUSTERING = MESSAGE_MODELS
BYTES, MILLISECONDS = "bytes", "milliseconds"
Lag = tuple[str, str, int, int]  # (group, topic, queue id, number of messages not consumed by the group)


class _Progress(msgspec.Struct):
    """The progress of a group in a topic, over all queues."""

    behind: int = 0  # The lag in messages
    consumed: int = 0  # The sum of the consumer offsets
    oldest_ms: int = 0  # The age of the oldest message that is not consumed
    pops: bool = False  # Whether the group pops from the topic; if not, the following fields are 0
    leased: int = 0
    ready: int = 0  # The number of messages that have not been popped
    queueing_ms: int = 0  # The age of the oldest message that has not been popped


class BrokerMetrics(msgspec.Struct, eq=False):
    """Collects the metrics of a broker. `more` holds functions that add those of other parts of the process.

    `connections` returns the number of open connections, and `registered` is Registrar.state.
    """

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    consumers: ConsumerTable
    producers: ProducerTable
    stats: Stats
    protection: Protection
    runtime: RuntimeAdmin
    address: BrokerAddress
    transactions: Ledger
    pops: PopService
    connections: Callable[[], int]
    registered: Callable[[], tuple[int, int]]
    rates: RateLimits
    more: list[Callable[[Families], None]]

    def why_not_ready(self) -> str:
        """Return why the broker is not ready, or "" if it is ready."""
        done, wanted = self.registered()
        if wanted and not done:
            return f"registered with none of {wanted} name servers"
        if self.runtime.replication.facts().get("raftRole") == "failed":
            return "this raft member has failed and takes no part until it is started again"
        return self.store.flags.why()

    async def collect(self, families: Families) -> None:
        """Add all metrics to `families`, and let other tasks of the event loop run during the collection."""
        turns = Turns()
        table = await self.runtime.table()
        self._runtime(families, table)
        self._broker(families)
        self._timers(families, table)
        self._store(families, float(table["earliestMessageTimeStamp"]))
        for add in self.more:
            add(families)
        self._clients(families)
        self._rate_limits(families)
        await self._topics(families, turns)
        lags = await self._groups(families, turns)
        async for group, topic, queue_id, lag in turns.each(lags):
            families.gauge(
                "cometmq_queue_lag_messages", "Lag of a consumer group in a queue, in messages.", lag,
                **self._node(), consumer_group=group, topic=topic, queue=queue_id,
            )  # fmt: skip
            if families.cut:
                break

    def _node(self) -> dict[str, str]:
        """Return the labels that RocketMQ 5.x's metrics use for a broker."""
        config = self.config
        return {"cluster": config.broker_cluster_name, "node_type": "broker", "node_id": config.broker_name}

    def _of_broker(self) -> dict[str, str]:
        """Return the labels that rocketmq-exporter uses for a broker."""
        return {"cluster": self.config.broker_cluster_name, "broker": self.config.broker_name}

    def _runtime(self, families: Families, table: dict[str, str]) -> None:
        """Add the metrics that rocketmq-exporter derives from the runtime table."""
        place = {**self._of_broker(), "brokerIP": self.address.text}
        labels = {
            **place,
            "brokerHost": "",  # rocketmq-exporter leaves `brokerHost` empty, too
            "des": table["brokerVersionDesc"],
            "boottime": table["bootTimestamp"],
            "broker_version": table["brokerVersion"],
        }
        found = {name: (f"{key} of brokerStatus.", float(table[key])) for key, name in RUNTIME.items()}
        for key, name in RATES.items():
            for span, rate in zip((10, 60, 600), table[key].split(), strict=True):
                found[f"{name}{span}"] = (f"{key} of brokerStatus, over {span} s.", float(rate))
        found["remain_howmanydata_toflush"] = (
            "Bytes of the log not yet synced.",
            self.store.flusher.unflushed,
        )
        with suppress(OSError):
            usage = self.store.disk.usage(self.store.config.commit_log_dirs[0])
            for name, size in (("total", usage.total), ("free", usage.usable)):
                found[f"commitlogdir_capacity_{name}"] = (f"Bytes of the log's disk: {name}.", size)
        for name, (words, value) in found.items():
            families.gauge(f"rocketmq_brokeruntime_{name}", words, value, **labels)
        now_ms = mono_ms(self.clock)
        for name, words, kind in (
            ("tps", "Messages stored per second, over a minute.", "put"),
            ("qps", "Messages pulled per second, over a minute.", "transferred"),
        ):
            per_second = self.stats.of_broker(kind, now_ms)[0].per_second
            families.gauge(f"rocketmq_broker_{name}", words, per_second, **place)
        lag = float(table.get("haLagBytes", 0))
        families.gauge("rocketmq_broker_commitlog_diff", "Bytes by which a slave lags.", lag, **place)

    def _broker(self, families: Families) -> None:
        node, load = self._node(), self.protection.load
        topics, groups = len(self.tables.topics.table), len(self.tables.groups.table)
        done, wanted = self.registered()
        for name, words, value in (
            ("rocketmq_broker_permission", "Permission: 2 write, 4 read.", self.config.broker_permission),
            ("rocketmq_topic_number", "Number of topics.", topics),
            ("rocketmq_consumer_group_number", "Number of consumer groups.", groups),
            ("cometmq_loop_lag_seconds", "Lag of the event loop.", load.lag_ms / 1000),
            (
                "rocketmq_half_messages",
                "Half messages neither committed nor rolled back.",
                self.transactions.count_open(max(self.store.max_offset(codes.TRANS_HALF_TOPIC, 0), 0)),
            ),
            (
                "rocketmq_pop_checkpoint_buffer_size",
                "Checkpoints in memory: leases of an earlier run, or of Apache's broker.",
                len(self.pops.revive),
            ),
            ("cometmq_pop_leases", "Messages that are leased to consumers.", len(self.pops.leases)),
            ("cometmq_pop_waiting", "Pops that wait for a message.", len(self.pops.pops.polls)),
            ("cometmq_sends_waiting", "Sends that wait for a sync or for slaves.", load.waiting),
            ("cometmq_connections", "Open connections.", self.connections()),
            ("cometmq_name_servers", "Name servers that the broker registers with.", wanted),
            ("cometmq_name_servers_registered", "Name servers where the broker is registered.", done),
        ):
            families.gauge(name, words, float(value), **node)
        waiting = load.waiting
        families.gauge(
            "rocketmq_processor_watermark", "Send requests that wait.", waiting, **node, processor="send"
        )
        refused = self.protection.refused
        families.counter("cometmq_requests_refused", "Requests refused by back-pressure.", refused, **node)

    def _rate_limits(self, families: Families) -> None:
        for name, words, label, counts in (
            ("delayed_sends", "Sends that a rate limit has delayed.", "topic", self.rates.delayed_sends),
            ("refused_sends", "Sends that a rate limit has refused.", "topic", self.rates.refused_sends),
            (
                "delayed_receives", "Times that a rate limit has parked a pull or pop.", "consumer_group",
                self.rates.delayed_receives,
            ),
        ):  # fmt: skip
            for (named, kind), times in list(counts.items()):
                families.counter(
                    f"cometmq_rate_limit_{name}", words, times, **self._node(), **{label: named}, limit=kind
                )

    def _of_disk(self) -> dict[str, str]:
        """Return the labels that RocketMQ 5.x's metrics use for the store."""
        return {**self._node(), "storage_type": "local", "storage_medium": "disk"}

    def _timers(self, families: Families, table: dict[str, str]) -> None:
        if "timerCongestNum" not in table:
            return
        families.gauge(
            "rocketmq_timer_enqueue_lag", "Timer messages that are not scheduled yet.",
            float(table["timerOffsetBehind"]), **self._of_disk(),
        )  # fmt: skip
        families.gauge(
            "rocketmq_timer_dequeue_latency", "Lateness of due timer messages.",
            float(table["timerReadBehind"]) * 1000, unit=MILLISECONDS, **self._of_disk(),
        )  # fmt: skip

    def _store(self, families: Families, earliest_ms: float) -> None:
        store, node, disk = self.store, self._node(), self._of_disk()
        flusher, log = store.flusher, store.log
        with suppress(OSError):
            used = store.disk.usage(store.config.store_path_root_dir).used
            words = "Used bytes of the store's disk."
            families.gauge("rocketmq_storage_size", words, used, unit=BYTES, **disk)
        for name, words, value in (
            ("flush", "Bytes of the log not yet synced.", flusher.unflushed),
            ("dispatch", "Bytes of the log not yet in consume queues.", 0),
        ):
            families.gauge(f"rocketmq_storage_{name}_behind_bytes", words, value, unit=BYTES, **disk)
        if earliest_ms > 0:
            families.gauge(
                "rocketmq_storage_message_reserve_time", "Age of the oldest message in the store.",
                max(self.clock.time_ms() - earliest_ms, 0), unit=MILLISECONDS, **disk,
            )  # fmt: skip
        size = log.end - log.min_position
        families.gauge("cometmq_log_size_bytes", "Size of the log in bytes.", size, unit=BYTES, **node)
        families.gauge(
            "cometmq_store_writeable", "Whether messages are accepted.", store.flags.writeable, **node
        )
        words = "Number of syncs of the log."
        families.counter("cometmq_log_syncs", words, flusher.syncs, **node)
        families.counter("cometmq_log_sync_seconds", "Duration of all log syncs.", flusher.synced_s, **node)
        for path, share in store.fullness.log_ratios.items():
            families.gauge(
                "cometmq_disk_used_ratio", "Used share of a disk of the log.", share, **node, path=path
            )
        self._tiered(families)

    def _tiered(self, families: Families) -> None:
        tiered, node = self.store.tiered, self._node()
        if tiered is None:
            return
        counts, held = tiered.counts, tiered.table.by_base
        for name, words, value in (
            ("segments", "Segments in the object store.", len(held)),
            (
                "size_bytes",
                "Bytes of segments in the object store.",
                sum(each.size for each in held.values()),
            ),
            ("upload_behind_bytes", "Bytes of full segments that are not uploaded.", tiered.waiting_bytes),
        ):
            families.gauge(f"cometmq_tiered_{name}", words, value, **node)
        for name, words, value in (
            ("uploaded_bytes", "Bytes of uploaded segments.", counts.uploaded_bytes),
            ("reads", "Requests for messages to the object store.", counts.reads),
            ("read_bytes", "Bytes of messages from the object store.", counts.read_bytes),
            ("failures", "Failed requests to the object store.", counts.failures),
            ("damaged", "Blocks from the object store that do not match their CRC.", counts.damaged),
            ("lost_segments", "Segments deleted without a copy, or missing there.", counts.lost),
        ):
            families.counter(f"cometmq_tiered_{name}", words, value, **node)

    def _clients(self, families: Families) -> None:
        node, of_broker = self._node(), self._of_broker()
        producers: Counter[tuple[str, str, str]] = Counter()
        for name, group in sorted(self.producers.groups.items()):
            producers.update(map(_kind, group.by_channel.values()))
            count = len(group.by_channel)
            families.gauge("rocketmq_producer_count", "Online producers.", count, **of_broker, group=name)
        for (language, version, protocol), count in producers.items():
            families.gauge(
                "rocketmq_producer_connections", "Connections of producers.", count,
                **node, language=language, version=version, protocol_type=protocol,
            )  # fmt: skip
        for name, online in sorted(self.consumers.groups.items()):
            kinds = Counter(map(_kind, online.by_channel.values()))
            for (language, version, protocol), count in kinds.items():
                families.gauge(
                    "rocketmq_consumer_connections", "Connections of a group's members.", count,
                    **node, consumer_group=name, language=language, version=version,
                    consume_mode=CONSUME_MODES.get(online.consume_type, ""), protocol_type=protocol,
                    is_system=is_system_group(name),
                )  # fmt: skip

    async def _topics(self, families: Families, turns: Turns) -> None:
        of_broker, node, topics = self._of_broker(), self._node(), self.tables.topics
        waiting, now_ms = self.tables.timers.counts, mono_ms(self.clock)
        async for topic in turns.each(sorted(topics.table)):
            config = topics.get(topic)
            if config is None:
                continue
            stored = 0
            async for queue_id in turns.each(range(config.write_queue_nums)):
                stored += max(self.store.max_offset(topic, queue_id), 0)
            if topic.startswith(codes.RETRY_PREFIX):
                name, labels = "rocketmq_topic_retry_offset", {**of_broker, "topic": topic}
            elif topic.startswith(codes.DLQ_PREFIX):
                name, labels = (
                    "rocketmq_topic_dlq_offset",
                    {**of_broker, "group": topic[len(codes.DLQ_PREFIX) :]},
                )
            else:
                name, labels = "rocketmq_producer_offset", {**of_broker, "topic": topic}
            families.gauge(name, "Messages stored in a topic since its creation.", stored, **labels)
            if "group" in labels:
                families.counter(
                    "rocketmq_send_to_dlq_messages", "Dead letters of a consumer group.", stored,
                    **node, consumer_group=labels["group"], is_system=is_system_group(labels["group"]),
                )  # fmt: skip
            rate = self.stats.topic_put(topic, stored, now_ms)[0].per_second
            words = "Messages stored per second, over a minute."
            families.gauge("rocketmq_producer_tps", words, rate, **of_broker, topic=topic)
            if topic in waiting:
                families.gauge(
                    "rocketmq_timing_messages", "Messages that wait for their delivery time.", waiting[topic],
                    **self._of_disk(), topic=topic,
                )  # fmt: skip
            families.counter(
                "rocketmq_messages_in", "Messages stored in a topic since its creation.", stored,
                **node, topic=topic, is_system=topics.is_system(topic),
            )  # fmt: skip
            if families.cut:
                return

    async def _groups(self, families: Families, turns: Turns) -> list[Lag]:
        """Add the metrics of all groups. Return each group's lag in each queue in which it has an offset."""
        lags: list[Lag] = []
        latencies = MAX_LATENCIES
        offsets = self.tables.offsets
        async for group in turns.each(sorted(offsets.groups() | self.consumers.groups.keys())):
            online = self.consumers.groups.get(group)
            members = len(online.by_channel) if online is not None else 0
            families.gauge(
                "rocketmq_group_count", "Online members.", members, **self._of_broker(), group=group
            )
            async for topic in turns.each(sorted(offsets.topics_of(group))):
                found = _Progress(pops=online is not None and online.pops)
                async for queue_id, offset in turns.each(offsets.queues(group, topic).items()):
                    end = max(self.store.max_offset(topic, queue_id), 0)
                    lag = end - max(offset, 0)
                    lags.append((group, topic, queue_id, lag))
                    found.consumed += max(offset, 0)
                    found.behind += lag
                    oldest_ms = 0
                    if lag > 0 and latencies:
                        latencies -= 1
                        oldest_ms = await self._waiting_ms(topic, queue_id, offset)
                        found.oldest_ms = max(found.oldest_ms, oldest_ms)
                    popped = self.pops.leases.find((group, topic, queue_id))
                    if popped is None:
                        found.ready += lag
                        found.queueing_ms = max(found.queueing_ms, oldest_ms)
                        continue
                    found.pops = True
                    found.leased += len(popped.leases)
                    ready = popped.ready(end)
                    found.ready += ready
                    if ready and latencies:
                        latencies -= 1
                        queueing_ms = await self._waiting_ms(topic, queue_id, popped.head)
                        found.queueing_ms = max(found.queueing_ms, queueing_ms)
                self._progress(families, group, topic, online, found)
            if families.cut:
                break
        return lags

    def _progress(
        self,
        families: Families,
        group: str,
        topic: str,
        online: ConsumerGroup | None,
        found: _Progress,
    ) -> None:
        of_broker, node = self._of_broker(), self._node()
        members = len(online.by_channel) if online is not None else 0
        model = (online.message_model if online is not None else "") or CLUSTERING
        kind = "diff"
        if topic.startswith(codes.RETRY_PREFIX):
            kind = "retrydiff"
        elif topic.startswith(codes.DLQ_PREFIX):
            kind = "dlqdiff"
        if model != BROADCASTING:  # A broadcasting group stores its offsets itself, so the lag is unknown
            families.gauge(
                f"rocketmq_group_{kind}", "Lag of a consumer group in messages.", found.behind,
                **of_broker, group=group, topic=topic, countOfOnlineConsumers=members,
                msgModel=MESSAGE_MODELS.index(CLUSTERING),
            )  # fmt: skip
        both = {"group": group, "topic": topic}
        rate = self.stats.group_rate(group, topic, mono_ms(self.clock))
        families.gauge("rocketmq_consumer_tps", "Messages consumed per second.", rate, **of_broker, **both)
        words = "Sum of consumer offsets."
        families.gauge("rocketmq_consumer_offset", words, found.consumed, **of_broker, **both)
        system = self.tables.topics.is_system(topic) or is_system_group(group)
        lag = {**node, "consumer_group": group, "topic": topic, "is_system": str(system).lower()}
        families.counter(
            "rocketmq_messages_out", "Messages pulled by a group since the broker's start.",
            self.stats.group_total(group, topic), **lag,
        )  # fmt: skip
        if (copies := self.pops.retries.copied.get((group, topic))) is not None:
            families.counter(
                "rocketmq_pop_revive_retry_messages",
                "Messages copied to a retry topic, because their leases expired, since the broker's start.",
                copies, **node, consumer_group=group, topic=topic, put_status="PUT_OK",
            )  # fmt: skip
        lag["is_retry"] = str(kind == "retrydiff").lower()
        families.gauge("rocketmq_consumer_lag_messages", "Lag of a group in messages.", found.behind, **lag)
        words = "Age of a group's oldest message not yet consumed."
        families.gauge("rocketmq_consumer_lag_latency", words, found.oldest_ms, unit=MILLISECONDS, **lag)
        families.gauge("rocketmq_group_get_latency_by_storetime", words, found.oldest_ms, **of_broker, **both)
        if found.pops:
            for name, words, count in (
                ("inflight", "Messages leased to a group's members.", found.leased),
                ("ready", "Messages that a group has not popped yet.", found.ready),
            ):
                families.gauge(f"rocketmq_consumer_{name}_messages", words, count, **lag)
            words = "Age of a group's oldest message not yet popped."
            families.gauge(
                "rocketmq_consumer_queueing_latency", words, found.queueing_ms, unit=MILLISECONDS, **lag
            )

    async def _waiting_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the age, in ms, of the message at an offset, or 0 if it is unknown."""
        queue = self.store.queues.find_queue(topic, queue_id)
        first = max(offset, self.store.min_offset(topic, queue_id), 0)
        stored = await self.store.lookups.time_to_show(queue, first)
        return max(self.clock.time_ms() - stored, 0) if stored > 0 else 0


def _kind(client: ClientInfo) -> tuple[str, str, str]:
    """Return a client's language, version and protocol in the form of RocketMQ 5.x's metrics.

    Any text may be sent as a language. Unknown ones become `other`, so that the number of samples is limited.
    """
    language = client.language if client.language in codes.LANGUAGES else "OTHER"
    protocol = "grpc" if client.grpc_type else "remoting"
    return language.lower(), codes.version_name(client.version).lower(), protocol
