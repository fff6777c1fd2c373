"""Sending a failed message to its group's retry topic ourselves. From there the broker takes what was tried
often enough to the dead letters."""

from __future__ import annotations

from cometmq.client.group.group import ConsumerGroup
from cometmq.client.producer.outgoing import prepare_system
from cometmq.client.producer.producer import Producer
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import CLIENT_INNER_PRODUCER_GROUP
from cometmq.protocol.compression import TYPE_MASK
from cometmq.protocol.properties import values as names
from cometmq.protocol.record.layout import COMPRESSED

__all__ = ["RetryTopic"]

_COMPRESSION = COMPRESSED | TYPE_MASK
_FIRST_RETRY_LEVEL = 3
"""The broker's rule: retry n waits delay level 3 + n."""


class RetryTopic:
    """The retry topic of a group, with a producer that is started for the first message."""

    def __init__(self, group: ConsumerGroup) -> None:
        self._group = group
        self._producer = Producer(CLIENT_INNER_PRODUCER_GROUP, client=group.instance)

    async def close(self) -> None:
        await self._producer.stop()

    async def send(self, message: MessageExt) -> None:
        """Raises CometError when no broker takes it."""
        if self._producer.state == "new":
            await self._producer.start()
        # A body that was not decompressed goes round as it is.
        packed = message.sys_flag & _COMPRESSION
        await self._producer.send_raw(prepare_system(self._again(message), self._group.instance.keys, packed))

    def _again(self, message: MessageExt) -> Message:
        """The same body, flag and unique id. It is a dead letter when a send-back would make it one, and then
        without DELAY, which 4.9.7 would obey; 4.9 takes as many tries as the maximum for too many, 5.x more
        (docs/reference/storage.md, Send back)."""
        tries, most = message.reconsume_times + 1, self._group.options.most_reconsume_times
        dropped = (names.TRAN_MSG, names.DELAY)
        properties = {key: value for key, value in message.properties.items() if key not in dropped}
        if tries <= most:
            properties[names.DELAY] = str(_FIRST_RETRY_LEVEL + message.reconsume_times)
            most = max(most, tries + 1)
        properties.setdefault(names.RETRY_TOPIC, self._group.instance.namespace.wrap(message.topic))
        properties.setdefault(names.ORIGIN_MESSAGE_ID, message.offset_msg_id)
        properties[names.RECONSUME_TIME] = str(tries)
        properties[names.MAX_RECONSUME_TIMES] = str(most)
        return Message(self._group.retry_topic, message.body, flag=message.flag, properties=properties)
