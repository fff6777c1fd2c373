"""The existing consumer groups: those with a retry topic, settings, stored offsets or members.

All commands, the console and the pipeline jobs use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from cometmq.admin.errors import UnknownNameError
from cometmq.admin.servers import MAX_CONCURRENT_BROKERS, ServerAdmin
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.cluster.workers import for_each
from cometmq.errors import BrokerError, CometError, NoRouteError
from cometmq.protocol.bodies import SubscriptionGroupConfig, SubscriptionGroupTable
from cometmq.protocol.bodies.admin import ConsumerOffsetTable
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode, is_system_group

AtBroker = dict[str, SubscriptionGroupConfig | None]
"""The groups at a broker with their settings, which are None for a group without settings."""


def group_names(topics: Iterable[str], at_brokers: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all groups, sorted.

    Args:
        topics: All topics. A retry topic shows that its group exists.
        at_brokers: For each broker, its groups with settings, offsets or members. RocketMQ's own groups are
            included only if they have a retry topic.
    """
    found = {topic.removeprefix(RETRY_PREFIX) for topic in topics if topic.startswith(RETRY_PREFIX)}
    found.update(name for names in at_brokers for name in names if not is_system_group(name))
    return sorted(found)


class KnownGroups(ServerAdmin):
    """Operations that find consumer groups."""

    async def group_table(self, broker_addr: str) -> dict[str, SubscriptionGroupConfig]:
        """Return the settings of every consumer group of a broker."""
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await self.client.brokers.fetch(broker_addr, code, SubscriptionGroupTable)
        return dict(table.subscription_group_table)

    async def groups_at(self, broker_addr: str) -> AtBroker:
        """Return the groups with settings, stored offsets or members at a broker.

        Groups without settings map to None. Apache's brokers do not report groups that only have members.
        """
        found: AtBroker = {**await self.group_table(broker_addr)}
        offsets = await self.client.brokers.call(broker_addr, RequestCode.GET_ALL_CONSUMER_OFFSET)
        # Decode the response outside the event loop, because a large broker's response has megabytes.
        table = await asyncio.to_thread(ConsumerOffsetTable.decode, offsets.body)
        for topic_and_group in table.offset_table:
            found.setdefault(topic_and_group.rpartition("@")[2], None)
        for group in table.online_groups or ():
            found.setdefault(group, None)
        return found

    async def group_names(self) -> list[str]:
        """Return all consumer groups, sorted: those with a retry topic, settings, offsets or members."""
        return list(await self.group_places())

    async def group_places(self) -> dict[str, dict[str, str]]:
        """Return all consumer groups with the brokers that have them.

        Returns:
            For each group the address of its brokers by broker name. For a group with a retry topic this is
                empty, because the route of the retry topic names the brokers. Brokers that do not answer are
                left out.
        """
        return (await self._places())[0]

    async def _places(self) -> tuple[dict[str, dict[str, str]], list[CometError]]:
        """Return `group_places`, and the errors of brokers that did not answer."""
        topics = await self.client.namesrv.topics()
        masters = await self._masters()
        at_brokers: dict[str, AtBroker] = {}
        failures: list[CometError] = []

        async def ask(name: str) -> None:
            try:
                at_brokers[name] = await self.groups_at(masters[name])
            except CometError as error:
                failures.append(error)

        await for_each(masters, ask, MAX_CONCURRENT_BROKERS)
        routed = {topic.removeprefix(RETRY_PREFIX) for topic in topics if topic.startswith(RETRY_PREFIX)}
        found = {
            group: {
                name: masters[name]
                for name in sorted(at_brokers)
                if group not in routed and group in at_brokers[name]
            }
            for group in group_names(topics, at_brokers.values())
        }
        return found, failures

    async def _masters(self) -> dict[str, str]:
        """Return the address by broker name of each master, or of a slave that acts as the master."""
        table = (await self.client.namesrv.cluster_info()).broker_addr_table
        addrs = {name: table[name].broker_addrs for name in sorted(table)}
        return {name: of[min(of)] for name, of in addrs.items() if of}

    async def brokers_of(self, group: str, offsets_at: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the brokers that have a consumer group, address by broker name.

        Args:
            group: The consumer group.
            offsets_at: Brokers that have offsets of the group. They are returned without a further request if
                the group has no retry topic.

        Raises:
            UnknownNameError: No broker has the group.
            RemotingError: No responding broker has the group, and other brokers do not respond.
        """
        try:
            return broker_addrs(await self.client.namesrv.route(RETRY_PREFIX + group))
        except NameServersUnreachable:
            raise
        except NoRouteError:
            if offsets_at:
                return dict(offsets_at)
        known, failures = await self._places()
        if group in known:
            return known[group]
        found = {}
        for name, addr in (await self._masters()).items():
            with suppress(CometError):
                await self.client.brokers.consumer_connection(addr, group)
                found[name] = addr
        if found:
            return found
        for failure in failures:
            # A broker that refuses the request does not count as a broker that may have the group.
            if not isinstance(failure, BrokerError):
                raise failure
        raise UnknownNameError("consumer group", group, list(known))
