"""The administration API: what `mqadmin` does, as one asyncio object.

    async with Admin("127.0.0.1:9876") as admin:
        print(await admin.topics())

Works against CometMQ and Apache RocketMQ alike. Every failure is a typed error that says who refused what.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from cometmq.admin import dead_letters, groups, known_groups, messages
from cometmq.admin.dead_letters import Resending, Selection
from cometmq.admin.errors import NoLeaderError, UnknownNameError
from cometmq.admin.newest import Newest, newest
from cometmq.admin.offsets import OffsetAdmin
from cometmq.admin.servers import check_cluster
from cometmq.admin.stats import StatsAdmin
from cometmq.admin.topic_admin import TopicAdmin, TopicSettings
from cometmq.admin.values import (
    BrokerStatus,
    DeadLetterCount,
    GroupProgress,
    GroupSubscriptions,
    GroupSummary,
    MessageTrack,
    QueueStatus,
    ResendResult,
    RetryLimits,
    SendTime,
    TraceView,
    broker_places,
    with_lags,
)
from cometmq.client.cluster import lookups
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.options import ClientOptions, TraceOptions
from cometmq.client.cluster.workers import for_each
from cometmq.client.producer.producer import Producer
from cometmq.errors import CometError, MessageNotFound, NoRouteError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, WaitingMessage
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult
from cometmq.protocol.bodies_admin import HaRuntimeInfo, RaftStatus
from cometmq.protocol.codes import (
    DLQ_PREFIX,
    MASTER_ID,
    TRACE_TOPIC,
    Perm,
)
from cometmq.protocol.headers import ListTimersRequestHeader
from cometmq.protocol.headers_admin import RemoveBrokerHeader

__all__ = ["Admin", "TopicSettings"]

ADMIN_GROUP = "admin_ext_group"
ADMIN_TIMEOUT_S = 5.0
BROKERS_AT_ONCE = 16  # requests under way where all are asked: one that hangs must not hold up the others


class Admin(StatsAdmin, TopicAdmin, OffsetAdmin):
    """Operations on a cluster, found through its name servers (`;` between several)."""

    def __init__(
        self,
        namesrv: str | Sequence[str] | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
        options: ClientOptions | None = None,
    ) -> None:
        """options: the account that signs (access_key and others), TLS; the rest of them is not used."""
        instance = str(time.time_ns() // 1_000_000)
        self._access = options if options is not None else ClientOptions()
        options = replace(self._access, api_timeout_s=timeout_s, instance_name=instance, namespace="")
        super().__init__("admin", namesrv, None, options)
        self._producer: Producer | None = None

    async def _begin(self) -> None:
        await self._start_client()

    async def _end(self, *, drain: bool) -> None:
        del drain
        try:
            if self._producer is not None:
                await self._producer.stop()
        finally:
            await self._close_client()

    # -- brokers

    async def runtime(self, broker_addr: str) -> dict[str, str]:
        """What a broker says about itself."""
        return await self.client.brokers.runtime_info(broker_addr)

    async def brokers(self, cluster: str | None = None) -> list[BrokerStatus]:
        """Every broker of one or all clusters with its runtime table; `problem` where one does not answer."""
        info = await self.cluster_info()
        if cluster is not None:
            check_cluster(cluster, info)

        async def status(place: BrokerStatus) -> BrokerStatus:
            try:
                return place.saying(await self.runtime(place.broker_addr))
            except CometError as error:
                return msgspec.structs.replace(place, problem=str(error))

        found = await for_each(broker_places(info, cluster), status, BROKERS_AT_ONCE)
        return with_lags(found)

    async def ha_status(self, broker_addr: str) -> HaRuntimeInfo:
        """The slaves of a master or members of a raft group, or whom a slave follows; how far they are."""
        return await self.client.brokers.ha_status(broker_addr)

    async def reset_master_flush_offset(self, broker_addr: str, offset: int) -> None:
        """Tell a slave what its master has on its device (5.x)."""
        await self.client.brokers.reset_master_flush_offset(broker_addr, offset)

    async def add_broker(self, container_addr: str, config_path: str) -> None:
        """Have a broker container of Apache's 5.x start a broker with a settings file of its machine."""
        await self.client.brokers.add_broker(container_addr, config_path)

    async def remove_broker(self, container_addr: str, cluster: str, name: str, broker_id: int) -> None:
        """Have a broker container of Apache's 5.x stop one of its brokers."""
        header = RemoveBrokerHeader(broker_cluster_name=cluster, broker_name=name, broker_id=broker_id)
        await self.client.brokers.remove_broker(container_addr, header)

    # -- consumer groups

    async def progress(
        self, group: str, *, with_client_ip: bool = False, brokers: Mapping[str, str] | None = None
    ) -> GroupProgress:
        """Return consumer offset, broker offset and lag of a group in each queue.

        Args:
            group: The group.
            with_client_ip: Ask the members which of them holds each queue.
            brokers: The group's entry of `group_places`, where many groups are asked.

        Raises:
            UnknownNameError: The group does not exist.
            BrokerError: A broker refuses.
        """
        return await groups.progress(self.client, group, with_client_ip=with_client_ip, brokers=brokers)

    async def subscriptions(self, group: str) -> GroupSubscriptions:
        """What the members of a group subscribe, and in what they differ, which loses messages. Raises
        UnknownNameError for a group nobody knows, BrokerError for one without members."""
        return await groups.subscriptions(self.client, group)

    async def brokers_of(self, group: str) -> dict[str, str]:
        """Broker name -> address of those that know a group. Raises UnknownNameError."""
        return dict(await known_groups.brokers_of(self.client, group))

    async def progress_at(self, addr: str, group: str) -> GroupProgress:
        """How far a group is in the queues of one broker."""
        return await groups.progress_at(self.client, addr, group)

    async def correction_offsets(
        self, topic: str, compare_group: str, left_out: Iterable[str] = ()
    ) -> dict[MessageQueue, int]:
        """The lowest offset that any group but those `left_out` has in each queue of a topic; 2**63 - 1 where
        `compare_group` is behind it. Apache's brokers forget the offsets of the groups left out."""
        return await groups.correction_offsets(self.client, topic, compare_group, left_out)

    async def group_names(self) -> list[str]:
        """Return all groups, sorted: those with a retry topic, settings or stored offsets."""
        return list(await self.group_places())

    async def group_places(self) -> dict[str, dict[str, str]]:
        """Return each group with the brokers that have it, by name with their addresses; no brokers for a
        group with a retry topic, whose route names them."""
        return await known_groups.places(self.client)

    async def groups(self) -> list[GroupSummary]:
        """Return a line about each group, the largest lag first."""
        found = [
            await groups.summary(self.client, name, brokers)
            for name, brokers in (await self.group_places()).items()
        ]
        return sorted(found, key=lambda row: (-(row.diff_total or 0), row.group))

    async def consume_directly(
        self, group: str, client_id: str, offset_msg_id: str
    ) -> ConsumeMessageDirectlyResult:
        """Have one member of a group process one message at once; what its listener said."""
        return await groups.consume_directly(self.client, group, client_id, offset_msg_id)

    # -- messages

    async def message_by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """The message of an id of either kind: the offset id, which names its broker, or the unique key that
        producers give, which is looked for in `topic`, or else in all topics. Raises MessageNotFound,
        BrokerError, IdError."""
        return await lookups.by_id(self.client, msg_id, topic)

    async def resume_check(self, msg_id: str) -> MessageExt:
        """Have the producer asked again about a half message that was given up; returns the message of
        TRANS_CHECK_MAX_TIME_TOPIC that was resumed. `msg_id`: its offset id, or the unique key that the
        producer has. Raises MessageNotFound, BrokerError (resumed before), IdError."""
        return await messages.resume_check(self.client, msg_id)

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        limit: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        missing: dict[str, CometError] | None = None,
    ) -> list[MessageExt]:
        """Messages of a topic with a key, the oldest first. missing: brokers that do not answer are put in,
        by name, with why; without it they are raised, as where none answers."""
        span = (begin_ms, end_ms)
        return await lookups.by_key(self.client, topic, key, limit, unique=False, span=span, missing=missing)

    async def messages_by_unique_key(
        self, topic: str, msg_id: str, limit: int = 32, *, missing: dict[str, CometError] | None = None
    ) -> list[MessageExt]:
        """Messages of a topic with a message id as producers return it; more than one after retries.
        missing: as of messages_by_key."""
        return await lookups.by_key(self.client, topic, msg_id, limit, unique=True, missing=missing)

    async def traces(
        self,
        msg_id: str,
        topic: str = TRACE_TOPIC,
        limit: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        missing: dict[str, CometError] | None = None,
    ) -> list[TraceView]:
        """What clients that trace wrote about a message, the oldest first. At most `limit` trace messages of
        each broker are looked at, of those stored in the time span. missing: as of messages_by_key."""
        return await messages.traces(self.client, topic, msg_id, limit, (begin_ms, end_ms), missing)

    async def tracks(self, message: MessageExt) -> list[MessageTrack]:
        """What became of a message in each group that consumes its topic."""
        return await groups.tracks(self.client, message)

    def read(self, wanted: messages.ReadRange, group: str | None = None) -> AsyncIterator[MessageExt]:
        """Messages of a topic, queue after queue, without committing anything."""
        return messages.read(self.client, wanted, group)

    async def newest(self, wanted: messages.ReadRange) -> Newest:
        """The newest messages of a range, all queues together, the newest first, with the beginnings of their
        bodies. Raises NoRouteError, UnknownNameError, BrokerError."""
        return await newest(self.client, wanted)

    def queue_bounds(self, wanted: messages.ReadRange) -> AsyncIterator[tuple[MessageQueue, int, int]]:
        """Each queue of a range, where `read` begins in it, and the offset behind its last message."""
        return messages.queue_bounds(self.client, wanted)

    async def message_at(self, topic: str, broker_name: str, queue_id: int, offset: int) -> MessageExt:
        """The message at an offset of a queue. Raises MessageNotFound, UnknownNameError, NoRouteError."""
        queue = MessageQueue(topic, broker_name, queue_id)
        found = await messages.at_offset(self.client, queue, offset)
        if found is None:
            raise MessageNotFound(str(offset), f"in queue {queue_id} of topic {topic} at {broker_name}")
        return found

    async def send_times(self, topic: str, amount: int, size: int) -> AsyncIterator[SendTime]:
        """Send messages of a topic one after the other, queue by queue, and say how long each took; the first
        one may make the topic. A send that fails is a value, too. Raises NoRouteError if no name server
        answers."""
        queues: list[MessageQueue] = []
        try:
            queues = [
                MessageQueue(topic, data.broker_name, queue_id)
                for data in sorted((await self.route(topic)).queue_datas, key=lambda data: data.broker_name)
                if data.perm & Perm.WRITE
                for queue_id in range(data.write_queue_nums)
            ]
        except NameServersUnreachable:
            raise
        except NoRouteError:
            pass
        producer = await self._started_producer()
        for number in range(amount):
            queue = queues[number % len(queues)] if queues else None
            began = time.perf_counter()
            sent, result, ids = True, "", ("", "", -1)
            try:
                done = await producer.send(Message(topic=topic, body=b"a" * size), queue=queue)
                queue, result = done.queue, done.status.name
                ids = done.msg_id, done.offset_msg_id, done.queue_offset
            except CometError as error:
                sent, result = False, str(error)
            yield SendTime(
                broker_name=queue.broker_name if queue else "",
                queue_id=queue.queue_id if queue else -1,
                sent=sent,
                result=result,
                millis=(time.perf_counter() - began) * 1000,
                msg_id=ids[0],
                offset_msg_id=ids[1],
                queue_offset=ids[2],
            )

    async def send(
        self,
        message: Message,
        *,
        broker_name: str | None = None,
        queue_id: int | None = None,
        traced: bool = False,
    ) -> SendResult:
        """Send a message, to a given queue if broker name and queue id are given; traced: with a trace."""
        queue = None
        if broker_name is not None and queue_id is not None:
            queue = MessageQueue(message.topic, broker_name, queue_id)
        if traced:
            options = replace(self._access, trace=TraceOptions())
            async with Producer(ADMIN_GROUP, namesrv=self._namesrv, client_options=options) as producer:
                return await producer.send(message, queue=queue)
        return await (await self._started_producer()).send(message, queue=queue)

    async def send_again(self, message: MessageExt) -> SendResult:
        """Send a stored message as a new one: body, flag, tag, keys and user properties."""
        return await self.send(
            Message(
                topic=message.topic,
                body=bytes(message.body),
                tags=message.tags,
                keys=message.keys,
                flag=message.flag,
                properties=message.user_properties,
            )
        )

    # -- dead letters

    async def dead_letter_counts(self, groups: Iterable[str] | None = None) -> list[DeadLetterCount]:
        """The groups that have a dead-letter topic, or these of them, with what is stored there."""
        if groups is None:
            topics = [topic for topic in await self.topics() if topic.startswith(DLQ_PREFIX)]
        else:
            topics = [DLQ_PREFIX + group for group in groups]
        return await for_each(topics, self._dead_letter_count, lookups.TOPICS_AT_ONCE)

    async def _dead_letter_count(self, topic: str) -> DeadLetterCount:
        queues: list[QueueStatus] = []
        problem = ""
        try:
            queues = await self.topic_status(topic)
        except CometError as error:
            problem = str(error)
        return DeadLetterCount(
            group=topic.removeprefix(DLQ_PREFIX),
            count=sum(queue.max_offset - queue.min_offset for queue in queues),
            last_update_timestamp=max((queue.last_update_timestamp for queue in queues), default=0),
            problem=problem,
        )

    async def dead_letters(self, wanted: Selection) -> AsyncIterator[MessageExt]:
        """The dead letters of a selection, broker after broker, the oldest first. Raises UnknownNameError for
        a group nobody knows, DeadLettersHidden for a topic that may not be read, SqlError."""
        try:
            async for message in dead_letters.select(self.client, wanted):
                yield message
        except NoRouteError as error:
            if error.topic != DLQ_PREFIX + wanted.group:
                raise
            await self.brokers_of(wanted.group)

    def resend(self, wanted: Selection, how: Resending) -> AsyncIterator[ResendResult]:
        """Send the dead letters of a selection again; says of each what became of it. A second run leaves out
        what an earlier one did. Raises IndexSilent, ResendStopped, and what `dead_letters` does."""
        return dead_letters.resend(self.client, self.dead_letters(wanted), wanted.group, how)

    async def was_resent(self, group: str, message: MessageExt) -> bool:
        """Whether a dead letter was sent again. Raises IndexSilent where that cannot be known."""
        return await dead_letters.was_resent(self.client, group, message)

    async def retry_limits(self, group: str) -> RetryLimits:
        """The most retries that members and the group allow, as far as CometMQ brokers have learnt it."""
        return await groups.retry_limits(self.client, group)

    # -- raft groups

    async def raft_group(self, broker_name: str | None = None) -> dict[str, RaftStatus | str]:
        """What each member of a raft group says of it, by address, or why it says nothing. Without a name the
        cluster's only one. Raises UnknownNameError."""
        found: dict[str, RaftStatus | str] = {}
        for addr in await self._raft_addrs(broker_name):
            try:
                found[addr] = await self.client.brokers.raft_status(addr)
            except CometError as error:
                found[addr] = str(error)
        return found

    async def change_raft_group(self, action: str, member: str, broker_name: str | None = None) -> None:
        """Have the leader hand over to a member (transfer), let one receive the log (addLearner), give it a
        vote (promote), or take it out (remove). Raises CommandError with the reason where that is refused,
        NoLeaderError, UnknownNameError."""
        for addr, status in (await self.raft_group(broker_name)).items():
            if isinstance(status, RaftStatus) and status.role == "leader":
                return await self.client.brokers.change_raft_group(addr, action, member)
        raise NoLeaderError(broker_name or "")

    async def _raft_addrs(self, broker_name: str | None) -> list[str]:
        table = (await self.cluster_info()).broker_addr_table
        if broker_name is None and len(table) == 1:
            broker_name = next(iter(table))
        if broker_name not in table:
            raise UnknownNameError("broker", broker_name or "", sorted(table))
        return [addr for _, addr in sorted(table[broker_name].broker_addrs.items())]

    # -- timer messages

    async def timers(
        self,
        topic: str | None = None,
        *,
        broker_addr: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[WaitingMessage]:
        """Messages that wait for their time or at a delay level, of all topics or one: broker after broker,
        by delivery time, at most `limit` of each. CometMQ brokers only."""
        for addr, name in (await self._waiting_at(broker_addr)).items():
            wanted = ListTimersRequestHeader(topic=topic)
            more, left = True, limit
            while more and left != 0:
                if left is not None:
                    wanted = msgspec.structs.replace(wanted, max_msg_nums=min(left, 64))
                found, page = await self.client.brokers.timers(addr, name, wanted)
                for waiting in found:
                    yield waiting
                more, left = page.more, None if left is None else left - len(found)
                wanted = msgspec.structs.replace(
                    wanted, after_ms=page.after_ms, after_position=page.after_position
                )

    async def timers_with_key(
        self,
        key: str,
        topic: str | None = None,
        *,
        broker_addr: str | None = None,
        missing: dict[str, CometError] | None = None,
    ) -> tuple[list[WaitingMessage], bool]:
        """The same with one key, or the id. A broker looks at the newest 64 messages that have had it, or
        1 MiB of them; the second value says whether there are more that it has not looked at.
        missing: as of messages_by_key."""
        found, more = [], False
        wanted = ListTimersRequestHeader(topic=topic, key=key)
        failed: dict[str, CometError] = {}
        addrs = await self._waiting_at(broker_addr)

        async def ask(addr: str) -> None:
            nonlocal more
            try:
                some, page = await self.client.brokers.timers(addr, addrs[addr], wanted)
            except CometError as error:
                failed[addrs[addr]] = error
                return
            found.extend(some)
            more |= page.more

        await for_each(addrs, ask, BROKERS_AT_ONCE)
        if missing is not None:
            missing |= failed
        if failed and (missing is None or len(failed) == len(addrs)):
            raise next(iter(failed.values()))
        return found, more

    async def _waiting_at(self, broker_addr: str | None) -> dict[str, str]:
        """Address -> name of the masters to ask."""
        brokers = {
            data.broker_addrs[MASTER_ID]: name
            for name, data in sorted((await self.cluster_info()).broker_addr_table.items())
            if MASTER_ID in data.broker_addrs
        }
        return {broker_addr: brokers.get(broker_addr, "")} if broker_addr else brokers

    async def recall(self, recall_handle: str) -> str:
        """Take back a message that waits for a time of its own; see Producer.recall."""
        return await (await self._started_producer()).recall(recall_handle)

    async def _started_producer(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(ADMIN_GROUP, client=self.client)
            await self._producer.start()
        return self._producer
