"""Power failures among messages that are popped, acknowledged and given back.

Whatever part of the records is stored, each message that was on the device and not acked is delivered, and
none before the last durable offset of its group. COMETMQ_CRASH_IMAGES=60000 tries 1,200 images (60 by
default), COMETMQ_CRASH_SEED=n tries different ones.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.faults.power_loss import try_images
from tests.kit.recording_disk import Image, RecordingDisk

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.replies import SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.filters.sql_filters import SqlFilters
from cometmq.broker.pop.leases import LeasedQueue
from cometmq.broker.pop.pops import PopRequest
from cometmq.broker.pop.retries import Retries
from cometmq.broker.pop.revive import ReviveLog
from cometmq.broker.pop.service import PopService
from cometmq.broker.pull.long_poll import LongPoll
from cometmq.broker.rates.rate_limits import RateLimits
from cometmq.broker.tables.durable import DurableTables
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.record.one import iter_records
from cometmq.remoting import Tick
from cometmq.store import ManualClock, MessageStore, StoreConfig

IMAGES = int(os.environ.get("COMETMQ_CRASH_IMAGES", "3000")) // 50
PER_RUN = 10  # the number of images that are taken from the run of one seed
HOST = b"\x7f\0\0\1\0\0\xc3\x50"
QUEUES = 2


class Popped(NamedTuple):
    """A delivered message with its receipt handle."""

    body: str
    key: tuple[str, str, int]
    offset: int
    pop_ms: int


class Member:
    """A stand-in for the connection of a pop consumer."""

    closed = False

    def hold(self) -> None: ...

    def release(self) -> None: ...


class World:
    """The pops of a broker without network connections.

    Attributes:
        promised: For each message on the device: the number of disk operations at that time, and its body.
        acked: The same for acknowledged messages.
        floors: The same for the group's offsets by queue.
    """

    def __init__(self, disk: RecordingDisk, now_ms: int = 1_700_000_000_000) -> None:
        self.disk = disk
        self.clock = ManualClock(now_ms)
        self.sent = 0
        self.promised: list[tuple[int, str]] = []
        self.acked: list[tuple[int, str]] = []
        self.floors: list[tuple[int, dict[int, int]]] = []
        self.leased: list[Popped] = []
        self._unpromised: list[tuple[int, str]] = []

    @property
    def now(self) -> int:
        return len(self.disk.history)

    async def open(self) -> None:
        config = BrokerConfig(
            broker_name="broker-a", broker_ip1="127.0.0.1", namesrv_addr="",
            store=StoreConfig(
                store_path_root_dir="/store", mapped_file_size_commit_log=8192, max_hash_slot_num=11,
                mapped_file_size_consume_queue=20 * 16, max_index_num=200,
            ),
        )  # fmt: skip
        self.store = store = MessageStore.open(config.store, self.disk, self.clock)
        tick, stats = Tick(), Stats(0, 0)
        writer = Writer(store, SendReplies("r", True), stats, tick, lambda _arrivals: None)
        store.dispatcher.on_visible = writer.visible
        tick.at_end(writer.end_tick)
        self.tables = DurableTables(config, self.clock, store, lambda: None)
        self.pops = PopService(
            config=config, clock=self.clock, store=store, tables=self.tables, stats=stats, tick=tick,
            writer=writer, filters=SqlFilters(config), arrivals=LongPoll(),
            rates=RateLimits(config, self.tables.groups.table, dict, lambda: 0),
        )  # fmt: skip
        self.tables.load()
        self.pops.load()
        self.tables.adopt()
        self.tables.topics.ensure("Orders", QUEUES)
        self.tables.groups.put(SubscriptionGroupConfig("G", retry_max_times=1000))
        self.pops.start()
        await self.turn()

    async def turn(self, seconds: float = 0.0) -> None:
        """Advance the time and run the work that is due."""
        self.clock.advance(seconds)
        self.pops.pops.expiry._expire(0)  # noqa: SLF001 - its timer counts real time
        self.pops.revive._check()  # noqa: SLF001
        for _ in range(3):
            await asyncio.sleep(0.001)
        flushed = self.store.flusher.flushed
        for each in [each for each in self._unpromised if each[0] <= flushed]:
            self._unpromised.remove(each)
            self.promised.append((self.now, each[1]))

    async def kill(self) -> None:
        """Stop the broker as kill -9 does."""
        for file in (self.tables.topics_file, self.tables.groups_file, self.tables.offsets_file):
            await file.saved()  # threads must not write after the kill
        await self.pops.lease_file.saved()
        self.pops.pops.expiry.stop()
        self.pops._saves.cancel()  # noqa: SLF001
        self.pops._sweeps.cancel()  # noqa: SLF001
        await self.pops.revive.stop(write=False)
        self.store.crash()

    async def stop(self) -> None:
        """Stop the broker cleanly."""
        await self.pops.stop()
        await self.pops.writer.drain(1)
        await self.pops.save()
        await self.tables.stop()
        await self.store.stop()

    def send(self, chance: random.Random) -> None:
        self.sent += 1
        body = f"m{self.sent}"
        stored = self.store.appender.append(
            "Orders", chance.randrange(QUEUES), body.encode(), b"",
            born_timestamp_ms=self.clock.time_ms(), born_host=HOST,
        )  # fmt: skip
        self.pops.writer.appended()
        self._unpromised.append((stored.physical_offset + stored.size, body))

    async def pop(self, count: int, invisible_ms: int) -> list[Popped]:
        answered: asyncio.Future[PopRequest] = asyncio.get_running_loop().create_future()
        self.pops.pops.serve(
            PopRequest(
                owner=Member(), opaque=0, group="G", topic="Orders", queue_id=-1, count=count,
                invisible_ms=invisible_ms, from_end=False,
                answer=lambda request, _code: answered.set_result(request),
            )
        )  # fmt: skip
        request = await answered
        found = []
        for each in request.found:
            messages = iter_records(b"".join(map(bytes, each.buffers)))
            key = ("G", each.kind.topic("Orders", "G"), each.queue_id)
            for message, offset in zip(messages, each.offsets, strict=True):
                found.append(Popped(message.body.decode(), key, offset, request.pop_ms))
        return found

    def ack(self, popped: Popped) -> None:
        if self.pops.pops.ack(popped.key, popped.offset, popped.pop_ms):
            self.acked.append((self.now, popped.body))

    async def save(self) -> None:
        """Write the offsets, and the leases before them."""
        floors = self.tables.offsets.queues("G", "Orders")
        self.pops._save_leases()  # noqa: SLF001
        await self.tables.offsets_file.save_now()
        self.floors.append((self.now, floors))


async def work(seed: int) -> World:
    """Pop on a recording disk."""
    chance = random.Random(seed)
    world = World(RecordingDisk())
    await world.open()
    for _ in range(60):
        kind = chance.randrange(14)
        if kind <= 3:
            for _ in range(chance.randrange(1, 5)):
                world.send(chance)
        elif kind <= 6:
            world.leased += await world.pop(chance.randrange(1, 6), chance.choice((500, 2_000, 60_000)))
        elif kind <= 9 and world.leased:
            for _ in range(chance.randrange(1, 4)):
                world.ack(chance.choice(world.leased))
        elif kind == 10 and world.leased:
            key, offset, pop_ms = chance.choice(world.leased)[1:]
            world.pops.pops.renew(key, offset, pop_ms, chance.choice((0, 1_000)))
        elif kind == 11:
            world.store.flusher.flush_now()
        elif kind == 12:
            await world.save()
        elif chance.random() < 0.6:
            await (world.kill() if chance.random() < 0.5 else world.stop())
            await world.open()
        await world.turn(chance.choice((0.0, 0.3, 3.0)))
    await world.kill()
    return world


async def try_image(before: World, at: int, image: Image, _chance: random.Random) -> None:
    """Let power fail after `at` operations, and consume what the recovered broker delivers."""
    world = World(RecordingDisk(image), before.clock.now_ms)
    await world.open()
    try:
        came: list[Popped] = []
        for _ in range(8):
            while found := await world.pop(32, 60_000):
                came += found
                for each in found:
                    world.ack(each)
                await world.turn()
            await world.turn(30)
        acked = {body for when, body in before.acked if when <= at}
        lost = {body for when, body in before.promised if when <= at} - acked - {each.body for each in came}
        assert not lost, f"lost: {lost}"
        floors = next((floors for when, floors in reversed(before.floors) if when <= at), {})
        again = [
            each for each in came if each.key[1] == "Orders" and each.offset < floors.get(each.key[2], 0)
        ]
        assert not again, f"delivered before the durable offset: {again}"
    finally:
        await world.kill()


@pytest.mark.slow("a start from each image of the disk")
@pytest.mark.representative
@pytest.mark.timeout(0)
async def test_no_message_is_lost_that_is_not_acked() -> None:
    await try_images(IMAGES, PER_RUN, work, try_image)


# -- planted bugs ----------------------------------------------------------------------------------


def pass_leased_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeasedQueue, "first_open", lambda self: self.head)


def forget_expired_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retries, "copy", lambda _self, _overdue, done: done(True))


def stop_without_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReviveLog, "_write_checkpoint", lambda *_given: None)


def write_offsets_before_the_log(patch: pytest.MonkeyPatch) -> None:
    async def wrong(*_given: Any) -> None:
        """Do not wait for the log."""

    patch.setattr(DurableTables, "log_flushed", wrong)


@pytest.mark.thorough("a check of the test itself")
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "plant",
    [pass_leased_messages, forget_expired_messages, stop_without_checkpoints, write_offsets_before_the_log],
    ids=lambda plant: plant.__name__,
)
async def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await try_images(600, PER_RUN, work, try_image)
