"""The purge of one topic: our own request, 21001. Other people's tools do not know it."""

from __future__ import annotations

from cometmq import logs
from cometmq.broker.base import compat
from cometmq.broker.base.names import check_topic
from cometmq.broker.context import BrokerContext
from cometmq.errors import CommandError
from cometmq.protocol.bodies_admin import PurgedQueue, PurgeResult
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers_admin import PurgeTopicRequestHeader
from cometmq.remoting import Connection, Handler

log = logs.logger(__name__)


class PurgeAdmin:
    """Moves the minimum offsets of a topic's queues."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {RequestCode.PURGE_TOPIC: self.purge}

    async def purge(self, connection: Connection, frame: Frame) -> Frame:
        """21001: hide the messages of a topic, durably; without `execute` only tell what would go."""
        header = frame.header(PurgeTopicRequestHeader)
        topics, store = self._context.topics, self._context.store
        name = check_topic(header.topic, frame.version)
        if topics.is_system(name):
            raise CommandError(
                compat.invalid_parameter(frame.version), f"The topic[{name}] is conflict with system topic."
            )
        if topics.get(name) is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        plan = await store.purge.plan(name, header.queue_id, header.before)
        if header.execute:
            floors = {queue.queue_id: queue.target for queue in plan}
            try:
                await store.purge.raise_min_offsets(name, floors)
            except OSError as error:
                raise CommandError(
                    ResponseCode.SYSTEM_ERROR, f"nothing was purged, the table could not be written: {error}"
                ) from error
            log.info("topic %s purged by %s, minimum offsets %s", name, connection.peer, floors)
        body = PurgeResult(
            queues=[
                PurgedQueue(
                    queue_id=queue.queue_id, min_offset=queue.min_offset, purged_to=queue.target,
                    max_offset=queue.max_offset,
                )
                for queue in plan
            ]
        )  # fmt: skip
        return frame.response(ResponseCode.SUCCESS, body=body.encode())
