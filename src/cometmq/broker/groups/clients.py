"""Who is connected: producer groups, consumer groups, their clients and subscriptions. No sockets and no
clock in here; times are those of a clock that is never set, in ms.

Heartbeats bring groups; only an unregister request, a lost connection or 120 s of silence takes them away: a
group missing from a later heartbeat stays (docs/reference/remoting.md, Heartbeats).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import msgspec

from cometmq.protocol.bodies import SubscriptionData

# No heartbeat for so long: the connection of the client is closed.
EXPIRED_MS = 120_000
# Consumer groups, and producer groups, that a connection is in; a group whose subscriptions are long counts
# for several. Clients in use have a few.
MOST_GROUPS = 1_000
WEIGHT_CHARACTERS = 16_384  # of the description of a group that count as one more
MOST_TOPICS = 1_000  # that a group subscribes
LONGEST_CLIENT_ID = 1_024  # characters; clients make up about 40


class ClientInfo(msgspec.Struct):
    """One client of a group on one connection."""

    channel: Any
    client_id: str
    language: str
    version: int
    seen_ms: int


class GroupsOf:
    """channel -> the groups that it is in, with their weights."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[str, int]] = {}

    def add(self, channel: Hashable, group: str, weight: int) -> None:
        """The channel is in the group."""
        self._groups.setdefault(channel, {})[group] = weight

    def remove(self, channel: Hashable, group: str) -> None:
        """It is not any more."""
        groups = self._groups.get(channel, {})
        groups.pop(group, None)
        if not groups:
            self._groups.pop(channel, None)

    def of(self, channel: Hashable) -> list[str]:
        """The groups of a channel."""
        return list(self._groups.get(channel, ()))

    def weight_with(self, channel: Hashable, more: Mapping[str, int]) -> int:
        """The weights of its groups together, once it is also in these."""
        return sum({**self._groups.get(channel, {}), **more}.values())


class Members:
    """channel -> client of one group."""

    __slots__ = ("by_channel",)

    def __init__(self) -> None:
        self.by_channel: dict[Hashable, ClientInfo] = {}

    def touch(self, channel: Hashable, client_id: str, language: str, version: int, now_ms: int) -> bool:
        """Note a sign of life; True if the client is new on this channel."""
        known = self.by_channel.get(channel)
        if known is not None and known.client_id == client_id:
            known.seen_ms = now_ms
            known.version = version
            known.language = language
            return False
        self.by_channel[channel] = ClientInfo(channel, client_id, language, version, now_ms)
        return True

    def expired(self, now_ms: int) -> list[ClientInfo]:
        """Clients without a sign of life for 120 s."""
        return [c for c in self.by_channel.values() if now_ms - c.seen_ms > EXPIRED_MS]

    def client_ids(self) -> list[str]:
        """Every client id once, in order of arrival."""
        return list(dict.fromkeys(client.client_id for client in self.by_channel.values()))

    def find(self, client_id: str) -> ClientInfo | None:
        """The newest channel of a client."""
        found = None
        for client in self.by_channel.values():
            if client.client_id == client_id:
                found = client
        return found


class ProducerTable:
    """Producer group -> members."""

    def __init__(self) -> None:
        self.groups: dict[str, Members] = {}
        self.groups_of = GroupsOf()

    def register(
        self, group: str, channel: Hashable, client_id: str, language: str, version: int, now_ms: int
    ) -> None:
        """A heartbeat names the group."""
        self.groups.setdefault(group, Members()).touch(channel, client_id, language, version, now_ms)
        self.groups_of.add(channel, group, 1)

    def unregister(self, group: str, channel: Hashable) -> None:
        """The client leaves the group."""
        members = self.groups.get(group)
        self.groups_of.remove(channel, group)
        if members is not None:
            members.by_channel.pop(channel, None)
            if not members.by_channel:
                del self.groups[group]

    def channel_closed(self, channel: Hashable) -> None:
        """The connection is gone: its clients leave every group."""
        for group in self.groups_of.of(channel):
            self.unregister(group, channel)

    def expire(self, now_ms: int) -> list[Any]:
        """Drop silent clients; returns the channels to close."""
        channels = []
        for group, members in list(self.groups.items()):
            for client in members.expired(now_ms):
                channels.append(client.channel)
                self.unregister(group, client.channel)
        return channels

    def find_client(self, client_id: str) -> ClientInfo | None:
        """A channel of the client, whatever its group (for replies of request/reply)."""
        for members in self.groups.values():
            found = members.find(client_id)
            if found is not None:
                return found
        return None


