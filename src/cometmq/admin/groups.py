"""State of consumer groups: offsets, members, and the consumption of single messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from cometmq.admin import values
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.known_groups import KnownGroups
from cometmq.admin.servers import ask_each
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.errors import BrokerError, CometError, NoRouteError, RemotingError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol import bodies, headers
from cometmq.protocol.bodies.subscriptions import (
    MAX_RETRIES_KEY,
    Wants,
    differences,
    setting_differences,
    wants_of,
)
from cometmq.protocol.codes import RETRY_PREFIX, Perm, RequestCode, ResponseCode, version_name
from cometmq.protocol.ids import decode_offset_id
from cometmq.settings import INT_MAX

PULL_TYPE, PUSH_TYPE, POP_TYPE = "CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP"
CONSUME_TYPES = {PULL_TYPE: "PULL", POP_TYPE: "POP"}
"""The names of consume types in summaries. All others are PUSH, as in Apache's tools."""
STATS_TIMEOUT_S = 15.0  # Timeout in seconds; a broker with thousands of queues responds slowly
BLOCKED_MS = (
    60_000  # Time without a consumed message after which a queue counts as blocked, as in Apache's tools
)
MAX_CONCURRENT_MEMBERS = 16  # Maximum number of a group's members to which requests are sent concurrently


async def groups_at(client: ClientInstance, addr: str, topic: str) -> list[str]:
    """Return the groups that have offsets for a topic at one broker."""
    header = headers.TopicRequestHeader(topic=topic)
    code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
    return (await client.brokers.fetch(addr, code, bodies.GroupList, header, topic=topic)).group_list


async def member_info(
    client: ClientInstance,
    addr: str,
    group: str,
    client_id: str,
    *,
    jstack: bool = False,
    timeout_s: float | None = None,
) -> bodies.ConsumerRunningInfo:
    """Return the running info of a member. The broker at `addr` requests it from the member."""
    header = headers.GetConsumerRunningInfoRequestHeader(
        consumer_group=group, client_id=client_id, jstack_enable=jstack
    )
    code = RequestCode.GET_CONSUMER_RUNNING_INFO
    return await client.brokers.fetch(addr, code, bodies.ConsumerRunningInfo, header, timeout_s=timeout_s)


def blocked_queues(info: bodies.ConsumerRunningInfo, now_ms: float) -> dict[str, int]:
    """Return the queues of a member in which messages wait, but none was consumed for more than a minute.

    The value is the time in ms since the last consumption, by the clocks of the member and of this machine.
    """
    idle = {
        str(queue): int(now_ms) - held.last_consume_timestamp
        for queue, held in sorted(info.mq_table.items())
        if held.cached_msg_count > 0 and held.last_consume_timestamp > 0
    }
    return {queue: idle_ms for queue, idle_ms in idle.items() if idle_ms > BLOCKED_MS}


def sum_progress(group: str, parts: Iterable[values.GroupProgress]) -> values.GroupProgress:
    """Combine the offsets of a group at several brokers in one result."""
    known = list(parts)
    rows = [row for part in known for row in part.queues]
    rows.sort(key=lambda row: (row.topic, row.broker_name, row.queue_id))
    return values.GroupProgress(
        group=group, consume_tps=values.known_sum(part.consume_tps for part in known), queues=rows
    )


def queue_progress(
    queue: MessageQueue, offsets: bodies.OffsetWrapper, client_ip: str = ""
) -> values.QueueProgress:
    """Return the offsets of a group in one queue."""
    return values.QueueProgress(
        topic=queue.topic,
        broker_name=queue.broker_name,
        queue_id=queue.queue_id,
        broker_offset=offsets.broker_offset,
        consumer_offset=offsets.consumer_offset,
        last_timestamp=offsets.last_timestamp,
        client_ip=client_ip,
        leased=offsets.leased,
        oldest_pop_ms=offsets.oldest_pop_time,
    )


def settings_of(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in a member's running info that should be equal in all members of a group.

    If the default maximum of retries applies, a Java member reports -1. The returned value is then 16, or
    INT_MAX for an ordered consumer.
    """
    found = {name: properties[name] for name in ("messageModel", "consumeFromWhere") if name in properties}
    ordered = properties.get("PROP_CONSUMEORDERLY")
    if ordered is not None:
        found["consumeOrderly"] = ordered
    if retries := properties.get(MAX_RETRIES_KEY):
        default = INT_MAX if ordered == "true" else bodies.RETRY_MAX_TIMES
        found[MAX_RETRIES_KEY] = retries if retries != "-1" else str(default)
    return found


class GroupStates(KnownGroups):
    """Operations that read the state of consumer groups: offsets, members, consumption of messages."""

    async def _groups_of_topic(self, route: bodies.TopicRouteData, topic: str) -> list[str]:
        """Return the groups that have offsets for a topic at any of its brokers, sorted."""
        names: set[str] = set()
        for addr in broker_addrs(route).values():
            names.update(await groups_at(self.client, addr, topic))
        return sorted(names)

    async def progress(
        self,
        group: str,
        *,
        with_client_ip: bool = False,
        brokers: Mapping[str, str] | None = None,
        missing: dict[str, CometError] | None = None,
    ) -> values.GroupProgress:
        """Return the consumer offset, the broker offset and the lag of a group in each queue.

        Args:
            with_client_ip: Ask the members which of them holds each queue.
            brokers: The brokers that have the group: address by name, as in the group's entry of
                `group_places`. None: they are found by a request.
            missing: Receives the error of each broker that fails, by broker name; its queues are left out.
                None: the first error is raised.
        """
        brokers = brokers or await self.brokers_of(group)
        owners = await self._queue_owners(brokers, group) if with_client_ip else {}
        parts = await ask_each(brokers, lambda _, addr: self.progress_at(addr, group, owners), missing)
        return sum_progress(group, parts.values())

    async def progress_at(
        self, addr: str, group: str, owners: Mapping[MessageQueue, str] | None = None
    ) -> values.GroupProgress:
        """Return the offsets and the lag of a group in the queues of one broker."""
        stats = await self._consume_stats(addr, group)
        owners = owners or {}
        rows = [
            queue_progress(queue, offsets, owners.get(queue, ""))
            for queue, offsets in stats.offset_table.items()
        ]
        counted = bool(rows) or stats.consume_tps > 0
        return values.GroupProgress(
            group=group, consume_tps=stats.consume_tps if counted else None, queues=rows
        )

    async def _consume_stats(self, addr: str, group: str) -> bodies.ConsumeStats:
        """Return the response of a broker to a request for the offsets of a group."""
        header = headers.GetConsumeStatsRequestHeader(consumer_group=group)
        timeout_s = max(self.client.brokers.timeout_s, STATS_TIMEOUT_S)
        return await self.client.brokers.fetch(
            addr, RequestCode.GET_CONSUME_STATS, bodies.ConsumeStats, header, timeout_s=timeout_s
        )

    async def _members(self, brokers: Mapping[str, str], group: str) -> bodies.ConsumerConnection:
        """Return the members of a group from the first broker in `brokers` that has members.

        Raises:
            BrokerError: A broker refuses the request. With CONSUMER_NOT_ONLINE: no broker has members.
            RemotingError: A broker does not answer, and the others have no members.
            NoRouteError: `brokers` is empty.
        """
        offline: BrokerError | None = None
        silent: RemotingError | None = None
        for addr in brokers.values():
            try:
                return await self.client.brokers.consumer_connection(addr, group)
            except BrokerError as error:
                if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                    raise
                offline = error
            except RemotingError as error:
                silent = error
        raise silent or offline or NoRouteError(RETRY_PREFIX + group, hint="the route names no broker")

    async def retry_limits(self, group: str) -> values.RetryLimits:
        """Return the maximum retries of a group and of each of its members.

        Only CometMQ brokers report the limits of members, and only for members that have sent a message back.
        The result has default values for a group that does not exist.
        """
        own, limits = bodies.RETRY_MAX_TIMES, dict[str, int]()
        try:
            brokers = await self.brokers_of(group)
        except UnknownNameError:
            return values.RetryLimits()
        for addr in brokers.values():
            with suppress(CometError):
                connected = await self.client.brokers.consumer_connection(addr, group)
                if connected.retry_max_times not in (None, bodies.RETRY_MAX_TIMES):
                    own = connected.retry_max_times
                for member in connected.connection_set:
                    if member.max_reconsume_times is not None:
                        limits[member.client_id] = member.max_reconsume_times
        return values.RetryLimits(group=own, members=limits)

    async def _members_if_online(
        self, brokers: Mapping[str, str], group: str
    ) -> bodies.ConsumerConnection | None:
        """Return the members of a group, or None if the broker responds that the group is not online.

        Raises BrokerError for any other error response.
        """
        try:
            return await self._members(brokers, group)
        except BrokerError as error:
            if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
                return None
            raise

    async def _queue_owners(self, brokers: Mapping[str, str], group: str) -> dict[MessageQueue, str]:
        """Return, for each queue, the IP address of the member that holds it.

        Queues of members that do not answer are left out.
        """
        owners: dict[MessageQueue, str] = {}
        try:
            connected = await self._members_if_online(brokers, group)
        except RemotingError:
            return {}
        for connection in connected.connection_set if connected else ():
            try:
                info = await self._running_info(brokers, group, connection.client_id)
            except CometError:
                continue  # The output shows N/A for the queues of this member
            for queue in info.mq_table:
                owners[queue] = connection.client_id.partition("@")[0]
        return owners

    async def _running_info(
        self,
        brokers: Mapping[str, str],
        group: str,
        client_id: str,
        *,
        jstack: bool = False,
        timeout_s: float | None = None,
    ) -> bodies.ConsumerRunningInfo:
        """Return a member's running info from the first broker that obtains it from the member.

        Raises CometError if no broker obtains it, for example because the member does not respond or because
        its version does not support the request.
        """
        failure: CometError = NoRouteError(RETRY_PREFIX + group, hint="the route names no broker")
        for addr in brokers.values():
            try:
                return await member_info(
                    self.client, addr, group, client_id, jstack=jstack, timeout_s=timeout_s
                )
            except CometError as error:
                failure = error  # Another broker in `brokers` may be connected to the member
        raise failure

    async def subscriptions(self, group: str) -> values.GroupSubscriptions:
        """Return the subscriptions of a group's members, and the differences that cause a loss of messages.

        Raises:
            BrokerError: With CONSUMER_NOT_ONLINE: the group has no members.
        """
        brokers = await self.brokers_of(group)
        connected = await self._members(brokers, group)
        pulling = connected.consume_type == PULL_TYPE
        gate = asyncio.Semaphore(MAX_CONCURRENT_MEMBERS)

        async def of(member: bodies.ClientConnection) -> values.MemberSubscriptions:
            wants: Wants = frozenset((member.subscriptions or {}).items())
            settings = member.settings or {}
            if member.max_reconsume_times is not None:
                settings[MAX_RETRIES_KEY] = str(member.max_reconsume_times)
            problem, queues, blocked = "", None, {}
            if not member.grpc_type and (not wants or not pulling):
                try:
                    async with gate:
                        info = await self._running_info(brokers, group, member.client_id)
                    wants = wants or wants_of(info.subscription_set)
                    settings |= settings_of(info.properties)
                    # No queue of a group that consumes by POP belongs to a member.
                    queues = sorted(info.mq_table) if connected.consume_type != POP_TYPE else None
                    blocked = blocked_queues(info, time.time() * 1000)
                except CometError as error:
                    problem = "" if wants else str(error)
            return values.MemberSubscriptions(
                client_id=member.client_id,
                client_addr=member.client_addr,
                version=version_name(member.version),
                subscriptions=dict(sorted(wants)),
                problem=problem,
                settings=dict(sorted(settings.items())),
                queues=queues,
                blocked=blocked,
                language=member.language,
                grpc_type=member.grpc_type or "",
            )

        found = await asyncio.gather(*(of(member) for member in connected.connection_set))
        if pulling:
            return values.GroupSubscriptions(
                group=group, members=list(found), differences={}, consume_type=PULL_TYPE
            )
        known = {
            each.client_id: frozenset(each.subscriptions.items())
            for each in found
            # A gRPC client has no subscriptions at the broker until it has sent its settings
            if not each.problem and (each.subscriptions or not each.grpc_type)
        }
        settings = {each.client_id: frozenset(each.settings.items()) for each in found}
        if connected.retry_max_times not in (None, bodies.RETRY_MAX_TIMES):
            settings[""] = frozenset({(MAX_RETRIES_KEY, str(connected.retry_max_times))})
        return values.GroupSubscriptions(
            group=group,
            members=list(found),
            differences=differences(known),
            setting_differences=setting_differences(settings),
            unbalanced=await self._unbalanced(found),
            consume_type=str(connected.consume_type),
        )

    async def _unbalanced(self, found: Iterable[values.MemberSubscriptions]) -> dict[str, list[str]] | None:
        """Return the subscribed queues that have no holder or several, each with its holders.

        Return None if a member did not report its queues, or if each member holds all queues (broadcasting).
        """
        holders: dict[MessageQueue, list[str]] = {}
        for topic in sorted({topic for each in found for topic in each.subscriptions}):
            try:
                route = await self.client.namesrv.route(topic)
            except NoRouteError:
                continue  # A topic without a route has no queues yet
            for data in route.queue_datas:
                for queue_id in range(data.read_queue_nums if data.perm & Perm.READ else 0):
                    holders[MessageQueue(topic, data.broker_name, queue_id)] = []
        for member in found:
            if member.queues is None or member.settings.get("messageModel") == "BROADCASTING":
                return None
            for queue in member.queues:
                if queue in holders:
                    holders[queue].append(member.client_id)
        return {str(queue): ids for queue, ids in sorted(holders.items()) if len(ids) != 1}

    async def _summary(
        self, group: str, brokers: Mapping[str, str], missing: Collection[str]
    ) -> values.GroupSummary:
        """Return a summary of a group; unknown values are None or empty.

        Args:
            missing: Names of brokers that do not answer. If one of them may have the group, the rate and the
                lag of the group are unknown. If no other broker has members, the members are unknown, too.
        """
        connected: bodies.ConsumerConnection | None = None
        count: int | None = None
        version: str | None = None
        tps: int | None = None
        diff: int | None = None
        try:
            brokers = brokers or await self.brokers_of(group)
            answering = {name: addr for name, addr in brokers.items() if name not in missing}
            connected = await self._members_if_online(answering, group)
            if len(answering) == len(brokers):
                count, version = 0, ""
                found = await self.progress(group, brokers=brokers)
                tps, diff = None if found.consume_tps is None else int(found.consume_tps), found.diff_total
        except CometError:
            pass  # List the group even if its state is unknown
        online = connected.connection_set if connected is not None else []
        kind = model = ""
        if connected is not None and online:
            count = len(online)
            kind = CONSUME_TYPES.get(str(connected.consume_type), "PUSH")
            model = str(connected.message_model)
            version = version_name(min(member.version for member in online))
        return values.GroupSummary(group, count, version, kind, model, tps, diff)

    async def tracks(self, message: MessageExt) -> list[values.MessageTrack]:
        """Return the consumption state of a message in each group that has offsets on its topic."""
        route = await self.client.namesrv.route(message.topic)
        names = await self._groups_of_topic(route, message.topic)
        at = broker_addrs(route)
        return list(await asyncio.gather(*(self._track(message, name, at) for name in names)))

    async def _track(
        self, message: MessageExt, group: str, offsets_at: Mapping[str, str]
    ) -> values.MessageTrack:
        """Return the consumption state of a message in one group, or UNKNOWN with the reason."""
        try:
            brokers = await self.brokers_of(group, offsets_at)
            connected = await self._members(brokers, group)
            if connected.consume_type == PULL_TYPE:
                return values.MessageTrack(consumer_group=group, track_type=values.TrackType.PULL)
            if not await self._consumed(message, group, brokers):
                return values.MessageTrack(consumer_group=group, track_type=values.TrackType.NOT_CONSUME_YET)
        except BrokerError as error:
            offline = error.code == ResponseCode.CONSUMER_NOT_ONLINE
            return values.MessageTrack(
                consumer_group=group,
                track_type=values.TrackType.NOT_ONLINE if offline else values.TrackType.UNKNOWN,
                exception_desc=f"CODE:{error.code} DESC:{error.remark}",
            )
        except CometError as error:
            return values.MessageTrack(
                consumer_group=group, track_type=values.TrackType.UNKNOWN, exception_desc=str(error)
            )
        subscription = connected.subscription_table.get(message.topic)
        wanted = set(subscription.tags_set) if subscription else set()
        passed = not wanted or "*" in wanted or message.tags in wanted
        kind = values.TrackType.CONSUMED if passed else values.TrackType.CONSUMED_BUT_FILTERED
        return values.MessageTrack(consumer_group=group, track_type=kind)

    async def _consumed(self, message: MessageExt, group: str, brokers: Mapping[str, str]) -> bool:
        """Return whether the group's offset at the broker that stores a message is beyond this message."""
        info = await self.client.namesrv.cluster_info()
        names = {
            name
            for name, data in info.broker_addr_table.items()
            if message.store_host in data.broker_addrs.values()
        }
        found = await self.progress(group, brokers=brokers)
        return any(
            row.topic == message.topic
            and row.queue_id == message.queue_id
            and row.broker_name in names
            and row.consumer_offset > message.queue_offset
            for row in found.queues
        )

    async def consume_directly(
        self, group: str, client_id: str, offset_msg_id: str
    ) -> bodies.ConsumeMessageDirectlyResult:
        """Have one member of a group consume one stored message immediately.

        Returns:
            The result of the member's listener.

        Raises:
            IdError: `offset_msg_id` is not an offset id.
            BrokerError: The member is not online, or the message does not exist.
        """
        place = decode_offset_id(offset_msg_id)
        header = headers.ConsumeMessageDirectlyRequestHeader(
            consumer_group=group, client_id=client_id, msg_id=offset_msg_id
        )
        code, body = RequestCode.CONSUME_MESSAGE_DIRECTLY, bodies.ConsumeMessageDirectlyResult
        return await self.client.brokers.fetch(place.host, code, body, header, timeout_s=STATS_TIMEOUT_S)
