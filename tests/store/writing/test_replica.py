"""A slave's log: whatever way the master's bytes are cut, the store becomes the master's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.kit import quick
from tests.store.pair import feed, fill, same


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20_000) | st.integers(0, 300), min_size=1, max_size=120),
    cuts=st.lists(st.integers(1, 40_000) | st.integers(1, 100), min_size=1, max_size=8),
    ticks=st.integers(1, 4),
)
def test_however_the_bytes_are_cut_the_slave_becomes_the_master(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int], ticks: int
) -> None:
    root = tmp_path_factory.mktemp("pair")
    master, slave = quick(root / "master"), quick(root / "slave", broker_role="SLAVE")
    fill(master, sizes)
    feed(slave, master, cuts, ticks)
    assert slave.replica.end == slave.replica.next == master.log.end
    same(slave, master)
