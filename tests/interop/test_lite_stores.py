"""A store with lite topics goes from our broker to Apache's 5.5.0, and back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.broker.lite.conftest import GROUP, PARENT, LiteClient, set_up
from tests.interop import store_input
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.kit.brokers import Peer

from cometmq import LiteConsumer, SimpleOptions

LIGHT_QUEUES = {"enableLmq": "true", "enableMultiDispatch": "true"}


def start(kind: str, directory: Path, names: str) -> ApacheBroker | CometBroker:
    if kind == "apache":
        return ApacheBroker("5.5.0", directory, names, settings=store_input.TINY | LIGHT_QUEUES)
    return CometBroker(directory, names, settings=store_input.TINY)


@pytest.mark.slow("Apache's broker starts and stops")
async def test_lite_topics_go_with_the_store(names: str, tmp_path: Path) -> None:
    """Apache's broker builds its queues from the log. Offsets in lite topics stay with our broker."""
    brokers = [await asyncio.to_thread(start, "ours", tmp_path, names)]
    try:
        async with Peer(f"127.0.0.1:{brokers[0].port}") as peer:
            await set_up(peer)
            client = LiteClient(peer)
            await client.send("s1", "1", "2", "3")
            await client.subscribe("s1")
            assert await client.take(1) == ["1"]
        await asyncio.to_thread(brokers[0].stop)
        shutil.rmtree(tmp_path / "store" / "consumequeue")

        brokers.append(await asyncio.to_thread(start, "apache", tmp_path, names))
        options = SimpleOptions(wait_s=5)
        async with (
            Peer(f"127.0.0.1:{brokers[1].port}") as peer,
            LiteConsumer(GROUP, PARENT, ["s1"], namesrv=names, options=options) as consumer,
        ):
            assert (await LiteClient(peer).send("s1", "4")).code == 0
            found: list[bytes] = []
            async with asyncio.timeout(60):
                while len(found) < 4:
                    for message in await consumer.receive():
                        found.append(message.body)
                        await consumer.ack(message)
            assert found == [b"1", b"2", b"3", b"4"]
        await asyncio.to_thread(brokers[1].stop)

        brokers.append(await asyncio.to_thread(start, "ours", tmp_path, names))
        async with Peer(f"127.0.0.1:{brokers[2].port}") as peer:
            client = LiteClient(peer)
            await client.subscribe("s1")
            await client.send("s1", "5")
            assert await client.take(4) == ["2", "3", "4", "5"]
    finally:
        for broker in brokers:
            if broker.process.running:
                await asyncio.to_thread(broker.kill)
