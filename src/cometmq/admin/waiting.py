"""What brokers hold back: timer messages, by pages over all brokers, and transactions without end."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cometmq.admin.admin import BROKERS_AT_ONCE, Admin
from cometmq.client.cluster.requests import pull_request
from cometmq.client.cluster.workers import for_each
from cometmq.errors import CometError
from cometmq.message import MessageExt, MessageQueue, PullStatus, WaitingMessage
from cometmq.protocol.codes import (
    MASTER_ID,
    TOOLS_CONSUMER_GROUP,
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_GROUP,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from cometmq.protocol.headers import ListTimersRequestHeader
from cometmq.protocol.properties import values as names

T = TypeVar("T")

PAGE_MAX = 64
"""Messages that a broker lists at once."""
HALVES_MAX, OPS_MAX = 1_000, 4_000
"""Half messages, and ops that close them, that are looked at on a broker: the oldest."""
PULL_MAX = 1024
"""Messages of one answer; Apache's brokers give 32."""
REMOVED = "d"
"""The tag of an op that closes half messages."""
_DIGITS = 18

Place = tuple[int, int]
"""Behind a message of a broker's list: its time (ms) and position in the log."""


@dataclass(frozen=True)
class TimerPage:
    """Messages that wait, by their time. after: broker name -> where its next ones begin; more: there are
    some; waiting: how many wait in all; missing: broker name -> why it says nothing."""

    rows: list[WaitingMessage]
    after: dict[str, Place]
    more: bool
    waiting: int
    missing: dict[str, str]


async def timer_page(
    admin: Admin, topic: str | None = None, *, after: Mapping[str, Place] | None = None, size: int = 100
) -> TimerPage:
    """The next `size` of all brokers' messages that wait, of one topic or all, behind the places that the
    page before gave. CometMQ brokers only; raises if none answers."""
    places = after or {}

    async def ask(name: str, addr: str) -> tuple[list[WaitingMessage], Place, bool, int]:
        begin = places.get(name, (-1, -1))
        found: list[WaitingMessage] = []
        while True:
            wanted = ListTimersRequestHeader(
                max_msg_nums=min(size - len(found), PAGE_MAX),
                after_ms=begin[0],
                after_position=begin[1],
                topic=topic,
            )
            rows, page = await admin.client.brokers.timers(addr, name, wanted)
            found += rows
            begin = page.after_ms, page.after_position
            if not page.more or len(found) >= size:
                return found, begin, page.more, page.waiting

    answers, missing = await each_master(admin, ask)
    ordered = heapq.merge(
        *([(row.deliver_at_ms, name, row) for row in answer[0]] for name, answer in answers.items()),
        key=lambda item: item[:2],
    )
    taken = [item for item, _ in zip(ordered, range(size), strict=False)]
    next_places, more = dict(places), False
    for name, (rows, behind, has_more, _) in answers.items():
        own = [row for _, of, row in taken if of == name]
        if len(own) == len(rows):
            next_places[name] = behind
            more |= has_more
        else:
            more = True
            if own:
                next_places[name] = own[-1].deliver_at_ms, own[-1].message.physical_offset
    waiting = sum(answer[3] for answer in answers.values())
    return TimerPage([row for _, _, row in taken], next_places, more, waiting, missing)


@dataclass(frozen=True)
class HalfMessage:
    """A transaction that is neither committed nor rolled back. message: as it is kept; topic: where it would
    go; group: of its producer; checks: how often a producer of the group was asked."""

    message: MessageExt
    topic: str
    group: str
    checks: int


@dataclass(frozen=True)
class HalfMessages:
    """Those of all brokers, the oldest first. partly: a broker has more than were looked at, and of the ones
    here some may have ended; missing: broker name -> why it says nothing."""

    rows: list[HalfMessage]
    partly: bool
    missing: dict[str, str]


async def half_messages(admin: Admin) -> HalfMessages:
    """Transactions that wait. They are read as messages, so this works with Apache's brokers, too; those of
    5.x write down for some seconds later what has ended. Raises if no broker answers."""

    async def ask(name: str, addr: str) -> tuple[list[MessageExt], bool]:
        halves = MessageQueue(TRANS_HALF_TOPIC, name, 0)
        ops = MessageQueue(TRANS_OP_HALF_TOPIC, name, 0)
        # Ops first: a copy that is stored between the two answers closes the older copy, and is found itself.
        closings, others = await behind_group(admin, addr, ops, OPS_MAX)
        found, some = await behind_group(admin, addr, halves, HALVES_MAX)
        if not found:
            return [], False
        closed = {number for op in closings if op.tags == REMOVED for number in closed_by(bytes(op.body))}
        return [each for each in newest_copies(found) if each.queue_offset not in closed], some or others

    answers, missing = await each_master(admin, ask)
    rows = [
        half_of(message)
        for messages, _ in answers.values()
        for message in messages
        if names.PGROUP in message.properties  # without one it fills a gap in the queue
    ]
    rows.sort(key=lambda row: row.message.born_timestamp_ms)
    return HalfMessages(rows, any(partly for _, partly in answers.values()), missing)


