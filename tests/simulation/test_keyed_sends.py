"""Deduplicated sends in seeded runs with faults: each key is stored once, and each has one answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from tests.simulation.clients import TOPIC, Clients
from tests.simulation.run import FAULTS, Plan, Run, body_of, stored
from tests.simulation.scheduler import Process
from tests.simulation.seeds import many, rarely_collecting

from cometmq.broker.send.dedup import Deduplication
from cometmq.client import Producer
from cometmq.errors import CometError
from cometmq.message import Message, SendResult, SendStatus
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import CreateTopicRequestHeader
from cometmq.remoting import RemotingClient

SEEDS = 24
SHAPES = ("one", "pair", "raft")
EXCLUDED = {"rot", "move"}
"""Faults that destroy messages, or change the address in message ids."""
CREATED = Frame.request(
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    CreateTopicRequestHeader(
        topic=TOPIC, read_queue_nums=2, write_queue_nums=2, perm=6, default_topic="TBW102",
        attributes="+dedup.window.ms=86400000,+dedup.key=id",
    ),
)  # fmt: skip


def plan_of(seed: int) -> Plan:
    chance = random.Random(f"keyed {seed}")
    sync_flush, shape = chance.random() < 0.7, SHAPES[seed % len(SHAPES)]
    faults = {fault for fault in FAULTS if chance.random() < 0.3} - EXCLUDED
    if not sync_flush:
        faults.discard("power")
    if shape != "raft":
        faults -= {"change", "wipe"}
    elif "wipe" in faults:
        faults.discard("change")
    return Plan(shape, "plain", frozenset(faults), sync_flush)


class KeyedClients(Clients):
    """Producers that send each message until it is acknowledged, and some once more."""

    def __init__(self, run: KeyedRun) -> None:
        super().__init__(run.cluster, "plain")
        self._run = run

    async def _send(self, producer: Producer, process: Process) -> None:
        await self._run.created.wait()
        self._numbers += 1
        name = f"m{self._numbers}"
        body = name.encode() + b"." * self.chance.choice(self.paddings)
        sending = self.history.begin("send", process=process.name, message=name, topic=TOPIC, half=False)
        found: SendResult | None = None
        for _ in range(6):
            with contextlib.suppress(CometError):
                result = await producer.send(Message(TOPIC, body, properties={"id": name}))
                self._compare(name, found, result)
                if result.status is SendStatus.SEND_OK:
                    found = result
                    if self.chance.random() < 0.7:
                        break
            await asyncio.sleep(self.chance.uniform(0, 0.3))
        if found is None:
            self.history.unknown(sending)
            return
        self.stored_for_sure.add(name)
        self.on_ack(found)
        self.history.ok(sending)
        self.acked.add(name)

    def _compare(self, name: str, found: SendResult | None, result: SendResult) -> None:
        both = [each for each in (found, result) if each is not None]
        places = {(each.offset_msg_id, each.queue, each.queue_offset) for each in both}
        if len(places) > 1:
            self._run._problem("one answer", f"{name}: {places}")  # noqa: SLF001


class KeyedRun(Run):
    """A run whose topic stores each key once."""

    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed, plan)
        self.created = asyncio.Event()
        self.clients = KeyedClients(self)
        self.clients.on_ack = self._check_ack

    def _start(self) -> None:
        self.cluster.client("setup").spawn(self._create())
        super()._start()

    async def _create(self) -> None:
        client = RemotingClient()
        while not self.created.is_set():
            await asyncio.sleep(0.2)
            masters = self.masters if self.group is None else self.group.serving
            for broker in [each.broker for each in masters if each.broker]:
                with contextlib.suppress(CometError):
                    if (await client.call(broker.addr, CREATED, 4.0)).code == ResponseCode.SUCCESS:
                        self.created.set()

    def _read_everything(self) -> None:
        super()._read_everything()
        for machine in self.masters:
            if machine.broker is not None:
                counts = Counter(map(body_of, stored(machine.store, TOPIC, machine.name)))
                for name, count in counts.items():
                    if count > 1:
                        self._problem("stored once", f"{name}: {count} times on {machine.host}")


@pytest.mark.slow("seeds of clusters")
def test_each_key_is_stored_once_whatever_fails() -> None:
    with many():
        sent = 0
        for seed in rarely_collecting(range(1, SEEDS + 1)):
            outcome = KeyedRun(seed, plan_of(seed))()
            assert outcome.problems == [], f"seed {seed}: {outcome.plan}"
            sent += outcome.sent
        assert sent > 5 * SEEDS


@pytest.mark.slow("seeds of clusters")
@pytest.mark.parametrize(("shape", "method"), [("one", "_scan"), ("raft", "_received"), ("one", "add")])
def test_broken_deduplication_is_noticed(monkeypatch: pytest.MonkeyPatch, shape: str, method: str) -> None:
    monkeypatch.setattr(Deduplication, method, lambda *_args: None)
    plan = Plan(shape, "plain", frozenset({"kill", "reset", "loss"}), True)
    with many():
        assert any(
            {"stored once", "one answer"} & {problem.rule for problem in KeyedRun(seed, plan)().problems}
            for seed in rarely_collecting(range(1, 30))
        )
