"""Repeated kill -9 under load on one store: no acknowledged message is lost.

After each restart every acknowledged message has the offset of its response and its own body; queues have no
gaps and no duplicates; the messages of each sender are in order; keys find them. In the end all acknowledged
delayed messages have been delivered. COMETMQ_KILL_CYCLES sets the number of cycles (12), COMETMQ_KILL_SEED
repeats a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
from tests.kit.waiting import until

from cometmq.errors import RemotingError
from cometmq.message import MessageExt
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    PullMessageRequestHeader,
    QueryMessageRequestHeader,
    QueueRequestHeader,
    SendMessageRequestHeaderV2,
)
from cometmq.protocol.java_properties import format_properties
from cometmq.protocol.record.one import iter_records
from cometmq.remoting import RemotingClient
from cometmq.testing.process import ServerProcess

CYCLES = int(os.environ.get("COMETMQ_KILL_CYCLES", "12"))
SEED = int(os.environ.get("COMETMQ_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)

QUEUES = 4
SENDERS = 12
TOPIC = "Orders"
# The files are small, so that kills also happen at changes of files.
SETTINGS = {
    "brokerName": "broker-a",
    "brokerIP1": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "listenPort": "0",
    "mappedFileSizeCommitLog": str(512 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 500),
    "maxHashSlotNum": "500",
    "maxIndexNum": "2000",
    "messageDelayLevel": "1s",
    "flushDelayOffsetInterval": "50",
    "brokerFastFailureEnable": "false",  # slowness of a busy machine is not tested here
}


class BrokerProcess:
    """A broker that can be killed at any time; `addr` is its current address."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self._conf = directory / "broker.conf"
        self._process: ServerProcess | None = None
        self.addr = ""
        properties = {**SETTINGS, "storePathRootDir": str(directory / "store"), **settings}
        self._conf.write_text(format_properties(properties))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Start the broker without waiting until it is ready."""
        command = [sys.executable, "-m", "cometmq.broker_process", "-c", str(self._conf)]
        self._process = ServerProcess(command, ready='"addr"')

    async def ready(self) -> None:
        """Wait until the broker is ready."""
        assert self._process is not None
        self.addr = json.loads(await asyncio.to_thread(self._process.wait_ready))["addr"]

    def kill(self) -> None:
        """Kill the broker with SIGKILL and wait for its end."""
        if self._process is not None:
            self._process.kill()

    def terminate(self) -> int:
        """Stop the broker with SIGTERM and return its exit code."""
        assert self._process is not None
        return self._process.stop()


class Ledger:
    """Acknowledged messages and other attempts."""

    def __init__(self) -> None:
        self.acknowledged: list[dict[int, bytes]] = [{} for _ in range(QUEUES)]
        self.delayed: set[bytes] = set()
        self.attempted: set[bytes] = set()

    @property
    def count(self) -> int:
        return sum(map(len, self.acknowledged))


def header(queue_id: int, properties: str, **more: object) -> SendMessageRequestHeaderV2:
    return SendMessageRequestHeaderV2(
        topic=TOPIC, queue_id=queue_id, sys_flag=0, born_timestamp=time.time_ns() // 1_000_000, flag=0,
        producer_group="P", default_topic="TBW102", default_topic_queue_nums=QUEUES, properties=properties,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


class Sender:
    """A sender of one message after the other until the broker is gone; some in batches, some delayed."""

    def __init__(
        self, name: str, client: RemotingClient, addr: str, ledger: Ledger, dice: random.Random
    ) -> None:
        self._name = name
        self._client = client
        self._addr = addr
        self._ledger = ledger
        self._dice = dice
        self._number = 0

    def _body(self) -> bytes:
        self._number += 1
        body = b"%s/%06d/" % (self._name.encode(), self._number)
        self._ledger.attempted.add(body)
        return body + b"." * self._dice.choice((0, 10, 300, 3000))

    async def run(self) -> None:
        with contextlib.suppress(RemotingError):
            while True:
                kind = self._dice.randrange(12)
                if kind == 0:
                    await self._send_delayed()
                elif kind <= 2:
                    await self._send_batch()
                else:
                    await self._send_one()

    async def _call(self, frame: Frame) -> dict[str, str]:
        answer = await self._client.call(self._addr, frame, 20)
        assert answer.code == 0, (answer.code, answer.remark)
        assert answer.ext is not None
        return answer.ext

    async def _send_one(self) -> None:
        queue_id, body = self._dice.randrange(QUEUES), self._body()
        key = body.rpartition(b"/")[0].decode()
        frame = Frame.request(
            RequestCode.SEND_MESSAGE_V2, header(queue_id, f"KEYS\x01{key}\x02TAGS\x01T"), body
        )
        ext = await self._call(frame)
        self._ledger.acknowledged[queue_id][int(ext["queueOffset"])] = body

    async def _send_batch(self) -> None:
        queue_id = self._dice.randrange(QUEUES)
        bodies = [self._body() for _ in range(self._dice.randrange(1, 8))]
        data = encode_batch([(0, body, b"TAGS\x01B") for body in bodies])
        ext = await self._call(
            Frame.request(RequestCode.SEND_BATCH_MESSAGE, header(queue_id, "", batch=True), data)
        )
        first = int(ext["queueOffset"])
        self._ledger.acknowledged[queue_id].update(enumerate(bodies, first))

    async def _send_delayed(self) -> None:
        body = b"delayed:" + self._body()
        await self._call(Frame.request(RequestCode.SEND_MESSAGE_V2, header(0, "DELAY\x011"), body))
        self._ledger.delayed.add(body)


async def load(
    addr: str, ledger: Ledger, cycle: int, dice: random.Random, kill: asyncio.Future[None]
) -> None:
    """Send from many senders over two connections until the broker dies."""
    clients = [RemotingClient() for _ in range(2)]
    senders = [
        Sender(f"{cycle}-{number}", clients[number % 2], addr, ledger, random.Random(dice.random()))
        for number in range(SENDERS)
    ]
    try:
        await asyncio.gather(kill, *(sender.run() for sender in senders))
    finally:
        for client in clients:
            await client.close()


def pull(queue_id: int, offset: int) -> Frame:
    """Build a pull of 32 messages without long polling."""
    asked = PullMessageRequestHeader(
        consumer_group="Checker", topic=TOPIC, queue_id=queue_id, queue_offset=offset, max_msg_nums=32,
        sys_flag=4, commit_offset=0, suspend_timeout_millis=0, subscription="*", sub_version=0,
    )  # fmt: skip
    return Frame.request(RequestCode.PULL_MESSAGE, asked)


async def read_queue(client: RemotingClient, addr: str, queue_id: int, offset: int) -> list[MessageExt]:
    """Read every message of a queue from an offset on."""
    found: list[MessageExt] = []
    while True:
        answer = await client.call(addr, pull(queue_id, offset), 20)
        if answer.code == 19:
            return found
        assert answer.code == 0, (answer.code, answer.remark)
        assert answer.ext is not None
        found += iter_records(answer.body, check_crc=True)
        offset = int(answer.ext["nextBeginOffset"])


def plain(body: bytes) -> bytes:
    """Return a body without its padding and its prefix of delayed messages."""
    return body.removeprefix(b"delayed:").rstrip(b".")


def check_queue(messages: list[MessageExt], first: int, ledger: Ledger, queue_id: int) -> None:
    """Check a queue: no gap, no unknown or duplicate message, senders' orders, all acknowledged messages."""
    assert [message.queue_offset for message in messages] == list(range(first, first + len(messages)))
    stored = {message.queue_offset: message.body for message in messages}
    lost = {
        offset: body[:30]
        for offset, body in ledger.acknowledged[queue_id].items()
        if offset >= first and stored.get(offset) != body
    }
    assert lost == {}
    at_once = [plain(m.body) for m in messages if not m.body.startswith(b"delayed:")]
    assert len(set(at_once)) == len(at_once)
    assert set(at_once) <= ledger.attempted
    last: dict[bytes, bytes] = {}
    for body in at_once:
        sender, number = body.split(b"/")[:2]
        assert last.get(sender, b"") < number
        last[sender] = number


