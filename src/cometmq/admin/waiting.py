"""Delayed messages of all brokers, page by page, and transactions not yet committed or rolled back."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cometmq.admin.admin import Admin
from cometmq.admin.servers import ask_each
from cometmq.client.cluster.requests import pull_request
from cometmq.errors import CometError
from cometmq.message import MessageExt, MessageQueue, PullStatus, WaitingMessage
from cometmq.protocol import codes
from cometmq.protocol.headers import ListTimersRequestHeader
from cometmq.protocol.properties import values as names

T = TypeVar("T")

MAX_LISTED_MESSAGES = 64
"""Maximum number of messages that a broker lists per request."""
MAX_HALF_MESSAGES, MAX_OPS = 1_000, 4_000
"""The maximum numbers of half messages and of op messages that are read from each broker.

An op message records that half messages were committed or rolled back.
"""
MAX_PULL_MESSAGES = 1024
"""Maximum number of messages per pull. Apache's brokers return at most 32."""
REMOVED = "d"
"""The tag of an op message, which records that half messages were committed or rolled back."""
_DIGITS = 18

Place = tuple[int, int]
"""A position in a broker's list of delayed messages: delivery time (ms) and log position of a message.

The next page begins after this message.
"""


@dataclass(frozen=True)
class TimerPage:
    """A page of delayed messages of all brokers, in the order of their delivery times.

    Attributes:
        rows: The messages.
        after: For each broker name, the position at which the next page begins.
        more: Whether there are messages after this page.
        waiting: Total number of messages that have not been delivered yet.
        missing: The errors of brokers that did not answer, by broker name.
    """

    rows: list[WaitingMessage]
    after: dict[str, Place]
    more: bool
    waiting: int
    missing: dict[str, str]


