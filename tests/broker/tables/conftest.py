"""Fixtures: a disk that fails on command, and table files that retry quickly."""

from __future__ import annotations

import pytest
from tests.kit.faulty_disk import FaultyDisk

from cometmq.broker.tables import table_file


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(really_sync=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_file, "RETRY_S", 0.01)
    monkeypatch.setattr(table_file, "MAX_RETRY_INTERVAL_S", 0.05)