async def check_keys(client: RemotingClient, addr: str, ledger: Ledger, dice: random.Random) -> None:
    """Check that some acknowledged single messages are found by key."""
    bodies = [body for queue in ledger.acknowledged for body in queue.values()]
    for body in dice.sample(bodies, min(10, len(bodies))):
        key = body.rpartition(b"/")[0].decode()
        request = QueryMessageRequestHeader(
            topic=TOPIC, key=key, max_num=32, begin_timestamp=0, end_timestamp=2**62
        )
        answer = await client.call(addr, Frame.request(RequestCode.QUERY_MESSAGE, request), 20)
        found = [message.body for message in iter_records(answer.body)] if answer.code == 0 else []
        if body not in found:
            # A message of a batch has no key; it is in its queue, which has been checked.
            assert await is_keyless(client, addr, ledger, body), key


async def is_keyless(client: RemotingClient, addr: str, ledger: Ledger, body: bytes) -> bool:
    for queue_id, queue in enumerate(ledger.acknowledged):
        for offset, stored in queue.items():
            if stored == body:
                return (await read_queue(client, addr, queue_id, offset))[0].tags == "B"
    return False


async def check(addr: str, ledger: Ledger, since: list[int], dice: random.Random) -> list[int]:
    """Check every queue from the given offsets on; return the ends of the queues."""
    client = RemotingClient()
    ends = []
    try:
        for queue_id in range(QUEUES):
            messages = await read_queue(client, addr, queue_id, since[queue_id])
            check_queue(messages, since[queue_id], ledger, queue_id)
            ends.append(since[queue_id] + len(messages))
            frame = Frame.request(
                RequestCode.GET_MAX_OFFSET, QueueRequestHeader(topic=TOPIC, queue_id=queue_id)
            )
            answer = await client.call(addr, frame, 20)
            assert answer.ext is not None
            assert int(answer.ext["offset"]) >= ends[-1]
        await check_keys(client, addr, ledger, dice)
    finally:
        await client.close()
    return ends


