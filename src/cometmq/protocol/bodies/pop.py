"""Bodies of POP consumption: batches of acknowledgements, and the records of the revive topic.

See docs/reference/remoting.md, POP family. Field names on the wire are one or two letters. Times are in ms;
`pop_time` is in epoch ms. A checkpoint names the messages that one request leased from a queue; an
acknowledgement refers to it by topic, queue, start offset, group, pop time and broker.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

import msgspec

from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.json_body import Body, always, empty
from cometmq.protocol.pop import ReceiptHandle

CHECKPOINT_TAG = "ck"
ACK_TAG = "ack"
BATCH_ACK_TAG = "bAck"
"""The tags of the three kinds of records in the revive topic."""

MAX_ACK_SPAN = 1 << 17
"""The maximum distance of an acknowledged offset from its checkpoint's start. Filters may skip many."""
MAX_ACKS_PER_BATCH = 4096
"""The maximum number of messages that a batch of acknowledgements may name."""
MAX_ACKS_PER_REQUEST = 16_384
MAX_LITE_NAMES_PER_REQUEST = 101_000
"""The maximum number of lite topics, and other values, in a request: a broker has 100,000 subscriptions."""


class BatchAck(Body):
    """Acknowledgements of messages that belong to one checkpoint.

    `retry` is their kind of topic (`TopicKind`). `bit_set` is Base64 of a little-endian bit set; bit n stands
    for offset `start_offset` + n.
    """

    consumer_group: str = always("", name="c")
    topic: str = always("", name="t")
    retry: str = always("0", name="r")
    start_offset: int = always(0, name="so")
    queue_id: int = always(0, name="q")
    revive_queue_id: int = always(0, name="rq")
    pop_time: int = always(0, name="pt")
    invisible_time: int = always(0, name="it")
    bit_set: str = always("", name="b")

    def offsets(self) -> list[int]:
        """Return the acknowledged queue offsets in ascending order. Raises BodyError for a bad bit set."""
        if len(self.bit_set) > MAX_ACK_SPAN // 6 + 4:
            raise BodyError("BatchAck", f"the bit set has {len(self.bit_set)} characters", "b")
        try:
            data = base64.b64decode(self.bit_set, validate=True)
        except (binascii.Error, ValueError):
            raise BodyError("BatchAck", "the bit set is not Base64", "b") from None
        bits = int.from_bytes(data, "little")
        if bits.bit_count() > MAX_ACKS_PER_BATCH:
            raise BodyError("BatchAck", f"{bits.bit_count()} bits are set", "b")
        return [
            self.start_offset + 8 * index + bit
            for index, byte in enumerate(data)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        ]


class BatchAckMessageRequestBody(Body):
    """The acknowledgements in request 200151 (BATCH_ACK_MESSAGE)."""

    MAX_OCCURRENCES = b"{", 1 + MAX_ACKS_PER_REQUEST

    broker_name: str = always("")
    acks: list[BatchAck] = empty(list)


