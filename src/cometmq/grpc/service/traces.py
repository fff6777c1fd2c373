"""Message traces of 5.x clients, which write none themselves (setting `grpcTraceEnable`).

The endpoint writes the records that a remoting client would write: one for each send, each delivery and its
end, each end of a transaction and each recall. They wait in memory and are stored once a second, and whenever
they fill a message. No call waits for them; records beyond MAX_WAITING_BYTES are dropped and counted. Each
trace message has the address of its client, because most kinds of records contain none.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from typing import Any

from cometmq import logs
from cometmq.broker.base.turns import Turns
from cometmq.broker.send.trace_topic import TraceTopic
from cometmq.grpc.rpc.enums import MessageType, TransactionResolution, TransactionSource
from cometmq.grpc.service.clients import Client
from cometmq.grpc.service.delivered import Popped
from cometmq.grpc.service.renewals import Renewed
from cometmq.grpc.service.sent import SendRequest
from cometmq.periodic import Periodic
from cometmq.protocol import traces
from cometmq.protocol.pop import ReceiptHandle
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.traces import ConsumeCode, EndTransaction, Pub, Recall, SubAfter, SubBefore, TraceLine
from cometmq.remoting import describe_peer

log = logs.logger(__name__)

INTERVAL_S = 1.0
MAX_WAITING_BYTES = 4 << 20
"""The maximum total size of the records that wait to be stored: about 15,000 records."""
MAX_ID_LENGTH = 255
"""The maximum length of a traced message's id. Those of clients have at most 34 characters."""
TYPES = {
    MessageType.TRANSACTION: traces.MessageType.HALF,
    MessageType.DELAY: traces.MessageType.DELAY,
    MessageType.FIFO: traces.MessageType.ORDER,
}
STATES: dict[int, str] = {
    TransactionResolution.COMMIT: "COMMIT_MESSAGE",
    TransactionResolution.ROLLBACK: "ROLLBACK_MESSAGE",
}
"""The states in trace records. Any other resolution is UNKNOW (RocketMQ's spelling)."""


