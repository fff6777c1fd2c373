"""CometMQ: a message queue compatible with RocketMQ. This module exports the client's names and Admin.

    from cometmq import Message, Producer, PushConsumer

A name is loaded at its first use, so that the command line of a server does not load the client.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the modules in which __getattr__ looks for the names of __all__
    from cometmq.admin import Admin
    from cometmq.client import *
    from cometmq.errors import *
    from cometmq.message import *

__all__ = [
    "Admin", "BadHandle", "BeingHandled", "BodyError", "BodyTooLarge", "BrokerError", "ClientInstance",
    "ClientOptions", "ClientStateError", "CometError", "ConfigError", "ConnectError", "ConsumeContext",
    "ConsumeFromWhere", "ConsumeHook", "ConsumeStatus", "ConsumerHealth", "Consuming", "DatabaseMarks",
    "EndingTransaction", "FileOffsets", "FlowLimits", "IdError", "LiteConsumer", "MemoryMarks", "Message",
    "MessageExt", "MessageIllegal", "MessageModel", "MessageNotFound", "MessageQueue", "MessageStream",
    "NoRouteError", "OffsetStorage", "OrderlyContext", "OrderlyStatus", "Producer", "ProducerOptions",
    "PullConsumer", "PullOptions", "PullResult", "PullStatus", "PullTurn", "PushConsumer", "PushOptions",
    "RedisMarks", "ReplyTimeout", "RequestNotSent", "RequestTimeout", "SendFailed", "SendHook", "SendResult",
    "SendStatus", "Sending", "SimpleConsumer", "SimpleOptions", "SqliteMarks", "SyncLiteConsumer",
    "SyncMessageStream", "SyncProducer", "SyncPullConsumer", "SyncPushConsumer", "SyncSimpleConsumer",
    "SyncTransactionProducer", "Telemetry", "Terminal", "TooManySends", "TraceOptions", "TransactionListener",
    "TransactionProducer", "TransactionSendResult", "TransactionState", "Transient", "filter_class",
    "idempotent", "reply_to", "select_by_hash", "select_by_random", "split_batches", "sql92",
    "stop_on_signal", "tags", "unique_key",
]  # fmt: skip

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
