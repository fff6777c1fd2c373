"""The tools on the directory of a raft member: they see only entries known to be committed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.golden.record_ledger import TARGET
from tests.store.kit import numbered
from tests.store.planted import extract_golden
from tests.store.raft_log.members import add, agree, elect, leader, member, seen

from cometmq.errors import StoreError
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.record_finder import RecordFinder
from cometmq.store.inspect.stats import store_stats
from cometmq.store.inspect.verify import verify


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a member with ten committed messages in two segments and three uncommitted ones."""
    return stopped(tmp_path / "store", kill=False)


def stopped(root: Path, *, kill: bool) -> Path:
    store = leader(root)
    add(store, *(b"%d" % number + bytes(12_000) for number in range(10)), properties=b"KEYS\x01k")
    agree(store)
    add(store, b"uncommitted", b"too", properties=b"KEYS\x01late")
    (store.crash if kill else store.close)()
    return root


def shown(root: Path) -> list[bytes]:
    with RecordFinder(str(root)) as finder:
        return [message.body.rstrip(b"\0") for message in finder.of_log() if message.topic == "T"]


@pytest.mark.parametrize("kill", [False, True])
def test_what_is_not_committed_is_not_shown(tmp_path: Path, kill: bool) -> None:
    root = stopped(tmp_path / "store", kill=kill)
    known = [] if kill else numbered(10)  # only the log was written
    assert shown(root) == known
    with RecordFinder(str(root)) as finder:
        assert [message.body[:1] for message in finder.by_key("k", None)] == [body[:1] for body in known]
        assert finder.by_key("late", None) == finder.by_key("late", None, scan=True) == []


def test_positions_behind_what_is_committed_are_named(root: Path) -> None:
    with RecordFinder(str(root)) as finder:
        last = list(finder.of_log())[-1]
        behind = last.physical_offset + last.store_size
        assert finder.at(last.physical_offset) == last
        assert finder.at(behind + 48) is None
        assert f"known to be committed up to {behind} only" in finder.why_not_at(behind + 48)


def test_it_is_sound_and_counted(root: Path) -> None:
    report = verify(str(root))
    assert (report.findings, report.records, report.units, report.segments) == ([], 11, 10, 2)
    stats = store_stats(str(root))
    assert [(topic.topic, topic.messages) for topic in stats.topics] == [("T", 10)]


def test_queues_and_index_are_made_anew(root: Path) -> None:
    for _ in range(2):  # the second run has no queue files
        report = rebuild(str(root))
        assert (report.units, report.index_entries, report.not_served) == (10, 10, 0)
        assert verify(str(root)).errors == 0
        (root / "checkpoint").unlink(missing_ok=True)
        shutil.rmtree(root / "consumequeue")
    store = member(root)
    assert len(seen(store)) == 10
    elect(store, 2)
    assert [body.rstrip(b"\0") for body in seen(store)] == [*numbered(10), b"uncommitted", b"too"]


def test_apaches_member_is_sound_too(tmp_path: Path) -> None:
    root = extract_golden(tmp_path, TARGET)
    report = verify(str(root))
    # The index has a gap: Apache's broker gives index files of the same millisecond the same name.
    assert {finding.kind for finding in report.findings if finding.severity == "error"} <= {"index-gap"}
    assert report.units > 100


def test_a_member_that_runs_is_not_checked(tmp_path: Path) -> None:
    store = leader(tmp_path)
    add(store, b"x")
    with pytest.raises(StoreError, match="stop it first"):
        verify(str(tmp_path))
    assert shown(tmp_path) == []
    store.close()


def test_it_must_be_clear_which_log_is_meant(root: Path) -> None:
    (root / "dledger-n7" / "data").mkdir(parents=True)
    (root / "dledger-n7" / "data" / f"{0:020d}").write_bytes(b"")
    with pytest.raises(StoreError, match="n0, n7"):
        verify(str(root))
    (root / "broker.conf").write_text("enableDLegerCommitLog=true\ndLegerGroup=g\ndLegerSelfId=n0\n")
    assert verify(str(root)).errors == 0
    (root / "broker.conf").unlink()
    (root / "commitlog").mkdir()
    (root / "commitlog" / f"{0:020d}").write_bytes(b"")
    with pytest.raises(StoreError, match="without raft"):
        verify(str(root))
