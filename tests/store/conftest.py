"""Fixtures: new stores, and stores that several test modules damage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import START_MS, open_store, opened
from tests.store.planted import root, sound  # noqa: F401 - fixtures

from cometmq.store import ManualClock, MessageStore


@pytest.fixture(autouse=True)
async def stopped_at_the_end() -> AsyncIterator[None]:
    """Stop the stores that the test opened with `open_store`."""
    yield
    while opened:
        await opened.pop().stop()


@pytest.fixture
def disk() -> FaultyDisk:
    """The disk of `store`, with syncs that take no time."""
    return FaultyDisk(really_sync=False)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_MS)


@pytest.fixture
def store(tmp_path: Path, disk: FaultyDisk, clock: ManualClock) -> MessageStore:
    """A new store in `tmp_path` itself."""
    return open_store(tmp_path, disk, clock)
