"""Half messages: how a send that begins a transaction is recognised, and the properties that are stored.

See docs/reference/storage.md, Transactions.
"""

from __future__ import annotations

from cometmq.errors import CommandError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import drop, put, value_of

# Properties that only the broker writes to half messages.
OF_THE_BROKER = (b"TRAN_PREPARED_QUEUE_OFFSET", b"TRANSACTION_CHECK_TIMES")
# Apache's broker would lose a delayed half message.
LATER = (b"DELAY", b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")


def is_transactional(properties: bytes, reconsume_times: int) -> bool:
    """Return whether a send begins a transaction.

    A message that a consumer failed on and sends again itself with a delay may still have TRAN_MSG; it does
    not.
    """
    if value_of(properties, b"TRAN_MSG").lower() != b"true":
        return False
    return reconsume_times <= 0 or value_of(properties, b"DELAY") in (b"", b"0")


def half_properties(topic: str, queue_id: int, properties: bytes) -> bytes:
    """Return the stored properties of a half message.

    Raises:
        CommandError: The message has a delay, or cannot be ended by any producer.
    """
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
    """Return the properties of a message that waits in another topic before it goes to this queue."""
    properties = put(drop(properties, b"REAL_QID"), b"REAL_TOPIC", topic.encode())
    return put(properties, b"REAL_QID", b"%d" % queue_id)
