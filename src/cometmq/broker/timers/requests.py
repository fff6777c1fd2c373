"""Handlers of requests about timer messages: recalls, lists, and the progress of delivery."""

from __future__ import annotations

from functools import partial

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.writer import Writer
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.timers.following import counted_as
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.broker.timers.timers import TimerService
from cometmq.broker.timers.wheel import Waiting
from cometmq.errors import CommandError
from cometmq.protocol.bodies import TimerMetric, TimerMetrics
from cometmq.protocol.codes import SCHEDULE_TOPIC, TIMER_TOPIC, Perm, RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ListTimersRequestHeader,
    ListTimersResponseHeader,
    RecallMessageRequestHeader,
)
from cometmq.protocol.properties.values import encode_properties, value_of
from cometmq.protocol.record.one import decode_record, properties_of
from cometmq.protocol.timers import RECALL_FOUND, BadHandle, RecallHandle, TimerCode, out_ms_of
from cometmq.remoting import Connection
from cometmq.settings import LONG_MAX
from cometmq.store import Clock, MessageStore, StoreRefused, link_to

log = logs.logger(__name__)

# The limits of one page: returned messages, examined messages, and bytes.
PAGE, LOOKED_AT, PAGE_BYTES = 64, 256, 1 << 20
RECALL_TAG = "_RECALL_TAG_"
# Stands for TIMER_OUT_MS in the list entries of messages with a delay level, which have no TIMER_OUT_MS.
NO_TIME = -1


class Page(msgspec.Struct, eq=False):
    """A page of the list of waiting messages: their delivery times in ms, and their records.

    `after` is the pair (delivery time, log position) after which the next page begins. `more` is whether
    there are further messages.
    """

    after: tuple[int, int]
    records: list[tuple[int, bytes]] = []
    more: bool = False


