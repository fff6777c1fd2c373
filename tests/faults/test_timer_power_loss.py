"""Power failures among messages with delivery times that are delivered, recalled and moved.

Whatever part of the records is stored, each message that was on the device is delivered once and not early.
COMETMQ_CRASH_IMAGES=60000 tries 1,200 images (60 by default), COMETMQ_CRASH_SEED=n tries different ones.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
from tests.faults.power_loss import try_images
from tests.kit.recording_disk import Image, RecordingDisk
from tests.kit.waiting import until

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.replies import SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.tables.durable import DurableTables, save_changes
from cometmq.broker.timers import delivered, timers
from cometmq.broker.timers.timers import TimerService
from cometmq.message import MessageExt
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.record.one import iter_records
from cometmq.remoting import Tick
from cometmq.store import WAITING, GetStatus, ManualClock, MessageStore, StoreConfig

IMAGES = int(os.environ.get("COMETMQ_CRASH_IMAGES", "3000")) // 50
PER_RUN = 10  # images of one run, before the next seed
HOST = b"\x7f\0\0\1\0\0\xc3\x50"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "CLOCK_CHECK_INTERVAL_MS", 1)


class World:
    """The timers of a broker without network connections.

    Attributes:
        promised: For each message on the device: the number of disk operations at that time, and its key.
        taken_back: The same for recalls.
        came: The log positions of delivered messages by key.
    """

    def __init__(self, disk: RecordingDisk, now_ms: int = 1_700_000_000_000) -> None:
        self.disk = disk
        self.clock = ManualClock(now_ms)
        self.promised: list[tuple[int, str]] = []
        self.taken_back: list[tuple[int, str]] = []
        self.came: dict[str, int] = {}
        self.due: dict[str, int] = {}
        self._unpromised: list[tuple[int, str, list[tuple[int, str]]]] = []

    async def open(self) -> None:
        config = BrokerConfig(
            broker_name="broker-a", broker_ip1="127.0.0.1", namesrv_addr="",
            store=StoreConfig(
                store_path_root_dir="/store", mapped_file_size_commit_log=8192, max_hash_slot_num=11,
                mapped_file_size_consume_queue=20 * 16, max_index_num=200, file_reserved_time=0,
                delete_when="25", delete_commit_log_files_interval=0,
            ),
        )  # fmt: skip
        self.store = store = MessageStore.open(config.store, self.disk, self.clock)
        tick = Tick()
        writer = Writer(
            store, SendReplies("r", True), Stats(0, 0), tick, lambda arrivals: self.service.arrived(arrivals)
        )
        store.dispatcher.on_visible = writer.visible
        tick.at_end(writer.end_tick)
        self.tables = DurableTables(config, self.clock, store, lambda: None)
        self.tables.load()
        self.timed = TimedSends(config=config, clock=self.clock, store=store, tables=self.tables)
        self.service = TimerService(
            clock=self.clock, store=store, tables=self.tables, timed=self.timed, writer=writer,
        )  # fmt: skip
        running = asyncio.all_tasks()
        self.service.start()
        store.retention.before_delete = self.service.move_on
        self._tasks = asyncio.all_tasks() - running
        self.tables.topics.ensure("Orders", 1)

    async def turn(self, seconds: float = 0.0) -> None:
        """Advance the time and run the work that is due."""
        self.clock.advance(seconds)
        await asyncio.sleep(0.004)
        service = self.service
        await until(lambda: not (service.follower.behind() or not service.pending.wait_ms(service.times())))
        flushed = self.store.flusher.flushed
        for each in [each for each in self._unpromised if each[0] <= flushed]:
            self._unpromised.remove(each)
            each[2].append((len(self.disk.history), each[1]))
        self.came |= {message.msg_id: message.physical_offset for message in self.messages()}

    async def kill(self) -> None:
        """Stop the broker as kill -9 does."""
        await self.tables.topics_file.saved()  # threads must not write after the kill
        await self.tables.timers_file.saved()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.store.crash()

    def append(self, key: str, ledger: list[tuple[int, str]], body: bytes, **properties: str) -> None:
        timed = self.timed.timed("Orders", 0, encode_properties({"UNIQ_KEY": key, **properties}))
        assert timed is not None
        stored = self.timed.append(timed, body, born_timestamp_ms=self.clock.time_ms(), born_host=HOST)
        self.service.writer.appended()
        self._unpromised.append((stored.physical_offset + stored.size, key, ledger))

    def send(self, chance: random.Random) -> None:
        key, delay_s = f"U{len(self.due)}", chance.choice((2, 10, chance.randrange(2, 40), 600))
        self.due[key] = self.clock.time_ms() + delay_s * 1_000
        name, value = ("TIMER_DELAY_SEC", delay_s), ("TIMER_DELIVER_MS", self.due[key])
        which, number = chance.choice((name, value))
        self.append(key, self.promised, chance.randbytes(chance.choice((10, 500))), **{which: str(number)})

    def take_back(self, chance: random.Random) -> None:
        keys = [key for key, due in self.due.items() if due > self.clock.time_ms() + 2_000]
        if keys:
            key = chance.choice(keys)
            self.append(
                key, self.taken_back, b"0", TIMER_DEL_UNIQKEY=key, TIMER_DELIVER_MS=str(self.due[key])
            )

    async def move(self) -> None:
        """Delete segments after the messages waiting in them have been moved."""
        self.store.retention.delete_now()
        await self.store.retention.log_cycle()

    async def save(self) -> None:
        save_changes(self.tables.timers, self.tables.timers_file)
        await self.tables.timers_file.saved()

    def messages(self) -> list[MessageExt]:
        """Return the messages that consumers can read."""
        found: list[MessageExt] = []
        offset = self.store.min_offset("Orders", 0)
        while True:
            got = self.store.get_messages("Orders", 0, offset, 32, reads=WAITING)
            if got.status is GetStatus.FOUND:
                found += iter_records(b"".join(got.buffers))
            if got.next_begin_offset <= offset:
                return found
            offset = got.next_begin_offset

    async def settle(self) -> None:
        """Advance the time until no message waits."""
        async with asyncio.timeout(60):
            while True:
                await self.turn(30)
                pending = self.service.pending
                if self.clock.now_ms > max(self.due.values(), default=0) + 60_000 and (
                    len(pending) == pending.recalls and not self.service.follower.behind()
                ):
                    return


async def work(seed: int) -> World:
    """Run the timers on a recording disk."""
    chance = random.Random(seed)
    world = World(RecordingDisk())
    await world.open()
    for _ in range(50):
        kind = chance.randrange(12)
        if kind <= 4:
            for _ in range(chance.randrange(1, 5)):
                world.send(chance)
            await world.turn()
        elif kind == 5:
            world.take_back(chance)
            await world.turn()
        elif kind <= 7:
            await world.turn(chance.randrange(12))
        elif kind == 8:
            world.store.flusher.flush_now()
            await world.turn()
        elif kind == 9:
            await world.save()
        elif kind == 10:
            await world.move()
            await world.turn()
        elif chance.random() < 0.5:
            await world.kill()
            await world.open()
            await world.turn()
    await world.kill()
    return world


async def try_image(before: World, at: int, image: Image, _chance: random.Random) -> None:
    """Let power fail after `at` operations and check the recovered timers."""
    world = World(RecordingDisk(image), before.clock.now_ms)
    world.due = before.due
    try:
        await world.open()
        await world.settle()
        seen = world.messages()
        times = Counter(message.msg_id for message in seen)
        early = [m.msg_id for m in seen if m.store_timestamp_ms < before.due[m.msg_id]]
        assert not early, f"early: {early}"
        gone = {key for key, position in before.came.items() if position < world.store.log.min_position}
        taken_back = {key for _, key in before.taken_back}
        certain = {key for when, key in before.promised if when <= at} - gone - taken_back
        wrong = {key: times[key] for key in times.keys() | certain if times[key] != 1}
        assert not wrong, f"times that messages came: {wrong}"
        never = {key for when, key in before.taken_back if when <= at} - before.came.keys()
        assert not never & times.keys(), f"taken back: {never & times.keys()}"
    finally:
        await world.kill()


@pytest.mark.slow("a start from each image of the disk")
@pytest.mark.timeout(0)
async def test_each_comes_once_whatever_arrived() -> None:
    await try_images(IMAGES, PER_RUN, work, try_image)


# -- planted bugs ----------------------------------------------------------------------------------


def forget_what_copies_name(patch: pytest.MonkeyPatch) -> None:
    async def wrong(*_: object) -> AsyncIterator[object]:
        return
        yield

    patch.setattr(delivered, "links", wrong)


def write_the_mark_before_the_log(patch: pytest.MonkeyPatch) -> None:
    async def wrong(self: DurableTables) -> None:
        del self

    patch.setattr(DurableTables, "log_flushed", wrong)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "plant", [forget_what_copies_name, write_the_mark_before_the_log], ids=lambda plant: plant.__name__
)
async def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await try_images(500, PER_RUN, work, try_image)
