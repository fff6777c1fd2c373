"""Handlers that forward tools' requests to consumers: offset reset, running info, direct consumption."""

from __future__ import annotations

from functools import partial

import msgspec

from cometmq import logs
from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.groups.clients import ClientInfo, ConsumerTable, send_oneway
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CometError, CommandError
from cometmq.message import MessageQueue
from cometmq.protocol import headers
from cometmq.protocol.bodies import GetConsumerStatusBody, ResetOffsetBody
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.json_body import MAX_SERVER_BYTES
from cometmq.remoting import Connection
from cometmq.store import MessageStore

log = logs.logger(__name__)

# The first protocol versions of clients that support running info and offset resets
# (docs/reference/remoting.md, Languages and versions).
RUNNING_INFO_SINCE = 62
RESET_SINCE = 28
FORWARD_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 5.0


class ClientStatus(GetConsumerStatusBody):
    """The offsets of one client, as its answer to GET_CONSUMER_STATUS_FROM_CLIENT."""

    MAX_LENIENT_BYTES = MAX_SERVER_BYTES


class ConsumerAdmin(msgspec.Struct, eq=False):
    """Forwards requests of tools to online consumers."""

    config: BrokerConfig
    store: MessageStore
    tables: DurableTables
    consumers: ConsumerTable

    @handles(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
    async def invoke_broker_to_reset_offset(self, connection: Connection, frame: Frame) -> Frame:
        """Calculate new offsets for a group and send them to the group's online consumers, which apply them.

        The request contains a point in time, which determines the new offset of each queue. A request of 5.x
        for a single queue may contain the new offset itself.
        """
        header = frame.header(headers.ResetOffsetRequestHeader)
        topic, group = header.topic, header.group
        config = self.tables.topics.get(topic)
        if config is None:
            raise CommandError.failed(
                f"[reset-offset] reset offset failed, no topic in this broker. topic={topic}"
            )
        offsets: dict[MessageQueue, int] = {}
        queue_ids = range(config.write_queue_nums)
        if header.queue_id is not None and header.queue_id >= 0:
            if header.queue_id >= len(queue_ids):
                raise CommandError.failed(
                    f"queueId {header.queue_id} must be between 0 and {len(queue_ids) - 1}"
                )
            queue_ids = range(header.queue_id, header.queue_id + 1)
        async for queue_id in Turns().each(queue_ids):
            stored = self.tables.offsets.query(group, topic, queue_id)
            if stored < 0:
                raise CommandError.failed(f"THe consumer group <{group}> not exist")
            offsets[self.tables.topics.queue(topic, queue_id)] = await self._target(
                header, queue_id, stored, compat.search_mode(frame.version, None)
            )
        clients = self.consumers.online(group)
        if not clients:
            raise CommandError(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic} "
                f"Timestamp: {header.timestamp}",
            )
        for client in clients:
            check_resets(client)
        body = ResetOffsetBody(offset_table=offsets)
        told = headers.ResetOffsetRequestHeader(
            topic=topic, group=group, timestamp=header.timestamp, is_force=bool(header.is_force)
        )
        answer = await encoded(body, len(offsets))
        for client in clients:
            # C++ clients can parse the new offsets only as a JSON list, and Java clients only as a JSON map.
            for_cpp = "CPP" in (str(frame.language), client.language)
            data = body.encode_for_cpp() if for_cpp else answer
            send_oneway(client.channel, Frame.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, told, data))
        log.info("offsets of %s in %s reset by %s: %s", group, topic, connection.peer, offsets)
        return frame.response(body=answer)

    async def _target(
        self, header: headers.ResetOffsetRequestHeader, queue_id: int, stored: int, mode: str | None
    ) -> int:
        store = self.store
        if header.offset is not None and header.queue_id is not None and header.queue_id >= 0:
            return min(
                max(header.offset, store.min_offset(header.topic, queue_id)),
                store.max_offset(header.topic, queue_id),
            )
        if header.timestamp == -1:
            target = store.max_offset(header.topic, queue_id)
        else:
            queue = store.queues.find_queue(header.topic, queue_id)
            target = max(await store.lookups.offset_by_time(queue, header.timestamp, mode), 0)
        # Unless the reset is forced, it may only move an offset backwards.
        return target if header.is_force or target < stored else stored

    @handles(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS)
    async def invoke_broker_to_get_consumer_status(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the offsets that a group's online consumers report (GET_CONSUMER_STATUS_FROM_CLIENT)."""
        header = frame.header(headers.GroupTopicRequestHeader)
        clients = self.consumers.online(header.group)
        if not clients:
            raise CommandError.failed(f"No Any Consumer online in the consumer group: [{header.group}]")
        table: dict[str, dict[MessageQueue, int]] = {}
        asked = headers.GroupTopicRequestHeader(topic=header.topic, group=header.group)
        for client in clients:
            if header.client_addr and header.client_addr != client.client_id:
                continue
            check_resets(client)
            request = Frame.request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, asked)
            try:
                answer = await client.channel.call(request, STATUS_TIMEOUT_S)
                if answer.code == ResponseCode.SUCCESS and answer.body:
                    table[client.client_id] = ClientStatus.decode(answer.body).message_queue_table
            except CometError as error:
                log.warning("client %s did not report its progress: %s", client.client_id, error)
        return frame.response(body=GetConsumerStatusBody(consumer_table=table).encode())

    @handles(RequestCode.GET_CONSUMER_RUNNING_INFO)
    async def get_consumer_running_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Forward the request for running info unchanged to the client that it names."""
        header = frame.header(headers.GetConsumerRunningInfoRequestHeader)
        request = Frame.request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        return await self._forward(frame, request, header.consumer_group, header.client_id)

    @handles(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    async def consume_message_directly(self, _connection: Connection, frame: Frame) -> Frame:
        """Forward a request to consume one stored message, with that message, to the client that it names."""
        header = frame.header(headers.ConsumeMessageDirectlyRequestHeader)
        record = None
        if header.msg_id:
            offset = decode_offset_id(header.msg_id).physical_offset
            store = self.store
            record = await store.executor.query(partial(store.lookups.record_at, offset))
            if record is None:
                raise CommandError.failed(f"no message at the offset of {header.msg_id}")
        told = msgspec.structs.replace(header, broker_name=self.config.broker_name)
        request = Frame.request(RequestCode.CONSUME_MESSAGE_DIRECTLY, told, bytes(record or b""))
        return await self._forward(frame, request, header.consumer_group, header.client_id)

    async def _forward(self, frame: Frame, request: Frame, group: str, client_id: str | None) -> Frame:
        known = self.consumers.groups.get(group)
        client = known.find(client_id) if known is not None and client_id else None
        if client is None:
            raise CommandError.failed(f"The Consumer <{group}> <{client_id}> not online")
        if client.version < RUNNING_INFO_SINCE:
            raise CommandError.failed(
                f"The Consumer <{client_id}> Version <{client.version}> too low to finish, please upgrade it"
            )
        try:
            answer = await client.channel.call(request, FORWARD_TIMEOUT_S)
        except CometError as error:
            raise CommandError(
                ResponseCode.CONSUME_MSG_TIMEOUT, f"consumer <{group}> <{client_id}> did not answer: {error}"
            ) from error
        return frame.response(answer.code, answer.remark, ext=answer.ext, body=bytes(answer.body))


def check_resets(client: ClientInfo) -> None:
    """Raise CommandError if a client is too old for requests about its offsets."""
    if client.version < RESET_SINCE:
        raise CommandError.failed(f"the client does not support this feature. version={client.version}")
