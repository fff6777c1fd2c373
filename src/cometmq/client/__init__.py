"""The client: asyncio producers and consumers for CometMQ and Apache RocketMQ, with blocking versions."""

from __future__ import annotations

from cometmq.client.blocking import (
    SyncMessageStream,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
    SyncTransactionProducer,
)
from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.hooks import (
    ConsumeHook,
    Consuming,
    EndingTransaction,
    EndTransactionHook,
    FilterHook,
    SendHook,
    Sending,
)
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.namesrv_api import NamesrvApi
from cometmq.client.cluster.options import ClientOptions, TraceOptions
from cometmq.client.cluster.telemetry import Telemetry
from cometmq.client.consumer.listener import (
    ConsumeContext,
    ConsumeStatus,
    Listener,
    OrderlyContext,
    OrderlyListener,
    OrderlyStatus,
)
from cometmq.client.consumer.push import PushConsumer
from cometmq.client.consumer.stream import MessageStream
from cometmq.client.group.allocate import (
    AllocateAveragely,
    AllocateAveragelyByCircle,
    AllocateByConfig,
    AllocateByConsistentHash,
    AllocateByMachineRoom,
    AllocateByMachineRoomNearby,
    AllocateStrategy,
)
from cometmq.client.group.health import ConsumerHealth, QueueHealth
from cometmq.client.group.offset_files import FileOffsets
from cometmq.client.group.options import (
    ConsumeFromWhere,
    MessageModel,
    OffsetStorage,
    PullOptions,
    PushOptions,
    QueueListener,
)
from cometmq.client.group.process_queue import FlowLimits
from cometmq.client.group.subscription import filter_class, sql92, tags
from cometmq.client.idempotency.database import DatabaseMarks, SqliteMarks
from cometmq.client.idempotency.idempotent import idempotent, unique_key
from cometmq.client.idempotency.memory import MemoryMarks
from cometmq.client.idempotency.redis_marks import RedisMarks
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.outgoing import split_batches
from cometmq.client.producer.producer import Producer, select_by_random
from cometmq.client.producer.request_reply import reply_to
from cometmq.client.producer.selectors import QueueSelector, select_by_hash
from cometmq.client.producer.transaction import TransactionListener, TransactionProducer
from cometmq.client.pull.pull import PullConsumer, PullTurn
from cometmq.client.signals import stop_on_signal
from cometmq.protocol.ids import IdError
from cometmq.protocol.timers import BadHandle

__all__ = [
    "AllocateAveragely",
    "AllocateAveragelyByCircle",
    "AllocateByConfig",
    "AllocateByConsistentHash",
    "AllocateByMachineRoom",
    "AllocateByMachineRoomNearby",
    "AllocateStrategy",
    "BadHandle",
    "BrokerApi",
    "ClientInstance",
    "ClientOptions",
    "ConsumeContext",
    "ConsumeFromWhere",
    "ConsumeHook",
    "ConsumeStatus",
    "ConsumerHealth",
    "Consuming",
    "DatabaseMarks",
    "EndTransactionHook",
    "EndingTransaction",
    "FileOffsets",
    "FilterHook",
    "FlowLimits",
    "IdError",
    "Listener",
    "MemoryMarks",
    "MessageModel",
    "MessageStream",
    "NamesrvApi",
    "OffsetStorage",
    "OrderlyContext",
    "OrderlyListener",
    "OrderlyStatus",
    "Producer",
    "ProducerOptions",
    "PullConsumer",
    "PullOptions",
    "PullTurn",
    "PushConsumer",
    "PushOptions",
    "QueueHealth",
    "QueueListener",
    "QueueSelector",
    "RedisMarks",
    "SendHook",
    "Sending",
    "SqliteMarks",
    "SyncMessageStream",
    "SyncProducer",
    "SyncPullConsumer",
    "SyncPushConsumer",
    "SyncTransactionProducer",
    "Telemetry",
    "TraceOptions",
    "TransactionListener",
    "TransactionProducer",
    "filter_class",
    "idempotent",
    "reply_to",
    "select_by_hash",
    "select_by_random",
    "split_batches",
    "sql92",
    "stop_on_signal",
    "tags",
    "unique_key",
]
