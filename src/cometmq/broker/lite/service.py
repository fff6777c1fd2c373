"""The lite topics of a broker: their messages, subscriptions, pops and removal.

A broker without lite topics opens no database and does no work for them. Lite topics are served by masters
and by leaders of raft groups. Slaves and followers keep the queues of lite topics up to date from their
copies of the log, and copy the consumer offsets and subscriptions, so that they can take over.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms
from cometmq.broker.groups.clients import send_oneway
from cometmq.broker.lite.following import ParentQueues
from cometmq.broker.lite.lite_queues import LiteQueues
from cometmq.broker.lite.pops import LitePops
from cometmq.broker.lite.subscriptions import LiteSubscriptions, Subscriber
from cometmq.broker.pop.leases import Leases, QueueKey
from cometmq.broker.pop.retries import Retries
from cometmq.broker.pull.long_poll import LongPoll
from cometmq.broker.rates.rate_limits import RateLimits
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.periodic import Periodic
from cometmq.protocol import lite
from cometmq.protocol.bodies import LiteState, OffsetOption, SubscriptionGroupConfig
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import NotifyUnsubscribeLiteRequestHeader
from cometmq.protocol.headers.admin import GetLiteStateHeader
from cometmq.protocol.properties.values import put, value_of
from cometmq.remoting import Connection, Tick
from cometmq.store import Arrivals, Clock, MessageStore, TickMessage
from cometmq.text import printable

log = logs.logger(__name__)

DATABASE = "liteTopics.db"
FLUSH_S = 0.5
"""The maximum time, in seconds, for which changes stay in memory."""
CHECK_S = 120.0
"""The interval, in seconds, between two searches for expired lite topics, as in Apache's broker."""
FAILURE_LOG_S = 60.0
"""The minimum interval, in seconds, between two log lines about changes that cannot be written."""
MIN_EXPIRATION_MS = 900_000
"""The time after its last message, and after the broker's start, in which no lite topic expires."""
REMOVED_PER_TURN = 64
REMOVED_PER_CHECK = 20_000


