"""The settings of a producer. Times are in seconds, sizes in bytes. The defaults are RocketMQ's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from cometmq.client.cluster.hooks import EndTransactionHook, SendHook, Sending, check_hooks
from cometmq.client.cluster.options import SOME_TIME, check_range, check_ranges
from cometmq.client.producer.retry import RETRY_RESPONSE_CODES
from cometmq.errors import ConfigError
from cometmq.protocol.codes import MAX_TOPIC_LENGTH, is_legal_name
from cometmq.protocol.compression import Compression

_SOME, _ANY = (1, math.inf), (0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """The settings of a producer. Times are in seconds, sizes in bytes.

    Attributes:
        send_timeout_s: The timeout of all tries of a send together, without the wait for `max_in_flight`.
        try_timeout_s: The timeout of one try while more tries remain. None: an unresponsive broker may use up
            the whole `send_timeout_s`.
        retry_times: The number of tries after the first, each on another broker if there is one.
        retry_response_codes: The response codes of a broker after which a send is tried again.
        retry_another_broker_when_not_store_ok: Try again if the message was stored but not flushed or
            replicated in time. This can store duplicates.
        send_latency_fault_enable: Avoid a slow or failed broker for 2 to 30 s while other brokers are
            available.
        compress_over: Bodies of at least this size are compressed. Batches are never compressed.
        compress_type: ZLIB, LZ4 or ZSTD. LZ4 and ZSTD require cometmq[zstd] at producers and consumers.
        compress_level: 0 to 9 for ZLIB, 1 to 22 for ZSTD. LZ4 has no levels.
        max_message_size: The maximum size of a body, or of the encoded messages of a batch.
        max_delay_level: The number of levels in the brokers' messageDelayLevel. A message with a higher level
            is refused, because brokers would silently use their highest level instead.
        create_topic_key: The existing topic whose route is used to send to a topic that does not exist yet.
        default_topic_queue_nums: The maximum number of queues of a topic that a send creates.
        check_forbidden: Functions called before each try. An exception that one of them raises ends the send.
        send_hooks: Hooks called before and after each try.
        end_transaction_hooks: Hooks called before the state of a transaction is sent to a broker.
        max_in_flight: The maximum number of concurrent sends. Further sends wait, which bounds the memory.
        max_requests: The maximum number of requests waiting for their replies. Further requests wait.
        transaction_threads: The number of threads of a transaction producer for plain (not async) listener
            methods.
        checks_at_once: The maximum number of transaction checks that the listener answers concurrently.
        max_checks_waiting: The maximum number of waiting transaction checks. Further checks are dropped, and
            the broker sends them again.
    """

    send_timeout_s: Annotated[float, SOME_TIME] = 3.0
    try_timeout_s: Annotated[float | None, SOME_TIME] = None
    retry_times: Annotated[int, _ANY] = 2
    retry_response_codes: frozenset[int] = RETRY_RESPONSE_CODES
    retry_another_broker_when_not_store_ok: bool = False
    send_latency_fault_enable: bool = False
    compress_over: Annotated[int, _ANY] = 4096
    compress_type: str = "ZLIB"
    compress_level: int = 5
    max_message_size: Annotated[int, _SOME] = 4 * 1024 * 1024
    max_delay_level: Annotated[int, _ANY] = 18
    create_topic_key: str = "TBW102"
    default_topic_queue_nums: Annotated[int, _SOME] = 4
    check_forbidden: Sequence[Callable[[Sending], None]] = ()
    send_hooks: Sequence[SendHook] = ()
    end_transaction_hooks: Sequence[EndTransactionHook] = ()
    max_in_flight: Annotated[int, _SOME] = 4096
    max_requests: Annotated[int, _SOME] = 4096
    transaction_threads: Annotated[int, _SOME] = 16
    checks_at_once: Annotated[int, _SOME] = 4
    max_checks_waiting: Annotated[int, _ANY] = 2000

    def __post_init__(self) -> None:
        how = Compression.of(self.compress_type)
        if not how.installed:
            raise ConfigError("compress_type", self.compress_type, "ZLIB, or cometmq[zstd] installed")
        if not is_legal_name(self.create_topic_key, MAX_TOPIC_LENGTH):
            raise ConfigError("create_topic_key", self.create_topic_key, "the name of a topic")
        check_range("compress_level", self.compress_level, *how.levels)
        check_ranges(self)
        check_hooks("check_forbidden", self.check_forbidden)
        check_hooks("end_transaction_hooks", self.end_transaction_hooks)
        check_hooks("send_hooks", self.send_hooks, "before_send", "after_send")
