"""The form in which a broker stores a send's property string: the broker's own properties come last.

Half messages have more properties (docs/reference/storage.md, Transactions).
"""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.errors import CommandError
from cometmq.protocol.codes import VERSION_5_0_0, ResponseCode
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.template import Template, TemplateCache, template_fields
from cometmq.protocol.properties.values import (
    MAX_PROPERTIES_BYTES,
    NAME_END,
    VALUE_END,
    append,
    drop,
    has_stray_separator,
    put,
    value_of,
)

PRIORITY, SHARDING_KEY = names.PRIORITY.encode(), names.SHARDING_KEY.encode()
_NOT_PLAIN = (b"DELAY\x01", b"TRAN_MSG\x01", b"TIMER_DEL", PRIORITY, b"__LITE_TOPIC\x01", b"INNER_MULTI_")
_EMPTY_VALUE = NAME_END + VALUE_END
_WAIT = b"WAIT\x01"
_WAIT_INSIDE = b"\x02WAIT\x01"


class StoredForm(Template, frozen=True, gc=False):
    """The stored form of a property string. Strings that differ only in the unique key share one object."""

    waits: bool
    """Whether the sender waits until the message is flushed and replicated."""
    plain: bool
    """Whether the message has no delay level, delivery time, priority or lite topic, and no transaction."""


class StoredForms:
    """A cache of the stored forms of property strings. Clients of 4.9 and of 5.x have different forms."""

    __slots__ = ("_by_4x", "_by_5x", "_cluster")

    def __init__(self, cluster: str, region: str, trace_on: bool) -> None:
        self._cluster = cluster
        self._by_4x = stored_forms(cluster)
        self.configure(region, trace_on)

    def configure(self, region: str, trace_on: bool) -> None:
        """Set regionId and traceOn, which are stored in messages of 5.x clients for message traces."""
        told = {b"MSG_REGION": region.encode(), b"TRACE_ON": b"true" if trace_on else b"false"}
        self._by_5x = stored_forms(self._cluster, told)

    def find(self, properties: str | None, version: int) -> tuple[StoredForm, bytes]:
        """Return the stored form of a send's property string, and its unique key. Raises CommandError."""
        forms = self._by_5x if version >= VERSION_5_0_0 else self._by_4x
        return forms.find(sent_properties(properties))


def stored_forms(cluster: str, told: Mapping[bytes, bytes] | None = None) -> TemplateCache[StoredForm]:
    """Return a cache of property strings in the form in which a broker stores them.

    `told` are the properties, beside the cluster's name, that a broker adds for 5.x clients, or None for 4.9
    clients. The cache's method `find` raises CommandError for a property string that is ambiguous.
    """
    pair = cluster_pair(cluster)

    def make(properties: bytes, unique: bytes) -> StoredForm:
        for name, value in (told or {}).items():
            properties = put(properties, name, value)
        stored, waits = stored_form(properties, pair, keep_wait=told is not None)
        if has_stray_separator(stored):
            why = "a property name or value contains a separator (0x01 or 0x02)"
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)
        plain = all(stored.find(name) < 0 for name in _NOT_PLAIN)
        return StoredForm(*template_fields(stored, unique), waits, plain)

    return TemplateCache(make)


def cluster_pair(cluster: str) -> bytes:
    return b"CLUSTER\x01" + cluster.encode()


def sent_properties(properties: str | None) -> bytes:
    """Return the property string of a send as bytes. Raises CommandError if it is too long for a record."""
    if not properties:
        return b""
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise CommandError(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. msg properties length "
            f"limit {MAX_PROPERTIES_BYTES}B, these have {len(properties)} characters",
        )
    return properties.encode()


def stored_form(properties: bytes, cluster_pair: bytes, *, keep_wait: bool = False) -> tuple[bytes, bool]:
    """Return the stored form of a property string, and whether the sender waits for flush and replication.

    Args:
        properties: The property string of the send.
        cluster_pair: `CLUSTER`, 0x01 and the cluster's name.
        keep_wait: Whether to store the property WAIT, as 5.x does.
    """
    # For bytes, `find` is faster than `in`.
    if properties.find(_EMPTY_VALUE) >= 0 or properties.endswith(NAME_END):
        # Like Apache's broker 4.9, remove properties with empty values.
        properties = VALUE_END.join(
            pair for pair in properties.split(VALUE_END) if pair.partition(NAME_END)[2]
        )
    waits = True
    start = properties.find(_WAIT_INSIDE) + 1
    if start or properties.startswith(_WAIT):
        value, following, behind = properties[start + len(_WAIT) :].partition(VALUE_END)
        waits = value.lower() != b"false"
        if not keep_wait:
            properties = properties[:start] + behind if following else properties[: max(start - 1, 0)]
    if properties.find(b"CLUSTER\x01") >= 0:
        properties = drop(properties, b"CLUSTER")
    if properties.find(b"POP_CK\x01") >= 0:
        # As at 5.x: the receipt handle of a message that was popped and is sent on. Clients would use it.
        properties = drop(properties, b"POP_CK")
    return append(properties, cluster_pair), waits


# Properties that only the broker may set in half messages.
OF_THE_BROKER = (b"TRAN_PREPARED_QUEUE_OFFSET", b"TRANSACTION_CHECK_TIMES")
# Properties that delay a message. A half message with one of these properties is refused, because it cannot
# be delayed; Apache's broker accepts such a message and then loses it.
LATER = (b"DELAY", b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")


def is_transactional(properties: bytes, reconsume_times: int) -> bool:
    """Return whether a send begins a transaction. A consumer's delayed copy with TRAN_MSG begins none."""
    if value_of(properties, b"TRAN_MSG").lower() != b"true":
        return False
    return reconsume_times <= 0 or value_of(properties, b"DELAY") in (b"", b"0")


def routed_by_priority(properties: bytes, queue_id: int, write_queues: int) -> tuple[bytes, int]:
    """Return the properties and the queue id of a message, which its priority may change.

    As at Apache's broker, the priority of a message is the id of its queue, at most that of the last one. A
    message of another kind (transactional, delayed, or with a message group) loses its priority.
    """
    text = value_of(properties, PRIORITY)
    if not text:
        return properties, queue_id
    transactional = value_of(properties, b"TRAN_MSG").lower() == b"true"
    if transactional or any(value_of(properties, name) for name in (*LATER, SHARDING_KEY)):
        return drop(properties, PRIORITY), queue_id
    if not text.isdigit() or len(text) > 10 or not write_queues:
        return properties, queue_id
    return properties, min(int(text), write_queues - 1)


def half_properties(topic: str, queue_id: int, properties: bytes) -> bytes:
    """Return the properties with which a half message is stored.

    Raises CommandError if it has a delay, or no producer group that could end the transaction.
    """
    for name in LATER:
        if value_of(properties, name) not in (b"", b"0"):
            why = f"a message of a transaction cannot have a delivery time: property {name.decode()}"
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)
    if not value_of(properties, b"PGROUP"):
        why = "a message of a transaction names the producer group that ends it: property PGROUP is missing"
        raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)
    for name in (*OF_THE_BROKER, PRIORITY):
        properties = drop(properties, name)
    return with_destination(properties, topic, queue_id)


def with_destination(properties: bytes, topic: str, queue_id: int) -> bytes:
    """Return the properties of a waiting message, with the given topic and queue as its destination."""
    properties = put(drop(properties, b"REAL_QID"), b"REAL_TOPIC", topic.encode())
    return put(properties, b"REAL_QID", b"%d" % queue_id)
