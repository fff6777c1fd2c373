"""Which consumer groups exist: those with a retry topic, settings, stored offsets or members.

Every command, the console and the jobs ask this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

from cometmq.admin.errors import UnknownNameError
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.workers import for_each
from cometmq.errors import BrokerError, CometError, NoRouteError
from cometmq.protocol.bodies import SubscriptionGroupConfig, SubscriptionGroupTable
from cometmq.protocol.bodies_admin import ConsumerOffsetTable
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode, is_system_group

BROKERS_AT_ONCE = 16
AtBroker = dict[str, SubscriptionGroupConfig | None]
"""Group -> its settings at a broker, None for one that has stored offsets alone."""


def group_names(topics: Iterable[str], at_brokers: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all groups, sorted.

    Args:
        topics: All topics: a retry topic makes its group known.
        at_brokers: The groups with settings or offsets, of each broker. Of the groups of RocketMQ itself
            only those with a retry topic count.
    """
    found = {topic.removeprefix(RETRY_PREFIX) for topic in topics if topic.startswith(RETRY_PREFIX)}
    found.update(name for names in at_brokers for name in names if not is_system_group(name))
    return sorted(found)


async def groups_at(client: ClientInstance, addr: str) -> AtBroker:
    """Return the groups with settings or stored offsets at one broker."""
    answer = await client.brokers.call(addr, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    found: AtBroker = dict(SubscriptionGroupTable.decode(answer.body).subscription_group_table)
    offsets = await client.brokers.call(addr, RequestCode.GET_ALL_CONSUMER_OFFSET)
    # A large broker's answer has megabytes: other work goes on while it is decoded.
    table = (await asyncio.to_thread(ConsumerOffsetTable.decode, offsets.body)).offset_table
    for topic_and_group in table:
        found.setdefault(topic_and_group.rpartition("@")[2], None)
    return found


async def places(client: ClientInstance) -> dict[str, dict[str, str]]:
    """Return group -> broker name -> address of the brokers that have it.

    There are no brokers for a group with a retry topic, whose route names them. Brokers that do not answer
    are left out.
    """
    return (await _places(client))[0]


async def _places(client: ClientInstance) -> tuple[dict[str, dict[str, str]], list[CometError]]:
    """As `places`, and why brokers have not answered."""
    topics = await client.namesrv.topics()
    masters = await _masters(client)
    at_brokers: dict[str, AtBroker] = {}
    failures: list[CometError] = []

    async def ask(name: str) -> None:
        try:
            at_brokers[name] = await groups_at(client, masters[name])
        except CometError as error:
            failures.append(error)

    await for_each(masters, ask, BROKERS_AT_ONCE)
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


async def _masters(client: ClientInstance) -> dict[str, str]:
    """Broker name -> address of the master, or of the slave that stands in for it."""
    table = (await client.namesrv.cluster_info()).broker_addr_table
    addrs = {name: table[name].broker_addrs for name in sorted(table)}
    return {name: of[min(of)] for name, of in addrs.items() if of}


async def brokers_of(
    client: ClientInstance, group: str, offsets_at: Mapping[str, str] | None = None
) -> Mapping[str, str]:
    """Return broker name -> address of the brokers that have a group.

    Args:
        client: Sends the requests.
        group: The group.
        offsets_at: Brokers where the group is known to have offsets. If it has no retry topic, these are the
            answer, and no broker is asked.

    Raises:
        UnknownNameError: No broker has it.
        RemotingError: No broker has it that answers, and others do not answer.
    """
    try:
        return broker_addrs(await client.namesrv.route(RETRY_PREFIX + group))
    except NameServersUnreachable:
        raise
    except NoRouteError:
        if offsets_at:
            return offsets_at
    known, failures = await _places(client)
    if group in known:
        return known[group]
    found = {}
    for name, addr in (await _masters(client)).items():
        with suppress(CometError):
            await client.brokers.consumer_connection(addr, group)
            found[name] = addr
    if found:
        return found
    for failure in failures:
        if not isinstance(failure, BrokerError):  # a refusal is no sign of the group
            raise failure
    raise UnknownNameError("consumer group", group, list(known))
