"""What can be set on a producer. Times are seconds, sizes bytes; defaults are RocketMQ's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cometmq.client.cluster.hooks import EndTransactionHook, SendHook, Sending, check_hooks
from cometmq.client.cluster.ranges import SOME_TIME, check_range, check_ranges
from cometmq.client.producer.retry import RETRY_RESPONSE_CODES
from cometmq.errors import ConfigError
from cometmq.protocol.codes import MAX_TOPIC_LENGTH, is_legal_name
from cometmq.protocol.compression import Compression

__all__ = ["ProducerOptions"]

_SOME, _ANY = (1, math.inf), (0, math.inf)
_RANGES = {
    "send_timeout_s": SOME_TIME,
    "try_timeout_s": SOME_TIME,
    "retry_times": _ANY,
    "compress_over": _ANY,
    "max_message_size": _SOME,
    "max_delay_level": _ANY,
    "default_topic_queue_nums": _SOME,
    "max_in_flight": _SOME,
    "max_requests": _SOME,
    "transaction_threads": _SOME,
    "checks_at_once": _SOME,
    "max_checks_waiting": _ANY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """Settings of a producer."""

    send_timeout_s: float = 3.0
    """One budget for all tries of a send, not counting the wait for others (max_in_flight)."""
    try_timeout_s: float | None = None
    """Limit of one try while more tries remain; None: a hanging broker may use the whole budget."""
    retry_times: int = 2
    """More tries after the first, each on another broker if there is one."""
    retry_response_codes: frozenset[int] = RETRY_RESPONSE_CODES
    retry_another_broker_when_not_store_ok: bool = False
    """Try again when a flush or a replica was late, though it makes duplicates."""
    send_latency_fault_enable: bool = False
    """Leave a broker that was slow, or failed, alone for 2 to 30 s while others are there."""
    compress_over: int = 4096
    """Bodies of this size and above are compressed, batches never."""
    compress_type: str = "ZLIB"
    """ZLIB, LZ4 or ZSTD; the last two need cometmq[zstd], here and at the consumers."""
    compress_level: int = 5
    """0 to 9 for ZLIB, 1 to 22 for ZSTD; LZ4 has none."""
    max_message_size: int = 4 * 1024 * 1024
    max_delay_level: int = 18
    """The highest level of the brokers' messageDelayLevel; they take a higher one for it in silence."""
    create_topic_key: str = "TBW102"
    default_topic_queue_nums: int = 4
    check_forbidden: Sequence[Callable[[Sending], None]] = ()
    """Called before each try; what one of them raises ends the send."""
    send_hooks: Sequence[SendHook] = ()
    """Told of each try."""
    end_transaction_hooks: Sequence[EndTransactionHook] = ()
    """Called before a broker is told how a transaction ended."""
    max_in_flight: int = 4096
    """Sends under way at once; more wait (bounded memory when a caller starts a million sends)."""
    max_requests: int = 4096
    """Requests that wait for their reply at once; more wait for their turn."""
    transaction_threads: int = 16
    """Threads of a transaction producer in which a listener's plain (not async) methods run."""
    checks_at_once: int = 4
    """Transactions that a listener is asked about at once."""
    max_checks_waiting: int = 2000
    """Further ones that wait; beyond that they are dropped, and the broker asks again."""

    def __post_init__(self) -> None:
        how = Compression.of(self.compress_type)
        if not how.installed:
            raise ConfigError("compress_type", self.compress_type, "ZLIB, or cometmq[zstd] installed")
        if not is_legal_name(self.create_topic_key, MAX_TOPIC_LENGTH):
            raise ConfigError("create_topic_key", self.create_topic_key, "the name of a topic")
        check_range("compress_level", self.compress_level, *how.levels)
        check_ranges(self, _RANGES)
        check_hooks("check_forbidden", self.check_forbidden)
        check_hooks("end_transaction_hooks", self.end_transaction_hooks)
        check_hooks("send_hooks", self.send_hooks, "before_send", "after_send")
