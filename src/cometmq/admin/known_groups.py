"""The existing consumer groups: those with a retry topic, settings, stored offsets or members.

All commands, the console and the pipeline jobs use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress

from cometmq.admin.errors import UnknownNameError
from cometmq.admin.servers import ServerAdmin, ask_each
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.errors import BrokerError, CometError, NoRouteError
from cometmq.protocol.bodies import SubscriptionGroupConfig, SubscriptionGroupTable
from cometmq.protocol.bodies.admin import ConsumerOffsetTable
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode, is_system_group

AtBroker = dict[str, SubscriptionGroupConfig | None]
"""The groups at a broker: settings by group name. A group that has no settings maps to None."""


def group_names(topics: Iterable[str], at_brokers: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all groups, sorted.

    Args:
        topics: All topics. A retry topic shows that its group exists. The retry topics from which groups pop
            are ignored, as their names contain that of a topic, too.
        at_brokers: For each broker, its groups that have settings, offsets or members. RocketMQ's own
            groups are included only if they have a retry topic.
    """
    known, there = set(topics), {name for names in at_brokers for name in names}
    found = {topic.removeprefix(RETRY_PREFIX) for topic in known if topic.startswith(RETRY_PREFIX)}
    found = {name for name in found if name in there or not _is_popped(name, known, there)}
    found.update(name for name in there if not is_system_group(name))
    return sorted(found)


def _is_popped(name: str, topics: Container[str], groups: Container[str]) -> bool:
    """Return whether the retry topic with this name, without its prefix, is one from which a group pops.

    Such a name is `<group>_<topic>` or `<group>+<topic>`.
    """
    places = [place for place, character in enumerate(name) if character in "_+"]
    return any(name[:place] in groups and name[place + 1 :] in topics for place in places)


class KnownGroups(ServerAdmin):
    """Operations that find consumer groups."""

    async def group_table(self, broker_addr: str) -> dict[str, SubscriptionGroupConfig]:
        """Return the settings of every consumer group of a broker."""
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await self.client.brokers.fetch(broker_addr, code, SubscriptionGroupTable)
        return dict(table.subscription_group_table)

    async def groups_at(self, broker_addr: str) -> AtBroker:
        """Return the groups that have settings, stored offsets or members at a broker.

        A group that has no settings maps to None. Apache's brokers do not report groups that only have
        members.
        """
        found: AtBroker = {**await self.group_table(broker_addr)}
        offsets = await self.client.brokers.call(broker_addr, RequestCode.GET_ALL_CONSUMER_OFFSET)
        # Decode the response in a thread, because it may contain several megabytes.
        table = await asyncio.to_thread(ConsumerOffsetTable.decode, offsets.body)
        for topic_and_group in table.offset_table:
            found.setdefault(topic_and_group.rpartition("@")[2], None)
        for group in table.online_groups or ():
            found.setdefault(group, None)
        return found

    async def group_names(self, *, missing: dict[str, CometError] | None = None) -> list[str]:
        """Return the names of all consumer groups, sorted.

        A group exists if it has a retry topic, settings, offsets or members.
        """
        return list(await self.group_places(missing=missing))

    async def group_places(
        self, *, missing: dict[str, CometError] | None = None
    ) -> dict[str, dict[str, str]]:
        """Return all consumer groups with the brokers that have them.

        Args:
            missing: Receives the error of each broker that fails, by broker name; groups that only these
                brokers have are left out. None: the first error is raised.

        Returns:
            For each group, the addresses of its brokers by broker name. Brokers in `missing` are included,
                because they may have the group. The inner dictionary is empty for a group that has a retry
                topic: the brokers of such a group are those in the route of its retry topic.
        """
        topics = await self.client.namesrv.topics()
        masters = await self._masters()
        at_brokers = await ask_each(masters, lambda _, addr: self.groups_at(addr), missing, need_answer=False)
        routed = {topic.removeprefix(RETRY_PREFIX) for topic in topics if topic.startswith(RETRY_PREFIX)}
        return {
            group: {
                name: addr
                for name, addr in masters.items()
                if group not in routed and (name not in at_brokers or group in at_brokers[name])
            }
            for group in group_names(topics, at_brokers.values())
        }

    async def _masters(self) -> dict[str, str]:
        """Return, for each broker name, the address of the master or of the slave that acts as the master."""
        table = (await self.client.namesrv.cluster_info()).broker_addr_table
        addrs = {name: table[name].broker_addrs for name in sorted(table)}
        return {name: of[min(of)] for name, of in addrs.items() if of}

    async def brokers_of(self, group: str, offsets_at: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the brokers that have a consumer group, address by broker name.

        Brokers that do not answer are included, because they may have the group.

        Args:
            offsets_at: Brokers that have offsets of the group. They are returned without a further request if
                the group has no retry topic.

        Raises:
            RemotingError: No responding broker has the group, and other brokers do not respond.
        """
        try:
            return broker_addrs(await self.client.namesrv.route(RETRY_PREFIX + group))
        except NameServersUnreachable:
            raise
        except NoRouteError:
            if offsets_at:
                return dict(offsets_at)
        missing: dict[str, CometError] = {}
        known = await self.group_places(missing=missing)
        if group in known:
            # Empty: the retry topic was created after the first request for its route.
            return known[group] or broker_addrs(await self.client.namesrv.route(RETRY_PREFIX + group))
        masters = await self._masters()
        found = set()
        for name, addr in masters.items():
            with suppress(CometError):
                await self.client.brokers.consumer_connection(addr, group)
                found.add(name)
        if found:
            return {name: addr for name, addr in masters.items() if name in found | missing.keys()}
        for failure in missing.values():
            # A broker that has refused the request counts as a broker without the group. Only a broker that
            # did not respond may have the group.
            if not isinstance(failure, BrokerError):
                raise failure
        raise UnknownNameError("consumer group", group, list(known))