class TimerProcessor(msgspec.Struct, eq=False):
    """Handles requests about timer messages: RocketMQ's codes 60, 61 and 370, and CometMQ's code 21002."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    timed: TimedSends
    service: TimerService
    schedule: ScheduleService
    writer: Writer
    _recalling: set[tuple[str, int, str]] = msgspec.field(default_factory=set)

    @handles(RequestCode.GET_TIMER_CHECK_POINT)
    def get_timer_check_point(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the progress of timer messages, in 56 bytes in the format of Apache's broker."""
        return frame.response(body=self.service.check_point(self.service.pending.followed))

    @handles(RequestCode.GET_TIMER_METRICS)
    def get_timer_metrics(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the number of waiting timer messages of each topic."""
        state = self.tables.timers
        counts = {
            topic: TimerMetric(count=count, time_stamp=state.counted_ms(topic))
            for topic, count in state.counts.items()
        }
        return frame.response(body=TimerMetrics(timing_count=counts, data_version=state.counted).encode())

    @handles(RequestCode.RECALL_MESSAGE)
    async def recall_message(self, connection: Connection, frame: Frame) -> None:
        """Recall a message by writing a recall to the timer topic (docs/reference/remoting.md, Recall)."""
        header = frame.header(RecallMessageRequestHeader)
        handle = self._checked(header)
        try:
            found = await self._waits(handle)
        except OSError as error:
            log.warning("a recall is missing in the statistics, because the index cannot be read: %s", error)
            # Store the recall although the index cannot be read. Because it is unknown whether the recalled
            # message waits, the recall does not reduce the number of waiting messages.
            found = False
        properties = encode_properties(
            {
                "TAGS": RECALL_TAG,
                "TIMER_DEL_UNIQKEY": handle.unique_key,
                "UNIQ_KEY": handle.unique_key,
                "TIMER_DELIVER_MS": str(handle.deliver_ms),
                "BORN_TIMESTAMP": str(self.clock.time_ms()),
                **({RECALL_FOUND.decode(): "true"} if found and self._is_first(handle) else {}),
                **({"PGROUP": header.producer_group} if header.producer_group else {}),
            }
        )
        timed = self.timed.timed(handle.topic, 0, properties)
        if timed is None:
            raise _refused("timestamp invalid")
        try:
            self.timed.append(
                timed, b"0", born_timestamp_ms=self.clock.time_ms(), born_host=connection.peer_host
            )
        except StoreRefused:
            raise _refused("execute error", ResponseCode.SYSTEM_ERROR) from None
        ext = {"msgId": handle.unique_key, "MSG_REGION": self.config.region_id}

        def answer(_code: int, remark: str | None) -> None:
            if remark is not None:
                connection.respond(frame, ResponseCode.SYSTEM_ERROR, remark="recall failed, execute error")
            else:
                connection.respond(frame, ResponseCode.SUCCESS, ext=ext)

        self.writer.appended(answer, wait=True)

    async def _waits(self, handle: RecallHandle) -> bool:
        """Return whether the message that a recall handle identifies is waiting, according to the index."""
        key, out_ms = handle.unique_key.encode(), out_ms_of(handle.deliver_ms)
        for record in await self.store.lookups.by_key(
            TIMER_TOPIC, handle.unique_key, PAGE, 0, LONG_MAX, PAGE_BYTES
        ):
            properties = properties_of(record)
            code = TimerCode.of(properties)
            same = value_of(properties, b"UNIQ_KEY") == key and code is not None and code.out_ms == out_ms
            if same and counted_as(properties) > 0 and self._is_wanted(record, out_ms, handle.topic):
                return True
        return False

    def _is_first(self, handle: RecallHandle) -> bool:
        """Return whether no earlier recall of this message exists, read from the timer topic or not."""
        out_ms, key = out_ms_of(handle.deliver_ms), handle.unique_key
        if not self.service.follower.behind():
            self._recalling.clear()
        if self.service.pending.is_recalled(out_ms, handle.topic.encode(), key.encode()):
            return False
        known = len(self._recalling)
        self._recalling.add((handle.topic, out_ms, key))
        return len(self._recalling) > known

    def _checked(self, header: RecallMessageRequestHeader) -> RecallHandle:
        config = self.config
        if not config.recall_message_enable:
            raise _refused("operation is forbidden", ResponseCode.NO_PERMISSION)
        if self.store.slave:
            raise _refused("broker service not available", ResponseCode.SLAVE_NOT_AVAILABLE)
        now_ms = self.clock.time_ms()
        late = now_ms < config.start_accept_send_request_time_stamp
        if late or not config.broker_permission & Perm.WRITE:
            raise _refused("broker service not available", ResponseCode.SERVICE_NOT_AVAILABLE)
        if self.tables.topics.get(header.topic) is None:
            raise _refused(f"the topic[{header.topic}] not exist", ResponseCode.TOPIC_NOT_EXIST)
        try:
            handle = RecallHandle.decode(header.recall_handle or "")
        except BadHandle as problem:
            raise CommandError(ResponseCode.ILLEGAL_OPERATION, str(problem)) from None
        if handle.topic != header.topic:
            raise _refused("topic not match")
        if handle.broker_name != config.broker_name:
            raise _refused("broker service not available")
        if not 0 < handle.deliver_ms - self.service.times().wall_ms < 1_000 * config.timer_max_delay_sec:
            raise _refused("timestamp invalid")
        return handle

    @handles(RequestCode.LIST_TIMERS)
    async def list_timers(self, _connection: Connection, frame: Frame) -> Frame:
        """Return a page of waiting messages by delivery time. RocketMQ has no such request."""
        header = frame.header(ListTimersRequestHeader)
        page = await (self._with_key(header, header.key) if header.key else self._page(header))
        answer = ListTimersResponseHeader(
            after_ms=page.after[0],
            after_position=page.after[1],
            more=page.more,
            waiting=len(self.service.pending) + self.schedule.waiting(),
            deliver_at=",".join(str(deliver_at_ms) for deliver_at_ms, _ in page.records),
        )
        return frame.response(header=answer, body=b"".join(record for _, record in page.records))

    async def _page(self, header: ListTimersRequestHeader) -> Page:
        found = Page(after=_behind(header))
        asked = PAGE if header.max_msg_nums is None else header.max_msg_nums
        most, left = max(1, min(asked, PAGE)), PAGE_BYTES
        waiting = self.service.pending.page(found.after, LOOKED_AT, self.service.times())
        waiting += [
            Waiting(due_ms, position, NO_TIME)
            for due_ms, position in await self.schedule.page(found.after, LOOKED_AT)
        ]
        waiting = sorted(waiting)[:LOOKED_AT]
        this_turn = 0
        for seen, listed in enumerate(waiting, 1):
            record = await self.store.executor.query(partial(self.store.lookups.record_at, listed.position))
            this_turn += len(record or b"")
            if this_turn >= PAGE_BYTES:
                this_turn = 0
                await self.store.executor.pause(0)
            if record is not None and self._is_wanted(record, listed.out_ms, header.topic):
                left -= len(record)
                if found.records and left < 0:
                    found.more = True
                    break
                found.records.append((listed.due_ms, record))
            found.after = listed.due_ms, listed.position
            found.more = seen < len(waiting) or seen == LOOKED_AT
            if len(found.records) == most:
                break
        return found

    async def _with_key(self, header: ListTimersRequestHeader, key: str) -> Page:
        """Return the newest waiting messages that have a key, without those that no longer wait."""
        found, now_ms = Page(after=_behind(header)), self.service.times().wall_ms
        records = await self._indexed(TIMER_TOPIC, key, found)
        messages = [decode_record(record, 0) for record in records]
        moved = {message.prepared_transaction_offset for message in messages}
        for message, record in zip(messages, records, strict=True):
            code = TimerCode.of(properties_of(record))
            if code is None or code.recall or code.due_ms <= now_ms:
                continue
            if link_to(message.physical_offset) not in moved and self._is_wanted(
                record, code.out_ms, header.topic
            ):
                found.records.append((code.due_ms, record))
        for record in await self._indexed(SCHEDULE_TOPIC, key, found):
            deliver_at_ms = self.schedule.deliver_at_ms(decode_record(record, 0))
            if deliver_at_ms is not None and self._is_wanted(record, NO_TIME, header.topic):
                found.records.append((deliver_at_ms, record))
        return found

    async def _indexed(self, topic: str, key: str, page: Page) -> list[bytes]:
        """Return the newest records of a topic that have a key. Set `page.more` if there are older ones."""
        lookups, log = self.store.lookups, self.store.log
        records = await lookups.by_key(topic, key, PAGE, 0, LONG_MAX, PAGE_BYTES)
        hits = await lookups.index.search(self.store.executor, topic, key, PAGE + 1, 0, LONG_MAX)
        page.more |= sum(hit >= log.readable_min for hit in hits) > len(records)
        return records

    def _is_wanted(self, record: bytes, out_ms: int, wanted: str | None) -> bool:
        properties = properties_of(record)
        topic, key = value_of(properties, b"REAL_TOPIC"), value_of(properties, b"UNIQ_KEY")
        if wanted and topic != wanted.encode():
            return False
        return not self.service.pending.is_recalled(out_ms, topic, key)


def _refused(why: str, code: ResponseCode = ResponseCode.ILLEGAL_OPERATION) -> CommandError:
    return CommandError(code, f"recall failed, {why}")


def _behind(header: ListTimersRequestHeader) -> tuple[int, int]:
    """Return the delivery time and log position after which a page begins. They are -1 for the first page."""
    position = header.after_position
    return (-1 if header.after_ms is None else header.after_ms), (-1 if position is None else position)
