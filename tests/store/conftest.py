"""Stores that several test modules damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.store.planted import build


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
