"""The connected clients: producer groups, consumer groups, their members, subscriptions and notifications.

Callers pass times in ms of a monotonic clock that does not count the time of a suspended machine. A heartbeat
adds a client to the groups that it contains. Only an unregister request, a lost connection or 120 s of
silence removes the client; a group that is missing from a later heartbeat keeps the client
(docs/reference/remoting.md, Heartbeats).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.errors import RemotingError
from cometmq.protocol.bodies import RETRY_MAX_TIMES, SubscriptionData
from cometmq.protocol.bodies.subscriptions import Settings, Wants, wants_of
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ConsumerGroupRequestHeader
from cometmq.remoting import Connection

log = logs.logger(__name__)

# Time in ms without a heartbeat after which a client's connection is closed.
EXPIRED_MS = 120_000
# The maximum number of consumer groups, and also of producer groups, of one connection. A group with long
# subscriptions counts as several groups. Real clients have only a few.
MAX_GROUPS_PER_CONNECTION = 1_000
# A group's subscriptions and other data count as one more group for each WEIGHT_CHARACTERS characters.
WEIGHT_CHARACTERS = 16_384
MAX_TOPICS_PER_GROUP = 1_000  # Maximum number of subscriptions of a consumer group
MAX_CLIENT_ID_LENGTH = 1_024  # Maximum number of characters of a client id; real client ids have about 40

REST_S = 0.2  # Minimum interval, in seconds, between two notifications of the same group

POP_TYPE = "CONSUME_POP"  # The consume type of groups whose members pop messages
# Client id, language and version of a client, and the type of a client that uses gRPC
Client = tuple[str, str, int] | tuple[str, str, int, str]


class ClientInfo(msgspec.Struct):
    """A client that is a member of a group, on one connection.

    For a consumer, `topics` holds the topics in its last heartbeat. For a consumer that does not pull,
    `wants` holds the subscriptions and `settings` the consume settings. For all other clients, these are
    empty. `grpc_type` is the type of a client that uses gRPC, and "" for other clients.
    """

    channel: Any
    client_id: str
    language: str
    version: int
    grpc_type: str = ""
    seen_ms: int = 0
    retry_limit: int | None = None
    """The maximum number of retries in the client's last send-back, or None before the first send-back."""
    topics: frozenset[str] = frozenset()
    wants: Wants = frozenset()
    settings: Settings = frozenset()


class Group:
    """The members of a group, by connection."""

    __slots__ = ("by_channel",)

    def __init__(self) -> None:
        self.by_channel: dict[Hashable, ClientInfo] = {}

    def client_ids(self) -> list[str]:
        """Return the ids of the group's clients, without duplicates, in the order in which they joined."""
        return list(dict.fromkeys(client.client_id for client in self.by_channel.values()))

    def find(self, client_id: str) -> ClientInfo | None:
        """Return the member with this client id on its newest connection, or None if there is none."""
        newest = reversed(self.by_channel.values())
        return next((client for client in newest if client.client_id == client_id), None)


