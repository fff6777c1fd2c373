"""Stores that several test modules damage."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.kit import open_store, opened
from tests.store.planted import build

from cometmq.store import MessageStore


@pytest.fixture(autouse=True)
async def stopped_at_the_end() -> AsyncIterator[None]:
    """Tests need not stop what they open with `open_store`."""
    yield
    while opened:
        await opened.pop().stop()


@pytest.fixture
def store(tmp_path: Path) -> MessageStore:
    """A new store in `tmp_path` itself."""
    return open_store(tmp_path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 400 messages that was stopped in order. Not to be changed."""
    root = tmp_path_factory.mktemp("sound")
    build(root)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "store"))