@dataclass(eq=False)
class LiteService:
    """The lite topics of a broker. Requests must call `check_ready` before they use its parts."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    stats: Stats
    tick: Tick
    retries: Retries
    arrivals: LongPoll
    rates: RateLimits

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Whether the broker serves requests; whether the database is open
        self._started = self.is_open = False
        self.parent_queues: ParentQueues
        self._parents: dict[str, int] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._log_limit = logs.LogLimiter(1, FAILURE_LOG_S)
        self._started_ms = mono_ms(self.clock)
        self._log_begin = 0  # The beginning of the log when it was last searched for expired messages
        self._deleted: dict[str, int] = {}  # The deletions of parent topics that were last searched for
        self._channels: dict[Subscriber, Connection] = {}
        root = self.config.store.root
        self.queues = LiteQueues(os.path.join(root, "config", DATABASE), self._changed)
        self.subscriptions = LiteSubscriptions()
        self.leases = Leases(self.queues, self.clock.time_ms())
        self.pops = LitePops(
            self.clock, self.store, self.tick, self.stats, self.leases, self.retries, self.rates,
            self.tables.groups, self.queues, self.subscriptions,
        )  # fmt: skip
        self._checks = Periodic(self._loop, CHECK_S, self.check, name="removal of expired lite topics")

    # -- opening

    def start(self) -> None:
        """Open the database if there are lite topics."""
        self._started = True
        self.use_topics()

    def lead(self) -> None:
        """Begin to serve lite topics, because this broker has become the leader of its raft group."""
        self._started_ms = mono_ms(self.clock)
        if self.is_open:
            self._serve()

    async def follow(self) -> None:
        """Answer waiting pops, and handle no further leases, because another broker has become the leader."""
        await self.pops.stop()
        self._forget_subscribers()

    def _forget_subscribers(self) -> None:
        """Forget all subscribers. Their subscriptions stay in the database."""
        for subscriber in self.subscriptions:
            self.subscriptions.remove(subscriber, list(subscriber.lmqs))
        self._channels.clear()

    def use_topics(self) -> None:
        """Follow the parent topics of the topic table. Must be called after each change of the table."""
        if not self._started:
            return
        self._parents = {
            name: max(config.read_queue_nums, config.write_queue_nums)
            for name, config in self.tables.topics.table.items()
            if lite.is_lite_parent(config.attributes)
        }
        if self.is_open:
            self.parent_queues.set_parents(self._parents)
        elif self._parents or os.path.exists(self.queues.path):
            self._begin()

    def _begin(self) -> None:
        """Open the database and read what it lacks."""
        try:
            self.queues.open(self.store.log.end)
        except self.queues.errors as error:
            log.error("lite topics are not served: %s cannot be opened: %s", self.queues.path, error)
            return
        self.is_open = True
        self.parent_queues = ParentQueues(self.store, self.queues, self.arrivals.watch, self.pops.available)
        self.parent_queues.set_parents(self._parents)
        self._checks.start()
        if not self.store.slave:
            self._serve()

    def _serve(self) -> None:
        """Forget leases and subscriptions of an earlier term as the leader, and restore the stored ones."""
        self.queues.forget_reservations()
        self.pops.restart()
        self._forget_subscribers()
        now_ms = mono_ms(self.clock)
        for client_id, group, parent, lmq in self.queues.subscriptions():
            subscriber = self.subscriptions.enter(client_id, group, parent, now_ms)
            self.subscriptions.add(subscriber, [lmq])
            subscriber.checked = False
        self.pops.expiry.start()

    def _changed(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        try:
            if self.queues.flush():
                self._loop.run_in_executor(None, self._checkpoint)
        except self.queues.errors as error:
            if self._log_limit.allows():
                log.error("changes of lite topics could not be written, trying again: %s", error)
            self._changed()

    def _checkpoint(self) -> None:
        try:
            self.queues.checkpoint()
        except self.queues.errors as error:
            log.warning("%s could not be synced: %s", self.queues.path, error)

    async def stop(self) -> None:
        """Answer waiting pops, and close the database."""
        self._started = False
        if not self.is_open:
            return
        self.is_open = False
        self._checks.cancel()
        await self.pops.stop()
        await self.parent_queues.stop()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        try:
            await asyncio.to_thread(self.queues.close)
        except self.queues.errors as error:
            log.error("changes of lite topics could not be written: %s", error)

    # -- events

    def arrived(self, arrivals: Arrivals) -> None:
        """Add new messages of parent queues to the lite topics."""
        if self.is_open:
            first = {(topic, queue_id): end - 1 for topic, queue_id, end, _, _ in reversed(arrivals)}
            for (topic, queue_id), offset in first.items():
                self.parent_queues.arrived(topic, queue_id, offset)

    def closed(self, connection: Connection) -> None:
        """Forget the pops of a connection. Its subscriptions stay for a while, as clients come back."""
        self.pops.polls.drop(connection)
        for subscriber in [each for each, channel in self._channels.items() if channel is connection]:
            del self._channels[subscriber]

    def renew(self, key: QueueKey, offset: int, pop_ms: int, invisible_ms: int, counts: bool = True) -> bool:
        """Let the lease of a message expire `invisible_ms` from now (see `Leases.renew`)."""
        return self.is_open and self.pops.renew(key, offset, pop_ms, invisible_ms, counts)

    def ack(self, key: QueueKey, offset: int, pop_ms: int) -> bool:
        """Mark a message as consumed. Return False if it is not leased under this handle."""
        return self.is_open and self.pops.ack(key, offset, pop_ms)

    # -- sends

    def sent_properties(self, parent: str, properties: bytes) -> bytes:
        """Return the properties with which a message of a parent topic is stored.

        A message with a lite topic gets its offset in the queue of the lite topic. Raises CommandError if the
        name is invalid, there are too many lite topics, or the topic is not ready.
        """
        lite_topic = value_of(properties, lite.LITE_TOPIC).decode("utf-8", "replace")
        if not lite_topic:
            return properties
        if not lite.is_lite_topic(lite_topic):
            raise CommandError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the lite topic {printable(lite_topic, 80)} is invalid: 1 to {lite.MAX_LITE_TOPIC_LENGTH} "
                "letters, digits, - and _ are allowed",
            )
        self.check_ready(parent)
        lmq = lite.lmq_name(parent, lite_topic)
        most = self.config.max_lmq_consume_queue_num
        if self.queues.count >= most and not self.queues.is_known(lmq):
            raise CommandError(
                ResponseCode.LMQ_QUOTA_EXCEEDED,
                f"lite topic {lite_topic} of {parent} is not created: there are {self.queues.count}, at most "
                f"{most} (maxLmqConsumeQueueNum)",
            )
        properties = put(properties, lite.DISPATCH, lmq.encode())
        return put(properties, lite.QUEUE_OFFSET, b"%d" % self.queues.reserve(lmq))

    def refused(self, message: TickMessage) -> None:
        """Take back the offset in a lite topic of a message that the store has refused."""
        if self.is_open and message.queue.topic in self._parents:
            lmq = value_of(message.properties, lite.DISPATCH).decode()
            if lmq:
                self.queues.release(lmq, int(value_of(message.properties, lite.QUEUE_OFFSET)))

    def check_ready(self, parent: str) -> None:
        """Raise CommandError if the lite topics of a topic cannot be used now."""
        if self.store.slave:
            raise CommandError.failed("this broker is a slave and serves no lite topics")
        if not self.is_open or not self.parent_queues.is_ready(parent):
            raise CommandError(
                ResponseCode.SYSTEM_BUSY, f"the lite topics of {parent} are being read from the log"
            )

    # -- subscriptions

    def subscribe(
        self,
        subscriber: Subscriber,
        lmqs: Collection[str],
        settings: SubscriptionGroupConfig,
        channel: Connection,
        *,
        complete: bool = False,
        offset: OffsetOption | None = None,
    ) -> None:
        """Add subscriptions of a client or, if `complete`, let it have exactly these.

        In an exclusive group, a single subscription displaces that of another client. If a client repeats all
        its subscriptions, those that it has lost are left out, and it is notified of them once more.
        """
        group, subscriptions = subscriber.group, self.subscriptions
        exclusive = (settings.attributes or {}).get(lite.SUB_MODEL) == "Exclusive"
        self._channels[subscriber] = channel
        if complete and exclusive:
            held = {
                lmq for lmq in lmqs if any(each is not subscriber for each in subscriptions.of(lmq, group))
            }
            lmqs = set(lmqs) - held
            for lmq in held:
                self._notify(subscriber, lmq)
        wanted = set(lmqs) if complete else subscriber.lmqs | set(lmqs)
        subscriptions.check_quota(subscriber, wanted, lite.client_quota(settings.attributes))
        if exclusive and not complete:
            self._displace(subscriber, lmqs, settings)
        added = subscriptions.add(subscriber, lmqs)
        if complete:
            self._remove(subscriber, subscriber.lmqs - wanted)
        self.queues.save_subscriptions(subscriber.client_id, group, subscriber.parent, added, ())
        if offset is not None:
            for lmq in lmqs:
                self._reset(group, lmq, offset)
            added = list(lmqs)
        self.pops.add_ready(subscriber, added)

    def _displace(
        self, subscriber: Subscriber, lmqs: Collection[str], settings: SubscriptionGroupConfig
    ) -> None:
        reset = (settings.attributes or {}).get(lite.RESET_OFFSET_EXCLUSIVE) == "true"
        for lmq in lmqs:
            for other in self.subscriptions.of(lmq, subscriber.group):
                if other is not subscriber:
                    self._notify(other, lmq)
                    self._remove(other, [lmq])
                    if reset:
                        self._reset(subscriber.group, lmq, OffsetOption("POLICY", 1))

    def _notify(self, subscriber: Subscriber, lmq: str) -> None:
        channel = self._channels.get(subscriber)
        if channel is not None:
            header = NotifyUnsubscribeLiteRequestHeader(
                lite.lite_topic_of(lmq), subscriber.group, subscriber.client_id
            )
            send_oneway(channel, Frame.request(RequestCode.NOTIFY_UNSUBSCRIBE_LITE, header))

    def unsubscribe(
        self, subscriber: Subscriber, lmqs: Collection[str], settings: SubscriptionGroupConfig | None = None
    ) -> None:
        """Remove subscriptions of a client."""
        removed = self._remove(subscriber, lmqs)
        if settings and (settings.attributes or {}).get(lite.RESET_OFFSET_UNSUBSCRIBE) == "true":
            for lmq in removed:
                self._reset(subscriber.group, lmq, OffsetOption("POLICY", 1))

    def _remove(self, subscriber: Subscriber, lmqs: Collection[str]) -> list[str]:
        removed = self.subscriptions.remove(subscriber, list(lmqs))
        self.queues.save_subscriptions(subscriber.client_id, subscriber.group, "", (), removed)
        if not subscriber.lmqs:
            self._channels.pop(subscriber, None)
        return removed

    def _reset(self, group: str, lmq: str, option: OffsetOption) -> None:
        """Set the offset of a group in a lite topic. Its leases are dropped then."""
        end, stored = self.queues.end(lmq), self.queues.query(group, lmq, 0)
        if option.type == "POLICY" and option.value in (1, 2):
            target = 0 if option.value == 1 else end
        elif option.type == "OFFSET":
            target = option.value
        elif option.type == "TAIL_N" and stored >= 0:
            target = stored - option.value
        else:
            return
        target = min(max(target, 0), end)
        if target != stored:
            self.queues.commit(group, lmq, 0, target)

    # -- removal

    async def check(self) -> None:
        """Remove lite topics that have expired, and subscriptions of clients that are gone."""
        now_ms = mono_ms(self.clock)
        for subscriber in self.subscriptions.silent(now_ms):
            self._remove(subscriber, list(subscriber.lmqs))
        for parent in self._parents:
            # A replica may not have noticed that a topic was deleted, because it was created again.
            end = self.store.deleted.ends.get(parent, 0)
            if end > self._deleted.get(parent, 0) and await self._remove_before(end, parent):
                self._deleted[parent] = end
        log_begin = self.store.log.readable_min
        if log_begin > self._log_begin and await self._remove_before(log_begin):
            self._log_begin = log_begin
        if self.store.slave or now_ms - self._started_ms < MIN_EXPIRATION_MS:
            return
        for parent in list(self._parents):
            config = self.tables.topics.get(parent)
            minutes = lite.expiration_minutes(config.attributes) if config is not None else -1
            if minutes > 0:
                before_ms = self.clock.time_ms() - max(minutes * 60_000, MIN_EXPIRATION_MS)
                await self.remove_silent(parent, before_ms)

    async def _remove_before(self, position: int, parent: str = "") -> bool:
        """Remove the messages before a log position from the lite topics of a parent, or from all.

        Return False if there may be more of them.
        """
        found = await self._remove_all(
            lambda: self.queues.expired(position, REMOVED_PER_CHECK, parent),
            lambda lmq: self.queues.cut(lmq, position),
        )
        return found < REMOVED_PER_CHECK

    async def remove_silent(self, parent: str, before_ms: int) -> None:
        """Remove the lite topics of a parent whose last message was stored before a time in epoch ms."""
        await self._remove_all(
            lambda: self.queues.silent(parent, before_ms, REMOVED_PER_CHECK),
            lambda lmq: self.queues.remove(lmq, before_ms),
        )

    async def _remove_all(self, find: Callable[[], list[str]], remove: Callable[[str], object]) -> int:
        """Find lite topics in a thread, and remove them in turns with the other work of the event loop.

        Return the number of those found.
        """
        self.queues.flush()
        found = await asyncio.to_thread(find)
        for start in range(0, len(found), REMOVED_PER_TURN):
            for lmq in found[start : start + REMOVED_PER_TURN]:
                remove(lmq)
            await asyncio.sleep(0)
        if found:
            log.info("%d expired lite topics were examined, %d remain", len(found), self.queues.count)
        return len(found)


class LiteStateCopy:
    """A replica's copy of consumer offsets in lite topics, and of subscriptions to them.

    It requests the changes since its last request. The queues themselves are not copied, because the replica
    derives them from its log.
    """

    def __init__(self, service: LiteService) -> None:
        self._service = service
        self._epoch = ""
        self._since = 0
        self._subscriptions = 0

    def request(self) -> GetLiteStateHeader | None:
        """Return the request for the next changes, or None if this broker has no lite topics."""
        if not self._service.is_open:
            return None
        return GetLiteStateHeader(self._epoch, self._since, self._subscriptions)

    def take(self, table: LiteState) -> bool:
        """Apply the changes in a response. Return whether the master has more of them.

        The changes are requested again later if messages of this broker's log are still being read.
        """
        if not self._service.is_open:
            return False
        queues = self._service.queues
        if table.subscriptions is not None:
            queues.replace_subscriptions(table.subscriptions)
            self._subscriptions = table.subscription_change
        parents = {lite.parent_of(lmq) for _, lmq, _, _ in table.changes}
        if not self._service.parent_queues.are_ready(parents):
            return False
        for _, lmq, group, offset in table.changes:
            if queues.query(group, lmq, 0) != offset:
                queues.commit(group, lmq, 0, offset)
        if table.epoch != self._epoch:
            self._epoch, self._since = table.epoch, 0
        if table.changes:
            self._since = table.changes[-1][0]
        return table.more
