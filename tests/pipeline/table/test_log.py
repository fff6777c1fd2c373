"""The archive's log: the combined result of its commits is the same with and without checkpoints."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from tests.long_form import LONG

from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table import log as table_log
from cometmq.pipeline.table.directory import ArchiveTable
from cometmq.pipeline.table.log import Log, commit_path, read_log

LOCAL = fs.LocalFileSystem()


def commit_of(number: int) -> dict[str, Any]:
    """Return the commit of a batch with one file."""
    path = f"topic=t/dt=2026-11-22/hour=07/part-{number}.parquet"
    file = {"path": path, "topic": "t", "dt": "2026-11-22", "hour": 7, "rows": 10, "bytes": 100}
    row = {"topic": "t", "broker_name": "b", "queue_id": 0, "start": number, "end": number + 1, "records": 1}
    return {
        "batch": number,
        "run": "r",
        "time": "2026-11-23T00:00:00.000+00:00",
        "ranges": [row],
        "files": [file],
        "quarantine": [{"path": f"_cometmq/quarantine/bad-{number}.parquet", "rows": 1, "bytes": 9}],
    }


def add(root: Path, number: int, **more: Any) -> dict[str, Any]:
    """Write a commit file and return its content."""
    commit = commit_of(number) | more
    where = root / commit_path(number)
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(commit))
    return commit


def checkpoint(root: Path, log: Log, now: datetime | None = None) -> None:
    assert log.last is not None
    where = root / table_log.checkpoint_path(log.last)
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_bytes(table_log.checkpoint_content(log, now or datetime(2026, 11, 23, tzinfo=UTC)))


def rows(log: Log) -> list[list[dict[str, Any]]]:
    return [table.to_pylist() for table in (log.ranges, log.files, log.quarantine, log.removed)]


def test_files_are_those_added_and_not_removed(tmp_path: Path) -> None:
    first, second = add(tmp_path, 0), add(tmp_path, 1)
    third = add(tmp_path, 2)
    merged = third["files"][0] | {"path": "m", "batch": 1, "rows": 20}
    removes = [file["path"] for commit in (first, second) for file in commit["files"]]
    add(tmp_path, 3, files=[merged], removes=removes, ranges=[], quarantine=[])
    log = read_log(LOCAL, str(tmp_path))
    assert log.last == 3
    assert log.files.select(["batch", "path", "rows"]).to_pylist() == [
        {"batch": 2, "path": third["files"][0]["path"], "rows": 10},
        {"batch": 1, "path": "m", "rows": 20},
    ]
    assert log.removed["path"].to_pylist() == removes
    assert log.ranges["batch"].to_pylist() == log.quarantine["batch"].to_pylist() == [0, 1, 2]
    assert rows(read_log(LOCAL, str(tmp_path), upto=2))[1:] == [
        [{"batch": commit["batch"], **commit["files"][0]} for commit in (first, second, third)],
        log.quarantine.to_pylist(),
        [],
    ]


def test_no_commit_yet(tmp_path: Path) -> None:
    assert rows(read_log(LOCAL, str(tmp_path))) == [[], [], [], []]
    assert read_log(LOCAL, str(tmp_path)).last is None


@pytest.mark.parametrize("at", [0, 3, 7, 9])
def test_a_checkpoint_stands_for_the_commits_before_it(tmp_path: Path, at: int) -> None:
    for number in range(10):
        removes = [f"topic=t/dt=2026-11-22/hour=07/part-{number - 2}.parquet"] if number % 3 == 2 else []
        add(tmp_path, number, removes=removes)
    whole = rows(read_log(LOCAL, str(tmp_path)))
    checkpoint(tmp_path, read_log(LOCAL, str(tmp_path), upto=at))
    for number in range(at + 1):
        (tmp_path / commit_path(number)).write_text("not read any more")
    log = read_log(LOCAL, str(tmp_path))
    assert rows(log) == whole
    assert log.last == 9


def test_files_removed_long_ago_are_forgotten(tmp_path: Path) -> None:
    add(tmp_path, 0)
    add(tmp_path, 1, removes=["topic=t/dt=2026-11-22/hour=07/part-0.parquet"])
    log = read_log(LOCAL, str(tmp_path))
    for days, kept in ((29, 1), (31, 0)):
        checkpoint(tmp_path, log, datetime(2026, 11, 23, tzinfo=UTC) + timedelta(days=days))
        assert read_log(LOCAL, str(tmp_path)).removed.num_rows == kept


def test_a_long_log_is_opened_with_few_reads(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 10)
    table = ArchiveTable(output)
    table.prepare()
    for number in range(35):
        table.commit(commit_of(number) | {"files": [], "quarantine": []})
    table.close()
    names = sorted(path.name for path in Path(output, table_log.CHECKPOINTS).iterdir())
    assert [int(name[:20]) for name in names] == [19, 29], "the two newest"
    read: list[str] = []
    real = table_log.read_commit

    def counting(*arguments: Any) -> Any:
        read.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(table_log, "read_commit", counting)
    assert read_log(LOCAL, output).ranges.num_rows == 35
    assert sorted(read) == [30, 31, 32, 33, 34]


def test_commits_are_deleted_when_two_checkpoints_and_a_day_are_behind_them(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 10)
    table = ArchiveTable(output)
    table.prepare()
    commits = Path(output, table_log.COMMITS)
    for number in range(40):
        table.commit(commit_of(number) | {"files": [], "quarantine": []})
        if number not in (5, 6):  # these commits are old
            os.utime(table.root + "/" + commit_path(number), (0, 0))
    assert sorted(int(path.stem) for path in commits.iterdir()) == [5, 6, *range(30, 40)]
    assert table.log().ranges["start"].to_pylist() == list(range(40))
    last = table.last_commit()
    assert last is not None
    assert last["batch"] == 39
    table.close()


def test_a_checkpoint_that_comes_while_the_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader starts over: commits after the old checkpoint may be deleted before it reads them."""
    for number in range(6):
        add(tmp_path, number)
    whole = rows(read_log(LOCAL, str(tmp_path)))
    real, moves = table_log.read_commit, iter([5, 4])

    def moving(*arguments: Any) -> Any:
        upto = next(moves, None)
        if upto == 5:
            checkpoint(tmp_path, read_log(LOCAL, str(tmp_path)))
            for number in range(6):
                (tmp_path / commit_path(number)).unlink()
        return real(*arguments)

    monkeypatch.setattr(table_log, "read_commit", moving)
    monkeypatch.setattr(table_log, "_READS", 1)
    assert rows(read_log(LOCAL, str(tmp_path))) == whole