async def timer_page(
    admin: Admin, topic: str | None = None, *, after: Mapping[str, Place] | None = None, size: int = 100
) -> TimerPage:
    """Return a page of the delayed messages of all brokers. Only CometMQ brokers support this.

    The page has at most `size` messages, of one topic or of all topics. It begins after the positions in
    `after`, one per broker name. Raises the first broker's error if no broker answers.
    """
    places = after or {}

    async def ask(name: str, addr: str) -> tuple[list[WaitingMessage], Place, bool, int]:
        begin = places.get(name, (-1, -1))
        found: list[WaitingMessage] = []
        while True:
            wanted = ListTimersRequestHeader(
                max_msg_nums=min(size - len(found), MAX_LISTED_MESSAGES),
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
    """A transaction that is neither committed nor rolled back.

    Attributes:
        message: The half message.
        topic: Topic of the message after a commit.
        group: Group of the producer.
        checks: Number of transaction checks sent to producers of the group.
    """

    message: MessageExt
    topic: str
    group: str
    checks: int


@dataclass(frozen=True)
class HalfMessages:
    """Open transactions of all brokers, the oldest first.

    Attributes:
        rows: The half messages.
        partly: Whether a broker has more half messages than were read. If so, some of the transactions in
            `rows` may have ended.
        missing: The errors of brokers that did not answer, by broker name.
    """

    rows: list[HalfMessage]
    partly: bool
    missing: dict[str, str]


async def half_messages(admin: Admin) -> HalfMessages:
    """Return the open transactions. They are read as messages, which also works with Apache's brokers.

    A 5.x broker records the end of a transaction with a delay of some seconds, so a transaction that has just
    ended may still be listed. Raises the first error if no broker answers.
    """

    async def ask(name: str, addr: str) -> tuple[list[MessageExt], bool]:
        halves = MessageQueue(codes.TRANS_HALF_TOPIC, name, 0)
        ops = MessageQueue(codes.TRANS_OP_HALF_TOPIC, name, 0)
        # Read the op messages before the half messages: in the other order, a transaction could be missed.
        # If a broker stores a half message again, it writes an op message that ends the old copy. If that
        # happened between the two reads, only the old copy would be read, and it would count as ended.
        closings, more_ops = await unprocessed_messages(admin, addr, ops, MAX_OPS)
        found, more_halves = await unprocessed_messages(admin, addr, halves, MAX_HALF_MESSAGES)
        if not found:
            return [], False
        closed = {number for op in closings if op.tags == REMOVED for number in closed_by(bytes(op.body))}
        return [
            each for each in newest_copies(found) if each.queue_offset not in closed
        ], more_halves or more_ops

    answers, missing = await each_master(admin, ask)
    rows = [
        half_of(message)
        for messages, _ in answers.values()
        for message in messages
        if names.PGROUP in message.properties  # Without a group, it only fills a gap in the queue
    ]
    rows.sort(key=lambda row: row.message.born_timestamp_ms)
    return HalfMessages(rows, any(partly for _, partly in answers.values()), missing)


def newest_copies(halves: Iterable[MessageExt]) -> list[MessageExt]:
    """Return the last copy of each transaction's half message.

    A broker stores a half message again with each check. Apache's broker skips the older copy only at the end
    of its check cycle, so until then the queue contains both copies.

    Args:
        halves: The half messages of one broker in queue order.
    """
    newest: dict[tuple[str, int], MessageExt] = {}
    begins: dict[str, int] = {}
    for half in halves:
        begin = _number(half.properties.get(names.TRAN_PREPARED_QUEUE_OFFSET, ""))
        if begin is None:
            # Each check of a transaction stores its half message again. CometMQ's brokers store the offset of
            # the original in each copy. Apache's brokers do not, but they store the number of checks: if it
            # is not 0, this half message is a copy of the previous one with the same message id.
            checked = half_of(half).checks > 0
            begin = begins.get(half.msg_id, half.queue_offset) if checked else half.queue_offset
        begins[half.msg_id] = begin
        newest[half.msg_id, begin] = half
    return list(newest.values())


async def given_up(admin: Admin, count: int = 100) -> HalfMessages:
    """Return, for each broker, the newest transactions that reached the maximum number of checks.

    `Admin.resume_check` resumes their checks.
    """

    async def ask(name: str, addr: str) -> tuple[list[MessageExt], bool]:
        queue = MessageQueue(codes.TRANS_CHECK_MAX_TIME_TOPIC, name, 0)
        first = await admin.client.brokers.min_offset(addr, queue)
        end = await admin.client.brokers.max_offset(addr, queue)
        return await _read(admin, addr, queue, max(first, end - count), end), end - first > count

    answers, missing = await each_master(admin, ask)
    rows = [half_of(message) for messages, _ in answers.values() for message in messages]
    rows.sort(key=lambda row: row.message.store_timestamp_ms, reverse=True)
    return HalfMessages(rows, any(partly for _, partly in answers.values()), missing)


def half_of(message: MessageExt) -> HalfMessage:
    found = message.properties
    return HalfMessage(
        message=message,
        topic=found.get(names.REAL_TOPIC, ""),
        group=found.get(names.PGROUP, ""),
        checks=_number(found.get(names.TRANSACTION_CHECK_TIMES, "")) or 0,
    )


def closed_by(body: bytes) -> list[int]:
    """Return the queue offsets that the body of an op message contains.

    The half messages at these offsets were committed or rolled back. A 4.9 broker writes an op message for
    each half message; that of a 5.x broker contains several offsets.
    """
    found = (_number(part) for part in body.decode("ascii", "replace").split(","))
    return [number for number in found if number is not None]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


async def unprocessed_messages(
    admin: Admin, addr: str, queue: MessageQueue, max_count: int
) -> tuple[list[MessageExt], bool]:
    """Return those half or op messages of a transaction queue that a broker has not processed yet.

    At most `max_count` messages are read. The second value is whether there are more.
    """
    brokers = admin.client.brokers
    first = await brokers.min_offset(addr, queue)
    end = await brokers.max_offset(addr, queue)
    done = await brokers.consumer_offset(addr, codes.TRANS_GROUP, queue)
    begin = min(max(first, done or 0), end)
    return await _read(admin, addr, queue, begin, min(end, begin + max_count)), end - begin > max_count


async def _read(admin: Admin, addr: str, queue: MessageQueue, begin: int, end: int) -> list[MessageExt]:
    found: list[MessageExt] = []
    while begin < end:
        request = pull_request(codes.TOOLS_CONSUMER_GROUP, queue, begin, min(MAX_PULL_MESSAGES, end - begin))
        result = await admin.client.brokers.pull(addr, queue, request)
        if result.status is PullStatus.NO_NEW_MSG or result.next_begin_offset <= begin:
            break
        found += result.messages
        begin = result.next_begin_offset
    return found


async def each_master(
    admin: Admin, ask: Callable[[str, str], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, str]]:
    """Call `ask(name, addr)` for every master. Return the results and the errors, each by broker name.

    Raises the first error if no master answers.
    """
    failures: dict[str, CometError] = {}
    answers = await ask_each(await admin.masters(), ask, failures)
    return answers, {name: str(error) for name, error in failures.items()}
