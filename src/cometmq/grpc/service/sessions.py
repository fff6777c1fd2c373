"""The RPCs about clients: Telemetry, Heartbeat, NotifyClientTermination; and the broker's requests to them.

Nothing is required of a client after a restart of the broker: what its settings contained is derived from its
requests and from its group. A heartbeat therefore never fails for want of settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cometmq import logs
from cometmq.broker.groups.client_requests import GRPC_TYPE
from cometmq.broker.groups.clients import POP_TYPE
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.grpc.listener.connection import GrpcConnection
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import ClientType, Code, Language
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import GrpcStatus, RpcError, ServiceError
from cometmq.grpc.service.clients import Client, Clients
from cometmq.grpc.service.delivered import unleased_message
from cometmq.grpc.service.lite import end_subscriptions, notify_unsubscribe
from cometmq.grpc.service.outcomes import status
from cometmq.grpc.service.relays import Relays
from cometmq.grpc.service.renewals import Renewals
from cometmq.grpc.service.sends import transaction_id
from cometmq.protocol.bodies import RETRY_MAX_TIMES, ConsumerData, HeartbeatData, ProducerData
from cometmq.protocol.bodies.retry_policy import RetryPolicy, policy_of
from cometmq.protocol.codes import MAX_GROUP_LENGTH, RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader
from cometmq.protocol.lite import MAX_LITE_TOPIC_LENGTH, client_quota
from cometmq.protocol.record.one import decode_record
from cometmq.remoting import Connection, Handler
from cometmq.settings import INT_MAX

log = logs.logger(__name__)

MAX_SETTINGS_BYTES = 256 * 1024
"""The maximum size of the settings of one client. Those of a consumer of 1,000 topics have about 60 KiB."""
MAX_TOPICS = 1_000
"""The maximum number of topics in settings: heartbeats with more are refused by the broker."""
MAX_KEPT_BYTES = 16 * 1024
"""Heartbeats repeat as many topics of the client's settings as fit into this size."""
RECEIVE_BATCH = 32
LONG_POLL_S = 20
PUBLISH_ATTEMPTS = 3
LITE_CONSUMERS = frozenset({ClientType.LITE_PUSH_CONSUMER, ClientType.LITE_SIMPLE_CONSUMER})
CONSUMERS = LITE_CONSUMERS | {ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER}
TYPE_NAMES = {int(each): each.name for each in ClientType}