class Traces:
    """Records what clients do, if the setting `grpcTraceEnable` is set and `traceOn` is not switched off.

    Attributes:
        lines: The waiting records of each client host, with the host's address in the form of records.
        dropped: The number of records that were not stored.
    """

    def __init__(self, topic: TraceTopic) -> None:
        self._topic = topic
        self._config = topic.config
        self._enabled = topic.config.grpc_trace_enable
        self.lines: dict[str, tuple[TraceLine, bytes]] = {}
        self._size = 0
        self._log_limit = logs.LogLimiter()
        loop = asyncio.get_running_loop()
        self._storing = Periodic(loop, INTERVAL_S, self.store_all, name="traces of 5.x clients")
        self.dropped = 0
        self.now_ms = topic.clock.time_ms

    def start(self) -> None:
        if self._enabled:
            self._storing.start()

    async def stop(self) -> None:
        await self._storing.stop()
        await self.store_all()

    # -- the recorded events

    def sent(
        self, client: Client, sent: SendRequest, offset_msg_id: str, begun_ms: int, *, success: bool
    ) -> None:
        """Record a message stored under an offset id, as durably as promised if `success` is set."""
        header = sent.header
        if not self._is_traced(header.topic, sent.message_id):
            return
        properties = decode_properties((header.properties or "").encode())
        self._add(
            client,
            Pub(
                timestamp_ms=begun_ms,
                region=self._config.region_id,
                group=header.producer_group,
                topic=header.topic,
                msg_id=sent.message_id,
                tags=properties.get(names.TAGS),
                keys=properties.get(names.KEYS),
                store_host=self._topic.address.text,
                body_length=len(sent.body),
                cost_ms=max(0, self.now_ms() - begun_ms),
                message_type=TYPES.get(sent.type, traces.MessageType.NORMAL),
                offset_msg_id=offset_msg_id,
                success=success,
            ),
        )

    def delivered(self, client: Client, group: str, topic: str, popped: Popped) -> None:
        """Record the delivery of a message. `topic` is the one to which the group has subscribed."""
        message = popped.message
        if self._is_traced(topic, message.msg_id):
            self._add(
                client,
                SubBefore(
                    timestamp_ms=self.now_ms(),
                    region=self._config.region_id,
                    group=group,
                    request_id=_request_id(group, popped.handle),
                    msg_id=message.msg_id,
                    retry_times=popped.deliveries,
                    keys=message.properties.get(names.KEYS),
                ),
            )

    def consumed(self, client: Client, lease: Renewed, message_id: str, code: ConsumeCode) -> None:
        """Record the end of a delivery: an acknowledgement, its refusal, or a message that is given up.

        The endpoint keeps no state between the delivery and this call, so the record has no keys.
        """
        if self._is_traced(lease.topic, message_id):
            now_ms = self.now_ms()
            trace = SubAfter(
                request_id=_request_id(lease.group, lease.handle),
                msg_id=message_id,
                cost_ms=max(0, now_ms - lease.handle.pop_time_ms),
                success=code is ConsumeCode.SUCCESS,
                keys=None,
                context_code=code,
                timestamp_ms=now_ms,
                group=lease.group,
            )
            self._add(client, trace)

    def refused(self, client: Client, lease: Renewed, message_id: str) -> None:
        """Record an acknowledgement after the end of the lease. A repeated one is not recorded."""
        if self.now_ms() >= lease.handle.pop_time_ms + lease.handle.invisible_ms:
            self.consumed(client, lease, message_id, ConsumeCode.TIME_OUT)

    def transaction_ended(self, client: Client, request: Any) -> None:
        """Record an EndTransaction. The record has neither tags nor keys: the request has none."""
        topic = request.topic.name
        if self._is_traced(topic, request.message_id):
            trace = EndTransaction(
                timestamp_ms=self.now_ms(),
                region=self._config.region_id,
                group=topic,
                topic=topic,
                msg_id=request.message_id,
                tags=None,
                keys=None,
                store_host=self._topic.address.text,
                message_type=traces.MessageType.COMMIT,
                transaction_id=request.transaction_id,
                state=STATES.get(request.resolution, "UNKNOW"),
                from_check=request.source == TransactionSource.SOURCE_SERVER_CHECK,
            )
            self._add(client, trace)

    def recalled(self, client: Client, topic: str, message_id: str) -> None:
        """Record the recall of a message."""
        if self._is_traced(topic, message_id):
            self._add(
                client,
                Recall(
                    timestamp_ms=self.now_ms(),
                    region=self._config.region_id,
                    group=topic,
                    topic=topic,
                    msg_id=message_id,
                    success=True,
                ),
            )

    # -- the waiting records

    def _is_traced(self, topic: str, message_id: str) -> bool:
        """Return whether an event is recorded. Ids, which clients choose, become keys of trace messages."""
        config = self._config
        return (
            self._enabled
            and config.trace_on
            and not traces.is_trace_topic(topic, config.msg_trace_topic_name)
            and 0 < len(message_id) <= MAX_ID_LENGTH
            and message_id.isprintable()
        )

    def _add(self, client: Client, trace: traces.AnyTrace) -> None:
        if self._size >= MAX_WAITING_BYTES:
            self._drop(1, f"more than {MAX_WAITING_BYTES} bytes wait to be stored")
            return
        host = client.peer[0]
        known = self.lines.get(host)
        if known is None:
            known = self.lines[host] = TraceLine(), describe_peer(client.peer)[1]
        line = known[0]
        self._size -= line.size
        line.add(trace)
        self._size += line.size
        if line.fills_a_message:
            self._storing.soon()

    async def store_all(self) -> None:
        """Store the waiting records."""
        async for host in Turns().each(list(self.lines)):
            line, address = self.lines.pop(host)
            self._size -= line.size
            while line:
                records, keys, count = line.take()
                self._topic.store_records(records, keys, address, partial(self._drop, count))

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        if self._log_limit.allows():
            log.warning("trace records of 5.x clients lost: %d: %s", count, why)


def _request_id(group: str, handle: ReceiptHandle) -> str:
    """Return the id that the records of a delivery and of its end have in common."""
    text = f"{group} {handle.encode()}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest().upper()