def test_a_log_that_never_rests_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, 0)
    numbers = iter(range(1000))
    monkeypatch.setattr(table_log, "last_checkpoint", lambda *_: -1 - next(numbers))
    with pytest.raises(ArchiveError, match="changes faster"):
        read_log(LOCAL, str(tmp_path))


def queue_ranges(root: Path) -> list[tuple[str, int, int, int, int]]:
    """Return (topic, start, end, records, lost) of each range."""
    found = read_log(LOCAL, str(root)).ranges.select(["topic", "start", "end", "records", "lost"])
    return [tuple(row.values()) for row in found.to_pylist()]


def range_of(start: int, end: int, topic: str = "t", **more: Any) -> dict[str, Any]:
    counts = {"records": end - start, "bad": 0, "lost": 0, "bytes": 10, "first_store_ms": start}
    row = {"topic": topic, "broker_name": "b", "queue_id": 0, "start": start, "end": end}
    return row | counts | {"last_store_ms": end} | more


def test_old_ranges_that_follow_each_other_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_log, "DETAILED", 2)
    ranges = [
        [range_of(0, 5), range_of(0, 2, "u")],
        [range_of(5, 9), range_of(2, 4, "u")],
        [range_of(9, 20, records=8, lost=3)],
        [range_of(20, 21, records=0, lost=1)],
        [range_of(21, 30), range_of(4, 5, "u")],
        [range_of(31, 40, first_store_ms=None, last_store_ms=None)],  # after a gap
        [range_of(7, 7, replaces=40)],  # a new queue begins here
        [range_of(7, 9)],
        [range_of(9, 11)],
        [range_of(11, 12)],
        [range_of(12, 13)],
    ]
    for number, rows_ in enumerate(ranges):
        add(tmp_path, number, ranges=rows_, seconds=1.5)
    expected = [
        ("t", 0, 9, 9, 0), ("t", 9, 21, 8, 4), ("t", 21, 30, 9, 0), ("u", 0, 5, 5, 0), ("t", 31, 40, 9, 0),
        ("t", 7, 7, 0, 0), ("t", 7, 11, 4, 0), ("t", 11, 12, 1, 0), ("t", 12, 13, 1, 0),
    ]  # fmt: skip
    assert queue_ranges(tmp_path) == expected
    log = read_log(LOCAL, str(tmp_path))
    assert log.ranges["batch"].to_pylist() == [1, 3, 4, 4, 5, 6, 8, 9, 10]
    assert log.ranges["seconds"].to_pylist() == [None] * 7 + [1.5] * 2
    assert log.ranges["first_store_ms"].to_pylist()[:5] == [0, 9, 21, 0, None]
    assert log.ranges["last_store_ms"].to_pylist()[:4] == [9, 21, 30, 5]
    checkpoint(tmp_path, log)
    add(tmp_path, 11, ranges=[range_of(13, 20)])
    assert queue_ranges(tmp_path) == [*expected[:6], ("t", 7, 12, 5, 0), expected[8], ("t", 13, 20, 7, 0)]


