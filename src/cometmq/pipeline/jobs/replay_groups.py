"""Consumer offsets in the target topics of a replay.

Each group continues before the first message that it had not consumed in the source topics.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from cometmq.message import MessageQueue
from cometmq.pipeline.base.engine import run_action
from cometmq.pipeline.base.errors import ReplayError
from cometmq.pipeline.base.options import Topics, WriteOptions
from cometmq.pipeline.jobs.inputs import LIVE, messages
from cometmq.pipeline.live.cluster import Cluster

_TARGET = ("topic", "broker_name", "queue_id")


def target_offsets(sent: DataFrame, positions: DataFrame, replay: str) -> DataFrame:
    """Return the next offset to consume for each group and queue of the target topics.

    Columns are group, topic, broker_name, queue_id and offset. `sent` has the messages of the targets with
    their properties; `positions` has the same columns as the result, for the source. If several source queues
    went to one target queue, the result is the lowest of their offsets, so that the group may receive
    messages twice but misses none.
    """
    origin = sent.filter(F.expr(f"properties['REPLAY_ID'] = '{replay}'")).select(
        *_TARGET,
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
    return joined.groupBy("group", *_TARGET).agg(F.coalesce(first, behind).alias("offset"))


def set_groups(
    spark: SparkSession,
    options: WriteOptions,
    targets: Sequence[str],
    positions: DataFrame,
    replay: str,
    stop: threading.Event,
) -> int:
    """Store the groups' offsets in the target topics on the brokers. Return the number of offsets.

    Raises BrokerError if a broker refuses the offsets, and ReplayError if a broker was unreachable.
    """
    columns = (*_TARGET, "queue_offset", "properties")
    sent = messages(spark, f"{LIVE}{';'.join(options.namesrv)}", targets, columns=columns)
    groups: dict[str, dict[MessageQueue, int]] = {}
    wanted = target_offsets(sent, positions, replay)
    for row in run_action(spark, "replay: positions", wanted.collect, stop=stop):
        queue = MessageQueue(row.topic, row.broker_name, row.queue_id)
        groups.setdefault(row.group, {})[queue] = row.offset
    with Cluster(options.namesrv, timeout_ms=options.timeout_ms, access=options.access) as cluster:
        cluster.queues(Topics(names=tuple(targets)))
        for group, offsets in groups.items():
            for refusal in cluster.commit(group, offsets):
                raise refusal
            # Read the offsets back, because `commit` skips unreachable brokers. `committed` retries while
            # brokers are unreachable.
            stored = cluster.committed(group, sorted(offsets))
            if stored != offsets:
                away = sorted({queue.broker_name for queue in offsets if stored.get(queue) != offsets[queue]})
                problem = f"not stored at {', '.join(away)}; run again when these brokers are reachable"
                raise ReplayError(f"offsets of group {group}", problem)
    return sum(map(len, groups.values()))
