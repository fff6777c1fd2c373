"""The client: producers and consumers for CometMQ and Apache RocketMQ, asyncio first, with blocking faces."""

from __future__ import annotations

from cometmq.client.allocate import (
    AllocateAveragely,
    AllocateAveragelyByCircle,
    AllocateByConfig,
    AllocateByConsistentHash,
    AllocateByMachineRoom,
    AllocateStrategy,
)
from cometmq.client.api import BrokerApi, NamesrvApi
from cometmq.client.blocking import SyncProducer, SyncPullConsumer, SyncPushConsumer
from cometmq.client.health import ConsumerHealth, QueueHealth
from cometmq.client.instance import ClientInstance
from cometmq.client.listener import ConsumeContext, ConsumeStatus, Listener
from cometmq.client.options import (
    ClientOptions,
    ConsumeFromWhere,
    MessageModel,
    ProducerOptions,
    PullOptions,
    PushOptions,
)
from cometmq.client.process_queue import FlowLimits
from cometmq.client.producer import Producer, select_by_random
from cometmq.client.pull import PullConsumer
from cometmq.client.push import PushConsumer
from cometmq.client.selectors import QueueSelector, select_by_hash
from cometmq.client.subscription import sql92, tags

__all__ = [
    "AllocateAveragely",
    "AllocateAveragelyByCircle",
    "AllocateByConfig",
    "AllocateByConsistentHash",
    "AllocateByMachineRoom",
    "AllocateStrategy",
    "BrokerApi",
    "ClientInstance",
    "ClientOptions",
    "ConsumeContext",
    "ConsumeFromWhere",
    "ConsumeStatus",
    "ConsumerHealth",
    "FlowLimits",
    "Listener",
    "MessageModel",
    "NamesrvApi",
    "Producer",
    "ProducerOptions",
    "PullConsumer",
    "PullOptions",
    "PushConsumer",
    "PushOptions",
    "QueueHealth",
    "QueueSelector",
    "SyncProducer",
    "SyncPullConsumer",
    "SyncPushConsumer",
    "select_by_hash",
    "select_by_random",
    "sql92",
    "tags",
]