def pack_acks(group: str, topic: str, handles: Iterable[ReceiptHandle]) -> list[BatchAck]:
    """Return the acknowledgements of a (plain) topic's messages, those of a checkpoint in one bit set.

    Raises BodyError if an offset is before its checkpoint's start, or too far from it.
    """
    checkpoints: dict[tuple[Any, ...], int] = {}  # The bits by the first seven fields of the handles
    for handle in handles:
        bit = (handle.offset or 0) - handle.start_offset
        if not 0 <= bit < MAX_ACK_SPAN:
            raise BodyError("BatchAck", f"offset {handle.offset} is not near {handle.start_offset}", "b")
        key = handle[:7]
        checkpoints[key] = checkpoints.get(key, 0) | 1 << bit
    return [
        BatchAck(
            consumer_group=group,
            topic=topic,
            retry=str(int(key.kind)),
            start_offset=key.start_offset,
            queue_id=key.queue_id,
            revive_queue_id=key.revive_queue_id,
            pop_time=key.pop_time_ms,
            invisible_time=key.invisible_ms,
            bit_set=base64.b64encode(bits.to_bytes((bits.bit_length() + 7) // 8, "little")).decode(),
        )
        for first, bits in checkpoints.items()
        for key in [ReceiptHandle(*first)]
    ]


# -- records of the revive topic


class PopCheckPoint(Body):
    """The messages of one queue that a request leased (a record with CHECKPOINT_TAG).

    Attributes:
        topic: The topic in which the messages were found.
        bit_map: Bit n is set if message n was acknowledged before the record was written.
        num: The number of messages.
        revive_offset: The record's own queue offset, which Apache's broker sets after reading.
        revive_time: `pop_time` + `invisible_time`. Apache's broker writes it and does not read it.
        queue_offset_diff: Each message's queue offset minus `start_offset`. Without it, offsets are dense.
        re_put_times: How often the checkpoint was written again because a retry could not be stored.
        suspend: Whether the messages come back without a counted delivery.
    """

    start_offset: int = always(0, name="so")
    pop_time: int = always(0, name="pt")
    invisible_time: int = always(0, name="it")
    bit_map: int = always(0, name="bm")
    num: int = always(0, name="n")
    queue_id: int = always(0, name="q")
    topic: str = always("", name="t")
    group: str = always("", name="c")
    revive_offset: int = always(0, name="ro")
    revive_time: int = always(0)
    queue_offset_diff: list[int] | None = msgspec.field(name="d", default=None)
    broker_name: str | None = msgspec.field(name="bn", default=None)
    re_put_times: str | None = msgspec.field(name="rp", default=None)
    suspend: bool = always(False, name="sp")

    def offsets(self) -> list[int]:
        """Return the queue offsets of the messages, at most 127. Raises BodyError if there are more."""
        steps = self.queue_offset_diff or range(max(0, min(self.num, 128)))
        if len(steps) > 127:
            raise BodyError("PopCheckPoint", f"it has {len(steps)} messages instead of 127 at most", "n")
        return [self.start_offset + step for step in steps]

    @property
    def unique_key(self) -> str:
        """The record's unique key."""
        return (
            f"{self.topic}@{self.queue_id}@{self.start_offset}@{self.group}@{self.pop_time}"
            f"@{self.broker_name}@{CHECKPOINT_TAG}"
        )


class AckMsg(Body):
    """The acknowledgement of one message (a record with ACK_TAG)."""

    ack_offset: int = always(0, name="ao")
    start_offset: int = always(0, name="so")
    group: str = always("", name="c")
    topic: str = always("", name="t")
    queue_id: int = always(0, name="q")
    pop_time: int = always(0, name="pt")
    broker_name: str | None = msgspec.field(name="bn", default=None)

    @property
    def unique_key(self) -> str:
        """The record's unique key. Records with BATCH_ACK_TAG have it in the same form."""
        return (
            f"{self.topic}@{self.queue_id}@{self.ack_offset}@{self.group}@{self.pop_time}"
            f"@{self.broker_name}@{ACK_TAG}"
        )


class BatchAckMsg(AckMsg):
    """The acknowledgement of several messages (a record with BATCH_ACK_TAG). Its `ack_offset` is -1."""

    ack_offset_list: list[int] = empty(list, name="aol")


# -- assignment of queues by the broker


class SetMessageRequestModeRequestBody(Body):
    """The body of request 401, and an entry of messageRequestMode.json: how a group consumes a topic.

    Attributes:
        mode: "PULL" or "POP".
        pop_share_queue_num: How many further members share the queues of a member. 0, a negative number or a
            large one: all members pop all queues.
    """

    topic: str = always("")
    consumer_group: str = always("")
    mode: str = always("PULL")
    pop_share_queue_num: int = always(0)


class MessageRequestModeTable(Body):
    """The consume modes of a broker by topic and group: the response to request 402."""

    message_request_mode_map: dict[str, dict[str, SetMessageRequestModeRequestBody]] = empty(dict)


class QueryAssignmentRequestBody(Body):
    """The body of request 400: a member asks which queues it consumes, and how."""

    topic: str = always("")
    consumer_group: str = always("")
    client_id: str = always("")
    strategy_name: str = always("")
    message_model: str = always("CLUSTERING")


class MessageQueueAssignment(Body):
    """A queue that is assigned to a member; the queue id -1 means all queues of the broker."""

    message_queue: MessageQueue
    mode: str = always("PULL")


class QueryAssignmentResponseBody(Body):
    """The body of the response to request 400. No list means that the member keeps what it has."""

    message_queue_assignments: list[MessageQueueAssignment] | None = None


# -- lite topics


class OffsetOption(Body):
    """Where a subscription to a lite topic starts: at a POLICY, OFFSET, TAIL_N or TIMESTAMP.

    The policies are 0 for the stored offset, 1 for the first message and 2 for the end.
    """

    type: str = always("POLICY")
    value: int = always(0)


class LiteSubscription(Body):
    """A change of a client's subscriptions to lite topics.

    Attributes:
        action: "PARTIAL_ADD", "PARTIAL_REMOVE", "COMPLETE_ADD" (the client has exactly these subscriptions)
            or "COMPLETE_REMOVE".
        topic: The parent topic.
        lite_topic_set: The lite topics, without their parent.
    """

    action: str = always("PARTIAL_ADD")
    client_id: str = always("")
    group: str = always("")
    topic: str = always("")
    lite_topic_set: list[str] = empty(list)
    offset_option: OffsetOption | None = None
    version: int = always(0)


class LiteSubscriptionCtlRequestBody(Body):
    """The changes in request 200071 (LITE_SUBSCRIPTION_CTL)."""

    MAX_OCCURRENCES = b",", MAX_LITE_NAMES_PER_REQUEST

    subscription_set: list[LiteSubscription] = empty(list)


class LiteState(Body):
    """The body of the response to request 21009 (CometMQ's own): offsets and subscriptions of lite topics.

    Attributes:
        epoch: The id of the time for which the numbers of changes are valid.
        log_end: The end of the visible log. Offsets must not be used by a slave whose log ends before it.
        changes: The number of the change, the queue name of the lite topic, the group and the offset.
        more: Whether there are further changes.
        subscriptions: Client, group, parent topic and queue name of each subscription; None if they have not
            changed.
        subscription_change: The number of the last change of a subscription.
    """

    epoch: str = always("")
    log_end: int = always(0)
    changes: list[tuple[int, str, str, int]] = empty(list)
    more: bool = always(False)
    subscriptions: list[tuple[str, str, str, str]] | None = None
    subscription_change: int = always(0)
