"""A broker's start and stop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.store import MessageStore, OsDisk, StoreConfig


class SlowDisk(OsDisk):
    """Holds up whoever lists a directory."""

    def __init__(self) -> None:
        super().__init__()
        self.opening, self.go_on = threading.Event(), threading.Event()

    def listdir(self, path: str) -> list[str]:
        self.opening.set()
        assert self.go_on.wait(20)
        return super().listdir(path)


async def test_a_cancelled_start_leaves_the_store_unlocked(tmp_path: Path) -> None:
    """The thread that opens the store cannot be cancelled: what it opens is closed again."""
    disk = SlowDisk()
    config = BrokerConfig(store=StoreConfig(store_path_root_dir=str(tmp_path)), listen_port=0)
    start = asyncio.create_task(Broker(config, disk=disk).start())
    assert await asyncio.to_thread(disk.opening.wait, 20)
    start.cancel()
    await asyncio.sleep(0)
    disk.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.sleep(0.5)
    MessageStore.open(config.store).close()
