"""The RPCs about clients: Telemetry, Heartbeat, NotifyClientTermination; and the broker's requests to them.

Nothing is required of a client after a restart of the broker: what its settings contained is derived from its
requests and from its group. A heartbeat therefore never fails for want of settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from cometmq import logs
from cometmq.grpc.listener.connection import GrpcConnection
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import ClientType, Code, FilterType
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import GrpcStatus, RpcError, ServiceError
from cometmq.grpc.service import renewals
from cometmq.grpc.service.clients import Client, Clients
from cometmq.grpc.service.delivered import Popped, delivered_message
from cometmq.grpc.service.outcomes import status
from cometmq.grpc.service.receives import Groups
from cometmq.grpc.service.sends import transaction_id
from cometmq.protocol.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader
from cometmq.protocol.pop import ReceiptHandle, TopicKind
from cometmq.protocol.record.one import decode_record
from cometmq.remoting import Connection, Handler

log = logs.logger(__name__)

MAX_SETTINGS_BYTES = 256 * 1024
"""The maximum size of the settings of one client. Those of a consumer of 1,000 topics have about 60 KiB."""
RECEIVE_BATCH = 32
LONG_POLL_S = 20
PUBLISH_ATTEMPTS = 3
RETRY_DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The delays of a group without a retry policy of its own: RocketMQ's delay levels."""
PUSH = frozenset({ClientType.PUSH_CONSUMER, ClientType.LITE_PUSH_CONSUMER})
CONSUMERS = PUSH | {ClientType.SIMPLE_CONSUMER}


class Sessions:
    """Handles the calls about clients.

    Args:
        groups: The groups of the broker.
        max_body: The maximum size of a message body in bytes.
    """

    def __init__(self, groups: Groups, max_body: int) -> None:
        self._groups = groups
        self._max_body = max_body
        self.clients: Clients

    # -- telemetry

    def telemetry(self, call: Call) -> None:
        """Serve a client's telemetry stream: its settings, and commands to it."""
        try:
            client = self.clients.find(call)
        except ServiceError as error:
            raise RpcError(GrpcStatus.INVALID_ARGUMENT, str(error)) from None
        call.on_message = partial(self._on_command, client, call)
        call.on_half_close = call.finish
        call.on_cancel = partial(_end_telemetry, client, call)

    def _on_command(self, client: Client, call: Call, command: Any) -> None:
        kind = command.WhichOneof("command")
        if kind == "settings":
            if command.ByteSize() > MAX_SETTINGS_BYTES:
                problem = f"settings: {command.ByteSize()} bytes, at most {MAX_SETTINGS_BYTES}"
                raise RpcError(GrpcStatus.INVALID_ARGUMENT, problem)
            client.settings = command.settings
            client.telemetry = call
            merged = self.merged(command.settings)
            client.command(messages().TelemetryCommand(status=status(Code.OK), settings=merged))

    def merged(self, given: Any) -> Any:
        """Return the settings with which a client is to work: its own and those of the server."""
        settings = messages().Settings()
        settings.CopyFrom(given)
        settings.ClearField("metric")  # no metrics are collected; some clients fail if they are told so
        if settings.HasField("publishing"):
            settings.publishing.max_body_size = self._max_body
            settings.publishing.validate_message_type = True
            policy = settings.backoff_policy
            policy.max_attempts = PUBLISH_ATTEMPTS
            policy.exponential_backoff.initial.FromMilliseconds(10)
            policy.exponential_backoff.max.FromMilliseconds(1000)
            policy.exponential_backoff.multiplier = 2
        elif settings.HasField("subscription"):
            self._merge_subscription(settings)
        return settings

    def _merge_subscription(self, settings: Any) -> None:
        subscription = settings.subscription
        config = self._groups.find(subscription.group.name)
        subscription.fifo = config is not None and bool(config.consume_message_orderly)
        subscription.receive_batch_size = RECEIVE_BATCH
        subscription.long_polling_timeout.FromSeconds(LONG_POLL_S)
        policy = settings.backoff_policy
        policy.max_attempts = 1 + (config.retry_max_times if config is not None else 16)
        delays = policy.customized_backoff.next
        del delays[:]
        for seconds in RETRY_DELAYS_S:
            delays.add().FromSeconds(seconds)

    # -- heartbeats

    async def heartbeat(self, call: Call, request: Any) -> Any:
        """Register a client's groups at the broker."""
        client = self.clients.find(call)
        data = HeartbeatData(client_id=client.client_id)
        if request.client_type in CONSUMERS or request.group.name:
            data.consumer_data_set.append(_consumer(client, request))
        elif client.settings is not None:
            topics = [each.name for each in client.settings.publishing.topics]
            data.producer_data_set.extend(ProducerData(group_name=topic) for topic in dict.fromkeys(topics))
        await client.call(RequestCode.HEART_BEAT, body=data.encode())
        return messages().HeartbeatResponse(status=status(Code.OK))

    def notify_client_termination(self, call: Call, _request: Any) -> Any:
        """Forget a client that ends: its groups, its leases and its telemetry stream."""
        client = self.clients.find(call)
        self.clients.forget(cast(GrpcConnection, call.connection), client)
        self._end(client)
        return messages().NotifyClientTerminationResponse(status=status(Code.OK))

    def closed(self, connection: GrpcConnection) -> None:
        """Forget the clients of a connection that has closed."""
        for client in self.clients.remove(connection):
            self._end(client)

    def _end(self, client: Client) -> None:
        renewals.give_back_all(client)
        if client.telemetry is not None:
            client.telemetry.finish()
        client.close()

    # -- requests of the broker

    def handlers(self, client: Client) -> Mapping[int, Handler]:
        """Return the handlers of requests that the broker sends to a client."""
        check: Callable[[Connection, Frame], None] = partial(_recover, client)
        return {RequestCode.CHECK_TRANSACTION_STATE: check}


def _end_telemetry(client: Client, call: Call) -> None:
    if client.telemetry is call:
        client.telemetry = None


def _consumer(client: Client, request: Any) -> ConsumerData:
    """Return a consumer's part of a heartbeat, without subscriptions until the client sends settings."""
    push = request.client_type in PUSH
    group = request.group.name
    found = []
    if client.settings is not None:
        subscription = client.settings.subscription
        group = group or subscription.group.name
        for each in subscription.subscriptions:
            sql = each.expression.type == FilterType.SQL
            found.append(
                SubscriptionData(
                    topic=each.topic.name,
                    sub_string=each.expression.expression or "*",
                    expression_type="SQL92" if sql else "TAG",
                )
            )
    return ConsumerData(
        group_name=group,
        consume_type="CONSUME_POP" if push else "CONSUME_ACTIVELY",
        subscription_data_set=found,
    )


def _recover(client: Client, _connection: Connection, frame: Frame) -> None:
    """Ask a producer how a transaction ends, whose half message the broker has sent in a check."""
    header = frame.header(CheckTransactionStateRequestHeader)
    stored = decode_record(bytes(frame.body))
    handle = ReceiptHandle(0, 0, 0, 0, TopicKind.NORMAL, "-", stored.queue_id, stored.queue_offset)
    command = messages().TelemetryCommand()
    recover = command.recover_orphaned_transaction_command
    recover.message.CopyFrom(delivered_message(Popped(stored, handle, 0), stored.topic, 0))
    recover.message.system_properties.ClearField("receipt_handle")
    recover.transaction_id = transaction_id(header.tran_state_table_offset, header.commit_log_offset)
    client.command(command)