def test_the_log_grows_with_queues_and_not_with_commits(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 10)
    monkeypatch.setattr(table_log, "DETAILED", 20)
    table = ArchiveTable(output)
    table.prepare()
    for number in range(205):
        table.commit(commit_of(number) | {"files": [], "quarantine": []})
    table.close()
    log = table.log()
    assert log.ranges.num_rows == 21
    assert log.ranges.slice(0, 1).select(["start", "end", "records"]).to_pylist() == [
        {"start": 0, "end": 185, "records": 185}
    ]


def test_a_checkpoint_that_cannot_be_written_fails_no_commit(
    output: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 10)
    table = ArchiveTable(output)
    table.prepare()
    where = Path(output, table_log.CHECKPOINTS)
    where.rmdir()
    where.write_text("no directory")
    for number in range(15):
        table.commit(commit_of(number) | {"files": [], "quarantine": []})
    assert table.checkpoints.problem is not None
    assert "no checkpoint of batch 9: " in table.checkpoints.problem
    assert table.checkpoints.problem in caplog.text
    where.unlink()
    where.mkdir()
    for number in range(15, 20):
        table.commit(commit_of(number) | {"files": [], "quarantine": []})
    assert [int(path.stem) for path in where.iterdir()] == [19]
    assert table.checkpoints.problem is None
    table.close()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    for number in range(9):
        add(tmp_path, number)
        if number in (3, 6):
            checkpoint(tmp_path, read_log(LOCAL, str(tmp_path)))
    whole = rows(read_log(LOCAL, str(tmp_path)))
    for number in range(4):
        (tmp_path / commit_path(number)).unlink()
    newest = tmp_path / table_log.checkpoint_path(6)
    for content in (b"", newest.read_bytes()[:-9], b"PAR1" * 9):
        newest.write_bytes(content)
        assert rows(read_log(LOCAL, str(tmp_path))) == whole
    (tmp_path / table_log.checkpoint_path(3)).write_bytes(b"")
    with pytest.raises(ArchiveError, match=r"06\.parquet cannot be read, and commits before it are gone"):
        read_log(LOCAL, str(tmp_path))


def test_each_flipped_bit_of_a_checkpoint_is_seen(tmp_path: Path) -> None:
    for number in range(9):
        add(tmp_path, number)
        if number in (3, 6):
            checkpoint(tmp_path, read_log(LOCAL, str(tmp_path)))
    whole = rows(read_log(LOCAL, str(tmp_path)))
    newest = tmp_path / table_log.checkpoint_path(6)
    content = newest.read_bytes()
    for at in range(0, len(content), 1 if LONG else 97):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        newest.write_bytes(flipped)
        assert rows(read_log(LOCAL, str(tmp_path))) == whole, at


