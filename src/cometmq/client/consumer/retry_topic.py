"""Sending failed messages back: to their broker or, if that fails, to the group's retry topic.

In both cases the broker moves a message with too many retries to the dead-letter queue.
"""

from __future__ import annotations

from cometmq import logs
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import QueryClient
from cometmq.client.cluster.options import check_range
from cometmq.client.producer.outgoing import prepare_system
from cometmq.client.producer.producer import Producer
from cometmq.errors import CometError
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import CLIENT_INNER_PRODUCER_GROUP, RETRY_PREFIX
from cometmq.protocol.compression import TYPE_MASK
from cometmq.protocol.properties import values as names
from cometmq.protocol.record.layout import COMPRESSED

log = logs.logger("cometmq.client.consumer")

_COMPRESSION = COMPRESSED | TYPE_MASK
_FIRST_RETRY_LEVEL = 3
"""The delay level of the first retry. As at the broker, the level increases by one with each retry."""


def check_delay_level(delay_level: object) -> None:
    """Raise ConfigError unless the delay level is valid for a retry."""
    check_range("delay_level", delay_level, -1, 18)


class SendsBack(QueryClient):
    """A consumer that can send received messages back."""

    def _retries(self) -> RetryTopic:
        """Return the retry topic of the group. Raises ClientStateError if the consumer is not running."""
        raise NotImplementedError

    async def send_message_back(self, message: MessageExt, delay_level: int = 0) -> None:
        """Send a message back to the broker, so that push consumers of the group receive it again later.

        Args:
            message: A message that this consumer received.
            delay_level: 0: the broker chooses the delay by the number of retries. 1 to 18: a delay level. -1:
                the message goes to the dead-letter queue immediately.

        Raises:
            CometError: The broker did not accept the message, or cannot be reached.
        """
        check_delay_level(delay_level)
        await self._retries().send_back(message, delay_level)


class RetryTopic:
    """Sends messages back to their brokers, or with its own producer to the retry topic of the group.

    After `most` retries a message goes to the dead-letter queue.
    """

    def __init__(self, client: ClientInstance, group: str, most: int) -> None:
        self._client = client
        self._group = group
        self._most = most
        self._producer = Producer(CLIENT_INNER_PRODUCER_GROUP, client=client)

    async def close(self) -> None:
        await self._producer.stop()

    async def send_back(self, message: MessageExt, delay_level: int) -> None:
        """Send a message back, so that the group consumes it again later. Raises CometError if that fails.

        `delay_level` 0: the broker chooses the delay by the number of retries. Negative: dead-letter queue.
        """
        client = self._client
        try:
            await client.brokers.send_message_back(
                client.master_addr(message.broker_name) if message.broker_name else message.store_host,
                message,
                self._group,
                delay_level=delay_level,
                max_reconsume_times=self._most,
            )
        except CometError as error:
            log.info("send-back of %s failed (%s); sending it to the retry topic", message.msg_id, error)
            await self.send(message, delay_level)

    async def send(self, message: MessageExt, delay_level: int = 0) -> None:
        """Send a message to the retry topic, see send_back. Raises CometError if no broker accepts it."""
        if self._producer.state == "new":
            await self._producer.start()
        # A body that was not decompressed is sent unchanged, so the message keeps its compression type.
        packed = message.sys_flag & _COMPRESSION
        await self._producer.send_raw(
            prepare_system(self._again(message, delay_level), self._client.keys, packed)
        )

    def _again(self, message: MessageExt, delay_level: int) -> Message:
        """Return a copy of the message for the retry topic, with the same body, flag and unique key.

        The broker moves the message to the dead-letter queue if its number of retries has reached the
        maximum. The maximum is counted as brokers of RocketMQ 4.9 count it when a message is sent back.
        Brokers of 5.x would allow one more retry (docs/reference/storage.md, Send back). A message for the
        dead-letter queue has no DELAY property, because RocketMQ 4.9.7 would delay it there.
        """
        tries = message.reconsume_times + 1
        most = self._most if delay_level >= 0 else min(self._most, tries - 1)
        dropped = (names.TRAN_MSG, names.DELAY, names.MIN_OFFSET, names.MAX_OFFSET, names.CONSUME_START_TIME)
        properties = {key: value for key, value in message.properties.items() if key not in dropped}
        if tries <= most:
            properties[names.DELAY] = str(delay_level or _FIRST_RETRY_LEVEL + message.reconsume_times)
            most = max(most, tries + 1)
        properties.setdefault(names.RETRY_TOPIC, self._client.namespace.wrap(message.topic))
        properties.setdefault(names.ORIGIN_MESSAGE_ID, message.offset_msg_id)
        properties[names.RECONSUME_TIME] = str(tries)
        properties[names.MAX_RECONSUME_TIMES] = str(most)
        return Message(RETRY_PREFIX + self._group, message.body, flag=message.flag, properties=properties)
