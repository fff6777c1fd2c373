"""CometMQ: a message queue that speaks RocketMQ's protocol. This module offers the client's names,
and Admin.

    from cometmq import Message, Producer, PushConsumer

The names are loaded when they are first used, so that a server's command line does not wait for the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cometmq.admin import Admin
    from cometmq.client import (
        ClientInstance,
        ClientOptions,
        ConsumeContext,
        ConsumeFromWhere,
        ConsumeHook,
        ConsumerHealth,
        ConsumeStatus,
        Consuming,
        FlowLimits,
        MessageModel,
        OrderlyContext,
        OrderlyStatus,
        Producer,
        ProducerOptions,
        PullConsumer,
        PullOptions,
        PushConsumer,
        PushOptions,
        SendHook,
        Sending,
        SyncProducer,
        SyncPullConsumer,
        SyncPushConsumer,
        SyncTransactionProducer,
        TraceOptions,
        TransactionListener,
        TransactionProducer,
        filter_class,
        reply_to,
        select_by_hash,
        select_by_random,
        split_batches,
        sql92,
        tags,
    )
    from cometmq.errors import (
        BodyError,
        BodyTooLarge,
        BrokerError,
        ClientStateError,
        CometError,
        ConfigError,
        ConnectError,
        MessageIllegal,
        NoRouteError,
        ReplyTimeout,
        RequestTimeout,
        SendFailed,
        Terminal,
        Transient,
    )
    from cometmq.message import (
        Message,
        MessageExt,
        MessageQueue,
        PullResult,
        PullStatus,
        SendResult,
        SendStatus,
        TransactionSendResult,
        TransactionState,
    )

__all__ = [
    "Admin",
    "BodyError",
    "BodyTooLarge",
    "BrokerError",
    "ClientInstance",
    "ClientOptions",
    "ClientStateError",
    "CometError",
    "ConfigError",
    "ConnectError",
    "ConsumeContext",
    "ConsumeFromWhere",
    "ConsumeHook",
    "ConsumeStatus",
    "ConsumerHealth",
    "Consuming",
    "FlowLimits",
    "Message",
    "MessageExt",
    "MessageIllegal",
    "MessageModel",
    "MessageQueue",
    "NoRouteError",
    "OrderlyContext",
    "OrderlyStatus",
    "Producer",
    "ProducerOptions",
    "PullConsumer",
    "PullOptions",
    "PullResult",
    "PullStatus",
    "PushConsumer",
    "PushOptions",
    "ReplyTimeout",
    "RequestTimeout",
    "SendFailed",
    "SendHook",
    "SendResult",
    "SendStatus",
    "Sending",
    "SyncProducer",
    "SyncPullConsumer",
    "SyncPushConsumer",
    "SyncTransactionProducer",
    "Terminal",
    "TraceOptions",
    "TransactionListener",
    "TransactionProducer",
    "TransactionSendResult",
    "TransactionState",
    "Transient",
    "filter_class",
    "reply_to",
    "select_by_hash",
    "select_by_random",
    "split_batches",
    "sql92",
    "tags",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in ("cometmq.message", "cometmq.errors", "cometmq.client", "cometmq.admin"):
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
