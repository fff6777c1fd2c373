"""A send that begins a transaction: how it is known, and what is stored of its properties
(docs/reference/storage.md, Transactions). No I/O in here."""

from __future__ import annotations

from cometmq.errors import CommandError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import drop, put, value_of

# What the broker alone writes on half messages.
OF_THE_BROKER = (b"TRAN_PREPARED_QUEUE_OFFSET", b"TRANSACTION_CHECK_TIMES")
# A delayed half message would be lost in Apache's broker.
LATER = (b"DELAY", b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")


def is_transactional(properties: bytes, reconsume_times: int) -> bool:
    """Whether a send is half of a transaction. A message that a consumer failed on, and sends again with a
    delay itself, may still carry TRAN_MSG: it is none."""
    if value_of(properties, b"TRAN_MSG").lower() != b"true":
        return False
    return reconsume_times <= 0 or value_of(properties, b"DELAY") in (b"", b"0")


def half_properties(topic: str, queue_id: int, properties: bytes) -> bytes:
    """What is stored of the properties. Raises CommandError for a message that is to be delivered later
    too, or that nobody could end."""
    for name in LATER:
        if value_of(properties, name) not in (b"", b"0"):
            raise CommandError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message of a transaction cannot be delayed: property {name.decode()}",
            )
    if not value_of(properties, b"PGROUP"):
        why = "a message of a transaction names the producer group that ends it: property PGROUP is missing"
        raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)
    for name in OF_THE_BROKER:
        properties = drop(properties, name)
    return with_destination(properties, topic, queue_id)


def with_destination(properties: bytes, topic: str, queue_id: int) -> bytes:
    """The properties of a message that waits elsewhere before it goes to this queue."""
    properties = put(drop(properties, b"REAL_QID"), b"REAL_TOPIC", topic.encode())
    return put(properties, b"REAL_QID", b"%d" % queue_id)