def test_checkpoints_without_a_checksum_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        add(tmp_path, number)
    log = read_log(LOCAL, str(tmp_path))
    checkpoint(tmp_path, log)
    path = tmp_path / table_log.checkpoint_path(3)
    pq.write_table(pq.read_table(path), path)  # rewrites the file without its checksum
    (tmp_path / commit_path(0)).unlink()
    assert rows(read_log(LOCAL, str(tmp_path))) == rows(log)
    assert not caplog.text


def test_what_a_readable_checkpoint_needs_stays_while_a_newer_one_is_damaged(
    output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 10)
    table = ArchiveTable(output)
    table.prepare()

    def commit(upto: int) -> list[int]:
        for number in range((table_log.last_number(LOCAL, output) or -1) + 1, upto):
            table.commit(commit_of(number) | {"files": [], "quarantine": []})
            os.utime(Path(output, commit_path(number)), (0, 0))
        return sorted(int(path.stem) for path in Path(output, table_log.CHECKPOINTS).iterdir())

    assert commit(25) == [9, 19]
    for damaged, checkpoints in ((19, [9, 19, 29]), (29, [9, 19, 29, 39])):
        Path(output, table_log.checkpoint_path(damaged)).write_bytes(b"damaged")
        assert commit(damaged + 16) == checkpoints
        assert table.log().ranges["start"].to_pylist() == list(range(damaged + 16))
    assert commit(50) == [39, 49], "the one before can be read again"
    assert table.log().ranges.num_rows == 50
    table.close()


def test_a_fallback_whose_commits_end_too_early_is_an_error(tmp_path: Path) -> None:
    for number in range(9):
        add(tmp_path, number)
        if number in (3, 8):
            checkpoint(tmp_path, read_log(LOCAL, str(tmp_path)))
    (tmp_path / table_log.checkpoint_path(8)).write_bytes(b"")
    for number in range(6, 9):
        (tmp_path / commit_path(number)).unlink()
    with pytest.raises(ArchiveError, match=r"08\.parquet cannot be read"):
        read_log(LOCAL, str(tmp_path))


def test_a_commit_far_ahead_costs_nothing(tmp_path: Path) -> None:
    add(tmp_path, 0)
    add(tmp_path, 10**15)
    log = read_log(LOCAL, str(tmp_path))
    assert (log.missing, log.first_missing) == (10**15 - 1, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"batch": 1}',
        b'{"batch": 2, "files": [], "quarantine": []}', b'{"batch": true, "files": [], "quarantine": []}',
        *(
            b'{"batch": 1, "quarantine": [], %s}' % rest
            for rest in (
                b'"files": [1]', b'"files": [{"path": null}]', b'"files": [{"path": "x", "staged": 1}]',
                b'"files": [{"path": "x", "rows": "many"}]', b'"files": [], "removes": ["a"]',
                b'"files": [], "removes": 5', b'"files": [], "removes": [1], "time": "2026-11-23"',
                b'"files": [], "removes": ["a"], "time": 5', b'"files": [], "ranges": null',
                b'"files": [], "ranges": [1]', b'"files": [], "ranges": [{"start": "x"}]',
                b'"files": [], "ranges": [{"start": 100000000000000000000}]',
            )
        ),
    ],
)  # fmt: skip
def test_a_damaged_commit_is_named(tmp_path: Path, content: bytes) -> None:
    for number in range(3):
        add(tmp_path, number)
    (tmp_path / commit_path(1)).write_bytes(content)
    with pytest.raises(ArchiveError, match=r"commits/0{19}1\.json is damaged"):
        read_log(LOCAL, str(tmp_path))


def test_a_missing_commit_is_told_and_nothing_is_summed_up_over_it(
    output: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 5)
    table = ArchiveTable(output)
    table.prepare()
    for number in range(5):
        table.commit(commit_of(number) | {"files": [], "quarantine": []})
        if number == 2:
            Path(output, commit_path(1)).unlink()
    assert "1 commits are missing, the first is 1" in caplog.text
    assert not list(Path(output, table_log.CHECKPOINTS).iterdir())
    assert "01.json is missing" in str(table.checkpoints.problem)
    assert (table.log().missing, table.log().first_missing) == (1, 1)
    table.close()