async def delayed_arrive(addr: str, ledger: Ledger) -> None:
    """Wait until every acknowledged delayed message has been delivered."""
    client = RemotingClient()
    missing = set(ledger.delayed)
    offset = 0
    try:
        async with asyncio.timeout(60):
            while missing:
                messages = await read_queue(client, addr, 0, offset)
                missing -= {message.body for message in messages}
                offset += len(messages)
                if missing:
                    await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{len(missing)} of {len(ledger.delayed)} delayed messages were not delivered")
    finally:
        await client.close()


async def kill_under_load(broker: BrokerProcess, ledger: Ledger, delay_s: float) -> None:
    """Kill the broker `delay_s` after it acknowledged the first message of this load."""
    before = ledger.count
    await until(lambda: ledger.count != before)
    await asyncio.sleep(delay_s)
    await asyncio.to_thread(broker.kill)


def queue_of(*bodies: bytes) -> list[MessageExt]:
    return [MessageExt(TOPIC, body, queue_offset=offset) for offset, body in enumerate(bodies)]


@pytest.mark.thorough("a check of the checker")
@pytest.mark.parametrize(
    "stored",
    [
        queue_of(b"s/000001/", b"s/000002/"),  # the acknowledged third message is missing
        queue_of(b"s/000001/", b"s/000002/", b"s/000004/"),  # another message has its offset
        queue_of(b"s/000001/", b"s/000002/", b"s/000003/", b"s/000002/"),  # a duplicate
        queue_of(b"s/000002/", b"s/000001/", b"s/000003/"),  # wrong order of a sender
        queue_of(b"s/000001/", b"s/000002/", b"s/000003/", b"x/000001/"),  # a message that was never sent
        queue_of(b"s/000001/", b"s/000002/", b"s/000003/")[1:],  # a gap
    ],
)
def test_the_checker_notices(stored: list[MessageExt]) -> None:
    ledger = Ledger()
    ledger.acknowledged[0][2] = b"s/000003/"
    ledger.attempted = {b"s/%06d/" % number for number in range(1, 5)}
    check_queue(queue_of(b"s/000001/", b"s/000002/", b"s/000003/"), 0, ledger, 0)
    with pytest.raises(AssertionError):
        check_queue(stored, 0, ledger, 0)


@pytest.mark.representative("sync")
@pytest.mark.slow("kills a broker again and again")
@pytest.mark.parametrize(
    ("flush", "cycles"),
    [("ASYNC_FLUSH", CYCLES - CYCLES // 4), ("SYNC_FLUSH", CYCLES // 4)],
    ids=["async", "sync"],
)
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, flush: str, cycles: int) -> None:
    print(f"COMETMQ_KILL_SEED={SEED}")
    dice = random.Random(f"{SEED} {flush}")
    broker = BrokerProcess(tmp_path, flushDiskType=flush)
    ledger = Ledger()
    ends = [0] * QUEUES
    try:
        for cycle in range(cycles):
            broker.spawn()
            if cycle % 4 == 3:
                # The broker is killed during or just after its recovery.
                await asyncio.sleep(dice.uniform(0.1, 0.6))
                broker.kill()
                broker.spawn()
            await broker.ready()
            if cycle:
                # Every fifth cycle checks the whole store, and all others check the new messages.
                ends = await check(broker.addr, ledger, ends if cycle % 5 else [0] * QUEUES, dice)
            kill = asyncio.ensure_future(kill_under_load(broker, ledger, dice.uniform(0, 0.5)))
            await load(broker.addr, ledger, cycle, dice, kill)
        broker.spawn()
        await broker.ready()
        await check(broker.addr, ledger, [0] * QUEUES, dice)
        await delayed_arrive(broker.addr, ledger)
        assert ledger.delayed
        assert broker.terminate() == 0
        # A clean stop leaves a store with the same content that needs no recovery.
        assert not (tmp_path / "store" / "abort").exists()
        broker.spawn()
        await broker.ready()
        await check(broker.addr, ledger, [0] * QUEUES, dice)
    finally:
        broker.kill()
