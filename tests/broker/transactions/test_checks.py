"""Rounds of transaction checks: the producers asked, and the fate of half messages that are never ended."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time

import pytest
from tests.broker.transactions.conftest import (
    GIVEN_UP,
    HALF,
    MANUAL,
    OP,
    ROLLBACK,
    asked,
    bodies,
    check_round,
    end,
    prepare,
    stored,
)
from tests.broker.transactions.world import Place, World, step
from tests.kit.brokers import refused
from tests.kit.recording_disk import RecordingDisk
from tests.kit.waiting import until

from cometmq.broker.transactions import checks
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.ids import decode_offset_id
from cometmq.store import MessageStore
from cometmq.store.base.clock import Clock
from cometmq.store.base.refusal import Flag

GROUP = "CID_RMQ_SYS_TRANS"


@pytest.fixture
async def room(started):
    cluster, peer = await started(**MANUAL)
    await peer.heartbeat(group=None, producers=("PG",))
    return cluster, peer


@pytest.fixture
def cluster(room):
    return room[0]


@pytest.fixture
def peer(room):
    return room[1]


async def test_a_producer_is_asked_and_ends_the_copy(cluster, peer):
    place = await prepare(peer, b"half", "K", queue_id=2)
    await check_round(cluster)
    message, copy, header = await asked(peer)
    assert (message.topic, message.queue_id, message.body) == ("Orders", 2, b"half")
    assert (copy.offset, message.queue_offset, message.physical_offset) == (1, 1, copy.position)
    assert (header.msg_id, header.transaction_id) == ("K", "K")
    assert decode_offset_id(header.offset_msg_id).physical_offset == copy.position
    assert message.properties["TRANSACTION_CHECK_TIMES"] == "1"

    assert (await end(peer, copy, check=True)).code == 0
    (committed,) = await stored(peer, "Orders", 2)
    assert committed.prepared_transaction_offset == copy.position
    refused(await end(peer, place), 1, "has ended")
    assert await bodies(peer, OP) == [b"0", b"1"]


async def test_an_end_that_names_an_older_copy_ends_the_newest(cluster, peer):
    first = await prepare(peer)
    for _ in range(2):
        await check_round(cluster)
    _, second, _ = await asked(peer)
    assert (await end(peer, second)).code == 0
    refused(await end(peer, first), 1, "has ended")
    _, third, _ = await asked(peer)
    refused(await end(peer, third, check=True), 1, "has ended")
    assert await bodies(peer) == [b"half"]
    await check_round(cluster)
    assert len(await bodies(peer, HALF)) == 3


async def test_nobody_is_asked_about_what_has_ended(cluster, peer, monkeypatch):
    reads = []
    read = MessageStore.get_messages
    monkeypatch.setattr(
        MessageStore, "get_messages", lambda *place, **more: reads.append(place[1:3]) or read(*place, **more)
    )
    for number in range(100):
        place = await prepare(peer, b"%d" % number)
        if number % 10:
            await end(peer, place, ROLLBACK)
    reads.clear()
    await check_round(cluster)
    assert reads.count((HALF, 0)) == 3  # each read covers 32 offsets from an open one
    found = [(await asked(peer))[0].body for _ in range(10)]
    assert found == [b"%d" % number for number in range(0, 100, 10)]
    assert len(await bodies(peer, HALF)) == 110


async def test_a_young_message_is_left_alone(started):
    cluster, peer = await started(**{**MANUAL, "transactionTimeOut": "60000"})
    await prepare(peer)
    await check_round(cluster)
    assert await bodies(peer, HALF) == [b"half"]


IMMUNE = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "100"}


async def test_who_asks_for_more_time_is_not_asked_and_stays_where_it_is(cluster, peer):
    bodies_ = [b"long %d" % number for number in range(40)]  # more than one batch of a round
    places = [await prepare(peer, body, properties=IMMUNE) for body in bodies_]
    await prepare(peer, b"usual")
    for _ in range(2):
        await check_round(cluster)
    assert [(await asked(peer))[0].body for _ in range(2)] == [b"usual"] * 2
    assert await bodies(peer, HALF) == [*bodies_, *[b"usual"] * 3]
    assert cluster.broker.parts.transactions.ledger.head == 0
    assert (await end(peer, places[0])).code == 0
    await check_round(cluster)
    assert cluster.broker.parts.transactions.ledger.head == 1
    assert await bodies(peer) == [b"long 0"]


async def test_who_asks_for_more_time_is_put_back_before_its_log_file_gets_old(started):
    cluster, peer = await started(**MANUAL, mappedFileSizeCommitLog="65536")
    await prepare(peer, b"long", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "9" * 18})
    for _ in range(9):
        await peer.send(body=b"x" * 8000)
    for _ in range(2):
        await check_round(cluster)
    copy = (await stored(peer, HALF))[-1]
    assert await bodies(peer, HALF) == [b"long"] * 2
    assert copy.properties["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
    assert "TRANSACTION_CHECK_TIMES" not in copy.properties


async def test_many_that_ask_for_more_time_do_not_push_each_other_back(started):
    cluster, peer = await started(**MANUAL, mappedFileSizeCommitLog="65536")
    for number in range(40):
        await prepare(peer, b"x" * 4000, f"K{number}", properties=IMMUNE)
    for rounds in range(1, 5):
        await check_round(cluster)
        assert len(await bodies(peer, HALF)) == 40 + 2 * rounds  # 1/8 of a log file per round


async def test_a_round_that_had_no_time_left_is_gone_on_with(cluster, peer, monkeypatch):
    for number in range(40):
        await prepare(peer, b"long %d" % number, properties=IMMUNE)
    await prepare(peer, b"usual")
    monkeypatch.setattr(checks, "MAX_CYCLE_S", 0.001)
    question = asyncio.create_task(asked(peer))
    while not question.done():
        await check_round(cluster)
    assert (await question)[0].body == b"usual"


async def test_after_the_last_check_it_is_given_up(started):
    cluster, peer = await started(**MANUAL, transactionCheckMax="2")
    place = await prepare(peer, flag=3)
    for _ in range(3):
        await check_round(cluster)
    (message,) = await stored(peer, GIVEN_UP)
    assert (message.body, message.flag, message.queue_id) == (b"half", 3, 0)
    assert (message.properties["TRANSACTION_CHECK_TIMES"], message.properties["REAL_TOPIC"]) == (
        "2",
        "Orders",
    )
    assert cluster.broker.parts.tables.topics.get(GIVEN_UP).write_queue_nums == 1
    refused(await end(peer, place), 1, "was given up")
    assert await bodies(peer) == []
    await check_round(cluster)
    assert len(await stored(peer, GIVEN_UP)) == 1


async def test_what_is_older_than_files_are_kept_is_not_given_up_before_its_producer_could_come(started):
    cluster, peer = await started(**MANUAL, fileReservedTime="1", transactionCheckMax="100")
    old = int(time.time() * 1000) - 3_700_000
    await prepare(peer, born_timestamp=old)
    for _ in range(15):
        await check_round(cluster)
    assert cluster.broker.parts.tables.topics.get(GIVEN_UP) is None
    await check_round(cluster)
    assert await bodies(peer, GIVEN_UP) == [b"half"]


async def test_a_clock_that_jumps_ahead_for_a_while_gives_nothing_up(cluster, peer, monkeypatch):
    await prepare(peer)
    await check_round(cluster)
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "time_ms", lambda _self: time.time_ns() // 1_000_000 + 400 * 86_400_000)
        await check_round(cluster)
    assert await bodies(peer, GIVEN_UP) == []
    _, copy, _ = await asked(peer)
    _, copy, _ = await asked(peer)
    assert (await end(peer, copy, check=True)).code == 0


async def test_producers_of_a_group_take_turns(cluster, peer):
    other = cluster.peer()
    await other.heartbeat("c2", group=None, producers=("PG",))
    for number in range(4):
        await prepare(peer, b"%d" % number)
    await check_round(cluster)
    for each in (peer, other):
        assert len({(await asked(each))[0].body for _ in range(2)}) == 2


async def test_without_a_producer_it_waits_for_the_next_round(cluster, peer, caplog):
    await prepare(peer, group="Gone")
    await check_round(cluster)
    assert "no producer of group Gone is connected" in caplog.text
    await peer.heartbeat(group=None, producers=("Gone",))
    await check_round(cluster)
    message, _, _ = await asked(peer)
    assert message.properties["TRANSACTION_CHECK_TIMES"] == "2"


async def test_rounds_come_by_themselves_and_the_interval_can_be_changed(started):
    cluster, peer = await started(transactionCheckInterval="20", transactionTimeOut="0")
    await peer.heartbeat(group=None, producers=("PG",))
    await prepare(peer)
    _, copy, _ = await asked(peer)
    while (await end(peer, copy, check=True)).code:
        _, copy, _ = await asked(peer)
    await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, b"transactionCheckInterval=100000000\n")
    assert cluster.broker.config.transaction_check_interval == 100_000_000
    assert await bodies(peer) == [b"half"]


async def test_how_far_the_head_is_and_which_ops_are_done_is_kept_as_apache_keeps_it(cluster, peer):
    for number in range(3):
        place = await prepare(peer, b"%d" % number)
        await end(peer, place)
    await prepare(peer, b"open")
    offsets = cluster.broker.parts.tables.offsets

    def kept():
        return offsets.query(GROUP, HALF, 0), offsets.query(GROUP, OP, 0)

    await check_round(cluster)
    assert kept() == (4, 3)
    await check_round(cluster)
    assert kept() == (5, 4)
    await cluster.restart()
    offsets = cluster.broker.parts.tables.offsets
    assert kept() == (5, 4)


async def test_a_copy_that_finds_no_room_for_its_properties_is_given_up(cluster, peer):
    await prepare(peer, properties={"long": "x" * 32_660})
    await check_round(cluster)
    assert await bodies(peer, GIVEN_UP) == [b"half"]
    assert await bodies(peer, HALF) == [b"half"]


async def test_a_damaged_half_message_is_not_stored_again(cluster, peer, caplog):
    await prepare(peer, b"rotting body")
    await prepare(peer, b"sound")
    buffer = cluster.broker.parts.store.log.buffer
    buffer[buffer.index(b"rotting body")] ^= 1
    await check_round(cluster)
    assert [m.body for m in (await stored(peer, HALF))[2:]] == [b"sound"]
    assert "is damaged at log position" in caplog.text
    assert await bodies(peer, OP) == [b"0", b"1"]


async def test_a_store_that_refuses_is_asked_again_in_the_next_round(cluster, peer, caplog):
    await prepare(peer)
    flags = cluster.broker.parts.store.flags
    flags.raise_flag(Flag.NOT_WRITEABLE, "the disk is gone")
    await check_round(cluster)
    flags.clear(Flag.NOT_WRITEABLE)
    assert "trying again later" in caplog.text
    await check_round(cluster)
    assert len(await bodies(peer, HALF)) == 2


async def test_one_that_the_device_cannot_read_is_skipped_and_stays_open(cluster, peer, monkeypatch, caplog):
    for number in range(8):
        await prepare(peer, b"%d" % number)
    parts = cluster.broker.parts
    real = parts.store.get_messages

    def read(topic, queue_id, offset, most, **more):
        if topic == HALF and offset <= 2 < offset + most:
            raise OSError(errno.EIO, "bad sector")
        return real(topic, queue_id, offset, most, **more)

    with monkeypatch.context() as patch:
        patch.setattr(parts.store, "get_messages", read)
        await check_round(cluster)
    assert sorted([(await asked(peer))[0].body for _ in range(7)]) == [b"%d" % n for n in range(8) if n != 2]
    assert caplog.text.count("could not check half message 2") == 1
    assert parts.transactions.ledger.head == 2
    await check_round(cluster)
    assert (await asked(peer))[0].body == b"2"


async def test_an_end_between_the_reading_and_the_copying_counts(cluster, peer, monkeypatch):
    place = await prepare(peer)
    checks = cluster.broker.parts.transactions.checks
    real = checks.inherited.is_settled

    async def slow(half):
        await end(peer, place)
        return await real(half)

    monkeypatch.setattr(checks.inherited, "is_settled", slow)
    await check_round(cluster)
    assert await bodies(peer, HALF) == [b"half"]
    assert await bodies(peer) == [b"half"]


async def test_half_messages_that_retention_took_are_passed_over(cluster, peer):
    for number in range(3):
        await prepare(peer, b"%d" % number)
    queue = cluster.broker.parts.store.queues.find_queue(HALF, 0)
    queue.min_offset = 2
    await check_round(cluster)
    assert (await asked(peer))[0].body == b"2"
    await until(lambda: cluster.broker.parts.transactions.ledger.head == 3)


# -- Anything may happen in any order, and a kill in between: every transaction ends once, as it should


RUNS = int(os.environ.get("COMETMQ_TRANSACTION_RUNS", "30"))
FIRST = int(os.environ.get("COMETMQ_TRANSACTION_SEED", "1"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
async def test_every_transaction_ends_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PAUSE_S", 0)
    chance = random.Random(seed)
    world = World(RecordingDisk())
    await world.open()
    known: list[Place] = []
    written: set[str] = set()
    for _ in range(120):
        await step(world, chance, known, kill=True)
        written |= {message.msg_id for message in world.messages("RMQ_SYS_TRANS_HALF_TOPIC")}
    await world.turn()
    written |= {message.msg_id for message in world.messages("RMQ_SYS_TRANS_HALF_TOPIC")}
    await world.settle()
    world.check(certain=written)
    await world.kill()
    await world.open()
    await world.settle()
    world.check(certain=written)
    await world.kill()
