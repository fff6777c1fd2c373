"""Snapshots of group positions: readers use the newest, and only few old ones are kept."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from tests.pipeline.s3_server import S3

from cometmq.message import MessageQueue
from cometmq.pipeline.table import groups
from cometmq.pipeline.table.directory import open_filesystem
from cometmq.pipeline.table.groups import GroupLog

QUEUES = [MessageQueue("t", "b", number) for number in range(4)]
ENDS = dict.fromkeys(QUEUES, 1000)


@pytest.fixture
def kept(tmp_path: Path) -> GroupLog:
    return GroupLog(fs.LocalFileSystem(), str(tmp_path))


def pictures(root: Path) -> list[Path]:
    return sorted((root / "_cometmq/groups").iterdir())


def keep(log: GroupLog, number: int, **offsets: int) -> None:
    log.keep(number, {group: {QUEUES[0]: offset} for group, offset in offsets.items()}, ENDS)


def taken_on(picture: Path, day: int) -> None:
    time = datetime(2026, 6, 1, tzinfo=UTC) + timedelta(days=day)
    picture.write_text(json.dumps(json.loads(picture.read_text()) | {"time": time.isoformat()}))


def test_the_newest_hundred_stay_and_one_a_day_before(tmp_path: Path, kept: GroupLog) -> None:
    for number in range(150):
        keep(kept, number, g=number)
        # Three snapshots per day; the times of the last hundred are irrelevant.
        taken_on(pictures(tmp_path)[-1], number // 3)
    keep(kept, 150, g=500)
    numbers = [int(path.stem) for path in pictures(tmp_path)]
    assert numbers == [*range(2, 49, 3), 50, *range(51, 151)]
    assert kept.newest().select(["batch", "offset"]).to_pylist() == [{"batch": 150, "offset": 500}]
    assert sorted(set(kept.read()["batch"].to_pylist())) == numbers


def test_of_days_a_hundred(tmp_path: Path, kept: GroupLog) -> None:
    for number in range(230):
        keep(kept, number, g=number)
        taken_on(pictures(tmp_path)[-1], number)
    assert [int(path.stem) for path in pictures(tmp_path)] == list(range(30, 230))


def test_two_jobs_thin_out_at_once(tmp_path: Path, kept: GroupLog) -> None:
    """The other job has deleted the files that this job has just listed."""
    for number in range(102):
        keep(kept, number, g=number)

    class Racing:
        def __getattr__(self, name: str) -> Any:
            return getattr(fs.LocalFileSystem(), name)

        def delete_file(self, path: str) -> None:
            os.unlink(path)
            fs.LocalFileSystem().delete_file(path)

    racing: Any = Racing()
    keep(GroupLog(racing, str(tmp_path)), 102, g=7)
    assert len(pictures(tmp_path)) == 101


def test_readers_of_the_newest_read_one_file(tmp_path: Path, kept: GroupLog) -> None:
    for number in range(3):
        keep(kept, number, g=number)
    keep(kept, 3)  # no broker was reachable
    pictures(tmp_path)[0].write_text("not read")
    (tmp_path / "_cometmq/groups/00000000000000000009.json.tmp").write_text("nor this")
    assert kept.newest()["offset"].to_pylist() == [2]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"batch": 2, "time": "x"}', '{"batch": 2, "time": "x", "positions": 5}',
        '{"batch": 2, "time": "x", "positions": [1]}',
        '{"batch": 2, "time": "x", "positions": [{"group": 1}]}',
        '{"batch": 2, "time": "x", "positions": [{"group": "g"}]}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_picture_is_passed_over(
    tmp_path: Path, kept: GroupLog, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    for number in range(3):
        keep(kept, number, g=number)
    path = pictures(tmp_path)[-1]
    path.write_text(content)
    assert kept.newest()["offset"].to_pylist() == [1]
    assert kept.read()["offset"].to_pylist() == [0, 1]
    assert f"skipping the damaged file {path}: " in caplog.text


def test_a_picture_has_an_end(kept: GroupLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_MOST_POSITIONS", 9)
    offsets = dict.fromkeys(QUEUES, 5)
    assert kept.keep(0, dict.fromkeys("abcd", offsets), ENDS) == 2
    assert kept.read()["group"].to_pylist() == ["a"] * 4 + ["b"] * 4
    monkeypatch.setattr(groups, "_MOST_READ", 15)
    kept.keep(1, {"c": offsets}, ENDS)
    kept.keep(2, {"d": offsets}, ENDS)
    assert sorted(set(kept.read()["batch"].to_pylist())) == [1, 2]


def test_on_an_object_store(s3: S3, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_NEWEST", 2)
    kept = GroupLog(*open_filesystem(s3.uri(at)))
    for number in range(5):
        keep(kept, number, g=number)
    assert [int(path[-25:-5]) for path in s3.paths(at)] == [2, 3, 4]
    assert kept.newest()["offset"].to_pylist() == [4]