class ConsumerGroup:
    """One consumer group as its heartbeats describe it."""

    __slots__ = ("consume_from_where", "consume_type", "members", "message_model", "name", "subscriptions")

    def __init__(self, name: str) -> None:
        self.name = name
        self.consume_type = "CONSUME_PASSIVELY"
        self.message_model = "CLUSTERING"
        self.consume_from_where = "CONSUME_FROM_LAST_OFFSET"
        self.members = Members()
        self.subscriptions: dict[str, SubscriptionData] = {}

    def update_subscriptions(self, subscriptions: Iterable[SubscriptionData]) -> bool:
        """Take a heartbeat's list: True if a topic came or went. A known topic is replaced by a higher
        version only.
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
        for topic in [known for known in self.subscriptions if known not in listed]:
            del self.subscriptions[topic]
            changed = True
        return changed


class ConsumerTable:
    """Consumer group -> description. Methods return the groups whose members must be told (code 40)."""

    def __init__(self) -> None:
        self.groups: dict[str, ConsumerGroup] = {}
        self.groups_of = GroupsOf()

    def register(
        self,
        group: str,
        channel: Hashable,
        client: tuple[str, str, int],
        described: tuple[str, str, str],
        subscriptions: Iterable[SubscriptionData],
        now_ms: int,
        weight: int = 1,
    ) -> bool:
        """A heartbeat names the group: `client` is (id, language, version), `described` (consume type,
        message model, consume from where), `weight` what it counts among the groups of the channel. Returns
        whether the membership or the subscriptions changed."""
        known = self.groups.get(group)
        if known is None:
            known = self.groups[group] = ConsumerGroup(group)
        self.groups_of.add(channel, group, weight)
        known.consume_type, known.message_model, known.consume_from_where = described
        joined = known.members.touch(channel, *client, now_ms)
        return known.update_subscriptions(subscriptions) or joined

    def unregister(self, group: str, channel: Hashable) -> bool:
        """The client leaves the group; True if it was in."""
        known = self.groups.get(group)
        self.groups_of.remove(channel, group)
        if known is None:
            return False
        left = known.members.by_channel.pop(channel, None) is not None
        if not known.members.by_channel:
            del self.groups[group]
        return left

    def channel_closed(self, channel: Hashable) -> list[str]:
        """The connection is gone; returns the groups it was in."""
        return [group for group in self.groups_of.of(channel) if self.unregister(group, channel)]

    def expire(self, now_ms: int) -> tuple[list[Any], list[str]]:
        """Drop silent clients; returns (channels to close, groups that lost a member)."""
        channels: list[Any] = []
        lost: dict[str, None] = {}
        for group, known in list(self.groups.items()):
            for client in known.members.expired(now_ms):
                channels.append(client.channel)
                self.unregister(group, client.channel)
                lost[group] = None
        return channels, list(lost)

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """What the group's heartbeats say about a topic."""
        known = self.groups.get(group)
        return None if known is None else known.subscriptions.get(topic)

    def channels(self, group: str) -> list[Any]:
        """Every connection of the group."""
        known = self.groups.get(group)
        return [] if known is None else list(known.members.by_channel)

    def groups_of_topic(self, topic: str) -> set[str]:
        """Online groups that subscribe the topic."""
        return {name for name, known in self.groups.items() if topic in known.subscriptions}
