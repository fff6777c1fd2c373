"""Settings and condition of a running broker: 25, 26, 28, and the clean-up requests 306, 316, 329."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from cometmq import logs
from cometmq.broker.base.config import NOT_BY_REQUEST
from cometmq.broker.base.store_views import runtime_facts
from cometmq.broker.context import BrokerContext
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.errors import CommandError, ConfigError
from cometmq.protocol.bodies import KVTable
from cometmq.protocol.codes import VERSION_4_9_7, RequestCode, ResponseCode, version_name
from cometmq.protocol.frame import Frame
from cometmq.protocol.java_properties import PropertiesError, format_properties, parse_properties
from cometmq.remoting import Connection, Handler
from cometmq.settings import BODY_MAX

log = logs.logger(__name__)

SUCCESS = ResponseCode.SUCCESS
# Pools that Apache's broker has and an event loop does not: the tools show them, so they are empty, not
# missing.
POOLS = ("send", "pull", "query", "litePull", "ack")


class RuntimeAdmin:
    """Shows and changes settings; shows the runtime table."""

    def __init__(
        self,
        context: BrokerContext,
        schedule: ScheduleService,
        settings_changed: Callable[[list[str]], Awaitable[None]],
    ) -> None:
        self._context = context
        self._schedule = schedule
        self._settings_changed = settings_changed
        self._version = {"counter": 0, "timestamp": context.clock.time_ms()}

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.UPDATE_BROKER_CONFIG: self.update_config,
            RequestCode.GET_BROKER_CONFIG: self.get_config,
            RequestCode.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean_queues,
            RequestCode.CLEAN_UNUSED_TOPIC: self.clean_unused_topics,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self.delete_expired,
        }

    async def update_config(self, connection: Connection, frame: Frame) -> Frame:
        """25: set known keys of the properties text, and write them; unknown ones are ignored."""
        if len(frame.body) > BODY_MAX:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"{len(frame.body)} bytes of settings are more than {BODY_MAX}"
            )
        try:
            properties = parse_properties(bytes(frame.body).decode())
        except (UnicodeDecodeError, PropertiesError) as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"string2Properties error: {error}") from error
        refused = NOT_BY_REQUEST & properties.keys()
        if refused:
            raise CommandError(
                ResponseCode.NO_PERMISSION, f"Can not update config in black list: {sorted(refused)}"
            )
        try:
            known = self._context.config.update(properties)
        except ConfigError as error:
            raise CommandError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        self._version = {"counter": self._version["counter"] + 1, "timestamp": self._context.clock.time_ms()}
        log.info("settings changed by %s: %s", connection.peer, ", ".join(known) or "none that is known")
        await self._settings_changed(known)
        return frame.response(SUCCESS)

    def get_config(self, _connection: Connection, frame: Frame) -> Frame:
        """26: every setting."""
        text = format_properties(self._context.config.properties())
        return frame.response(
            SUCCESS, ext={"version": json.dumps(self._version, separators=(",", ":"))}, body=text.encode()
        )

    async def clean_queues(self, connection: Connection, frame: Frame) -> Frame:
        """306: correct the minimum offsets, and begin to delete queue and index files whose records are
        gone."""
        store = self._context.store
        log.info("queues and index are cleaned up for %s", connection.peer)
        store.retention.look_at_everything()
        await store.retention.run_now(log_too=False)
        return frame.response(SUCCESS)

    async def delete_expired(self, connection: Connection, frame: Frame) -> Frame:
        """329: delete expired segments whatever the hour: ten now, ten in each pass that follows."""
        store = self._context.store
        log.info("expired files are deleted for %s", connection.peer)
        store.retention.delete_now()
        await store.retention.run_now(log_too=True)
        return frame.response(SUCCESS)

    async def clean_unused_topics(self, connection: Connection, frame: Frame) -> Frame:
        """316: delete the queues of topics that nobody configured."""
        try:
            gone = await self._context.store.deletion.keep(self._context.topics.table)
        except OSError as error:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"not all topics were deleted: {error.strerror or error}"
            ) from error
        log.info(
            "topics without configuration deleted for %s: %s", connection.peer, ", ".join(gone) or "none"
        )
        return frame.response(SUCCESS)

    def runtime_info(self, _connection: Connection, frame: Frame) -> Frame:
        """28: the table that brokerStatus and clusterList show, all values text."""
        return frame.response(SUCCESS, body=KVTable(table=self.table()).encode())

    def table(self) -> dict[str, str]:
        """Every key of Apache's brokers, in both lines' spelling
        (docs/reference/remoting.md, Runtime table)."""
        context = self._context
        stats, config = context.stats, context.config
        table = runtime_facts(context.store)
        table |= {
            "brokerVersionDesc": version_name(VERSION_4_9_7),
            "brokerVersion": str(VERSION_4_9_7),
            "brokerActive": "true",
            "bootTimestamp": str(stats.boot_ms),
            "runtime": runtime_text(context.mono_ms() - stats.boot_mono_ms),
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
            "pageCacheLockTimeMills": "0",
            "remainTransientStoreBufferNumbs": "0",
        }
        for pool in POOLS:
            table[f"{pool}ThreadPoolQueueSize"] = "0"
            table[f"{pool}ThreadPoolQueueCapacity"] = "10000"
            table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        for level, (delivered, stored) in self._schedule.positions().items():
            table[f"scheduleMessageOffset_{level}"] = f"{delivered},{stored}"
        return table


def runtime_text(elapsed_ms: int) -> str:
    """How long the broker runs, in Apache's words."""
    seconds = elapsed_ms // 1000
    days, seconds = divmod(seconds, 86_400)
    hours, seconds = divmod(seconds, 3_600)
    minutes, seconds = divmod(seconds, 60)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
