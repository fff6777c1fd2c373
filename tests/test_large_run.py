"""What `make run-large` says of memory; the run itself takes too long for every day."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def large_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as a module; it imports the one beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    before = set(sys.modules)
    yield importlib.import_module("large_run")
    for name in {"large_run", "first_run"} - before:
        sys.modules.pop(name, None)


def test_memory_is_told_by_stage(large_run: ModuleType) -> None:
    memory = large_run.Memory(os.getpid())
    memory.stages = [("send", 1.0), ("archive", 3.0), ("", 5.0)]
    memory.samples = {
        "broker": [(0.0, 9.0), (1.0, 50.0), (2.0, 70.0), (2.9, 60.0), (3.0, 61.0)],
        "JVM": [(1.0, 0.0), (4.0, 5.0)],
    }

    assert memory.rows() == [
        ("send", "broker", 50.0, 60.0, 70.0),
        ("archive", "broker", 61.0, 61.0, 61.0),
        ("archive", "JVM", 5.0, 5.0, 5.0),
    ]


def test_a_broker_that_grows_is_named(large_run: ModuleType) -> None:
    memory = large_run.Memory(os.getpid())
    memory.samples = {"broker": [(0.0, 90.0), (1.0, 200.0)], "program": [(0.0, 300.0)]}
    assert memory.too_much() == []
    memory.samples["broker"].append((2.0, 200.5))
    assert memory.too_much() == ["broker 200 MB"]


def test_memory_is_measured_until_the_end(large_run: ModuleType) -> None:
    memory = large_run.Memory(os.getpid())
    memory.stage("all")
    memory.start()
    while not memory.samples:
        memory.join(0.1)
    memory.end()

    assert not memory.is_alive()
    assert memory.samples["program"][0][1] > 10  # MB of this process
    assert [name for name, _ in memory.stages] == ["all", ""]
