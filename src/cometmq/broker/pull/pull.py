"""Pulls, with long polling. Lite pulls of 5.x clients are served exactly the same.

A pull is checked when it comes; then it is served from the page cache inline, or by a thread when the
records are not in memory (the reader's next ones then wait for their turn, see backlog.py), or parked until
something arrives. A pull that waited is checked again before it is served: topic, group or subscription may
have changed. A parked one is served once more when it is woken, and then answered whatever there is; its
offset was stored at its first arrival only.

So many pulls of a connection, and on a queue, may be parked. Further ones are answered "nothing found" as if
long polling was off: after a short time, for clients ask again at once.

Budget: 2 µs per pulled message in batches of 32. The records go from the store's buffers to the transport as
they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from cometmq import logs
from cometmq.broker.base import compat
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.replies import pull_reply
from cometmq.broker.base.stats import Stats
from cometmq.broker.groups.clients import ConsumerTable
from cometmq.broker.groups.subscriptions import ExpressionError, check_tag_type, tag_codes
from cometmq.broker.pull.backlog import NEAR, Backlog
from cometmq.broker.pull.long_poll import RECHECK_MS, HeldPull, LongPoll
from cometmq.broker.pull.offset_moved import OffsetMovedEvents
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import CommandError
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.codes import Perm, ResponseCode
from cometmq.protocol.frame import Frame, encode_frame
from cometmq.protocol.headers import PullMessageRequestHeader
from cometmq.remoting import Connection, Tick
from cometmq.store import CACHED, Arrivals, GetStatus, Got, MessageStore, NotInMemory, Reads

log = logs.logger(__name__)

COMMIT_OFFSET = 1
SUSPEND = 2
SUBSCRIPTION = 4

READ = int(Perm.READ)  # a flag of an enum costs 1 µs a test

FOUND = int(ResponseCode.SUCCESS)
NOT_FOUND = int(ResponseCode.PULL_NOT_FOUND)
RETRY = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
MOVED = int(ResponseCode.PULL_OFFSET_MOVED)
# Status of a read -> code of the answer (docs/reference/storage.md, Pull answers); an empty queue depends on
# the offset that was asked for.
CODE_OF_STATUS = {
    GetStatus.FOUND: FOUND,
    GetStatus.NO_MATCHED_MESSAGE: RETRY,
    GetStatus.MESSAGE_WAS_REMOVING: RETRY,
    GetStatus.OFFSET_FOUND_NULL: NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: MOVED,
    GetStatus.OFFSET_TOO_SMALL: MOVED,
}
# How many parked pulls one tick serves, and with how many bytes: one busy topic must not keep the others
# waiting.
WOKEN_PER_TICK = 128
WOKEN_BYTES = 8 << 20
# A pull for which there is no room waits so long at most, and shortPollingTimeMills: its connection may have
# to wait with it.
MOST_ASIDE_MS = 1_000
# So many characters of a subscription that a parked pull carries count as one more pull of its connection.
CHARACTERS_OF_A_PULL = 256


class PullRequest:
    """A checked pull: everything needed to serve it, now or later."""

    __slots__ = (
        "aside", "codes", "connection", "group", "header", "hold_ms", "max_bytes", "max_count", "may_hold",
        "offset", "opaque", "queue_id", "topic", "version",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        opaque: int,
        version: int,
        header: PullMessageRequestHeader,
        codes: frozenset[int] | None,
        max_bytes: int | None,
    ) -> None:
        self.connection = connection
        self.opaque = opaque
        self.version = version
        self.header = header
        self.group = header.consumer_group
        self.topic = header.topic
        self.queue_id = header.queue_id
        self.offset = header.queue_offset
        self.max_count = header.max_msg_nums
        self.max_bytes = max_bytes
        self.codes = codes
        self.may_hold = bool(header.sys_flag & SUSPEND)
        self.hold_ms = header.suspend_timeout_millis or 0
        self.aside = False  # it waits without being parked on its queue


class PullProcessor:
    """Handles pulls of a broker. `end_tick` runs after the writer's, so acknowledgements leave first."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        store: MessageStore,
        tick: Tick,
        topics: TopicTable,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsets,
        consumers: ConsumerTable,
        stats: Stats,
        moved: OffsetMovedEvents,
    ) -> None:
        self._config = config
        self._store = store
        self._tick = tick
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._consumers = consumers
        self._stats = stats
        self._moved_events = moved
        self._loop = asyncio.get_running_loop()
        self.long_poll = LongPoll()
        self._ready: deque[PullRequest] = deque()
        self._given = 0  # bytes of messages, so far
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._rechecks = Periodic(self._loop, RECHECK_MS / 1000, self.recheck, name="recheck of held pulls")
        self._cold: set[asyncio.Task[None]] = set()
        self._backlog: Backlog[PullRequest] = Backlog(
            self._serve_late, lambda: self._store.commit_log_max, self._loop.time
        )
        self._backlog_due = False  # _serve_backlog is scheduled

    def pull_message(self, connection: Connection, frame: Frame) -> None:
        """Serve, park or refuse a pull."""
        header = frame.header(PullMessageRequestHeader)
        codes = self._check(connection, frame.version, header)
        max_bytes = compat.most_bytes(frame.version, header.max_msg_bytes)
        request = PullRequest(connection, frame.opaque, frame.version, header, codes, max_bytes)
        commits = header.sys_flag & COMMIT_OFFSET and request.may_hold and not self._store.slave
        if commits and header.commit_offset is not None:
            self._offsets.commit(request.group, request.topic, request.queue_id, header.commit_offset)
        backlog = self._backlog
        draining = backlog.readers and (request.group, request.topic, request.queue_id) in backlog.readers
        if draining and backlog.wait(request):
            self._tick.schedule()
        else:
            self._serve(request)

    lite_pull_message = pull_message

    def _check(
        self, connection: Connection, version: int, header: PullMessageRequestHeader
    ) -> frozenset[int] | None:
        """Apache's checks in their order (docs/reference/storage.md, Pull answers); returns the tag
        codes that pass."""
        config = self._config
        if not config.broker_permission & READ:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the broker[{config.broker_ip1}] pulling message is forbidden"
            )
        group = self._groups.find(header.consumer_group)
        if group is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist",
            )
        if not group.consume_enable:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}"
            )
        topic = self._topics.table.get(header.topic)
        if topic is None:
            raise CommandError(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please!"
            )
        if not topic.perm & READ:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden"
            )
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise CommandError(
                compat.invalid_parameter(version),
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}] consumer:[{connection.peer}]",
            )
        if header.sys_flag & SUBSCRIPTION:
            expression, expression_type = header.subscription, header.expression_type
        else:
            subscription = self._subscription(header, group.consume_broadcast_enable)
            expression, expression_type = subscription.sub_string, subscription.expression_type
        check_tag_type(expression_type)
        try:
            return tag_codes(expression)
        except ExpressionError as error:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from None

    def _subscription(self, header: PullMessageRequestHeader, broadcast_allowed: bool) -> SubscriptionData:
        """What the group's heartbeats say about the topic of a pull that does not carry it."""
        known = self._consumers.groups.get(header.consumer_group)
        if known is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's group info not exist", ext={}
            )
        if not broadcast_allowed and known.message_model == "BROADCASTING":
            raise CommandError(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] can not consume by broadcast way",
            )
        subscription = known.subscriptions.get(header.topic)
        if subscription is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist", ext={}
            )
        if subscription.sub_version < (header.sub_version or 0):
            raise CommandError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest", ext={}
            )
        return subscription

    # -- serving

    def _read(self, request: PullRequest, reads: Reads = CACHED) -> Got:
        return self._store.get_messages(
            request.topic,
            request.queue_id,
            request.offset,
            request.max_count,
            filter=request.codes,
            max_bytes=request.max_bytes,
            reads=reads,
        )

    def _serve(self, request: PullRequest) -> None:
        try:
            got = self._read(request)
        except NotInMemory as miss:
            self._backlog.missed((request.group, request.topic, request.queue_id))
            connection = request.connection
            connection.hold()
            task = self._loop.create_task(self._serve_cold(request, miss))
            self._cold.add(task)

            def done(task: asyncio.Task[None]) -> None:
                self._cold.discard(task)
                connection.release()

            task.add_done_callback(done)
        else:
            self._answer(request, got)

    async def _serve_cold(self, request: PullRequest, miss: NotInMemory) -> None:
        try:
            got = await self._store.ask(partial(self._read, request), miss)
        except Exception as error:
            self._failed(request, error)
            return
        self._answer(request, got)

    def _serve_late(self, request: PullRequest) -> None:
        """Serve a pull that waited, if its client is still there and a new one like it would be served."""
        connection = request.connection
        if request.aside:
            connection.release()
        if not connection.closed:
            try:
                request.codes = self._check(connection, request.version, request.header)
                self._serve(request)
            except Exception as error:
                self._failed(request, error)

    def _failed(self, request: PullRequest, error: Exception) -> None:
        if isinstance(error, CommandError):
            code, remark, ext = error.code, error.remark, error.ext
        else:
            where = request.topic, request.queue_id, request.offset
            log.error("pull of %s queue %d at %d failed", *where, exc_info=error)
            code, remark, ext = ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}", None
        answered = Frame(code=0, opaque=request.opaque).response(code, remark, ext=ext)
        request.connection.write(encode_frame(answered))

    def _answer(self, request: PullRequest, got: Got) -> None:
        if got.behind < NEAR and self._backlog.readers:
            self._backlog.readers.discard((request.group, request.topic, request.queue_id))
        status = got.status
        stats = self._stats
        stats.get += 1
        if status is GetStatus.FOUND:
            code = FOUND
            stats.found += 1
            stats.transferred += got.count
            key = (request.group, request.topic)
            stats.group_get[key] = stats.group_get.get(key, 0) + got.count
        else:
            stats.miss += 1
            code = CODE_OF_STATUS.get(status, NOT_FOUND if request.offset == 0 else MOVED)
            if code == NOT_FOUND and request.may_hold:
                self._park(request)
                return
        connection = request.connection
        suggested = self._suggested_broker(request.group, got.suggest_slave)
        if code == MOVED:
            code, suggested = self._moved(request, got.next_begin_offset, suggested)
        buffers = got.buffers if code == FOUND else ()
        size = sum(map(len, buffers))
        self._given += size
        header = pull_reply(
            code,
            request.opaque,
            b"FOUND" if code == FOUND else status.name.encode(),
            (got.next_begin_offset, got.min_offset, got.max_offset),
            suggested,
            size,
        )
        connection.write(header)
        for buffer in buffers:
            connection.write(buffer)

    def _moved(self, request: PullRequest, begin: int, suggested: int) -> tuple[int, int]:
        """Code of the answer and suggested broker for an offset outside its queue. Who corrects it tells so
        in a topic; a slave that does not sends the client to the group's broker."""
        group, topic, queue_id = request.group, request.topic, request.queue_id
        if not self._store.corrects_offsets:
            settings = self._groups.table.get(group)
            return RETRY, suggested if settings is None else settings.broker_id
        where = request.offset, topic, queue_id
        log.info("offset %d of %s/%d, asked for by group %s, becomes %d", *where, group, begin)
        self._moved_events.store_event(group, topic, queue_id, request.offset, begin)
        # At the end of a tick it is too late to take part in it, and too early to ask for the next one.
        self._loop.call_soon(self._tick.schedule)
        return MOVED, suggested

    def _suggested_broker(self, group: str, suggest_slave: bool) -> int:
        if not self._config.slave_read_enable:
            return 0
        settings = self._groups.table.get(group)
        if settings is None:
            return 0
        return settings.which_broker_when_consume_slowly if suggest_slave else settings.broker_id

    # -- waiting

    def _park(self, request: PullRequest) -> None:
        config = self._config
        hold_ms = request.hold_ms if config.long_polling_enable else config.short_polling_time_mills
        request.may_hold = False
        connection, topic, queue_id = request.connection, request.topic, request.queue_id
        weight = 1 + len(request.header.subscription or "") // CHARACTERS_OF_A_PULL
        held = HeldPull(connection, request, request.offset, request.codes, weight=weight)
        now_ms = self._now_ms()
        limits = config.max_held_pulls_per_connection, config.max_held_pulls_per_queue
        if self.long_poll.has_room(topic, queue_id, held, *limits):
            at_ms = self.long_poll.park(topic, queue_id, held, now_ms, hold_ms)
        else:
            request.aside = True
            connection.hold()  # who has too many of these is not read from until some are answered
            at_ms = self.long_poll.put_aside(
                held, now_ms, max(0, min(hold_ms, config.short_polling_time_mills, MOST_ASIDE_MS))
            )
        self._arm(at_ms, now_ms)

    def _now_ms(self) -> int:
        # Hold times follow the loop's clock: a step of the wall clock must not release or keep every pull.
        return int(self._loop.time() * 1000)

    def _arm(self, at_ms: int, now_ms: int) -> None:
        if self._timer is not None:
            if self._timer_at <= at_ms:
                return
            self._timer.cancel()
        self._timer_at = at_ms
        self._timer = self._loop.call_later(max(at_ms - now_ms, 0) / 1000, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now_ms = self._now_ms()
        self._wake(self.long_poll.expire(now_ms))
        following = self.long_poll.next_deadline()
        if following is not None:
            self._arm(following, now_ms)

    def start(self) -> None:
        """Begin the periodic recheck."""
        self._rechecks.start()

    def recheck(self) -> None:
        """Serve the pulls whose queue has got something newer, whatever its tag."""
        self._wake(self.long_poll.recheck(self._store.max_offset))

    async def stop(self) -> None:
        """Answer everything that is parked, and finish what is being read: the broker stops."""
        self._rechecks.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._wake(self.long_poll.wake_all())
        while self._ready:
            self._serve_late(self._ready.popleft())
        self._backlog.serve_all()
        if self._cold:
            await asyncio.gather(*self._cold, return_exceptions=True)

    def arrived(self, arrivals: Arrivals) -> None:
        """Messages became readable: wake those who wait for them."""
        if not len(self.long_poll):
            return
        arrived, waited_for = self.long_poll.arrived, self.long_poll.queues
        for topic, queue_id, next_offset, tags_code, _, _ in arrivals:
            if (topic, queue_id) not in waited_for:  # most of a batch: its first message has woken them all
                continue
            woken = arrived(topic, queue_id, next_offset, tags_code)
            if woken:
                self._wake(woken)

    def topic_gone(self, topic: str) -> None:
        """A topic was deleted: pulls parked on it are answered."""
        self._wake(self.long_poll.wake_topic(topic))

    def _wake(self, pulls: Sequence[HeldPull]) -> None:
        if pulls:
            self._ready.extend(pull.request for pull in pulls)
            self._tick.schedule()

    def end_tick(self) -> None:
        """Serve woken pulls, a share per tick; then, once answers have left, those of the backlog."""
        ready = self._ready
        most = self._given + WOKEN_BYTES
        for _ in range(min(len(ready), WOKEN_PER_TICK)):
            if self._given >= most:
                break
            self._serve_late(ready.popleft())
        if ready:
            # The running tick cannot schedule itself: ask for the next one from the loop.
            self._loop.call_soon(self._tick.schedule)
        if len(self._backlog) and not self._backlog_due:
            self._backlog_due = True
            self._loop.call_soon(self._serve_backlog)

    def _serve_backlog(self) -> None:
        self._backlog_due = False
        if self._backlog.serve_some():
            self._tick.schedule()