def newest_copies(halves: Iterable[MessageExt]) -> list[MessageExt]:
    """Return the last copy of each transaction.

    A broker stores a half message again when it asks the producer. Apache's broker passes the older copy only
    at the end of its cycle of checks; until then both are in the queue.

    Args:
        halves: The half messages of one broker in queue order.
    """
    newest: dict[tuple[str, int], MessageExt] = {}
    begins: dict[str, int] = {}
    for half in halves:
        begin = _number(half.properties.get(names.TRAN_PREPARED_QUEUE_OFFSET, ""))
        if begin is None:
            # Copies of Apache's brokers do not name the first copy, but count the checks.
            checked = half_of(half).checks > 0
            begin = begins.get(half.msg_id, half.queue_offset) if checked else half.queue_offset
        begins[half.msg_id] = begin
        newest[half.msg_id, begin] = half
    return list(newest.values())


async def given_up(admin: Admin, count: int = 100) -> HalfMessages:
    """The newest transactions of each broker whose producers were asked in vain until the broker gave up.
    Admin.resume_check has them asked again."""

    async def ask(name: str, addr: str) -> tuple[list[MessageExt], bool]:
        queue = MessageQueue(TRANS_CHECK_MAX_TIME_TOPIC, name, 0)
        least = await admin.client.brokers.min_offset(addr, queue)
        end = await admin.client.brokers.max_offset(addr, queue)
        return await _read(admin, addr, queue, max(least, end - count), end), end - least > count

    answers, missing = await each_master(admin, ask)
    rows = [half_of(message) for messages, _ in answers.values() for message in messages]
    rows.sort(key=lambda row: row.message.store_timestamp_ms, reverse=True)
    return HalfMessages(rows, any(partly for _, partly in answers.values()), missing)


def half_of(message: MessageExt) -> HalfMessage:
    """What the properties of a half message say."""
    found = message.properties
    return HalfMessage(
        message=message,
        topic=found.get(names.REAL_TOPIC, ""),
        group=found.get(names.PGROUP, ""),
        checks=_number(found.get(names.TRANSACTION_CHECK_TIMES, "")) or 0,
    )


def closed_by(body: bytes) -> list[int]:
    """The queue offsets of half messages that an op names: one (4.9), or some with commas (5.x)."""
    found = (_number(part) for part in body.decode("ascii", "replace").split(","))
    return [number for number in found if number is not None]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


async def behind_group(
    admin: Admin, addr: str, queue: MessageQueue, most: int
) -> tuple[list[MessageExt], bool]:
    """The messages that the broker has not worked off, and whether there are more than `most`."""
    brokers = admin.client.brokers
    least = await brokers.min_offset(addr, queue)
    end = await brokers.max_offset(addr, queue)
    done = await brokers.consumer_offset(addr, TRANS_GROUP, queue)
    begin = min(max(least, done or 0), end)
    return await _read(admin, addr, queue, begin, min(end, begin + most)), end - begin > most


async def _read(admin: Admin, addr: str, queue: MessageQueue, begin: int, end: int) -> list[MessageExt]:
    found: list[MessageExt] = []
    while begin < end:
        request = pull_request(TOOLS_CONSUMER_GROUP, queue, begin, min(PULL_MAX, end - begin))
        result = await admin.client.brokers.pull(addr, queue, request)
        if result.status is PullStatus.NO_NEW_MSG or result.next_begin_offset <= begin:
            break
        found += result.messages
        begin = result.next_begin_offset
    return found


async def each_master(
    admin: Admin, ask: Callable[[str, str], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, str]]:
    """Broker name -> what `ask(name, addr)` gives of its master, and name -> why there is nothing. Raises if
    no master answers."""
    table = (await admin.cluster_info()).broker_addr_table
    answers: dict[str, T] = {}
    failures: dict[str, CometError] = {}

    async def one(name: str) -> None:
        try:
            answers[name] = await ask(name, table[name].broker_addrs[MASTER_ID])
        except CometError as error:
            failures[name] = error

    masters = sorted(name for name, data in table.items() if MASTER_ID in data.broker_addrs)
    await for_each(masters, one, BROKERS_AT_ONCE)
    if failures and not answers:
        raise next(iter(failures.values()))
    return dict(sorted(answers.items())), {name: str(error) for name, error in sorted(failures.items())}
