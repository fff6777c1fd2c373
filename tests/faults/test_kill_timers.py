"""kill -9 among messages with delivery times and delay levels.

Each acknowledged message is delivered once and not early, and recalled messages are never delivered.
COMETMQ_KILL_CYCLES sets the number of cycles (8 here at most), COMETMQ_KILL_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.faults.test_kill import CYCLES, QUEUES, SEED, TOPIC, BrokerProcess, header, read_queue
from tests.long_form import LONG, long_form

from cometmq.errors import RemotingError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import RecallMessageRequestHeader
from cometmq.remoting import RemotingClient

SENDERS = 6


class Ledger:
    """Delivery times (ms) of the sent messages by body, and the acknowledged and recalled bodies."""

    def __init__(self) -> None:
        self.sent: dict[bytes, int] = {}
        self.acknowledged: set[bytes] = set()
        self.recalled: set[bytes] = set()
        self.perhaps_recalled: set[bytes] = set()  # recalls without a response, because the broker was killed


async def kill_later(broker: BrokerProcess, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await asyncio.to_thread(broker.kill)


async def sender(name: str, addr: str, client: RemotingClient, ledger: Ledger, dice: random.Random) -> None:
    with contextlib.suppress(RemotingError):
        for number in range(1_000_000):
            key = f"{name}-{number}"
            body, now_ms = key.encode(), time.time_ns() // 1_000_000
            delay_ms = dice.choice((1, 300, 1_500, 4_000, dice.randrange(8_000)))
            ledger.sent[body] = now_ms + delay_ms
            when = dice.choice(
                (f"TIMER_DELAY_MS\x01{delay_ms}", f"TIMER_DELIVER_MS\x01{now_ms + delay_ms}", "DELAY\x011")
            )
            request = header(dice.randrange(QUEUES), f"UNIQ_KEY\x01{key}\x02{when}")
            answer = await client.call(addr, Frame.request(RequestCode.SEND_MESSAGE_V2, request, body), 20)
            assert answer.code == 0, answer.remark
            ledger.acknowledged.add(body)
            handle = (answer.ext or {}).get("recallHandle")
            if handle and dice.random() < 0.2:
                ledger.perhaps_recalled.add(body)
                recall = RecallMessageRequestHeader(topic=TOPIC, recall_handle=handle)
                answer = await client.call(addr, Frame.request(RequestCode.RECALL_MESSAGE, recall), 20)
                ledger.perhaps_recalled.discard(body)
                if answer.code == 0:  # otherwise the message was due
                    ledger.recalled.add(body)


async def came(addr: str) -> Counter[bytes]:
    """Count the deliveries of each message, and check that none was early."""
    found: Counter[bytes] = Counter()
    client = RemotingClient()
    try:
        for queue_id in range(QUEUES):
            for message in await read_queue(client, addr, queue_id, 0):
                found[message.body] += 1
                due = message.properties.get("TIMER_DELIVER_MS")
                assert due is None or message.store_timestamp_ms >= int(due)
    finally:
        await client.close()
    return found


@pytest.mark.slow("kills brokers while messages wait for their time")
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"] if LONG else ["ASYNC_FLUSH"])
async def test_each_comes_once_through_kills(tmp_path: Path, flush: str) -> None:
    print(f"COMETMQ_KILL_SEED={SEED}")
    dice = random.Random(f"{SEED} {flush}")
    broker, ledger = BrokerProcess(tmp_path, flushDiskType=flush), Ledger()
    try:
        for cycle in range(min(CYCLES, 16) // 2):
            broker.spawn()
            await broker.ready()
            clients = [RemotingClient() for _ in range(2)]
            senders = [
                sender(
                    f"{cycle}-{number}",
                    broker.addr,
                    clients[number % 2],
                    ledger,
                    random.Random(dice.random()),
                )
                for number in range(SENDERS)
            ]
            try:
                await asyncio.gather(kill_later(broker, dice.uniform(0.1, 2.0)), *senders)
            finally:
                for client in clients:
                    await client.close()
        broker.spawn()
        await broker.ready()
        wanted = ledger.acknowledged - ledger.recalled - ledger.perhaps_recalled
        assert wanted
        async with asyncio.timeout(60):
            while wanted - (found := await came(broker.addr)).keys():
                await asyncio.sleep(0.5)
        last_ms = max(ledger.sent.values())
        await asyncio.sleep(max(0, last_ms / 1000 + 2.5 - time.time()))
        found = await came(broker.addr)
        assert {body: count for body, count in found.items() if count > 1} == {}
        assert wanted <= found.keys() <= ledger.sent.keys() - ledger.recalled
        assert broker.terminate() == 0
    finally:
        broker.kill()


async def call(client: RemotingClient, addr: str, request: Frame) -> None:
    answer = await client.call(addr, request, 20)
    assert answer.code == 0, answer.remark


@long_form("kills brokers")
async def test_each_comes_once_when_killed_while_messages_are_moved_on(tmp_path: Path) -> None:
    print(f"COMETMQ_KILL_SEED={SEED}")
    dice = random.Random(SEED)
    # On request, retention deletes all but the newest segment, and messages waiting in them are moved.
    broker = BrokerProcess(
        tmp_path,
        fileReservedTime="0",
        deleteWhen="25",
        deleteCommitLogFilesInterval="1",
        waitTimeMillsInSendQueue="60000",
    )
    client = RemotingClient()
    try:
        broker.spawn()
        await broker.ready()
        at_ms = time.time_ns() // 1_000_000 + 12_000
        sends = []
        for number in range(3_000):
            when = dice.choice(("TIMER_DELAY_MS\x0112000", f"TIMER_DELIVER_MS\x01{at_ms}"))
            request = header(number % QUEUES, f"UNIQ_KEY\x01{number}\x02{when}")
            sends.append(Frame.request(RequestCode.SEND_MESSAGE_V2, request, b"%d" % number))
        for first in range(0, len(sends), 200):
            calls = (call(client, broker.addr, send) for send in sends[first : first + 200])
            await asyncio.gather(*calls)
        for _ in range(max(3, CYCLES // 5)):
            delete = call(client, broker.addr, Frame.request(RequestCode.DELETE_EXPIRED_COMMITLOG))
            killed = asyncio.create_task(kill_later(broker, dice.uniform(0.005, 0.3)))
            with contextlib.suppress(RemotingError):
                await delete
            await killed
            broker.spawn()
            await broker.ready()
        async with asyncio.timeout(60):
            while len(await came(broker.addr)) < len(sends):
                await asyncio.sleep(0.5)
        await asyncio.sleep(1)
        assert await came(broker.addr) == Counter(send.body for send in sends)
        moved = {
            message.properties.get("TIMER_ROLL_TIMES")
            for message in await read_queue(client, broker.addr, 0, 0)
        }
        assert len(moved) > 1
        assert broker.terminate() == 0
    finally:
        await client.close()
        broker.kill()
