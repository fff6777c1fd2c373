"""Decides which requests an overloaded broker refuses, and formats the remark of the refusal. It does no I/O.

docs/server.md, Back-pressure, defines each limit. A remark begins with the text of Apache's broker
(docs/reference/storage.md, Overload), which is followed by the exceeded limits.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.broker.base.config import BrokerConfig
from cometmq.protocol.codes import RequestCode
from cometmq.settings import camel

SENDS = (
    *(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE),
    RequestCode.CONSUMER_SEND_MSG_BACK,
)
# For request codes, the setting that limits the wait of such requests. In Apache's broker, it limits the wait
# in the queue of a thread pool. In CometMQ, which has no such queues, these requests are refused while the
# delay of the event loop is at least the setting's value.
LATENESS = {
    SENDS: "wait_time_mills_in_send_queue",
    (RequestCode.PULL_MESSAGE,): "wait_time_mills_in_pull_queue",
    (RequestCode.LITE_PULL_MESSAGE,): "wait_time_mills_in_lite_pull_queue",
    (RequestCode.HEART_BEAT,): "wait_time_mills_in_heartbeat_queue",
    (RequestCode.END_TRANSACTION,): "wait_time_mills_in_transaction_queue",
}
LAG, FLUSH, PENDING = "loop lag", "flush backlog", "pending size"
MARKS = {LAG: "TIMEOUT_CLEAN_QUEUE", FLUSH: "PCBUSY_CLEAN_QUEUE", PENDING: "OVERLOAD"}


class Load(NamedTuple):
    """The load of a broker at one moment."""

    lag_ms: int = 0  # The delay of the event loop: the smaller one of the last two measurements
    sync_ms: int = 0  # The time that the current sync has taken so far, if senders wait for it
    waiting: int = 0  # The number of senders that wait for a sync or for copies on other brokers
    unflushed: int = 0  # The number of bytes of the log that have not been synced to the disk


class Excess(NamedTuple):
    """An exceeded limit: the measured value, the limit (both in ms or bytes), and the limit's setting."""

    reason: str
    measured: int
    limit: int
    setting: str

    def __str__(self) -> str:
        unit = "bytes" if self.reason == PENDING else "ms"
        return f"{self.reason} {self.measured} {unit}, limit {self.limit} {unit} ({camel(self.setting)})"


def exceeded(load: Load, config: BrokerConfig) -> dict[int, list[Excess]]:
    """Return the codes of the requests that must be refused, each with the limits that the load exceeds."""
    if not config.broker_fast_failure_enable:
        return {}
    of_sends = []
    if load.sync_ms >= config.os_page_cache_busy_time_out_mills:
        limit = config.os_page_cache_busy_time_out_mills
        of_sends.append(Excess(FLUSH, load.sync_ms, limit, "os_page_cache_busy_time_out_mills"))
    if 0 < config.max_unflushed_bytes <= load.unflushed:
        of_sends.append(Excess(PENDING, load.unflushed, config.max_unflushed_bytes, "max_unflushed_bytes"))
    found: dict[int, list[Excess]] = {}
    for codes, setting in LATENESS.items():
        excess = [*of_sends] if codes is SENDS else []
        limit = getattr(config, setting)
        if load.lag_ms >= limit:
            excess.append(Excess(LAG, load.lag_ms, limit, setting))
        if excess:
            found |= dict.fromkeys(codes, excess)
    return found


def remark(excess: list[Excess], load: Load) -> str:
    """Return the remark of a refusal: Apache's text for a busy broker, then the exceeded limits."""
    waited = max(load.lag_ms, load.sync_ms)
    return (
        f"[{MARKS[excess[0].reason]}]broker busy, start flow control for a while, "
        f"period in queue: {waited}ms, size of queue: {load.waiting}, "
        f"reason: {'; '.join(map(str, excess))}"
    )