class ConsumerGroup(Group):
    """A consumer group, as described by its members' heartbeats."""

    __slots__ = (
        "consume_from_where", "consume_type", "limits_told", "message_model", "own_limit_told",
        "subscriptions",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.consume_type = self.message_model = self.consume_from_where = ""  # Set by each heartbeat
        self.subscriptions: dict[str, SubscriptionData] = {}
        self.limits_told = False  # Whether a log line has reported different retry limits of members
        self.own_limit_told = RETRY_MAX_TIMES  # The group's retry limit that was logged last

    @property
    def pops(self) -> bool:
        """Whether the members pop messages instead of pulling them."""
        return self.consume_type == POP_TYPE

    def wants(self) -> dict[str, Wants]:
        """Return the subscriptions of each member, of its newest connection, by client id."""
        return {client.client_id: client.wants for client in self.by_channel.values()}

    def settings(self) -> dict[str, Settings]:
        """Return the consume settings of each member, of its newest connection, by client id."""
        return {client.client_id: client.settings for client in self.by_channel.values()}

    def update_subscriptions(self, member: ClientInfo, subscriptions: Iterable[SubscriptionData]) -> bool:
        """Apply the subscriptions of a member's heartbeat. Return whether a topic was added or removed.

        A known topic's subscription is replaced only by one with a higher version. A topic is removed once no
        member subscribes to it: members of 5.x, for instance, do not list the retry topic, from which members
        of 4.x pull.
        """
        changed = False
        listed = set()
        for new in subscriptions:
            listed.add(new.topic)
            old = self.subscriptions.get(new.topic)
            if old is None:
                self.subscriptions[new.topic] = new
                changed = True
            elif new.sub_version > old.sub_version:
                self.subscriptions[new.topic] = new
        if member.topics != listed:
            # Thousands of members may list the same topics, so let them share one object.
            same = (each.topics for each in self.by_channel.values() if each.topics == listed)
            member.topics = next(same, frozenset(listed))
        unlisted = self.subscriptions.keys() - listed
        for each in self.by_channel.values():
            if not unlisted:
                break
            unlisted -= each.topics
        for topic in unlisted:
            del self.subscriptions[topic]
        return changed or bool(unlisted)


G = TypeVar("G", bound=Group)


class ClientTable(Generic[G]):
    """The groups of connected clients, by name. A group exists only while it has members."""

    def __init__(self, new_group: type[G]) -> None:
        self.groups: dict[str, G] = {}
        self._new_group = new_group
        # For each connection, its groups and their weights, which count toward MAX_GROUPS_PER_CONNECTION
        self.groups_of: dict[Hashable, dict[str, int]] = {}

    def join(self, group: str, channel: Hashable, client: Client, now_ms: int, weight: int = 1) -> bool:
        """Add a client to a group, or renew its membership. Return whether it is new on this connection.

        `weight` is what the group counts toward the limit for the groups of a connection.
        """
        known = self.groups.get(group)
        if known is None:
            known = self.groups[group] = self._new_group()
        self.groups_of.setdefault(channel, {})[group] = weight
        before = known.by_channel.get(channel)
        same = before is not None and before.client_id == client[0]
        info = known.by_channel[channel] = ClientInfo(channel, *client)
        info.seen_ms = now_ms
        if before is not None:
            info.topics, info.wants, info.settings = before.topics, before.wants, before.settings
            info.retry_limit = before.retry_limit if same else None
        return not same

    def unregister(self, group: str, channel: Hashable) -> bool:
        """Remove a connection's client from a group. Return whether the client was a member."""
        groups = self.groups_of.get(channel, {})
        if groups.pop(group, None) is None:
            return False
        if not groups:
            del self.groups_of[channel]
        known = self.groups[group]
        del known.by_channel[channel]
        if not known.by_channel:
            del self.groups[group]
        return True

    def channel_closed(self, channel: Hashable) -> list[str]:
        """Remove the clients of a closed connection from all groups. Return these groups."""
        groups = list(self.groups_of.get(channel, ()))
        for group in groups:
            self.unregister(group, channel)
        return groups

    def expire(self, now_ms: int) -> tuple[list[Any], list[str]]:
        """Remove the clients that have sent no heartbeat for EXPIRED_MS.

        Return their connections, which the caller must close, and the groups that have lost a member.
        """
        silent = [
            (group, channel)
            for group, known in self.groups.items()
            for channel, client in known.by_channel.items()
            if now_ms - client.seen_ms > EXPIRED_MS
        ]
        for group, channel in silent:
            self.unregister(group, channel)
        return [channel for _, channel in silent], list(dict.fromkeys(group for group, _ in silent))

    def online(self, group: str) -> list[ClientInfo]:
        """Return the connected members of a group."""
        known = self.groups.get(group)
        return [] if known is None else list(known.by_channel.values())

    def weight_with(self, channel: Hashable, more: Mapping[str, int]) -> int:
        """Return the total weight of a connection's groups with those in `more`, which replace known ones."""
        return sum({**self.groups_of.get(channel, {}), **more}.values())


class ProducerTable(ClientTable[Group]):
    """The producer groups, and the connection of each client id."""

    def __init__(self, may_replace: Callable[[Any, Any], bool] = lambda _new, _old: True) -> None:
        """Create a table without groups.

        If a client connects with the client id of an open connection, `may_replace` is called with the new
        and the open connection, and returns whether replies for the client id are sent to the new one.
        """
        super().__init__(Group)
        self._may_replace = may_replace
        self._channel_of: dict[str, Any] = {}
        self._id_of: dict[Hashable, str] = {}  # The last client id of each connection

    def channel(self, client_id: str) -> Any:
        """Return the connection to which replies for a client id are sent, or None."""
        return self._channel_of.get(client_id)

    def join(self, group: str, channel: Hashable, client: Client, now_ms: int, weight: int = 1) -> bool:
        """Add a client to a group (see ClientTable.join), and update the connection of its client id."""
        if self._id_of.get(channel) != client[0]:
            self._forget(channel)
            self._id_of[channel] = client[0]
        before = self._channel_of.get(client[0])
        if before is None or self._may_replace(channel, before):
            self._channel_of[client[0]] = channel
        return super().join(group, channel, client, now_ms, weight)

    def unregister(self, group: str, channel: Hashable) -> bool:
        """Remove a client from a group (see ClientTable.unregister)."""
        left = super().unregister(group, channel)
        if channel not in self.groups_of:
            self._forget(channel)
        return left

    def _forget(self, channel: Hashable) -> None:
        client_id = self._id_of.pop(channel, "")
        if self._channel_of.get(client_id) is channel:
            del self._channel_of[client_id]


class ConsumerTable(ClientTable[ConsumerGroup]):
    """The consumer groups of connected clients."""

    def __init__(self) -> None:
        super().__init__(ConsumerGroup)
        self._log_limit = logs.LogLimiter()

    def register(
        self,
        group: str,
        channel: Hashable,
        client: Client,
        described: tuple[str, str, str],
        subscriptions: Iterable[SubscriptionData],
        now_ms: int,
        weight: int = 1,
    ) -> bool:
        """Add a client to a group, and apply its heartbeat. Return whether members or topics have changed.

        `described` holds the consume type, the message model and `consumeFromWhere` of the heartbeat.
        """
        joined = self.join(group, channel, client, now_ms, weight)
        known = self.groups[group]
        known.consume_type, known.message_model, known.consume_from_where = described
        return known.update_subscriptions(known.by_channel[channel], subscriptions) or joined

    def subscribes(self, group: str, channel: Hashable, subscriptions: Iterable[SubscriptionData]) -> bool:
        """Store the subscriptions and consume settings of one member. Return whether they have changed."""
        known = self.groups[group]
        member = known.by_channel[channel]
        wants = wants_of(subscriptions)
        settings: Settings = frozenset(
            {("messageModel", known.message_model), ("consumeFromWhere", known.consume_from_where)}
        )
        if (wants, settings) == (member.wants, member.settings):
            return False
        # Thousands of members may have equal subscriptions, so let them share one object.
        others = known.by_channel.values()
        member.wants = next((other.wants for other in others if other.wants == wants), wants)
        member.settings = next((other.settings for other in others if other.settings == settings), settings)
        return True

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """Return a group's subscription to a topic, or None."""
        known = self.groups.get(group)
        return None if known is None else known.subscriptions.get(topic)

    def topics_of(self, group: str) -> set[str]:
        """Return the topics to which a group subscribes. The set is empty for a group without members."""
        known = self.groups.get(group)
        return set() if known is None else set(known.subscriptions)

    def note_retry_limit(self, group: str, channel: Hashable, limit: int, own: int) -> None:
        """Save the retry limit that a member's send-back contains. `own` is the group's configured limit.

        If the member's limit differs from that of another member, or from `own`, log this once, because then
        the number of retries depends on the member that sends a message back. If the log's rate limit
        suppresses the line, a later send-back logs it.
        """
        known = self.groups.get(group)
        client = None if known is None else known.by_channel.get(channel)
        if known is None or client is None:
            return
        if own not in (limit, RETRY_MAX_TIMES, known.own_limit_told) and self._log_limit.allows():
            known.own_limit_told = own
            log.warning(
                "group %s: client %s sends maxReconsumeTimes %d, which overrides the group's "
                "retryMaxTimes=%d",
                group, client.client_id, limit, own,
            )  # fmt: skip
        if client.retry_limit == limit:
            return
        if not known.limits_told:
            others = (each for each in known.by_channel.values() if each is not client)
            other = next((each for each in others if each.retry_limit not in (None, limit)), None)
            if other is not None:
                if not self._log_limit.allows():
                    return
                known.limits_told = True
                log.warning(
                    "group %s: client %s sends maxReconsumeTimes %d, client %s sends %d: the value "
                    "of the client that sends a message back applies",
                    group, client.client_id, limit, other.client_id, other.retry_limit,
                )  # fmt: skip
        client.retry_limit = limit

    def groups_of_topic(self, topic: str) -> set[str]:
        """Return the names of the online groups that subscribe to a topic."""
        return {name for name, known in self.groups.items() if topic in known.subscriptions}


@dataclass(eq=False)
class GroupNotices:
    """Notifies the members of a group when its membership changes (NOTIFY_CONSUMER_IDS_CHANGED).

    All changes within one iteration of the event loop cause one notification. Between two notifications of a
    group there is a minimum interval. Otherwise a client that repeatedly joins and leaves, or changes its
    subscriptions, could keep a group of thousands of members busy with rebalancing.
    """

    config: BrokerConfig
    groups: SubscriptionGroups
    consumers: ConsumerTable

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: dict[str, bool] = {}  # Whether each group has changed since its last notification

    def changed(self, group: str) -> None:
        """Notify the members of a changed group, soon."""
        if group not in self._changed:
            self._loop.call_soon(self._next, group)
        self._changed[group] = True

    def _next(self, group: str) -> None:
        if self._changed[group]:
            self._changed[group] = False
            self._loop.call_later(REST_S, self._next, group)
            self._send_notice(group)
        else:
            del self._changed[group]

    def _send_notice(self, group: str) -> None:
        settings = self.groups.table.get(group)
        if not self.config.notify_consumer_ids_changed_enable or (
            settings is not None and not settings.notify_consumer_ids_changed_enable
        ):
            return
        header = ConsumerGroupRequestHeader(consumer_group=group)
        for client in self.consumers.online(group):
            send_oneway(client.channel, Frame.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header))


def send_oneway(channel: Connection, frame: Frame) -> None:
    """Send a one-way request. If the connection is closed, do nothing: another handler handles the close."""
    if channel.closed:
        return
    try:
        channel.oneway(frame)
    except RemotingError as error:
        log.debug("oneway %d to %s not sent: %s", frame.code, channel.peer, error)
