"""kill -9 among deduplicated sends: each key is stored once, and each answer for a key is the same.

Senders repeat messages while the first is in progress, after its answer and, above all, after a kill. After
each restart the broker has the keys from its log alone. COMETMQ_KILL_CYCLES sets the number of cycles (4 here
at most), COMETMQ_KILL_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.faults.test_kill import CYCLES, QUEUES, SEED, TOPIC, BrokerProcess, header, read_queue
from tests.faults.test_kill_timers import kill_later

from cometmq.errors import RemotingError
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CreateTopicRequestHeader
from cometmq.remoting import RemotingClient

SENDERS = 6


class Keys:
    """The keys that were sent, and the message id in the answer for each."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.ids: dict[str, str] = {}

    def answered(self, key: str, msg_id: str) -> None:
        # The id begins with the address, which is another after each restart; then follows the position.
        assert self.ids.setdefault(key, msg_id[-16:]) == msg_id[-16:]


class Sender:
    """A sender of new keys and of keys of all senders, alone and in batches, until the broker is gone."""

    def __init__(self, name: str, client: RemotingClient, addr: str, keys: Keys, seed: float) -> None:
        self._name, self._client, self._addr, self._keys = name, client, addr, keys
        self._dice = random.Random(seed)
        self._number = 0

    def _key(self) -> str:
        if self._keys.sent and self._dice.random() < 0.4:
            return self._dice.choice(self._keys.sent[-200:])
        self._number += 1
        self._keys.sent.append(f"{self._name}-{self._number}")
        return self._keys.sent[-1]

    async def _send(self, keys: list[str]) -> None:
        queue_id, code = self._dice.randrange(QUEUES), RequestCode.SEND_MESSAGE_V2
        asked, body = header(queue_id, f"UNIQ_KEY\x01{keys[0]}"), keys[0].encode()
        if len(keys) > 1:
            items = [(0, key.encode(), f"UNIQ_KEY\x01{key}".encode()) for key in keys]
            asked, body = header(queue_id, "", batch=True), encode_batch(items)
            code = RequestCode.SEND_BATCH_MESSAGE
        answer = await self._client.call(self._addr, Frame.request(code, asked, body), 20)
        assert answer.code == 0, answer.remark
        assert answer.ext is not None
        for key, msg_id in zip(keys, answer.ext["msgId"].split(","), strict=True):
            self._keys.answered(key, msg_id)

    async def run(self) -> None:
        try:
            while True:
                keys = [self._key() for _ in range(self._dice.choice((1, 1, 1, 5)))]
                await asyncio.gather(*(self._send(keys) for _ in range(self._dice.choice((1, 1, 2)))))
        except RemotingError:
            pass

    async def again(self) -> None:
        """Send the newest keys again, among them those without an answer."""
        for key in self._keys.sent[-300:]:
            await self._send([key])


async def stored(client: RemotingClient, addr: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for queue_id in range(QUEUES):
        for message in await read_queue(client, addr, queue_id, 0):
            found[message.body.decode()] += 1
    return found


@pytest.mark.slow("kills brokers while messages are sent repeatedly")
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_each_key_is_stored_once_through_kills(tmp_path: Path, flush: str) -> None:
    print(f"COMETMQ_KILL_SEED={SEED}")
    dice = random.Random(f"{SEED} {flush}")
    broker, keys = BrokerProcess(tmp_path, flushDiskType=flush), Keys()
    topic = CreateTopicRequestHeader(
        topic=TOPIC, read_queue_nums=QUEUES, write_queue_nums=QUEUES, perm=6, default_topic="TBW102",
        attributes="+dedup.window.ms=86400000",
    )  # fmt: skip
    try:
        for cycle in range(min(CYCLES, 8) // 2 + 1):
            broker.spawn()
            await broker.ready()
            clients = [RemotingClient() for _ in range(2)]
            senders = [
                Sender(f"{cycle}-{number}", clients[number % 2], broker.addr, keys, dice.random())
                for number in range(SENDERS)
            ]
            try:
                answer = await clients[0].call(
                    broker.addr, Frame.request(RequestCode.UPDATE_AND_CREATE_TOPIC, topic), 20
                )
                assert answer.code == 0, answer.remark
                await senders[0].again()
                found = await stored(clients[0], broker.addr)
                assert {key: count for key, count in found.items() if count > 1} == {}
                assert keys.ids.keys() <= found.keys() <= set(keys.sent)
                await asyncio.gather(
                    kill_later(broker, dice.uniform(0.1, 1.5)), *(sender.run() for sender in senders)
                )
            finally:
                for client in clients:
                    await client.close()
        assert len(keys.ids) > 50
    finally:
        broker.kill()
