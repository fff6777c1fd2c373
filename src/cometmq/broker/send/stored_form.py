"""The form in which a broker stores a client's property string, with the broker's own properties last.

Half messages have more properties (docs/reference/storage.md, Transactions).
"""

from __future__ import annotations

from collections.abc import Mapping

from cometmq.errors import CommandError
from cometmq.protocol.codes import VERSION_5_0_0, ResponseCode
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

_EMPTY_VALUE = NAME_END + VALUE_END
_WAIT = b"WAIT\x01"
_WAIT_INSIDE = b"\x02WAIT\x01"


class StoredForm(Template, frozen=True, gc=False):
    """The stored form of strings that differ only in the value of their unique key."""

    waits: bool
    """Whether the sender waits for flush and replication."""
    plain: bool
    """Whether the message has no delay and no delivery time, and is not part of a transaction."""


class StoredForms:
    """The stored forms of a broker, for senders of 4.9 and of 5.x."""

    __slots__ = ("_by_4x", "_by_5x", "_cluster")

    def __init__(self, cluster: str, region: str, trace_on: bool) -> None:
        self._cluster = cluster
        self._by_4x = stored_forms(cluster)
        self.configure(region, trace_on)

    def configure(self, region: str, trace_on: bool) -> None:
        """Set the values for message traces that 5.x stores: regionId and traceOn."""
        told = {b"MSG_REGION": region.encode(), b"TRACE_ON": b"true" if trace_on else b"false"}
        self._by_5x = stored_forms(self._cluster, told)

    def find(self, properties: str | None, version: int) -> tuple[StoredForm, bytes]:
        """Return the form of a send's property string, and its unique key. Raises CommandError."""
        forms = self._by_5x if version >= VERSION_5_0_0 else self._by_4x
        return forms.find(sent_properties(properties))


def stored_forms(cluster: str, told: Mapping[bytes, bytes] | None = None) -> TemplateCache[StoredForm]:
    """Return the stored forms in a cluster of that name.

    The method `find` raises CommandError for a property string that is ambiguous.

    Args:
        cluster: The name of the cluster.
        told: The properties that a 5.x broker adds; None for the forms of 4.9.
    """
    pair = cluster_pair(cluster)

    def make(properties: bytes, unique: bytes) -> StoredForm:
        for name, value in (told or {}).items():
            properties = put(properties, name, value)
        stored, waits = stored_form(properties, pair, keep_wait=told is not None)
        if has_stray_separator(stored):
            raise CommandError(
                ResponseCode.MESSAGE_ILLEGAL,
                "a property name or value contains a separator (0x01 or 0x02)",
            )
        plain = all(stored.find(name) < 0 for name in (b"DELAY\x01", b"TRAN_MSG\x01", b"TIMER_DEL"))
        return StoredForm(*template_fields(stored, unique), waits, plain)

    return TemplateCache(make)


def cluster_pair(cluster: str) -> bytes:
    return b"CLUSTER\x01" + cluster.encode()


def sent_properties(properties: str | None) -> bytes:
    """Return the property string of a send.

    Raises:
        CommandError: No record can hold the string. This is checked before anything is hashed or cached.
    """
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
    """Return the stored form of a client's properties, and whether the sender waits for flush and replicas.

    Args:
        properties: The property string of the send.
        cluster_pair: `CLUSTER`, 0x01 and the cluster's name.
        keep_wait: Store WAIT, as 5.x does; 4.9 leaves it out.
    """
    if properties.find(_EMPTY_VALUE) >= 0 or properties.endswith(NAME_END):  # `find` is twice as fast as `in`
        # 4.9 passes all properties through a map without empty values.
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
    return append(properties, cluster_pair), waits


# Properties of half messages that only the broker may write.
OF_THE_BROKER = (b"TRAN_PREPARED_QUEUE_OFFSET", b"TRANSACTION_CHECK_TIMES")
# Properties of delayed messages. Apache's broker would lose a delayed half message.
LATER = (b"DELAY", b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS")


def is_transactional(properties: bytes, reconsume_times: int) -> bool:
    """Return whether a send begins a transaction.

    If a consumer sends a failed message again with a delay, the message may still have TRAN_MSG, but begins
    no transaction.
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
                f"a message of a transaction cannot have a delivery time: property {name.decode()}",
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
