"""Handlers of requests about a running broker's settings and state, and of requests to delete files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from cometmq import __version__, logs
from cometmq.broker.base import attributes
from cometmq.broker.base.config import AT_NEXT_START, NOT_BY_REQUEST, WITHOUT_EFFECT, BrokerConfig
from cometmq.broker.base.protection import Protection
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms, span_text
from cometmq.broker.replication.replication import Replication
from cometmq.broker.tables.topics import TopicTable
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.broker.timers.timers import TimerService
from cometmq.errors import CommandError, ConfigError
from cometmq.protocol import codes
from cometmq.protocol.bodies import KVTable
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import GetBrokerConfigResponseHeader, UpdateBrokerConfigResponseHeader
from cometmq.protocol.java_properties import format_properties
from cometmq.remoting import Connection
from cometmq.settings import TEXT_MAX, requested_settings, without_secrets
from cometmq.store import Clock, MessageStore

if TYPE_CHECKING:
    from cometmq.broker.replication.raft import RaftReplication

log = logs.logger(__name__)

# The thread pools of Apache's broker, for which the runtime table has values. An event loop has no such
# pools, so the table shows the loop's delay as the wait in each pool's queue, and the number of waiting
# senders as the size of the send queue.
POOLS = ("send", "pull", "query", "litePull", "ack")

NO_CONTAINER = (
    "this is no broker container: every broker is a process of its own, which mqbroker -c FILE starts on its "
    "machine and SIGTERM ends"
)


@dataclass(eq=False)
class RuntimeAdmin:
    """Shows and changes the broker's settings, and shows its runtime table.

    `settings_changed` applies the new values of the given keys, and writes them to the settings file.
    """

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    topics: TopicTable
    stats: Stats
    schedule: ScheduleService
    timers: TimerService
    protection: Protection
    replication: Replication | RaftReplication
    settings_changed: Callable[[list[str]], Awaitable[None]]
    registration_problem: Callable[[], str]
    _changes: int = 0
    _changed_ms: int = field(init=False)

    def __post_init__(self) -> None:
        self._changed_ms = self.clock.time_ms()

    @handles(RequestCode.UPDATE_BROKER_CONFIG)
    async def update_broker_config(self, connection: Connection, frame: Frame) -> Frame:
        """Change settings and write them to the settings file, if the broker was started with such a file.

        Unknown keys are ignored. The response lists the unknown keys, and the changed settings that only take
        effect at the next start.
        """
        properties = requested_settings(frame.body)
        refused = NOT_BY_REQUEST & properties.keys()
        if refused:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"Can not update config in black list: {sorted(refused)}"
            )
        try:
            known = self.config.update(
                properties, partial(attributes.check_windows, self.topics.table.values())
            )
        except ConfigError as error:
            raise CommandError.failed(str(error)) from error
        self._changes += 1
        self._changed_ms = self.clock.time_ms()
        log.info("client %s changed settings: %s", connection.peer, ", ".join(known) or "no known setting")
        await self.settings_changed(known)
        lost = bool(known) and not self.config.broker_config_path
        if lost:
            log.warning(
                "the change is lost at the next start, because this broker was started without a "
                "settings file (mqbroker -c FILE): %s", ", ".join(known),
            )  # fmt: skip
        said = UpdateBrokerConfigResponseHeader(
            at_next_start=" ".join(sorted(AT_NEXT_START.intersection(known))),
            unknown=" ".join(sorted(key for key in properties.keys() - set(known) if key.isprintable()))[
                :TEXT_MAX
            ],
            not_written=lost or None,
            without_effect=" ".join(sorted(WITHOUT_EFFECT.intersection(known))) or None,
        )
        return frame.response(header=said)

    @handles(RequestCode.GET_BROKER_CONFIG)
    def get_broker_config(self, _connection: Connection, frame: Frame) -> Frame:
        """Return all settings except secrets, with a raft member's current role, and those without effect."""
        role = {"brokerRole": self.replication.facts()["brokerRole"]}
        text = format_properties(without_secrets(self.config.properties() | role))
        version = f'{{"counter":{self._changes},"timestamp":{self._changed_ms}}}'
        header = GetBrokerConfigResponseHeader(
            version=version, without_effect=" ".join(sorted(WITHOUT_EFFECT))
        )
        return frame.response(header=header, body=text.encode())

    @handles(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)
    async def clean_expired_consumequeue(self, connection: Connection, frame: Frame) -> Frame:
        """Recalculate the minimum offsets, and start to delete queue and index files without records."""
        store = self.store
        log.info("cleaning up consume queues and index, as requested by %s", connection.peer)
        store.retention.recheck_everything()
        await store.retention.run_now(log_too=False)
        return frame.response()

    @handles(RequestCode.DELETE_EXPIRED_COMMITLOG)
    async def delete_expired_commitlog(self, connection: Connection, frame: Frame) -> Frame:
        """Delete expired segments of the commit log now, without waiting for the hour in `deleteWhen`.

        One run deletes up to `deleteFileBatchMax` segments. This request causes 20 runs regardless of
        the hour, and starts the first one.
        """
        store = self.store
        log.info("deleting expired files, as requested by %s", connection.peer)
        store.retention.delete_now()
        await store.retention.run_now(log_too=True)
        return frame.response()

    @handles(RequestCode.ADD_BROKER, RequestCode.REMOVE_BROKER)
    def change_container(self, _connection: Connection, frame: Frame) -> Frame:
        """Refuse the requests that start and stop a broker in a broker container of 5.x."""
        return frame.response(ResponseCode.SYSTEM_ERROR, NO_CONTAINER)

    @handles(RequestCode.GET_BROKER_RUNTIME_INFO)
    async def get_broker_runtime_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the runtime table, which the tools `brokerStatus` and `clusterList` show."""
        return frame.response(body=KVTable(table=await self.table()).encode())

    async def table(self) -> dict[str, str]:
        """Return the table, with spellings of 4.9 and 5.x (docs/reference/remoting.md, Runtime table)."""
        stats, config, load = self.stats, self.config, self.protection.load
        table = store_facts(self.store) | self.replication.facts()
        written = max(self.store.log.end - stats.boot_log_end, 0) if stats.put else 0
        table |= {
            "earliestMessageTimeStamp": str(await self.store.lookups.earliest_store_time()),
            "putMessageSizeTotal": str(written),
            "putMessageAverageSize": str(written / stats.put if stats.put else 0.0),
            "brokerVersionDesc": codes.version_name(codes.VERSION_4_9_7),
            "brokerVersion": str(codes.VERSION_4_9_7),
            "brokerActive": "true",
            "registrationProblem": self.registration_problem() or "none",
            "brokerId": str(config.broker_id),
            "bootTimestamp": str(stats.boot_ms),
            "cometmqVersion": __version__,
            "systemTimeMillis": str(self.clock.time_ms()),
            "runtime": span_text(mono_ms(self.clock) - stats.boot_mono_ms),
            "startAcceptSendRequestTimeStamp": str(config.start_accept_send_request_time_stamp),
            "putTps": stats.rates("put"),
            "getTotalTps": stats.rates("get"),
            "getFoundTps": stats.rates("found"),
            "getMissTps": stats.rates("miss"),
            "getTransferedTps": stats.rates("transferred"),
            "getTransferredTps": stats.rates("transferred"),
            "msgPutTotalTodayNow": str(stats.put),
            "msgPutTotalTodayMorning": str(stats.put_this_morning),
            "msgPutTotalYesterdayMorning": str(stats.put_yesterday_morning),
            "msgGetTotalTodayNow": str(stats.transferred),
            "msgGetTotalTodayMorning": str(stats.get_this_morning),
            "msgGetTotalYesterdayMorning": str(stats.get_yesterday_morning),
            "putMessageTimesTotal": str(stats.put),
            "putMessageFailedTimes": str(stats.put_failed),
            "EndTransactionQueueSize": "0",
            "EndTransactionThreadPoolQueueCapacity": config.extra.get(
                "endTransactionPoolQueueCapacity", "100000"
            ),
            "dispatchMaxBuffer": "0",
            "pageCacheLockTimeMills": str(load.sync_ms),
            "remainTransientStoreBufferNumbs": "0",
        }
        for pool in POOLS:
            table[f"{pool}ThreadPoolQueueSize"] = "0"
            table[f"{pool}ThreadPoolQueueCapacity"] = "10000"
            table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = str(load.lag_ms)
        table["sendThreadPoolQueueSize"] = str(load.waiting)
        table["flowControl"] = self.protection.why or "none"
        table["flowControlRefused"] = str(self.protection.refused)
        for level, (delivered, stored) in self.schedule.positions().items():
            table[f"scheduleMessageOffset_{level}"] = f"{delivered},{stored}"
        if config.timer_wheel_enable and not self.store.slave:
            table |= self._timer_facts()
        return table

    def _timer_facts(self) -> dict[str, str]:
        """Return the entries about timers: delay in seconds, messages not read yet, messages that wait."""
        pending, now = self.timers.pending, self.timers.times()
        stored = self.store.max_offset(codes.TIMER_TOPIC, 0)
        return {
            "timerReadBehind": str(max(0, now.wall_ms - pending.read_ms(now)) // 1000),
            "timerOffsetBehind": str(max(0, stored - pending.followed)),
            "timerCongestNum": str(len(pending)),
        }


def store_facts(store: MessageStore) -> dict[str, str]:
    """Return the runtime table's entries about the store (docs/reference/remoting.md, Runtime table)."""
    fullness, tiered = store.fullness, store.tiered
    of_tiered = {}
    if tiered is not None:
        of_tiered = {
            "tieredSegments": str(len(tiered.table.by_base)),
            "tieredMinOffset": str(store.log.readable_min),
            "tieredUploadBehind": size_text(tiered.waiting_bytes),
        }
    return {
        "commitLogMaxOffset": str(store.log.end),
        "commitLogMinOffset": str(store.log.min_position),
        "commitLogDirCapacity": capacity(store),
        "commitLogDiskRatio": ratio(fullness.log_ratio),
        **{f"commitLogDiskRatio_{path}": ratio(used) for path, used in fullness.log_ratios.items()},
        "consumeQueueDiskRatio": ratio(fullness.queue_ratio),
        "dispatchBehindBytes": "0",
        "remainHowManyDataToFlush": size_text(store.log.end - store.flusher.flushed),
        # CometMQ does not measure the next three values, but rocketmq-exporter requires them.
        "putMessageDistributeTime": "{}",
        "putMessageEntireTimeMax": "0",
        "getMessageEntireTimeMax": "0",
        "storeFlags": store.flags.why() or "ok",
        "commitLogSpace": no_space(store) if store.log.lacks_space else "ok",
        **of_tiered,
    }


def capacity(store: MessageStore) -> str:
    """Return the size and the free space of the commit log's file system, in Apache's form."""
    try:
        usage = store.disk.usage(store.config.commit_log_dirs[0])
    except OSError:
        return "Total : unknown, Free : unknown."
    return f"Total : {size_text(usage.total)}, Free : {size_text(usage.usable)}."


def no_space(store: MessageStore) -> str:
    """Return the text for a log whose disk lacks space for another segment."""
    return f"no space for a segment of {size_text(store.log.segment_size)}"


def ratio(value: float) -> str:
    """Return a ratio as text for the runtime table. A negative ratio becomes 0.0."""
    return str(max(value, 0.0))


def size_text(size: int) -> str:
    """Return a size in bytes in readable form, such as 512 B, 1.5 KiB or 20.0 GiB."""
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            return f"{amount:.1f} {unit}"
    return f"{size} B"
