"""Pulls with long polling. Lite pulls of 5.x clients are handled identically.

A pull is checked on arrival. If its records are in memory, it is served at once from the page cache. If they
are not, a thread serves it, and the reader's next pulls must wait (see backlog.py). If there are no records,
the pull is parked until messages arrive. When a parked pull is woken, it is checked again, because its topic,
group or subscription may have changed. A woken pull without an SQL92 filter is then always answered, even if
it finds no message. The commit offset of a pull is stored once, on arrival.

A pull with an SQL92 filter waits in `_filter_scans` for its turn. Then the broker scans the queue's records
and checks their properties, for at most FILTER_SCAN_S. The client must pull again for the remaining records.
Bulk pulls wait in `_filter_scans`, too, because they cost as much CPU time. A woken pull with an SQL92 filter
also waits there; if nothing matches up to the end of its queue, it is parked again.

A pull of a group that has received as much as a rate limit allows is parked until the group may receive more.
If its wait ends before, its client is told to pull again (PULL_RETRY_IMMEDIATELY), and not that the queue has
no more messages.

The number of parked pulls per connection and per queue is limited. A pull beyond a limit receives "nothing
found" after a short wait, as if long polling were disabled; the wait is needed because clients pull again
immediately.

Budget: 1.5 µs of the broker's CPU per pulled message in batches of 32; this module and the store take a third
of it. The records go from the store's buffers to the transport without a copy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cometmq import logs
from cometmq.broker.base import compat
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.deadlines import DeadlineTimer
from cometmq.broker.base.replies import pull_reply
from cometmq.broker.base.retry_records import sent_back_only
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.filters.sql_filters import FilterScan, NotCompiled
from cometmq.broker.pull.backlog import NEAR, Backlog, Reader, SlowReaders
from cometmq.broker.pull.checks import PullChecks, Wanted
from cometmq.broker.pull.long_poll import RECHECK_MS, LongPoll, ParkedPull
from cometmq.broker.rates.rate_limits import Amount, RateLimit, RateLimits, count_one
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError, StoreError
from cometmq.periodic import Periodic, Tasks
from cometmq.protocol.bodies import OffsetMovedEvent
from cometmq.protocol.codes import (
    OFFSET_MOVED_EVENT,
    TOOLS_CONSUMER_GROUP,
    RequestCode,
    ResponseCode,
    handles,
)
from cometmq.protocol.frame import Frame, encode_frame
from cometmq.protocol.headers import PullMessageRequestHeader
from cometmq.protocol.properties.values import encode_properties, tags_code
from cometmq.protocol.sql import SqlFilter
from cometmq.remoting import Connection, Tick
from cometmq.store import (
    CACHED,
    Arrivals,
    Clock,
    GetStatus,
    MessageStore,
    NotInMemory,
    ReadResult,
    Reads,
    RecordFilter,
)

log = logs.logger(__name__)

COMMIT_OFFSET = 1
SUSPEND = 2

FOUND = int(ResponseCode.SUCCESS)
NOT_FOUND = int(ResponseCode.PULL_NOT_FOUND)
RETRY = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
MOVED = int(ResponseCode.PULL_OFFSET_MOVED)
# The response code for each status of a read (docs/reference/storage.md, Pull answers). Statuses of empty
# queues are missing: their code depends on the requested offset.
CODE_OF_STATUS = {
    GetStatus.FOUND: FOUND,
    GetStatus.NO_MATCHED_MESSAGE: RETRY,
    GetStatus.MESSAGE_WAS_REMOVING: RETRY,
    GetStatus.OFFSET_FOUND_NULL: NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: MOVED,
    GetStatus.OFFSET_TOO_SMALL: MOVED,
}
# The maximum number of woken pulls that are served per event-loop tick, and the maximum total size of their
# responses, in bytes. The limits prevent one busy topic from delaying others.
WOKEN_PER_TICK = 128
WOKEN_BYTES = 8 << 20
# The maximum wait, in ms, of a pull beyond the limits of parked pulls. It is short because the broker reads
# no further request from the pull's connection in the meantime.
MAX_SUSPENSION_MS = 1_000
# The number of parked pulls per connection is limited. For this limit, a pull counts once, and once more for
# every block of this many characters in its subscription.
CHARACTERS_OF_A_PULL = 256
FILTER_SCAN_S = 0.001
"""The maximum duration of one filter scan, in seconds, as a filter scan blocks the event loop."""
FILTER_SCAN_SHARE = 0.5
"""The CPU time that filter scans may use while producers send, as a share of all other CPU time.

