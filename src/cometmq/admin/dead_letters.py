"""Dead letters, the messages whose retries a group has exhausted: counting, reading, selecting, resending.

A resent dead letter stays in the dead-letter topic. The copy that is sent has the same message ids, and its
property DLQ_RESEND_TIMES is one higher. Therefore the broker's index shows which dead letters were resent
before, even by an interrupted run or from another machine. The property DLQ_RESEND_RUN of a copy names the
dead letter and the run that sent the copy. By this property, a run that processes a dead letter twice
recognises the copy that it has already sent.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from cometmq.admin.errors import IndexSilent, ResendStopped
from cometmq.admin.groups import POP_TYPE
from cometmq.admin.values import DeadLetterView, Value
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import ALWAYS, MAX_UNIQUE_HITS, by_key, offset_id_in
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.producer.options import ProducerOptions
from cometmq.client.producer.outgoing import prepare_system
from cometmq.client.producer.producer import Producer
from cometmq.errors import BrokerError, CometError, ConfigError, NoRouteError, shown
from cometmq.message import Message, MessageExt
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, UNSENDABLE_TOPICS, SysFlag, is_system_topic
from cometmq.protocol.compression import TYPE_MASK
from cometmq.protocol.pop import subscribed_topic
from cometmq.protocol.properties import values as names

RESEND_TIMES = "DLQ_RESEND_TIMES"
RESEND_RUN = "DLQ_RESEND_RUN"
RESEND_GROUP = "dlq_resend_group"  # Producer group that resends dead letters
MAX_CONCURRENT_RESENDS = 16  # Maximum number of dead letters that are sent concurrently
MAX_FAILURES = 10  # A resend run ends after this many consecutive failures
MAX_CLOCK_SKEW_MS = 10_000  # Assumed maximum difference, in ms, between the clocks of two brokers
COMPRESS_OVER = 4096
INT_MAX = 2**31 - 1
KEPT_PROPERTIES = (names.TAGS, names.KEYS, names.UNIQ_KEY, names.BUYER_ID, names.INSTANCE_ID)
"""Reserved properties that are copied when a dead letter is resent.

They describe the message itself, unlike properties that describe its deliveries and retries.
"""
ZLIB = int(SysFlag.COMPRESSED | SysFlag.COMPRESSION_ZLIB)


class Resend(StrEnum):
    """Outcome of a dead letter in a resend run.

    SKIPPED: an earlier run has resent the dead letter. PLANNED: a dry run has selected the dead letter.
    """

    RESENT = "RESENT"
    SKIPPED = "SKIPPED"
    PLANNED = "PLANNED"
    FAILED = "FAILED"


class ResendResult(Value, frozen=True, kw_only=True):
    """Result of a resend run for one dead letter.

    `target` is the topic of the copy, and `copy_offset_msg_id` is the offset id of the copy.
    """

    state: Resend
    msg_id: str
    offset_msg_id: str
    original_topic: str | None
    keys: list[str]
    target: str
    copy_offset_msg_id: str = ""
    problem: str = ""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of a group's dead letters. A dead letter is selected if all given conditions apply.

    Attributes:
        group: The consumer group.
        ids: Offset ids or unique keys of the dead letters, or offset ids of the original messages. Empty:
            all.
        topic: Only dead letters of this original topic.
        key: Only dead letters with this key.
        begin_ms: Only dead letters stored at or after this time (ms since 1970).
        end_ms: Only dead letters stored before this time (ms since 1970).
        sql: An SQL92 expression over the properties, including TAGS, KEYS and RETRY_TOPIC.

    Raises:
        ConfigError: `end_ms` is not after `begin_ms`.
    """

    group: str
    ids: frozenset[str] = frozenset()
    topic: str | None = None
    key: str | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    sql: str | None = None

    def __post_init__(self) -> None:
        begin, end = self.begin_ms, self.end_ms
        if begin is not None and end is not None and begin >= end:
            raise ConfigError("end", str(end), f"a time after the begin, {begin}")
        msgspec.structs.force_setattr(self, "ids", frozenset(map(str.upper, self.ids)))

    def takes(self, message: MessageExt) -> bool:
        """Return whether a dead letter matches the ids, the topic and the key of the selection.

        This method does not check the time range and `sql`.
        """
        ids = map(str.upper, (message.msg_id, message.offset_msg_id, origin_id(message)))
        return (
            (not self.ids or not self.ids.isdisjoint(ids))
            and self.topic in (None, original_topic(message))
            and (self.key is None or self.key in message.keys)
        )


