"""The client: asyncio producers and consumers for CometMQ and Apache RocketMQ, with blocking versions.

A name is loaded at its first use, so that a program that only sends does not load the consumers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.client.blocking import (
        SyncLiteConsumer,
        SyncMessageStream,
        SyncProducer,
        SyncPullConsumer,
        SyncPushConsumer,
        SyncSimpleConsumer,
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
        SimpleOptions,
    )
    from cometmq.client.group.process_queue import FlowLimits
    from cometmq.client.group.subscription import filter_class, sql92, tags
    from cometmq.client.idempotency.database import DatabaseMarks, SqliteMarks
    from cometmq.client.idempotency.idempotent import idempotent, unique_key
    from cometmq.client.idempotency.memory import MemoryMarks
    from cometmq.client.idempotency.redis_marks import RedisMarks
    from cometmq.client.producer.options import ProducerOptions
    from cometmq.client.producer.outgoing import reply_to, split_batches
    from cometmq.client.producer.producer import Producer, select_by_random
    from cometmq.client.producer.selectors import QueueSelector, select_by_hash
    from cometmq.client.producer.transaction import TransactionListener, TransactionProducer
    from cometmq.client.pull.pull import PullConsumer, PullTurn
    from cometmq.client.signals import stop_on_signal
    from cometmq.client.simple.lite import LiteConsumer
    from cometmq.client.simple.simple import SimpleConsumer
    from cometmq.protocol.ids import IdError
    from cometmq.protocol.timers import BadHandle

__all__ = [
    "AllocateAveragely", "AllocateAveragelyByCircle", "AllocateByConfig", "AllocateByConsistentHash",
    "AllocateByMachineRoom", "AllocateByMachineRoomNearby", "AllocateStrategy", "BadHandle", "BrokerApi",
    "ClientInstance", "ClientOptions", "ConsumeContext", "ConsumeFromWhere", "ConsumeHook", "ConsumeStatus",
    "ConsumerHealth", "Consuming", "DatabaseMarks", "EndTransactionHook", "EndingTransaction", "FileOffsets",
    "FilterHook", "FlowLimits", "IdError", "Listener", "LiteConsumer", "MemoryMarks", "MessageModel",
    "MessageStream", "NamesrvApi", "OffsetStorage", "OrderlyContext", "OrderlyListener", "OrderlyStatus",
    "Producer", "ProducerOptions", "PullConsumer", "PullOptions", "PullTurn", "PushConsumer", "PushOptions",
    "QueueHealth", "QueueListener", "QueueSelector", "RedisMarks", "SendHook", "Sending", "SimpleConsumer",
    "SimpleOptions", "SqliteMarks", "SyncLiteConsumer", "SyncMessageStream", "SyncProducer",
    "SyncPullConsumer", "SyncPushConsumer", "SyncSimpleConsumer", "SyncTransactionProducer", "Telemetry",
    "TraceOptions", "TransactionListener", "TransactionProducer", "filter_class", "idempotent", "reply_to",
    "select_by_hash", "select_by_random", "split_batches", "sql92", "stop_on_signal", "tags", "unique_key",
]  # fmt: skip

_MODULES = {
    "cometmq.client.blocking": (
        "SyncLiteConsumer SyncMessageStream SyncProducer SyncPullConsumer SyncPushConsumer "
        "SyncSimpleConsumer SyncTransactionProducer"
    ),
    "cometmq.client.cluster.broker_api": "BrokerApi",
    "cometmq.client.cluster.hooks": (
        "ConsumeHook Consuming EndingTransaction EndTransactionHook FilterHook SendHook Sending"
    ),
    "cometmq.client.cluster.instance": "ClientInstance",
    "cometmq.client.cluster.namesrv_api": "NamesrvApi",
    "cometmq.client.cluster.options": "ClientOptions TraceOptions",
    "cometmq.client.cluster.telemetry": "Telemetry",
    "cometmq.client.consumer.listener": (
        "ConsumeContext ConsumeStatus Listener OrderlyContext OrderlyListener OrderlyStatus"
    ),
    "cometmq.client.consumer.push": "PushConsumer",
    "cometmq.client.consumer.stream": "MessageStream",
    "cometmq.client.group.allocate": (
        "AllocateAveragely AllocateAveragelyByCircle AllocateByConfig AllocateByConsistentHash "
        "AllocateByMachineRoom AllocateByMachineRoomNearby AllocateStrategy"
    ),
    "cometmq.client.group.health": "ConsumerHealth QueueHealth",
    "cometmq.client.group.offset_files": "FileOffsets",
    "cometmq.client.group.options": (
        "ConsumeFromWhere MessageModel OffsetStorage PullOptions PushOptions QueueListener SimpleOptions"
    ),
    "cometmq.client.group.process_queue": "FlowLimits",
    "cometmq.client.group.subscription": "filter_class sql92 tags",
    "cometmq.client.idempotency.database": "DatabaseMarks SqliteMarks",
    "cometmq.client.idempotency.idempotent": "idempotent unique_key",
    "cometmq.client.idempotency.memory": "MemoryMarks",
    "cometmq.client.idempotency.redis_marks": "RedisMarks",
    "cometmq.client.producer.options": "ProducerOptions",
    "cometmq.client.producer.outgoing": "reply_to split_batches",
    "cometmq.client.producer.producer": "Producer select_by_random",
    "cometmq.client.producer.selectors": "QueueSelector select_by_hash",
    "cometmq.client.producer.transaction": "TransactionListener TransactionProducer",
    "cometmq.client.pull.pull": "PullConsumer PullTurn",
    "cometmq.client.signals": "stop_on_signal",
    "cometmq.client.simple.lite": "LiteConsumer",
    "cometmq.client.simple.simple": "SimpleConsumer",
    "cometmq.protocol.ids": "IdError",
    "cometmq.protocol.timers": "BadHandle",
}
"""The public names that each module defines."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
