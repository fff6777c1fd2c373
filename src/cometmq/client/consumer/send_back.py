"""A message that could not be handled goes round once more, by way of the broker or of the group's retry
topic."""

from __future__ import annotations

from cometmq import logs
from cometmq.client.consumer.group import ConsumerGroup
from cometmq.client.producer.outgoing import prepare_system
from cometmq.client.producer.producer import Producer
from cometmq.errors import CometError
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.compression import COMPRESSED, TYPE_MASK
from cometmq.protocol.properties import text as names

__all__ = ["SendBack", "retry_message"]

log = logs.logger("cometmq.client.consumer")

_COMPRESSION = COMPRESSED | TYPE_MASK
_FIRST_RETRY_LEVEL = 3
"""The broker's rule: retry n waits delay level 3 + n."""


class SendBack:
    """Callable: (message, delay level). Raises CometError when neither way worked."""

    def __init__(self, group: ConsumerGroup, producer: Producer) -> None:
        self._group = group
        self._producer = producer

    async def __call__(self, message: MessageExt, delay_level: int) -> None:
        group = self._group
        try:
            addr = group.instance.master_addr(message.broker_name)
            await group.instance.brokers.send_message_back(
                addr,
                message,
                group.name,
                delay_level=delay_level,
                max_reconsume_times=group.options.max_reconsume_times,
            )
        except CometError as error:
            log.info(
                "send-back of %s failed (%s); sending it to %s", message.msg_id, error, group.retry_topic
            )
            if not self._producer.started:
                await self._producer.start()
            again = retry_message(message, group.name, group.options.max_reconsume_times)
            # A body that was not decompressed goes round as it is.
            packed = message.sys_flag & _COMPRESSION
            await self._producer.send_raw(prepare_system(again, group.instance.keys, packed))


def retry_message(message: MessageExt, group: str, max_reconsume_times: int) -> Message:
    """The message as the client itself writes it to the retry topic: same body, flag and unique id."""
    properties = {key: value for key, value in message.properties.items() if key != names.TRAN_MSG}
    properties.setdefault(names.RETRY_TOPIC, message.topic)
    properties.setdefault(names.ORIGIN_MESSAGE_ID, message.offset_msg_id)
    properties[names.RECONSUME_TIME] = str(message.reconsume_times + 1)
    properties[names.MAX_RECONSUME_TIMES] = str(max_reconsume_times)
    properties[names.DELAY] = str(_FIRST_RETRY_LEVEL + message.reconsume_times)
    return Message(topic=RETRY_PREFIX + group, body=message.body, flag=message.flag, properties=properties)
