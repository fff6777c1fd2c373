"""Encode a decoded message as a record."""

from __future__ import annotations

from cometmq.message import MessageExt
from cometmq.protocol.ids import pack_host
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.record.one import encode_record


def encode_message(message: MessageExt, last_separator: bool = False) -> bytes:
    """Return the record that `decode_record` decodes to this message."""
    return encode_record(
        message.topic,
        message.body,
        encode_properties(message.properties, last_separator),
        queue_id=message.queue_id,
        queue_offset=message.queue_offset,
        physical_offset=message.physical_offset,
        born_timestamp_ms=message.born_timestamp_ms,
        born_host=pack_host(message.born_host),
        store_timestamp_ms=message.store_timestamp_ms,
        store_host=pack_host(message.store_host),
        flag=message.flag,
        sys_flag=message.sys_flag,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )
