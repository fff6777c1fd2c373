"""Setting the offsets of groups: to a time, to the end, or to the offsets of another group."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from cometmq.admin.errors import AllQueuesOnly, UnknownNameError
from cometmq.admin.groups import MAX_CONCURRENT_MEMBERS, POP_TYPE, PUSH_TYPE, GroupStates, member_info
from cometmq.admin.values import QueueProgress, Value
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.workers import for_each
from cometmq.errors import BrokerError, CometError
from cometmq.message import MessageQueue
from cometmq.protocol import bodies
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import GroupTopicRequestHeader, ResetOffsetRequestHeader

MAX_CONCURRENT_QUEUES = 16
END = -1
"""The time in a reset request (code 222) that stands for the end of each queue."""
MEMBERS_TIMEOUT_S = 30.0
"""Maximum time in seconds for which a reset waits for members.

Java members pause for 10 s before they consume from the new offsets, and they store offsets every 5 s. A 5.x
broker notifies members only when their pull requests end, which takes up to 15 s.
"""
PULL_CHECK_DELAY_S = 6.0
"""The delay, in seconds, after which the offset stored for a pull consumer is checked.

A running pull consumer stores its own offset every 5 s. If it does so during this delay, it undoes the reset.
"""
POLL_INTERVAL_S = 0.1
BROADCASTING = "BROADCASTING"
TIME_TOLERANCE_MS = 2
"""The maximum difference, in ms, between two consume times that count as the same time.

A member may report the same time with slightly different values.
"""
ConsumeTimes = dict[tuple[str, MessageQueue], int]
RESET_TIMEOUT_S = 15.0


class OffsetWay(StrEnum):
    """A method of resetting offsets.

    MEMBERS: the broker sends the new offsets to the members of the group (request 222).
    STORED: the new offsets are stored at the broker (request 15), and members read them when they start.
    """

    MEMBERS = "MEMBERS"
    STORED = "STORED"


class QueueReset(Value, frozen=True, kw_only=True):
    """Reset of a group's consumer offset in one queue.

    Attributes:
        broker_offset: End offset of the queue.
        consumer_offset: Offset before the reset, -1 for none.
        target: Offset that corresponds to the time of the reset.
        rollback_offset: Offset that was set.
        seen: Offset observed after the reset. None: members did not report one.
        problem: Why the observed offset is not the expected one.
    """

    broker_name: str
    queue_id: int
    way: OffsetWay
    broker_offset: int
    consumer_offset: int
    target: int
    rollback_offset: int
    seen: int | None = None
    problem: str = ""

    @property
    def changes(self) -> bool:
        """Whether the reset must store an offset for this queue.

        It need not if the broker already stores the new offset. If the broker reports 0, the reset stores
        the offset in any case: the broker may also report 0 for a queue that has no stored offset, and a
        consumer would not begin to read such a queue at 0.
        """
        return self.consumer_offset <= 0 or self.rollback_offset != self.consumer_offset


class Reset(msgspec.Struct, frozen=True, kw_only=True):
    """A reset of a group's offsets in a topic.

    Args:
        at_ms: A store time, or END for the end of each queue.
        force: False: offsets only move backwards.
        queue_id: Only this queue; requires `broker_addr`.
        offset: The new offset, instead of the time; requires `queue_id`.
        in_cpp_form: Apache's brokers notify the members in the form that C++ clients read. CometMQ's brokers
        use the form of each member.
        cluster: Only at the masters of this cluster.
        new_group: The group need not exist: the reset creates it.
    """

    group: str
    topic: str
    at_ms: int = END
    force: bool = True
    broker_addr: str | None = None
    queue_id: int | None = None
    offset: int | None = None
    in_cpp_form: bool = False
    cluster: str | None = None
    new_group: bool = False


class OffsetAdmin(GroupStates):
    """Operations that set offsets."""

    async def plan_reset(self, wanted: Reset) -> list[QueueReset]:
        """Return the offsets that `reset_offset` would set, queue by queue.

        Raises:
            UnknownNameError: The group does not exist, or the topic has no such broker or queue.
            AllQueuesOnly: A broker of Apache 4.9 cannot reset a single queue of a group that is online.
        """
        return [found for part in await self._parts(wanted) for found in part.resets]

    async def reset_offset(
        self, wanted: Reset, *, members_s: float = MEMBERS_TIMEOUT_S, kept_s: float = PULL_CHECK_DELAY_S
    ) -> list[QueueReset]:
        """Set a group's offsets in a topic, and wait until the new offsets are observed.

        If the members have a listener, the brokers notify them (request 222), also in broadcasting mode. In
        all other cases the offsets are stored at the broker (request 15) and read back.

        Args:
            members_s: Maximum time to wait for notified members, in seconds.
            kept_s: Time after which the offsets of pull consumers are read back, in seconds, because the
                members may overwrite them.

        Returns:
            The result of each queue. `problem` describes an offset that was not reached.

        Raises:
            UnknownNameError: The group does not exist, or the topic has no such broker or queue.
            AllQueuesOnly: A broker of Apache 4.9 cannot reset a single queue of a group that is online.
        """
        parts = await self._parts(wanted)
        for part in parts:
            await part.set()
        return [found for part in parts for found in await part.seen(members_s, kept_s)]

    async def _parts(self, wanted: Reset) -> list[BrokerReset]:
        route = await self.client.namesrv.route(wanted.topic)
        if not wanted.new_group:
            await self.brokers_of(wanted.group)
        addrs = broker_addrs(route)
        if wanted.cluster is not None:
            there = set(await self.master_addrs(wanted.cluster))
            addrs = {name: addr for name, addr in addrs.items() if addr in there}
            if not addrs:
                names = {data.cluster for data in route.broker_datas}
                raise UnknownNameError("cluster with the topic", wanted.cluster, sorted(names))
        if wanted.broker_addr is not None:
            addrs = {name: addr for name, addr in addrs.items() if addr == wanted.broker_addr}
            if not addrs:
                raise UnknownNameError("broker", wanted.broker_addr, sorted(broker_addrs(route).values()))
        return [
            await BrokerReset.plan(self.client, wanted, route, name, addr) for name, addr in addrs.items()
        ]

    async def clone_offsets(
        self, source: str, target: str, topic: str, *, execute: bool = True, new_group: bool = False
    ) -> list[QueueProgress]:
        """Copy the offsets of a group in a topic to another group.

        Apache's tool differs: it also copies the offsets of other topics, and sends them to brokers that may
        not have these topics.

        Args:
            source: The group whose offsets are copied.
            target: The group that receives the offsets.
            execute: False: only return the offsets.
            new_group: The target group need not exist: the offsets create it.

        Returns:
            The offsets of the source group.

        Raises:
            UnknownNameError: A group does not exist, or the source has no offsets in the topic.
        """
        if not new_group:
            await self.brokers_of(target)
        found = await self.progress(source)
        addrs = broker_addrs(await self.client.namesrv.route(topic))
        rows = [row for row in found.queues if row.topic == topic and row.broker_name in addrs]
        if not rows:
            raise UnknownNameError("topic of the group", topic, sorted({row.topic for row in found.queues}))
        for row in rows if execute else ():
            queue = MessageQueue(topic, row.broker_name, row.queue_id)
            await self.client.brokers.update_consumer_offset(
                addrs[row.broker_name], target, queue, row.consumer_offset
            )
        return rows


class BrokerReset:
    """A reset of a group's offsets at one broker."""

    def __init__(
        self, client: ClientInstance, wanted: Reset, addr: str, online: bodies.ConsumerConnection | None
    ) -> None:
        self._client = client
        self._wanted = wanted
        self._addr = addr
        self._online = online
        self._broadcasts = online is not None and online.message_model == BROADCASTING
        self.resets: list[QueueReset] = []
        self._consume_times_before: ConsumeTimes = {}

    @classmethod
    async def plan(
        cls, client: ClientInstance, wanted: Reset, route: bodies.TopicRouteData, name: str, addr: str
    ) -> BrokerReset:
        """Read the current offsets of the group, and compute the new offsets."""
        made = cls(client, wanted, addr, await online_at(client, addr, wanted.group))
        member_offsets = await made.offsets_of_members() if made._broadcasts else {}
        counts = {
            data.broker_name: max(data.read_queue_nums, data.write_queue_nums) for data in route.queue_datas
        }
        queue_ids: Iterable[int] = range(counts.get(name, 0))
        if wanted.queue_id is not None:
            if wanted.queue_id not in queue_ids:
                raise UnknownNameError("queue", str(wanted.queue_id), [str(each) for each in queue_ids])
            queue_ids = (wanted.queue_id,)
            if made._way is OffsetWay.MEMBERS and not await made._may_notify_members():
                raise AllQueuesOnly(addr)

        async def of(queue_id: int) -> QueueReset:
            queue = MessageQueue(wanted.topic, name, queue_id)
            if made._broadcasts:
                return await made._plan(queue, member_offsets.get(queue))
            return await made._plan(queue, await client.brokers.consumer_offset(addr, wanted.group, queue))

        made.resets = await for_each(list(queue_ids), of, MAX_CONCURRENT_QUEUES)
        return made

    @property
    def _way(self) -> OffsetWay:
        pushed = self._online is not None and self._online.consume_type == PUSH_TYPE
        return OffsetWay.MEMBERS if pushed else OffsetWay.STORED

    @property
    def _pops(self) -> bool:
        """Whether the members pop: then the broker alone stores offsets, and its pops begin at a new one."""
        return self._online is not None and self._online.consume_type == POP_TYPE

    async def _plan(self, queue: MessageQueue, stored: int | None) -> QueueReset:
        brokers, wanted, addr = self._client.brokers, self._wanted, self._addr
        first, end = await brokers.min_offset(addr, queue), await brokers.max_offset(addr, queue)
        if wanted.offset is not None:
            target = wanted.offset
        elif wanted.at_ms == END:
            target = end
        else:
            target = await brokers.offset_by_time(addr, queue, wanted.at_ms)
        target = min(max(target, first, 0), end)
        moves = wanted.force or stored is None or target <= stored
        return QueueReset(
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
            way=self._way,
            broker_offset=end,
            consumer_offset=-1 if stored is None else stored,
            target=target,
            rollback_offset=target if moves else stored or 0,
        )

    # -- setting

    async def set(self) -> None:
        """Set the new offsets at the broker, or through its connected members."""
        if self._way is OffsetWay.STORED:
            await self._store(self.resets)
            if self._online is not None and not self._pops and await self._may_notify_members():
                # Notify pull consumers, too. Java's pull consumers ignore the notification, but CometMQ's
                # apply the new offsets.
                with contextlib.suppress(BrokerError):
                    await self._notify_members()
            return
        self._consume_times_before = await self._consume_times()
        try:
            new_offsets = await self._notify_members()
        except BrokerError as error:
            if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
                self._online = None  # The group had members, but they have left in the meantime
                self.resets = [msgspec.structs.replace(each, way=OffsetWay.STORED) for each in self.resets]
                await self._store(self.resets)
                return
            # A broker that has no offset for one of the queues refuses the request, as if the group did not
            # exist. Broadcasting groups never have offsets at the broker, and new groups have none yet.
            none = [each for each in self.resets if self._broadcasts or each.consumer_offset <= 0]
            if error.code != ResponseCode.SYSTEM_ERROR or not none:
                raise
            await self._store(none, anyhow=True)
            new_offsets = await self._notify_members()
        # The broker has computed the new offsets itself; they may differ from the plan, because messages may
        # have arrived since.
        self.resets = [
            msgspec.structs.replace(
                each, rollback_offset=new_offsets.get(self._queue(each), each.rollback_offset)
            )
            for each in self.resets
        ]

    def _queue(self, each: QueueReset) -> MessageQueue:
        return MessageQueue(self._wanted.topic, each.broker_name, each.queue_id)

    async def _store(self, resets: Iterable[QueueReset], *, anyhow: bool = False) -> None:
        for each in resets:
            if anyhow or each.changes:
                await self._client.brokers.update_consumer_offset(
                    self._addr, self._wanted.group, self._queue(each), each.rollback_offset
                )

    async def _may_notify_members(self) -> bool:
        """Return whether a notification resets only the selected queues.

        Brokers of CometMQ and of 5.x can reset a single queue. Apache's 4.9 brokers reset all queues of the
        topic.
        """
        if self._wanted.queue_id is None:
            return True
        runtime = await self._client.brokers.runtime_info(self._addr)
        return "flowControl" in runtime or runtime.get("brokerVersionDesc", "").startswith("V5")

    async def _notify_members(self) -> dict[MessageQueue, int]:
        wanted = self._wanted
        header = ResetOffsetRequestHeader(
            topic=wanted.topic,
            group=wanted.group,
            timestamp=wanted.at_ms,
            is_force=wanted.force,
            queue_id=wanted.queue_id,
            offset=self.resets[0].rollback_offset if wanted.queue_id is not None else None,
        )
        return await self._client.brokers.reset_offset(
            self._addr, header, in_cpp_form=wanted.in_cpp_form, timeout_s=RESET_TIMEOUT_S
        )

    # -- observation

    async def seen(self, members_s: float, kept_s: float) -> list[QueueReset]:
        """Wait until the reset is observed, or for a maximum time. Return each queue's reset.

        Args:
            members_s: Maximum time, in seconds, to wait for members that were notified.
            kept_s: Time, in seconds, after which the stored offsets of a group of pull consumers are read.
        """
        if self._online is None or self._pops:
            return await self._observe()
        if self._way is OffsetWay.STORED:
            await asyncio.sleep(kept_s)
            return await self._observe()
        end = time.monotonic() + members_s
        while True:
            self.resets = await self._observe()
            if not any(each.problem for each in self.resets) or time.monotonic() >= end:
                return self.resets
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _observe(self) -> list[QueueReset]:
        member_offsets = await self.offsets_of_members() if self._broadcasts else {}
        restarted_queues = await self._restarted_queues() if self._way is OffsetWay.MEMBERS else set()

        async def of(each: QueueReset) -> QueueReset:
            if self._way is OffsetWay.MEMBERS and each.seen is not None and not each.problem:
                return each  # The reset was observed. Any later change of the offset is due to consumption
            queue, brokers = self._queue(each), self._client.brokers
            if self._broadcasts:
                seen, again = member_offsets.get(queue), queue in restarted_queues
            else:
                seen = await brokers.consumer_offset(self._addr, self._wanted.group, queue)
                # If a member has consumed from the queue since the notification, the reset may have caused
                # that. This is certain only if the queue had no unconsumed messages before the reset and has
                # received none since.
                again = queue in restarted_queues and seen == each.consumer_offset == each.broker_offset
                again = again and seen == await brokers.max_offset(self._addr, queue)
            # If `again` is true, members have consumed the queue since the reset. An unchanged offset is then
            # no problem, because they may have consumed up to their previous offset again.
            problem = "" if again else self._problem(each, seen)
            return msgspec.structs.replace(each, seen=seen, problem=problem)

        return await for_each(self.resets, of, MAX_CONCURRENT_QUEUES)

    def _problem(self, each: QueueReset, seen: int | None) -> str:
        if self._way is OffsetWay.STORED:
            if seen == each.rollback_offset or (self._pops and (seen or 0) > each.rollback_offset):
                return ""
            if self._online is None:
                return f"the broker has {seen}"
            return f"a pull consumer has stored {seen} since: stop the group first"
        if seen is None:
            return "no member has reported its offset"
        back = each.rollback_offset < each.consumer_offset
        if seen < each.rollback_offset or (back and seen >= each.consumer_offset):
            return f"the members were notified, but are still at {seen}"
        return ""

    async def _restarted_queues(self) -> Collection[MessageQueue]:
        """Return the queues from which members have consumed since the broker notified them of the reset.

        Queues that a member has been assigned since then are included.
        """
        consume_times = await self._consume_times()
        same = {
            queue for (client, queue), at in consume_times.items()
            if at - self._consume_times_before.get((client, queue), at) <= TIME_TOLERANCE_MS
        }  # fmt: skip
        return {queue for _, queue in consume_times} - same

    async def _consume_times(self) -> ConsumeTimes:
        """Return when each member last consumed from each of its queues, or was assigned the queue.

        Members that do not answer are left out.
        """
        found: ConsumeTimes = {}

        async def of(member: bodies.ClientConnection) -> None:
            with contextlib.suppress(CometError):
                info = await member_info(self._client, self._addr, self._wanted.group, member.client_id)
                for queue, held in info.mq_table.items():
                    found[member.client_id, queue] = held.last_consume_timestamp

        members = self._online.connection_set if self._online is not None else []
        await for_each(members, of, MAX_CONCURRENT_MEMBERS)
        return found

    async def offsets_of_members(self) -> dict[MessageQueue, int]:
        """Return the lowest offset that any member reports for each queue."""
        header = GroupTopicRequestHeader(topic=self._wanted.topic, group=self._wanted.group)
        try:
            code = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
            answer = await self._client.brokers.fetch(
                self._addr, code, bodies.GetConsumerStatusBody, header, timeout_s=RESET_TIMEOUT_S
            )
        except CometError:
            return {}  # A failure is not final, because the request is repeated until the timeout
        found: dict[MessageQueue, int] = {}
        for offsets in answer.consumer_table.values():
            for queue, offset in offsets.items():
                found[queue] = min(offset, found.get(queue, offset))
        return found


async def online_at(client: ClientInstance, addr: str, group: str) -> bodies.ConsumerConnection | None:
    """Return the members of a group that are connected to a broker, None if there are none."""
    try:
        return await client.brokers.consumer_connection(addr, group)
    except BrokerError as error:
        if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
            return None
        raise


__all__ = ["END", "OffsetAdmin", "Reset"]