class Resending(msgspec.Struct, frozen=True, kw_only=True):
    """Target, rate and limits of a resend run.

    Attributes:
        to_topic: True: send to the original topic, from which all groups receive the message. False: send to
            the retry topic of the group, from which only this group receives the message.
        again: Also send dead letters that were resent before.
        dry_run: Send nothing.
        rate: Maximum messages per second. None: no limit.
        limit: Maximum number of messages that this run sends; skipped dead letters do not count. None: no
            limit.
        run: Name of the run, which is stored in the property DLQ_RESEND_RUN of each copy. A run that may
            process the same dead letter twice recognises its own copies by this name. "": no name is stored.
    """

    to_topic: bool = False
    again: bool = False
    dry_run: bool = False
    rate: float | None = None
    limit: int | None = None
    run: str = ""


def original_topic(message: MessageExt) -> str | None:
    """Return the original topic of a dead letter, None if its properties do not contain one.

    At Apache's brokers, a dead letter that was retried by POP names its retry topic.
    """
    properties = message.properties
    topic = properties.get(names.RETRY_TOPIC) or properties.get(names.DLQ_ORIGIN_TOPIC)
    return topic and subscribed_topic(topic, message.topic.removeprefix(DLQ_PREFIX))


def belongs_to_system(topic: str) -> bool:
    """Return whether a topic is reserved.

    Nothing is resent to a reserved topic: the sender of a dead letter chose the topic's name, and a resend
    would write to that topic with an operator's permissions.
    """
    return topic.startswith("%") or topic in UNSENDABLE_TOPICS or is_system_topic(topic)


def origin_id(message: MessageExt) -> str:
    """Return the offset id of a dead letter's original message."""
    properties = message.properties
    return (
        properties.get(names.ORIGIN_MESSAGE_ID, "").strip()
        or properties.get(names.DLQ_ORIGIN_MESSAGE_ID)
        or message.offset_msg_id
    )


