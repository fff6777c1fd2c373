"""Trace messages that a broker stores for clients that write no traces themselves."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.writer import Writer
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import StoreError
from cometmq.protocol.codes import Perm
from cometmq.protocol.properties.values import KEYS, encode_properties
from cometmq.store import Clock, MessageStore


class TraceTopic(msgspec.Struct, eq=False):
    """Stores messages in the broker's trace topic."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    topics: TopicTable
    writer: Writer
    address: BrokerAddress

    def store_records(
        self, records: bytes, keys: str, client_host: bytes, dropped: Callable[[str], None]
    ) -> None:
        """Store one message with trace records. The commit at the end of the event-loop tick contains it.

        Args:
            records: The body of the message.
            keys: The keys by which the message is found, separated by blanks.
            client_host: The address of the traced client in the form of records. Tools show it as the client.
            dropped: Is called with the reason if the message cannot be stored.
        """
        name = self.config.msg_trace_topic_name
        topic = self.topics.get(name)
        if topic is None or not topic.perm & Perm.WRITE or not topic.write_queue_nums:
            dropped(f"topic {name} does not exist or cannot be written")
            return
        try:
            self.store.appender.append(
                name,
                random.randrange(topic.write_queue_nums),
                records,
                encode_properties({KEYS: keys}),
                born_timestamp_ms=self.clock.time_ms(),
                born_host=client_host,
            )
        except StoreError as error:
            dropped(str(error))
            return
        self.writer.appended(lambda _code, remark: None if remark is None else dropped(remark))
