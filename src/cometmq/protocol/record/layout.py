"""The layout of a record in the commit log, and in the responses to pulls, queries and views.

    offset  type   field                          offset  type   field
    0       i4     size of the whole record       56      i8     store timestamp, ms
    4       i4     magic: V1 or V2                64      8|20   store host
    8       i4     CRC-32 of the body, 31 bits    72      i4     reconsume times
    12      i4     queue id                       76      i8     prepared transaction offset
    16      i4     flag (the user's)              84      i4     body length
    20      i8     queue offset                   88      n      body
    28      i8     physical offset                        i1|i2  topic length (i2 in V2)
    36      i4     sysFlag                                n      topic
    40      i8     born timestamp, ms                     i2     properties length
    48      8|20   born host                              n      properties

A host is 4 address bytes (16 if sysFlag marks IPv6) and a 4-byte port. An IPv6 host moves the fields after it
by 12 bytes. Integers are big-endian and signed, except for the topic length. A segment is closed by a blank
record: the number of remaining bytes and BLANK_MAGIC. Only this module defines these positions
(docs/reference/storage.md, Record).
"""

from __future__ import annotations

from struct import Struct

from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES

MAGIC_V1 = 0xDAA320A7 - (1 << 32)
MAGIC_V2 = 0xDAA320AB - (1 << 32)
BLANK_MAGIC = 0xCBD43194 - (1 << 32)
MAGIC_AT = 4
MAGICS_BEGIN = b"\xda\xa3\x20"
"""The first three bytes of the magic number of a message record, V1 or V2."""
BLANK_MAGIC_BYTES = BLANK_MAGIC.to_bytes(4, "big", signed=True)

START = Struct(">ii")
"""The first two fields of every record: its size and magic number. A blank record has no other fields."""
BLANK_SIZE = START.size

# The bits of sysFlag.
COMPRESSED = 0x1
TRANSACTION_MASK, PREPARED, COMMITTED, ROLLBACK = 0xC, 0x4, 0x8, 0xC
BORN_V6 = 0x10
STORE_V6 = 0x20

HOST_V4 = 8
HOST_V6 = 20
V6_EXTRA = HOST_V6 - HOST_V4

FIELDS = {
    "store_size": "i",
    "magic": "i",
    "body_crc": "i",
    "queue_id": "i",
    "flag": "i",
    "queue_offset": "q",
    "physical_offset": "q",
    "sys_flag": "i",
    "born_timestamp": "q",
    "born_host": f"{HOST_V4}s",
    "store_timestamp": "q",
    "store_host": f"{HOST_V4}s",
    "reconsume_times": "i",
    "prepared_transaction_offset": "q",
    "body_length": "i",
}
"""The struct format of each fixed field, if both hosts are IPv4."""

HEADS = {
    (born, store): Struct(
        ">" + "".join({**FIELDS, "born_host": f"{born}s", "store_host": f"{store}s"}.values())
    )
    for born in (HOST_V4, HOST_V6)
    for store in (HOST_V4, HOST_V6)
}
"""The struct of the fixed fields, by the sizes in bytes of the born host and the store host."""
HEAD_V4 = HEADS[HOST_V4, HOST_V4]
LENGTH = Struct(">H")
"""A length of two bytes: that of a V2 topic or of the properties. Both have at most 32,767 bytes."""

AT = {name: Struct(">" + "".join(list(FIELDS.values())[:number])).size for number, name in enumerate(FIELDS)}
"""The offset of each field in a record with IPv4 hosts."""
BEHIND_BORN_HOST = frozenset(name for name, at in AT.items() if at > AT["born_host"])
BEHIND_STORE_HOST = frozenset(name for name, at in AT.items() if at > AT["store_host"])
BODY_CRC_AT = AT["body_crc"]
QUEUE_ID_AT = AT["queue_id"]
QUEUE_OFFSET_AT = AT["queue_offset"]
SYS_FLAG_AT = AT["sys_flag"]

MIN_SIZE = HEAD_V4.size + 3
"""The minimum size of a record: IPv4 hosts, and empty body, topic and properties."""
MAX_TOPIC_V1 = 127
MAX_TOPIC_V2 = 32_767
MAX_PROPERTIES = MAX_PROPERTIES_BYTES

_BY_V6_BITS = tuple(
    HEADS[HOST_V6 if bits & 1 else HOST_V4, HOST_V6 if bits & 2 else HOST_V4] for bits in range(4)
)


def head_for(sys_flag: int) -> Struct:
    """Return the struct of the fixed fields for a record with this sysFlag."""
    return _BY_V6_BITS[sys_flag >> 4 & 3]
