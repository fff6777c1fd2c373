"""The newest messages of a topic on a real broker: in order, complete, in pages, limited in size."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from cometmq.admin import Admin, Newest, ReadRange, TopicSettings, UnknownNameError
from cometmq.admin import messages as module
from cometmq.errors import ConnectError, NoRouteError
from cometmq.message import Message, MessageExt, MessageQueue
from cometmq.testing import LocalBroker

numbers = itertools.count(1)


@pytest.fixture
async def admin(broker: LocalBroker) -> AsyncIterator[Admin]:
    async with Admin(broker.namesrv) as admin:
        yield admin


async def filled(admin: Admin, broker: LocalBroker, count: int, queues: int = 4) -> str:
    """Create a topic with numbered messages, spread over its queues."""
    topic = f"newest{next(numbers)}"
    settings = TopicSettings(topic=topic, read_queue_nums=queues, write_queue_nums=queues)
    async for _ in admin.create_topic(settings, broker_addr=broker.broker_addr):
        pass
    for number in range(count):
        await admin.send(
            Message(topic, b"%d" % number), broker_name=broker.broker_name, queue_id=number % queues
        )
    return topic


def bodies(found: Newest) -> list[int]:
    return [int(bytes(each.body)) for each in found.messages]


async def all_pages(admin: Admin, topic: str, count: int, **more: int) -> list[Newest]:
    pages = [await admin.newest(ReadRange(topic=topic, count=count, **more))]  # type: ignore[arg-type]
    while (before_ms := pages[-1].before_ms) is not None:
        pages.append(await admin.newest(ReadRange(topic=topic, count=count, end_ms=before_ms)))
    return pages


async def test_queues_are_merged_and_pages_hold_each_message_once(admin: Admin, broker: LocalBroker) -> None:
    topic = await filled(admin, broker, 75)

    pages = await all_pages(admin, topic, 10)
    times = [each.store_timestamp_ms for page in pages for each in page.messages]

    assert pages[0].stored == 75
    assert times == sorted(times, reverse=True)
    assert sorted(number for page in pages for number in bodies(page)) == list(range(75))
    assert len(pages) > 3


async def test_messages_of_one_millisecond_stand_on_one_page(
    admin: Admin, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(admin, broker, 30, queues=1)
    decode = admin.client.brokers.pull

    async def same_time(*given: object, **more: object) -> object:
        found = await decode(*given, **more)  # type: ignore[arg-type]
        for each in found.messages:
            each.store_timestamp_ms = 1000 + each.queue_offset // 20
        return found

    monkeypatch.setattr(admin.client.brokers, "pull", same_time)

    found = await admin.newest(ReadRange(topic=topic, count=12))
    assert bodies(found) == [*range(29, -1, -1)]
    assert found.before_ms is None
    monkeypatch.setattr(module, "MAX_TIED_MESSAGES", 3)
    assert bodies(await admin.newest(ReadRange(topic=topic, count=12))) == [*range(29, 14, -1)]


async def test_a_span_of_time(admin: Admin, broker: LocalBroker) -> None:
    topic = await filled(admin, broker, 8, queues=2)
    await asyncio.sleep(0.005)
    middle = await admin.send(Message(topic, b"8"))
    stored = await admin.message_by_id(middle.offset_msg_id)
    await asyncio.sleep(0.005)
    await admin.send(Message(topic, b"9"))
    at_ms = stored.store_timestamp_ms

    assert bodies(await admin.newest(ReadRange(topic=topic, begin_ms=at_ms))) == [9, 8]
    assert sorted(bodies(await admin.newest(ReadRange(topic=topic, end_ms=at_ms)))) == list(range(8))
    only = await admin.newest(ReadRange(topic=topic, begin_ms=at_ms, end_ms=at_ms + 1))
    assert (bodies(only), only.before_ms) == ([8], None)
    assert only.stored in (1, 2)
    none = await admin.newest(ReadRange(topic=topic, begin_ms=at_ms + 10_000_000))
    assert (none.messages, none.before_ms) == ([], None)


async def test_what_is_read_is_bounded(
    admin: Admin, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(admin, broker, 0, queues=1)
    for _ in range(6):
        await admin.send(Message(topic, bytes(3000)))

    found = await admin.newest(ReadRange(topic=topic))
    assert [len(each.body) for each in found.messages] == [module.MAX_PREVIEW_BYTES] * 6
    assert found.messages[0].store_size > 0

    monkeypatch.setattr(module, "MAX_READ_BYTES", 1)
    pages = await all_pages(admin, topic, 500)
    assert len(pages[0].messages) < 6 or len({each.store_timestamp_ms for each in found.messages}) == 1
    assert sum(len(page.messages) for page in pages) == 6


async def test_with_little_to_read_no_queue_is_left_out(
    admin: Admin, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(admin, broker, 40, queues=8)
    monkeypatch.setattr(module, "MAX_READ_BYTES", 1)

    pages = await all_pages(admin, topic, 500)

    assert sorted(number for page in pages for number in bodies(page)) == list(range(40))
    times = [each.store_timestamp_ms for page in pages for each in page.messages]
    assert times == sorted(times, reverse=True)


async def test_a_time_that_a_broker_names_only_nearly(
    admin: Admin, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(admin, broker, 40, queues=1)
    everything: list[MessageExt] = (await admin.newest(ReadRange(topic=topic))).messages
    end_ms = everything[5].store_timestamp_ms

    async def older(*_given: object) -> int:
        return 2

    monkeypatch.setattr(admin.client.brokers, "offset_by_time", older)
    found = await admin.newest(ReadRange(topic=topic, end_ms=end_ms))
    assert bodies(found) == [int(bytes(each.body)) for each in everything if each.store_timestamp_ms < end_ms]


async def test_names_nobody_knows(admin: Admin, broker: LocalBroker) -> None:
    topic = await filled(admin, broker, 1)
    with pytest.raises(NoRouteError):
        await admin.newest(ReadRange(topic="no-such-topic"))
    with pytest.raises(UnknownNameError):
        await admin.newest(ReadRange(topic=topic, broker_name="nobody"))


async def test_a_broker_that_does_not_answer_leaves_those_of_the_others(
    admin: Admin, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await filled(admin, broker, 8)
    own_addrs, own_queues = module.broker_addrs, module.queues_of
    monkeypatch.setattr(module, "broker_addrs", lambda route: {**own_addrs(route), "gone": "127.0.0.1:1"})
    gone = [MessageQueue(topic, "gone", queue_id) for queue_id in range(2)]
    monkeypatch.setattr(module, "queues_of", lambda route, wanted: [*gone, *own_queues(route, wanted)])

    found = await admin.newest(ReadRange(topic=topic, count=100))
    assert (sorted(bodies(found)), list(found.missing)) == (list(range(8)), ["gone"])

    monkeypatch.setattr(module, "queues_of", lambda _route, _wanted: gone)
    with pytest.raises(ConnectError):
        await admin.newest(ReadRange(topic=topic, count=100))