@dataclass(eq=False)
class Sessions:
    """Handles the calls about clients. `max_body` is the maximum size of a message body in bytes."""

    groups: SubscriptionGroups
    max_body: int
    clients: Clients = field(init=False)
    renewals: Renewals = field(init=False)
    _relays: Relays = field(default_factory=Relays)

    # -- telemetry

    def telemetry(self, call: Call) -> None:
        """Serve a client's telemetry stream: its settings, and commands to it."""
        client = self._client(call)
        client.streams.add(call)
        call.on_message = partial(self._on_command, call)
        call.on_half_close = call.on_cancel = partial(_end_telemetry, client, call)

    def _client(self, call: Call) -> Client:
        """Return the client of a telemetry stream. Raises RpcError."""
        try:
            return self.clients.find(call)
        except ServiceError as error:
            raise RpcError(GrpcStatus.INVALID_ARGUMENT, str(error)) from None

    def _on_command(self, call: Call, command: Any) -> None:
        client = self._client(call)
        kind = command.WhichOneof("command")
        if kind in ("thread_stack_trace", "verify_message_result"):
            self._relays.answered(client, getattr(command, kind).nonce, command)
        elif kind == "settings":
            self._on_settings(client, call, command)

    def _on_settings(self, client: Client, call: Call, command: Any) -> None:
        if not client.changes.take(self.clients.now()):
            raise RpcError(GrpcStatus.RESOURCE_EXHAUSTED, "settings: the client sends them too often")
        settings = command.settings
        count = max(len(settings.publishing.topics), len(settings.subscription.subscriptions))
        if command.ByteSize() > MAX_SETTINGS_BYTES or count > MAX_TOPICS:
            problem = (
                f"settings: {count} topics in {command.ByteSize()} bytes, at most {MAX_TOPICS} topics in "
                f"{MAX_SETTINGS_BYTES} bytes"
            )
            raise RpcError(GrpcStatus.INVALID_ARGUMENT, problem)
        client.settings = _kept(settings)
        client.is_lite = settings.client_type in LITE_CONSUMERS
        client.telemetry = call
        client.streams.add(call)
        call.on_half_close = call.on_cancel = partial(_end_telemetry, client, call)
        # Without this, a producer would receive no checks of transactions until its next heartbeat.
        group = settings.subscription.group.name
        client.oneway(self._heartbeat(client, settings.client_type, group))
        client.reply(messages().TelemetryCommand(status=status(Code.OK), settings=self.merged(settings)))

    def merged(self, given: Any) -> Any:
        """Return the settings with which a client is to work: its own and those of the server."""
        settings = messages().Settings()
        settings.CopyFrom(given)
        settings.ClearField("metric")  # no metrics are collected; some clients fail if they are told so
        if settings.HasField("publishing"):
            settings.publishing.max_body_size = self.max_body
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
        config = self.groups.table.get(subscription.group.name)
        subscription.fifo = config is not None and bool(config.consume_message_orderly)
        subscription.receive_batch_size = RECEIVE_BATCH
        subscription.long_polling_timeout.FromSeconds(LONG_POLL_S)
        if settings.client_type in LITE_CONSUMERS:
            attributes = None if config is None else config.attributes
            subscription.lite_subscription_quota = client_quota(attributes)
            subscription.max_lite_topic_size = MAX_LITE_TOPIC_LENGTH
        retries = RETRY_MAX_TIMES if config is None else config.retry_max_times
        settings.backoff_policy.max_attempts = min(1 + retries, INT_MAX)
        policy = policy_of(config)
        if policy.delays and settings.user_agent.language == Language.NODE_JS:
            # Apache's Node client ignores a list of delays: it then never retries ordered messages, and
            # retries others without a delay. It takes the seconds of this policy for milliseconds.
            policy = RetryPolicy((), policy.delays[0], policy.delays[-1], 2)
        _announce(policy, settings.backoff_policy)

    # -- heartbeats

    async def heartbeat(self, call: Call, request: Any) -> Any:
        """Register a client's groups at the broker."""
        client = self.clients.find(call)
        await client.send(self._heartbeat(client, request.client_type, request.group.name))
        return messages().HeartbeatResponse(status=status(Code.OK))

    def _heartbeat(self, client: Client, client_type: int, group: str) -> Frame:
        """Return the heartbeat of a client, with the topics of its settings."""
        settings = messages().Settings.FromString(client.settings)
        data = HeartbeatData(client_id=client.client_id)
        if client_type in CONSUMERS or group:
            data.consumer_data_set.append(
                ConsumerData(
                    group_name=group or settings.subscription.group.name,
                    consume_type=POP_TYPE,
                    subscription_data_set=client.subscriptions(),
                )
            )
        else:
            topics = [*(each.name for each in settings.publishing.topics), *client.transactions]
            data.producer_data_set.extend(ProducerData(group_name=topic) for topic in dict.fromkeys(topics))
            client_type = client_type or ClientType.PRODUCER
        ext = {GRPC_TYPE: TYPE_NAMES.get(client_type, "")}
        return client.frame(RequestCode.HEART_BEAT, body=data.encode(), ext=ext)

    def notify_client_termination(self, call: Call, _request: Any) -> Any:
        """Forget a client that ends: its groups, its leases and its telemetry streams."""
        client = self.clients.find(call)
        if client.is_lite:
            end_subscriptions(client)
        self.clients.forget(client)
        self.end(client)
        return messages().NotifyClientTerminationResponse(status=status(Code.OK))

    def closed(self, connection: GrpcConnection) -> None:
        """Forget the clients whose last connection has closed."""
        for client in self.clients.remove(connection):
            self.end(client)

    def expire(self, now: float) -> None:
        """Forget silent clients. Called every few seconds, with the time of the event loop."""
        for client in self.clients.silent(now):
            self.clients.forget(client)
            self.end(client)

    def end(self, client: Client) -> None:
        """End the leases, the telemetry streams and the link of a client that has been forgotten."""
        self.renewals.give_back_all(client)
        for call in client.streams:  # Java's client waits for the end of each
            call.finish()
        client.close()

    # -- requests of the broker

    def handlers(self, client: Client) -> Mapping[int, Handler]:
        """Return the handlers of requests that the broker sends to a client."""
        handlers: dict[int, Callable[[Client, Connection, Frame], Any]] = {
            RequestCode.CHECK_TRANSACTION_STATE: _recover,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._relays.running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._relays.consume_directly,
            RequestCode.NOTIFY_UNSUBSCRIBE_LITE: notify_unsubscribe,
        }
        return {code: partial(handler, client) for code, handler in handlers.items()}


def _end_telemetry(client: Client, call: Call) -> None:
    call.finish()
    client.streams.discard(call)
    if client.telemetry is call:
        client.telemetry = None


def _announce(policy: RetryPolicy, message: Any) -> None:
    """Set the delays in a `RetryPolicy` message."""
    if policy.delays:
        message.customized_backoff.ClearField("next")
        for delay in policy.delays:
            message.customized_backoff.next.add().FromMilliseconds(delay)
        return
    backoff = message.exponential_backoff
    backoff.initial.FromMilliseconds(policy.initial)
    backoff.max.FromMilliseconds(policy.maximum)
    backoff.multiplier = policy.multiplier


def _kept(given: Any) -> bytes:
    """Return the settings that heartbeats repeat: the group, and as many topics as fit."""
    kept, size = messages().Settings(), 0
    if given.HasField("subscription"):
        # A name that is too long stays invalid.
        kept.subscription.group.name = given.subscription.group.name[: MAX_GROUP_LENGTH + 1]
    for source, target in (
        (given.publishing.topics, kept.publishing.topics),
        (given.subscription.subscriptions, kept.subscription.subscriptions),
    ):
        for each in source:
            size += each.ByteSize() + 4  # 4: its tag and length
            if size <= MAX_KEPT_BYTES:
                target.append(each)
    return bytes(kept.SerializeToString())


def _recover(client: Client, _connection: Connection, frame: Frame) -> None:
    """Ask a producer how a transaction ends, whose half message the broker has sent in a check."""
    header = frame.header(CheckTransactionStateRequestHeader)
    command = messages().TelemetryCommand()
    recover = command.recover_orphaned_transaction_command
    recover.message.CopyFrom(unleased_message(decode_record(bytes(frame.body))))
    recover.transaction_id = transaction_id(header.tran_state_table_offset, header.commit_log_offset)
    client.command(command)