The share is large, so that consumers with filters can keep up with the sends.
"""
MAX_FILTER_SCANS_PER_TICK = 4
"""The maximum number of filter scans per event-loop tick in which no message was sent."""


MAX_BYTES = 1 << 31
"""A size, in bytes, that no response to a pull has."""
Most = tuple[int, int | None]
"""The maximum number of messages of a response, and its maximum size in bytes (None: as in the settings)."""


class PullRequest(msgspec.Struct, eq=False):
    """A checked pull, with everything that is needed to serve it now or later."""

    connection: Connection
    opaque: int
    version: int
    header: PullMessageRequestHeader
    wanted: Wanted
    may_hold: bool
    offset: int
    # Whether the pull was received while too many pulls were parked. Until such a pull is answered, the
    # broker reads no further request from its connection.
    aside: bool = False
    # Whether the pull returns all records of a retry topic that several groups share: an administrator's tool
    # has sent it.
    whole: bool = False
    # The deadline of a parked pull, in ms on the event loop's clock, or 0 before the pull is parked. When a
    # pull without `may_hold` is served, it is answered even if it finds no message.
    until_ms: int = 0
    # The access key of the sender ("": none), and the rate limits that applied when the pull was last served.
    account: str = ""
    limits: Sequence[RateLimit] = ()

    @property
    def reader(self) -> Reader:
        """The consumer group, topic and queue id of the pull."""
        header = self.header
        return header.consumer_group, header.topic, header.queue_id


@dataclass(eq=False)
class PullProcessor:
    """Handles the pulls of a broker.

    Its `end_tick` must run after `Writer.end_tick`, so that sends are answered before pulls.
    """

    config: BrokerConfig
    store: MessageStore
    tick: Tick
    tables: DurableTables
    stats: Stats
    checks: PullChecks
    slow_readers: SlowReaders
    is_admin: Callable[[Connection, Frame], bool]
    clock: Clock
    writer: Writer
    address: BrokerAddress
    rates: RateLimits

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.long_poll = LongPoll()
        self._ready: deque[PullRequest] = deque()
        self._given = 0  # Total bytes of messages sent to consumers
        self._timer = DeadlineTimer(self._loop, self._expire)
        self._rechecks = Periodic(self._loop, RECHECK_MS / 1000, self.recheck, name="recheck of parked pulls")
        self._beside_tasks = Tasks()
        self._backlog: Backlog[PullRequest] = Backlog(
            self.serve_late, lambda: self.store.log.end, self._loop.time
        )
        self._filter_scans: Backlog[PullRequest] = Backlog(
            self.serve_late, lambda: self.store.log.end, self._loop.time,
            part=FILTER_SCAN_SHARE, at_once=MAX_FILTER_SCANS_PER_TICK,
        )  # fmt: skip
        self._backlog_due = False  # Whether a call of `_serve_backlog` is scheduled
        self._stopping = False

    @handles(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def pull_message(self, connection: Connection, frame: Frame) -> None:
        """Check a pull. Then serve it, park it, or queue it for a filter scan or a read from the disk."""
        header = frame.header(PullMessageRequestHeader)
        may_hold = bool(header.sys_flag & SUSPEND)
        request = PullRequest(
            connection, frame.opaque, frame.version, header, None, may_hold, header.queue_offset
        )
        if self.rates.has_accounts:
            request.account = self.rates.account_of(frame)
        if header.consumer_group == TOOLS_CONSUMER_GROUP:
            request.whole = self.is_admin(connection, frame)
        try:
            request.wanted = self.checks.check(connection, frame.version, header)
        except NotCompiled as missing:
            self._beside(connection, self._compile_first(request, missing))
        else:
            self._checked(request)

    def _checked(self, request: PullRequest) -> None:
        header = request.header
        commits = request.may_hold and header.sys_flag & COMMIT_OFFSET and not self.store.slave
        if commits and header.commit_offset is not None:
            self.tables.offsets.commit(*request.reader, header.commit_offset)
        backlog = self._backlog
        if (backlog.readers and request.reader in backlog.readers and backlog.wait(request)) or (
            (header.bulk or isinstance(request.wanted, SqlFilter)) and self._waits_for_scan(request)
        ):
            self.tick.schedule()
        else:
            self._serve(request)

    def _waits_for_scan(self, request: PullRequest) -> bool:
        """Queue a pull for a filter scan if there are messages to check. Return whether it was queued."""
        _, topic, queue_id = request.reader
        return request.offset < self.store.max_offset(topic, queue_id) and self._filter_scans.wait(request)

    async def _compile_first(self, request: PullRequest, missing: NotCompiled) -> None:
        """Compile the SQL92 filter of a pull, then continue to handle the pull."""
        connection = request.connection
        try:
            await self.checks.filters.compile(missing.key, connection)
            if not connection.closed:
                request.wanted = self.checks.check(connection, request.version, request.header)
                self._checked(request)
        except Exception as error:
            self._failed(request, error)

    # -- serving

    def _read(self, request: PullRequest, most: Most, reads: Reads = CACHED) -> ReadResult:
        header, codes = request.header, request.wanted
        find_match: RecordFilter = None
        if isinstance(codes, SqlFilter):
            find_match, codes = FilterScan(codes, FILTER_SCAN_S).find_match, None
        return self.store.get_messages(
            header.topic,
            header.queue_id,
            request.offset,
            most[0],
            filter=codes,
            record_filter=find_match if request.whole else sent_back_only(header.topic, find_match),
            max_bytes=most[1],
            bulk=bool(header.bulk),
            reads=reads,
        )

    def _serve(self, request: PullRequest) -> None:
        header = request.header
        most: Most = header.max_msg_nums, compat.most_bytes(request.version, header.max_msg_bytes)
        request.limits = limits = self.rates.of_receive(header.consumer_group, request.account)
        if limits:
            most, limit, wait_ms = self.rates.allowance(limits, Amount(most[0], most[1] or MAX_BYTES))
            if limit is not None:
                self._throttle(request, limit, wait_ms)
                return
        try:
            got = self._read(request, most)
        except NotInMemory as miss:
            self._backlog.missed(request.reader)
            held = Amount(0, 0)
            if limits:  # Other pulls must not receive the same tokens while this one waits for the disk
                config = self.store.config
                held = Amount(
                    min(most[0], config.max_transfer_count_on_message_in_disk),
                    min(most[1] or MAX_BYTES, config.max_transfer_bytes_on_message_in_disk),
                )
                self.rates.take(limits, held)
            self._beside(request.connection, self._serve_cold(request, most, miss, held))
        else:
            self._answer(request, got)

    def _beside(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Complete a pull in a task. Until the task ends, read no requests from the pull's connection."""
        connection.hold()
        self._beside_tasks.start(work).add_done_callback(lambda _task: connection.release())

    def _throttle(self, request: PullRequest, limit: RateLimit, wait_ms: int) -> None:
        """Park a pull for `wait_ms` because of a rate limit. If its own wait is over, answer it."""
        group, topic, queue_id = request.reader
        count_one(self.rates.delayed_receives, group, limit)
        if self._stopping or 0 < request.until_ms <= self._timer.now_ms():
            store = self.store
            bounds = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
            answer = pull_reply(RETRY, request.opaque, b"RATE_LIMITED", (request.offset, *bounds))
            request.connection.write(answer)
        else:
            self._park(request, wait_ms)

    async def _serve_cold(self, request: PullRequest, most: Most, miss: NotInMemory, held: Amount) -> None:
        try:
            got = await self.store.executor.query(partial(self._read, request, most), miss)
        except Exception as error:
            self._failed(request, error)
            return
        finally:
            if request.limits:
                self.rates.give_back(request.limits, held)
        self._answer(request, got)

    def serve_late(self, request: PullRequest) -> None:
        """Check a waiting pull once more, and serve it, if its client is still connected."""
        connection = request.connection
        if request.aside:
            request.aside = False
            connection.release()
        if not connection.closed:
            try:
                request.wanted = self.checks.check(connection, request.version, request.header)
                self._serve(request)
            except NotCompiled as missing:  # Compile the group's new SQL92 filter before serving the pull
                request.may_hold = False
                self._beside(connection, self._compile_first(request, missing))
            except Exception as error:
                self._failed(request, error)

    def _failed(self, request: PullRequest, error: Exception) -> None:
        if isinstance(error, CommandError):
            code, remark, ext = error.code, error.remark, error.ext
        else:
            header = request.header
            where = header.topic, header.queue_id, request.offset
            log.error("pull from topic %s queue %d at offset %d failed", *where, exc_info=error)
            code, remark, ext = ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}", None
        answered = Frame(code=0, opaque=request.opaque).response(code, remark, ext=ext)
        request.connection.write(encode_frame(answered))

    def _answer(self, request: PullRequest, got: ReadResult) -> None:
        if got.behind < NEAR and self._backlog.readers:
            self._backlog.readers.discard(request.reader)
        if self.config.disable_consume_if_consumer_read_slowly:
            self.slow_readers.record_lag(request.reader, got.behind)
        status, header = got.status, request.header
        stats = self.stats
        stats.get += 1
        if status is GetStatus.FOUND:
            code = FOUND
            stats.found += 1
            stats.transferred += got.count
            key = (header.consumer_group, header.topic)
            stats.group_get[key] = stats.group_get.get(key, 0) + got.count
        else:
            stats.miss += 1
            code = CODE_OF_STATUS.get(status, NOT_FOUND if request.offset == 0 else MOVED)
            if code == NOT_FOUND and request.may_hold:
                self._park(request)
                return
        if isinstance(request.wanted, SqlFilter) and self._parked_on(request, got):
            return
        connection = request.connection
        suggested = self._suggested_broker(header.consumer_group, got.suggest_slave)
        if code == MOVED:
            code, suggested = self._moved(request, got.next_begin_offset, suggested)
        buffers = got.buffers if code == FOUND else ()
        size = sum(map(len, buffers))
        self._given += size
        if size and request.limits:
            self.rates.take(request.limits, Amount(got.count, size))
        remark = b"FOUND" if code == FOUND else status.name.encode()
        offsets = (got.next_begin_offset, got.min_offset, got.max_offset)
        connection.write(pull_reply(code, request.opaque, remark, offsets, suggested, size))
        for buffer in buffers:
            connection.write(buffer)

    def _parked_on(self, request: PullRequest, got: ReadResult) -> bool:
        """Park a pull whose SQL92 filter matches nothing up to the queue's end. Otherwise return False."""
        _, topic, queue_id = request.reader
        at_end = got.next_begin_offset >= self.store.max_offset(topic, queue_id)
        waits = request.may_hold or self._timer.now_ms() < request.until_ms
        if got.status is not GetStatus.NO_MATCHED_MESSAGE or not (at_end and waits) or self._stopping:
            return False
        request.offset = got.next_begin_offset
        self._park(request)
        return True

    def _moved(self, request: PullRequest, begin: int, suggested: int) -> tuple[int, int]:
        """Return the response code and the suggested broker for an offset outside the queue.

        A master corrects the offset and stores an event about it. A slave that does not correct offsets
        directs the client to the broker that the group should use.
        """
        group, topic, queue_id = request.reader
        offset = request.offset
        if not self.store.corrects_offsets:
            settings = self.tables.groups.table.get(group)
            return RETRY, suggested if settings is None else settings.broker_id
        where = offset, topic, queue_id
        log.info(
            "offset %d of topic %s queue %d, requested by group %s, is corrected to %d", *where, group, begin
        )
        self._store_moved_event(group, topic, queue_id, offset, begin)
        # Schedule the next event-loop tick only after the current one: this method may run at the end of a
        # tick, and a running tick cannot schedule the next one.
        self._loop.call_soon(self.tick.schedule)
        return MOVED, suggested

    def _store_moved_event(self, group: str, topic: str, queue_id: int, asked: int, begin: int) -> None:
        """Store an event in the topic OFFSET_MOVED_EVENT: the offset `asked` has been corrected to `begin`.

        If the store accepts no messages at present, the event is lost.
        """
        event = OffsetMovedEvent(self.tables.topics.queue(topic, queue_id), group, asked, begin)
        try:
            self.store.appender.append(
                OFFSET_MOVED_EVENT, 0, event.encode(), encode_properties({"KEYS": group, "TAGS": group}),
                born_timestamp_ms=self.clock.time_ms(), born_host=self.address.packed,
                tags_code=tags_code(group),
            )  # fmt: skip
        except StoreError as error:
            log.warning("%s event of group %s could not be stored: %s", OFFSET_MOVED_EVENT, group, error)
            return
        self.writer.appended()

    def _suggested_broker(self, group: str, suggest_slave: bool) -> int:
        if not self.config.slave_read_enable:
            return 0
        settings = self.tables.groups.table.get(group)
        if settings is None:
            return 0
        return settings.which_broker_when_consume_slowly if suggest_slave else settings.broker_id

    # -- waiting

    def _park(self, request: PullRequest, throttled_ms: int = 0) -> None:
        """Park a pull until a message arrives or, with `throttled_ms`, for this time."""
        config = self.config
        header, connection = request.header, request.connection
        now_ms = self._timer.now_ms()
        if not request.until_ms:
            longest = min(config.short_polling_time_mills, MAX_SUSPENSION_MS)
            if request.may_hold:
                asked = header.suspend_timeout_millis or 0
                longest = asked if config.long_polling_enable else config.short_polling_time_mills
            request.until_ms = now_ms + longest
        if not throttled_ms:
            request.may_hold = False
        hold_ms = request.until_ms - now_ms
        topic, queue_id = header.topic, header.queue_id
        weight = 1 + len(header.subscription or "") // CHARACTERS_OF_A_PULL
        # Every new message wakes a pull with an SQL92 filter; the pull's filter scan determines whether the
        # message matches.
        codes = None if isinstance(request.wanted, SqlFilter) else request.wanted
        parked = ParkedPull(connection, request, request.offset, codes, weight=weight)
        limits = config.max_held_pulls_per_connection, config.max_held_pulls_per_queue
        if self.long_poll.has_room(topic, queue_id, parked, *limits):
            if throttled_ms:
                at_ms = self.long_poll.put_aside(parked, now_ms, min(hold_ms, throttled_ms))
            else:
                at_ms = self.long_poll.park(topic, queue_id, parked, now_ms, hold_ms)
        else:
            request.aside = True
            request.may_hold = False
            request.until_ms = (
                now_ms  # When the pull is next served, it must be answered and not parked again
            )
            connection.hold()  # Read no further request from the connection until some pulls are answered
            at_ms = self.long_poll.put_aside(
                parked, now_ms, max(0, min(hold_ms, config.short_polling_time_mills, MAX_SUSPENSION_MS))
            )
        self._timer.arm(at_ms)

    def _expire(self, now_ms: int) -> int | None:
        self.wake(self.long_poll.expire(now_ms))
        return self.long_poll.next_deadline()

    def start(self) -> None:
        self._rechecks.start()

    def recheck(self) -> None:
        """Wake the pulls whose queue has newer messages, whatever their tags."""
        self.wake(self.long_poll.recheck(self.store.max_offset))

    async def stop(self) -> None:
        """Answer all parked and waiting pulls, and complete reads in progress: the broker is stopping."""
        self._stopping = True
        self.checks.filters.stop()
        self._rechecks.cancel()
        self._timer.cancel()
        self.wake(self.long_poll.wake_all())
        while self._ready:
            self.serve_late(self._ready.popleft())
        self._backlog.serve_all()
        self._filter_scans.serve_all()
        await self._beside_tasks.finish()
        self._filter_scans.serve_all()  # The finished tasks may have queued further pulls

    def arrived(self, arrivals: Arrivals) -> None:
        """Wake the pulls whose filter matches messages that have become visible."""
        if not len(self.long_poll):
            return
        arrived, waited_for = self.long_poll.arrived, self.long_poll.queues
        for topic, queue_id, next_offset, code, _ in arrivals:
            if (topic, queue_id) not in waited_for:  # An earlier arrival has woken all pulls of the queue
                continue
            woken = arrived(topic, queue_id, next_offset, code)
            if woken:
                self.wake(woken)

    def topic_gone(self, topic: str) -> None:
        """Wake the pulls that are parked on a deleted topic, so that they are answered."""
        self.wake(self.long_poll.wake_topic(topic))

    def wake(self, pulls: Sequence[ParkedPull]) -> None:
        """Serve `pulls`: in this event-loop tick up to its limits, and the others in the next ticks."""
        if pulls:
            self._ready.extend(pull.request for pull in pulls)
            self.tick.schedule()

    def end_tick(self) -> None:
        """Serve woken pulls, up to the limits per event-loop tick.

        Filter scans, and pulls that wait for CPU time (see Backlog), are scheduled to run after the tick.
        """
        ready = self._ready
        most = self._given + WOKEN_BYTES
        for _ in range(min(len(ready), WOKEN_PER_TICK)):
            if self._given >= most:
                break
            request = ready.popleft()
            if not (isinstance(request.wanted, SqlFilter) and self._waits_for_scan(request)):
                self.serve_late(request)
        if ready:
            # Schedule the next tick via the event loop, because a running tick cannot schedule itself.
            self._loop.call_soon(self.tick.schedule)
        if (len(self._backlog) or len(self._filter_scans)) and not self._backlog_due:
            self._backlog_due = True
            self._loop.call_soon(self._serve_backlog)

    def _serve_backlog(self) -> None:
        self._backlog_due = False
        more = self._backlog.serve_some()
        if self._filter_scans.serve_some() or more:
            self.tick.schedule()
