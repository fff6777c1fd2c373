"""The transactions of a broker without network connections, and the checks of their final state.

The disk records every operation, and the producers have decided how each transaction will end.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import NamedTuple

from tests.kit.recording_disk import RecordingDisk

from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.replies import SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.groups.clients import ProducerTable
from cometmq.broker.send.dedup import Deduplication
from cometmq.broker.send.stored_form import half_properties
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.transactions.service import TransactionService
from cometmq.errors import CommandError
from cometmq.message import MessageExt
from cometmq.protocol.codes import TRANS_HALF_TOPIC, RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.record.one import decode_record, iter_records
from cometmq.remoting import Tick
from cometmq.store import WAITING, GetStatus, ManualClock, MessageStore, StoreConfig

COMMIT, ROLLBACK = 8, 12
GROUP = "PG"
HOST = b"\x7f\0\0\1\0\0\xc3\x50"


class Place(NamedTuple):
    key: str
    offset: int
    position: int


class Producer:
    """A stand-in for the connection of a producer that is checked or ends a transaction."""

    closed = False
    peer = "a producer"

    def __init__(self) -> None:
        self.asked: list[Place] = []

    def oneway(self, frame: Frame) -> None:
        header = frame.header(CheckTransactionStateRequestHeader)
        assert header.msg_id == decode_record(frame.body, check_crc=True).msg_id
        self.asked.append(Place(header.msg_id, header.tran_state_table_offset, header.commit_log_offset))

    def respond(self, _request: Frame, code: int, *, remark: str | None = None) -> None:
        assert (code, remark) == (0, None)


class World:
    """One broker's transactions.

    Attributes:
        ends: How each transaction will end, by key.
        promised: For each half message on the device: the number of disk operations at that time, and its
            key.
    """

    def __init__(self, disk: RecordingDisk, *, sync: bool = False) -> None:
        self.disk = disk
        self.clock = ManualClock()
        self.sync = sync
        self.ends: dict[str, int] = {}
        self.promised: list[tuple[int, str]] = []
        self._unpromised: list[tuple[int, str]] = []
        self._number = 0

    async def open(self) -> None:
        config = BrokerConfig(
            broker_name="broker-a", broker_ip1="127.0.0.1", namesrv_addr="", transaction_time_out=0,
            transaction_check_max=1000, transaction_check_interval=100_000_000,
            store=StoreConfig(
                store_path_root_dir="/store", mapped_file_size_commit_log=16384,
                mapped_file_size_consume_queue=20 * 16, max_hash_slot_num=11, max_index_num=200,
                flush_disk_type="SYNC_FLUSH" if self.sync else "ASYNC_FLUSH",
            ),
        )  # fmt: skip
        self.store = store = MessageStore.open(config.store, self.disk, self.clock)
        self.producer = Producer()
        tick = Tick()
        stats = Stats(0, 0)
        writer = Writer(store, SendReplies("r", True), stats, tick, lambda _: None)
        store.dispatcher.on_visible = writer.visible
        tick.at_end(writer.end_tick)
        self.tables = DurableTables(config, self.clock, store, lambda: None)
        producers = ProducerTable()
        producers.join(GROUP, self.producer, ("c", "JAVA", 407), 0)
        self.service = TransactionService(
            config=config, clock=self.clock, store=store, tables=self.tables, producers=producers,
            writer=writer, address=BrokerAddress(config, "127.0.0.1", 10911),
            dedup=Deduplication(
                config, self.clock, store, self.tables.topics, writer,
                TimedSends(config, self.clock, store, self.tables),
            ),
        )  # fmt: skip
        self.tables.load()
        self.service.load()
        self.service.fill()
        await self.turn()

    async def turn(self) -> None:
        """Run one iteration of the event loop, which ends the tick."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.clock.advance(0.01)
        flushed = self.store.flusher.flushed
        for promise in [each for each in self._unpromised if each[0] <= flushed]:
            self._unpromised.remove(promise)
            self.promised.append((len(self.disk.history), promise[1]))

    async def kill(self) -> None:
        """Stop the broker as kill -9 does: data that was not written is lost."""
        await self.tables.topics_file.saved()  # a thread must not write after the kill
        self._unpromised = [each for each in self._unpromised if each[0] <= self.store.log.end]
        self.store.crash()

    # -- what happens

    def prepare(self, end: int, body: bytes, name: str = "") -> Place:
        self._number += 1
        key = f"{name}{self._number}"
        self.ends[key] = end
        properties = encode_properties({"TRAN_MSG": "true", "PGROUP": GROUP, "UNIQ_KEY": key})
        stored = self.store.appender.append(
            TRANS_HALF_TOPIC, 0, body, half_properties("Orders", 0, properties),
            born_timestamp_ms=self.clock.time_ms(), born_host=HOST,
        )  # fmt: skip
        self.service.writer.appended()
        self._unpromised.append((stored.physical_offset + stored.size, key))
        return Place(key, stored.queue_offset, stored.physical_offset)

    async def end(self, place: Place, *, check: bool = False) -> bool:
        """Let the producer end a transaction; return False if the broker refuses."""
        header = EndTransactionRequestHeader(
            producer_group=GROUP, tran_state_table_offset=place.offset, commit_log_offset=place.position,
            commit_or_rollback=self.ends[place.key], from_transaction_check=check, msg_id=place.key,
        )  # fmt: skip
        frame = Frame.request(RequestCode.END_TRANSACTION, header)
        try:
            later = self.service.ends.end_transaction(self.producer, frame)  # type: ignore[arg-type]
            if later is not None:
                assert not isinstance(later, Frame)
                await later
        except CommandError:
            return False
        return True

    async def other(self, chance: random.Random) -> None:
        """Store a message that does not belong to a transaction."""
        self.store.appender.append(
            "Other", 0, chance.randbytes(chance.choice((10, 400))), b"",
            born_timestamp_ms=1, born_host=HOST,
        )  # fmt: skip
        self.service.writer.appended()

    async def round(self) -> None:
        await asyncio.gather(self.service.checks.round(), self.turn())

    async def answer(self, chance: random.Random | None = None) -> None:
        """Let producers respond to the checks they received: to all, or with `chance` to random ones."""
        asked, self.producer.asked = self.producer.asked, []
        for place in asked:
            if chance is None or chance.random() < 0.7:
                await self.end(place, check=True)
        await self.turn()

    async def save(self) -> None:
        """Write consumer offsets to their file."""
        await self.tables.offsets_file.save_now()

    # -- in the end

    async def settle(self) -> None:
        """Run checks until no transaction is open."""
        for _ in range(10):
            await self.round()
            await self.answer()
            ledger = self.service.ledger
            if ledger.next_open(ledger.head) >= self.store.max_offset(TRANS_HALF_TOPIC, 0):
                return
        raise AssertionError(f"open after ten rounds: {ledger.next_open(ledger.head)}")

    def messages(self, topic: str = "Orders") -> list[MessageExt]:
        """Return the messages that consumers of a topic can read."""
        found: list[MessageExt] = []
        offset = 0
        while True:
            got = self.store.get_messages(topic, 0, offset, 32, reads=WAITING)
            if got.status is GetStatus.FOUND:
                found += iter_records(b"".join(got.buffers))
            if got.next_begin_offset <= offset:
                return found
            offset = got.next_begin_offset

    def check(self, certain: set[str]) -> None:
        """Check that every transaction ended exactly once, as its producer had decided.

        The half message of a transaction not in `certain` may be lost; its transaction then has no effect.
        """
        seen = Counter(message.msg_id for message in self.messages())
        wrong = {
            key: seen[key]
            for key, end in self.ends.items()
            if seen[key] != (end == COMMIT) and not (seen[key] == 0 and key not in certain)
        }
        assert not wrong, f"times that messages are seen: {wrong}"
        assert self.messages("TRANS_CHECK_MAX_TIME_TOPIC") == []
        assert all(message.prepared_transaction_offset >= 0 for message in self.messages())


async def step(world: World, chance: random.Random, known: list[Place], *, kill: bool) -> None:
    """Run one random event. `known` holds the half messages whose senders have received their positions."""
    kind = chance.randrange(14)
    if kind <= 3:
        for _ in range(chance.choice((1, 1, 3))):
            end = chance.choice((COMMIT, COMMIT, ROLLBACK))
            known.append(world.prepare(end, chance.randbytes(chance.choice((10, 100, 700)))))
        if chance.random() < 0.8:
            await world.turn()
    elif kind <= 7 and known:
        for _ in range(chance.choice((1, 2, 4))):
            await world.end(chance.choice(known[-12:]))  # may end a transaction twice
        if chance.random() < 0.7:
            await world.turn()
    elif kind == 8:
        await world.turn()
        await world.round()
    elif kind == 9:
        await world.answer(chance)
    elif kind == 10:
        await world.other(chance)
        await world.turn()
    elif kind == 11:
        await world.turn()
        world.store.flusher.flush_now()
        await world.turn()
    elif kind == 12:
        await world.turn()
        await world.save()
    elif kill:
        if chance.random() < 0.5:
            await world.turn()  # otherwise the last tick would never be written
        await world.kill()
        await world.open()
