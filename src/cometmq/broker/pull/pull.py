"""Pulls: codes 11 and 361 (lite pull of 5.x clients, served exactly the same), with long polling.

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
from cometmq.broker.base.replies import pull_reply
from cometmq.broker.context import BrokerContext
from cometmq.broker.groups.subscriptions import ExpressionError, is_tag_type, tag_codes
from cometmq.broker.pull.backlog import NEAR, Backlog
from cometmq.broker.pull.long_poll import RECHECK_MS, HeldPull, LongPoll
from cometmq.broker.pull.offset_moved import store_offset_moved
from cometmq.errors import CommandError
from cometmq.protocol.bodies import SubscriptionData
from cometmq.protocol.codes import Perm, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame, encode_frame
from cometmq.protocol.headers import PullMessageRequestHeader
from cometmq.remoting import Connection, Handler
from cometmq.store import CACHED, Arrivals, GetStatus, Got, NotInMemory, Reads

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

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._store = context.store
        self._loop = asyncio.get_running_loop()
        self.long_poll = LongPoll()
        self._ready: deque[PullRequest] = deque()
        self._given = 0  # bytes of messages, so far
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._recheck: asyncio.TimerHandle | None = None
        self._cold: set[asyncio.Task[None]] = set()
        self._backlog: Backlog[PullRequest] = Backlog(
            self._serve_late, lambda: self._store.log.end, self._loop.time
        )
        self._backlog_due = False  # _serve_backlog is scheduled

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def pull(self, connection: Connection, frame: Frame) -> None:
        """Serve, park or refuse a pull."""
        header = frame.header(PullMessageRequestHeader)
        codes = self._check(connection, frame.version, header)
        max_bytes = compat.most_bytes(frame.version, header.max_msg_bytes)
        request = PullRequest(connection, frame.opaque, frame.version, header, codes, max_bytes)
        context = self._context
        commits = header.sys_flag & COMMIT_OFFSET and request.may_hold and not self._store.slave
        if commits and header.commit_offset is not None:
            context.offsets.commit(request.group, request.topic, request.queue_id, header.commit_offset)
        backlog = self._backlog
        draining = backlog.readers and (request.group, request.topic, request.queue_id) in backlog.readers
        if draining and backlog.wait(request):
            context.tick.schedule()
        else:
            self._serve(request)

    def _check(
        self, connection: Connection, version: int, header: PullMessageRequestHeader
    ) -> frozenset[int] | None:
        """Apache's checks in their order (docs/reference/storage.md, Pull answers); returns the tag
        codes that pass."""
        context = self._context
        config = context.config
        if not config.broker_permission & READ:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"the broker[{config.broker_ip1}] pulling message is forbidden"
            )
        group = context.groups.find(header.consumer_group)
        if group is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist",
            )
        if not group.consume_enable:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}"
            )
        topic = context.topics.table.get(header.topic)
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
        if not is_tag_type(expression_type):
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {expression_type}",
            )
        try:
            return tag_codes(expression)
        except ExpressionError as error:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {error}"
            ) from None

    def _subscription(self, header: PullMessageRequestHeader, broadcast_allowed: bool) -> SubscriptionData:
        """What the group's heartbeats say about the topic of a pull that does not carry it."""
        known = self._context.consumers.groups.get(header.consumer_group)
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
            got = await self._store.off_loop.ask(partial(self._read, request), miss)
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
        stats = self._context.stats
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
        context = self._context
        group, topic, queue_id = request.group, request.topic, request.queue_id
        if not self._store.corrects_offsets:
            settings = context.groups.table.get(group)
            return RETRY, suggested if settings is None else settings.broker_id
        where = request.offset, topic, queue_id
        log.info("offset %d of %s/%d, asked for by group %s, becomes %d", *where, group, begin)
        store_offset_moved(context, group, topic, queue_id, request.offset, begin)
        # At the end of a tick it is too late to take part in it, and too early to ask for the next one.
        self._loop.call_soon(context.tick.schedule)
        return MOVED, suggested

    def _suggested_broker(self, group: str, suggest_slave: bool) -> int:
        if not self._context.config.slave_read_enable:
            return 0
        settings = self._context.groups.table.get(group)
        if settings is None:
            return 0
        return settings.which_broker_when_consume_slowly if suggest_slave else settings.broker_id

    # -- waiting

    def _park(self, request: PullRequest) -> None:
        config = self._context.config
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
        self._recheck = self._loop.call_later(RECHECK_MS / 1000, self._run_recheck)

    def _run_recheck(self) -> None:
        self._wake(self.long_poll.recheck(self._store.max_offset))
        self.start()

    async def stop(self) -> None:
        """Answer everything that is parked, and finish what is being read: the broker stops."""
        for timer in (self._timer, self._recheck):
            if timer is not None:
                timer.cancel()
        self._wake(self.long_poll.take_all())
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
        for topic, queue_id, next_offset, tags_code, _, properties in arrivals:
            if (topic, queue_id) not in waited_for:  # most of a batch: its first message has woken them all
                continue
            woken = arrived(topic, queue_id, next_offset, tags_code, properties)
            if woken:
                self._wake(woken)

    def topic_gone(self, topic: str) -> None:
        """A topic was deleted: pulls parked on it are answered."""
        self._wake(self.long_poll.take_queue(topic))

    def _wake(self, pulls: Sequence[HeldPull]) -> None:
        if pulls:
            self._ready.extend(pull.request for pull in pulls)
            self._context.tick.schedule()

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
            self._loop.call_soon(self._context.tick.schedule)
        if len(self._backlog) and not self._backlog_due:
            self._backlog_due = True
            self._loop.call_soon(self._serve_backlog)

    def _serve_backlog(self) -> None:
        self._backlog_due = False
        if self._backlog.serve_some():
            self._context.tick.schedule()
