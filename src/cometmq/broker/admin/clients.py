"""Handlers of the requests by which tools list connected clients."""

from __future__ import annotations

import msgspec

from cometmq.broker.base.times import awake_ms
from cometmq.broker.groups.clients import ConsumerTable, Group, ProducerTable
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.errors import CommandError
from cometmq.protocol import bodies, headers
from cometmq.protocol.bodies import Body
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import Header
from cometmq.remoting import Connection
from cometmq.store import Clock


class QuerySubscriptionByConsumerRequestHeader(Header, gc=False):
    """The header of QUERY_SUBSCRIPTION_BY_CONSUMER (5.x)."""

    group: str
    topic: str | None = None


class SubscriptionOfGroup(Body):
    """The body of the response to QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str
    subscription_data: bodies.SubscriptionData | None = None


class ClientAdmin(msgspec.Struct, eq=False):
    """Answers requests about clients from the broker's tables of producers and consumers."""

    clock: Clock
    producers: ProducerTable
    consumers: ConsumerTable
    groups: SubscriptionGroups

    @handles(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def get_consumer_connection_list(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the online members of a consumer group, its subscriptions and its settings."""
        group = frame.header(headers.ConsumerGroupRequestHeader).consumer_group
        known = self.consumers.groups.get(group)
        if known is None:
            raise CommandError(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online")
        settings = self.groups.table.get(group)
        body = bodies.ConsumerConnection(
            connection_set=connections_of(known),
            subscription_table=dict(known.subscriptions),
            consume_type=known.consume_type,
            message_model=known.message_model,
            consume_from_where=known.consume_from_where,
            retry_max_times=None if settings is None else settings.retry_max_times,
        )
        return frame.response(body=body.encode())

    @handles(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def get_producer_connection_list(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the online members of a producer group."""
        group = frame.header(headers.GetProducerConnectionListRequestHeader).producer_group
        known = self.producers.groups.get(group)
        if known is None:
            raise CommandError.failed(f"the producer group[{group}] not exist")
        return frame.response(body=bodies.ProducerConnection(connection_set=connections_of(known)).encode())

    @handles(RequestCode.GET_ALL_PRODUCER_INFO)
    def get_all_producer_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the online members of every producer group."""
        shift = self.clock.time_ms() - awake_ms(self.clock)  # Monotonic to wall-clock times
        table = {
            group: [
                bodies.ProducerInfo(
                    client_id=client.client_id,
                    remote_ip=f"/{client.channel.peer}",
                    language=client.language,
                    version=client.version,
                    last_update_timestamp=client.seen_ms + shift,
                    grpc_type=client.grpc_type or None,
                )
                for client in known.by_channel.values()
            ]
            for group, known in self.producers.groups.items()
        }
        return frame.response(body=bodies.ProducerTableInfo(data=table).encode())

    @handles(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def query_subscription_by_consumer(self, _connection: Connection, frame: Frame) -> Frame:
        """Return a group's current subscription to a topic."""
        header = frame.header(QuerySubscriptionByConsumerRequestHeader)
        topic = header.topic or ""
        found = self.consumers.subscription(header.group, topic)
        return frame.response(body=SubscriptionOfGroup(header.group, topic, found).encode())


def connections_of(group: Group) -> list[bodies.ClientConnection]:
    """Return the online members of a group in the form that tools expect."""
    return [
        bodies.ClientConnection(
            client_id=client.client_id,
            client_addr=client.channel.peer,
            language=client.language,
            version=client.version,
            max_reconsume_times=client.retry_limit,
            subscriptions=dict(sorted(client.wants)) or None,
            settings=dict(sorted(client.settings)) or None,
            grpc_type=client.grpc_type or None,
        )
        for client in group.by_channel.values()
    ]
