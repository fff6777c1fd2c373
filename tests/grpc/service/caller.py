"""A 5.x client that makes single calls."""

from __future__ import annotations

from typing import Any

from tests.grpc.serving import Client, M

from cometmq.grpc.rpc.enums import ClientType, Code

SETTINGS = {"grpcPort": "0", "brokerFastFailureEnable": "false"}
"""Settings of a broker with an endpoint, which does not refuse sends on a busy machine."""


class Caller:
    """Calls RPCs as one client. `metadata` is sent with each call."""

    def __init__(self, channel: Client, client_id: str = "client-1", **metadata: str) -> None:
        self.channel = channel
        self.metadata = [("x-mq-client-id", client_id), ("x-mq-language", "JAVA")]
        self.metadata += [(name.replace("_", "-"), value) for name, value in metadata.items()]

    async def call(self, name: str, request: Any, timeout_s: float = 60.0) -> Any:
        return await self.channel.unary(name)(request, metadata=self.metadata, timeout=timeout_s)

    async def send(self, *messages: Any) -> Any:
        return await self.call("SendMessage", M.SendMessageRequest(messages=messages))

    async def receive(
        self,
        topic: str = "Orders",
        group: str = "G",
        *,
        count: int = 32,
        invisible_s: float | None = 30,
        poll_s: float = 0,
        auto_renew: bool = False,
        expression: Any = None,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Receive messages. Asserts that the call succeeds or finds nothing."""
        request = self.receive_request(topic, group, count, invisible_s, poll_s, auto_renew, expression)
        responses = [each async for each in self.receiving(request, timeout_s)]
        found = [each.message for each in responses if each.WhichOneof("content") == "message"]
        (status,) = (each.status for each in responses if each.WhichOneof("content") == "status")
        assert status.code == (Code.OK if found else Code.MESSAGE_NOT_FOUND), status
        return found

    def receiving(self, request: Any, timeout_s: float = 60.0) -> Any:
        return self.channel.receive(request, metadata=self.metadata, timeout=timeout_s)

    def receive_request(
        self,
        topic: str = "Orders",
        group: str = "G",
        count: int = 32,
        invisible_s: float | None = 30,
        poll_s: float = 0,
        auto_renew: bool = False,
        expression: Any = None,
    ) -> Any:
        request = M.ReceiveMessageRequest(
            group=M.Resource(name=group),
            message_queue=M.MessageQueue(topic=M.Resource(name=topic)),
            batch_size=count,
            auto_renew=auto_renew,
            filter_expression=expression,
        )
        request.long_polling_timeout.FromMilliseconds(int(poll_s * 1000))
        if invisible_s is not None:
            request.invisible_duration.FromMilliseconds(int(invisible_s * 1000))
        return request

    async def ack(self, *messages: Any, group: str = "G") -> Any:
        entries = [
            M.AckMessageEntry(
                message_id=each.system_properties.message_id,
                receipt_handle=each.system_properties.receipt_handle,
            )
            for each in messages
        ]
        topic = messages[0].topic
        request = M.AckMessageRequest(group=M.Resource(name=group), topic=topic, entries=entries)
        return await self.call("AckMessage", request)

    async def change(self, message: Any, seconds: float, group: str = "G", suspend: bool = False) -> Any:
        request = M.ChangeInvisibleDurationRequest(
            group=M.Resource(name=group),
            topic=message.topic,
            receipt_handle=message.system_properties.receipt_handle,
            message_id=message.system_properties.message_id,
            suspend=suspend,
        )
        request.invisible_duration.FromMilliseconds(int(seconds * 1000))
        return await self.call("ChangeInvisibleDuration", request)

    async def dead_letter(self, received: Any, group: str = "G") -> Any:
        system = received.system_properties
        request = M.ForwardMessageToDeadLetterQueueRequest(
            group=M.Resource(name=group),
            topic=received.topic,
            receipt_handle=system.receipt_handle,
            message_id=system.message_id,
            lite_topic=system.lite_topic,
        )
        return await self.call("ForwardMessageToDeadLetterQueue", request)

    async def heartbeat(self, group: str = "", kind: int = ClientType.PUSH_CONSUMER) -> Any:
        request = M.HeartbeatRequest(client_type=kind)
        if group:
            request.group.name = group
        return await self.call("Heartbeat", request)

    def telemetry(self) -> Any:
        return self.channel.telemetry(metadata=self.metadata)


def message(topic: str = "Orders", body: bytes = b"body", message_id: str = "id-1", **system: Any) -> Any:
    """Return a message. `system` are system properties."""
    made = M.Message(topic=M.Resource(name=topic), body=body)
    made.system_properties.message_id = message_id
    made.system_properties.born_timestamp.GetCurrentTime()
    for name, value in system.items():
        if name == "keys":
            made.system_properties.keys.extend(value)
        else:
            setattr(made.system_properties, name, value)
    return made


def producer_settings(*topics: str) -> Any:
    settings = M.Settings(client_type=ClientType.PRODUCER)
    settings.publishing.topics.extend(M.Resource(name=topic) for topic in topics)
    return M.TelemetryCommand(settings=settings)


def consumer_settings(group: str = "G", topic: str = "Orders", kind: int = ClientType.PUSH_CONSUMER) -> Any:
    settings = M.Settings(client_type=kind)
    settings.subscription.group.name = group
    entry = settings.subscription.subscriptions.add()
    entry.topic.name, entry.expression.expression = topic, "*"
    return M.TelemetryCommand(settings=settings)