def resend_times(message: MessageExt) -> int:
    """Return how often the message had been resent before it became the given dead letter."""
    text = message.properties.get(RESEND_TIMES, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def view(message: MessageExt) -> DeadLetterView:
    """Return a dead letter in the form of the JSON output."""
    return DeadLetterView.of_dead_letter(
        message, original_topic(message), origin_id(message), resend_times(message)
    )


# -- copies of earlier runs


async def was_resent(client: ClientInstance, group: str, message: MessageExt) -> bool:
    """Return whether a copy of a dead letter exists in its original topic or in the group's retry topic.

    Raises IndexSilent if the broker's index cannot report that.
    """
    return await copy_of(client, group, message, "") is not None


async def copy_of(client: ClientInstance, group: str, message: MessageExt, mark: str) -> MessageExt | None:
    """Return a copy of a dead letter from its original topic or the group's retry topic, None if none exists.

    Raises IndexSilent if the broker's index cannot report that.

    Args:
        mark: Value of DLQ_RESEND_RUN. A copy with this value is preferred to other copies.
    """
    origin, times = origin_id(message), resend_times(message)
    topic, found = original_topic(message), None
    for target in (RETRY_PREFIX + group, *((topic,) if topic else ())):
        # Only the newest messages with the id are read. They are enough: if the group retries a copy, the
        # broker stores it as a new message, which keeps DLQ_RESEND_RUN.
        for copy in (copies := await copies_in(client, target, message)):
            later = origin_id(copy) == origin and resend_times(copy) > times
            if later and (found is None or copy.properties.get(RESEND_RUN) == mark):
                found = copy
        if len(copies) >= MAX_UNIQUE_HITS and found is None:
            raise IndexSilent(f"{len(copies)} or more messages of {target} have the id {message.msg_id}")
        if found is not None and not mark:
            break
    return found


async def copies_in(client: ClientInstance, topic: str, message: MessageExt) -> list[MessageExt]:
    """Return a topic's newest messages that have the id of a dead letter and were stored after the letter."""
    span = message.store_timestamp_ms - MAX_CLOCK_SKEW_MS, ALWAYS[1]
    try:
        return await by_key(client, topic, message.msg_id, MAX_UNIQUE_HITS, unique=True, span=span)
    except NameServersUnreachable:
        raise
    except NoRouteError:
        return []


async def check_index(client: ClientInstance, message: MessageExt) -> None:
    """Raise IndexSilent unless the broker that stores a dead letter finds it in its index."""
    if names.UNIQ_KEY in message.properties and not await copies_in(client, message.topic, message):
        raise IndexSilent(
            f"the index of {message.broker_name} does not find message {message.msg_id} of {message.topic}"
        )


async def check_copy(client: ClientInstance, result: ResendResult) -> None:
    """Raise ResendStopped if the resent copy has become a dead letter again.

    This happens if the group has queue locks: a 5.x broker then turns every message that is sent to the
    group's retry topic into a dead letter.
    """
    place = offset_id_in(result.copy_offset_msg_id)
    if place is not None:
        stored = await client.brokers.view_message(place.host, place.physical_offset)
        if stored.topic.startswith(DLQ_PREFIX):
            raise ResendStopped(
                f"dead letter {result.msg_id} was created immediately, as RocketMQ 5.x does for "
                "groups that consume in order; send it to its original topic instead"
            )


# -- resending


@dataclass
class Resender:
    """Sends dead letters again. `producer` must not retry: a failed try may have stored the message."""

    client: ClientInstance
    producer: Producer
    group: str
    how: Resending
    _next_s: float = field(default=0.0, init=False)
    _reads_retries: dict[str, bool | None] = field(default_factory=dict, init=False)

    async def resend_all(self, letters: list[MessageExt]) -> list[ResendResult]:
        """Resend dead letters concurrently.

        Dead letters with the same original message are resent one after the other.
        """
        results: dict[int, ResendResult] = {}

        async def in_turn(same: list[MessageExt]) -> None:
            for message in same:
                results[id(message)] = await self.resend(message)

        by_origin: dict[str, list[MessageExt]] = {}
        for message in letters:
            by_origin.setdefault(origin_id(message), []).append(message)
        await asyncio.gather(*map(in_turn, by_origin.values()))
        return [results[id(message)] for message in letters]

    async def resend(self, message: MessageExt) -> ResendResult:
        """Resend a dead letter unless it was resent before. Never raises a CometError."""
        topic = original_topic(message)
        target = (topic or "") if self.how.to_topic else RETRY_PREFIX + self.group
        state, problem, copy = Resend.FAILED, "", ""
        mark = self.how.run and f"{self.how.run} {message.broker_name} {message.offset_msg_id}"
        try:
            if topic is None:
                problem = "the dead letter has no original topic"
            elif self.how.to_topic and belongs_to_system(topic):
                problem = f"it names {shown(topic)} as its original topic, which is reserved"
            elif not self.how.to_topic and not await self._reaches_group(message):
                problem = (
                    "the members of the group pop, so they receive nothing from its retry topic; send it to "
                    "its original topic instead"
                )
            elif before := await self._before(message, mark):
                state, copy = before
            elif self.how.dry_run:
                state = Resend.PLANNED
            else:
                copy = await self._send(message, target, topic, mark)
                state = Resend.RESENT
        except CometError as error:
            problem = str(error)
        return ResendResult(
            msg_id=message.msg_id, offset_msg_id=message.offset_msg_id, original_topic=topic,
            keys=list(message.keys), target=target, state=state, problem=problem, copy_offset_msg_id=copy,
        )  # fmt: skip

    async def _reaches_group(self, message: MessageExt) -> bool:
        """Return whether the group receives a copy of a dead letter from its retry topic.

        Members that pop have retry topics of other names. If no member is online, the dead letter shows
        whether it was popped, unless it died at its first delivery.
        """
        name = message.broker_name
        if name not in self._reads_retries:
            try:
                addr = await self.client.find_master(message.queue)
                found = await self.client.brokers.consumer_connection(addr, self.group)
            except BrokerError:  # no member is online
                self._reads_retries[name] = None
            else:
                topics = [each.topic for each in found.subscription_table.values()]
                pops = found.consume_type == POP_TYPE
                self._reads_retries[name] = not pops or RETRY_PREFIX + self.group in topics
        reads = self._reads_retries[name]
        return names.FIRST_POP_TIME not in message.properties if reads is None else reads

    async def _before(self, message: MessageExt, mark: str) -> tuple[Resend, str] | None:
        """Return the outcome of a dead letter that was resent before, None for any other dead letter.

        The outcome is RESENT, with the offset id of the copy, if this run sent the copy. It is SKIPPED,
        without an offset id, if another run sent the copy.
        """
        if self.how.again and not mark:
            return None
        try:
            copy = await copy_of(self.client, self.group, message, mark)
        except IndexSilent:
            if self.how.again:
                return None
            raise
        if copy is not None and mark and copy.properties.get(RESEND_RUN) == mark:
            return Resend.RESENT, copy.offset_msg_id
        return None if copy is None or self.how.again else (Resend.SKIPPED, "")

    async def _send(self, message: MessageExt, target: str, topic: str, mark: str) -> str:
        """Send a copy of a dead letter, and return the offset id of the copy."""
        await self._pace()
        properties = message.user_properties
        properties.pop(RESEND_RUN, None)
        if mark:
            properties[RESEND_RUN] = mark
        properties |= {
            name: message.properties[name] for name in KEPT_PROPERTIES if name in message.properties
        }
        properties.setdefault(names.UNIQ_KEY, message.msg_id)
        properties[names.ORIGIN_MESSAGE_ID] = origin_id(message)
        properties[RESEND_TIMES] = str(resend_times(message) + 1)
        if not self.how.to_topic:
            properties[names.RETRY_TOPIC] = topic
            # Set the retry count to 0, so that the group can retry the copy as often as a new message. A
            # broker stores a message in the retry topic as a dead letter if its retry count has reached the
            # maximum. Therefore the copy also contains a maximum that no retry count reaches.
            properties |= {names.RECONSUME_TIME: "0", names.MAX_RECONSUME_TIMES: str(INT_MAX)}
        body, sys_flag = message.body, 0
        if message.sys_flag & SysFlag.COMPRESSED:  # The client could not decompress the body
            sys_flag = message.sys_flag & (int(SysFlag.COMPRESSED) | TYPE_MASK)
        elif len(body) >= COMPRESS_OVER:
            body, sys_flag = await asyncio.to_thread(zlib.compress, body), ZLIB
        copy = Message(topic=target, body=body, flag=message.flag, properties=properties)
        result = await self.producer.send_raw(prepare_system(copy, self.client.keys, sys_flag))
        return result.offset_msg_id

    async def _pace(self) -> None:
        if self.how.rate is not None:
            now_s = asyncio.get_running_loop().time()
            at_s = max(self._next_s, now_s)
            self._next_s = at_s + 1 / self.how.rate
            await asyncio.sleep(at_s - now_s)


async def resend(
    client: ClientInstance, letters: AsyncIterator[MessageExt], group: str, how: Resending
) -> AsyncIterator[ResendResult]:
    """Resend dead letters, and yield the outcome of each.

    Raises IndexSilent before the first send if a broker's index cannot report earlier copies. Raises
    ResendStopped after MAX_FAILURES consecutive failures, or if the first copy does not reach its target.
    """
    async with Producer(RESEND_GROUP, client=client, options=ProducerOptions(retry_times=0)) as producer:
        resender = Resender(client, producer, group, how)
        left = sys.maxsize if how.limit is None else how.limit
        # A batch contains at most as many messages as may be sent in one second, so that a cancelled run ends
        # within one second.
        batch_size = (
            MAX_CONCURRENT_RESENDS if how.rate is None else max(1, min(MAX_CONCURRENT_RESENDS, int(how.rate)))
        )
        failures, checked = 0, how.to_topic
        some = await next_batch(min(1, left), letters)
        if some and not how.again:
            await check_index(client, some[0])
        while some:
            for result in await resender.resend_all(some):
                yield result
                left -= result.state in (Resend.RESENT, Resend.PLANNED)
                if result.state is Resend.RESENT and not checked:
                    await check_copy(client, result)
                    checked = True
                topic = result.original_topic
                tried = topic and not (how.to_topic and belongs_to_system(topic))
                failures = failures + 1 if result.state is Resend.FAILED and tried else 0
                if failures >= MAX_FAILURES:
                    raise ResendStopped(
                        f"{failures} messages in a row failed; the last error: {result.problem}"
                    )
            some = await next_batch(min(batch_size, left), letters)


async def next_batch(count: int, letters: AsyncIterator[MessageExt]) -> list[MessageExt]:
    """Return the next `count` dead letters, or fewer at the end."""
    found: list[MessageExt] = []
    while len(found) < count and (message := await anext(letters, None)) is not None:
        found.append(message)
    return found
