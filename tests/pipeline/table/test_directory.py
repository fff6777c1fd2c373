"""The archive's directory: after a commit failed or was interrupted, the next run has each file once."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table.directory import ArchiveTable
from cometmq.pipeline.table.formats import open_lake, open_table

CHANGES = ("create_dir", "move", "delete_dir", "delete_file", "open_output_stream")
FILES = [f"topic=t/dt=2026-11-22/hour={hour:02}/part-{hour}.parquet" for hour in range(3)]


class Faults:
    """A counter of the changes made to a disk that can fail one of them before or after it is made."""

    def __init__(self) -> None:
        self.left = self.made = 10_000
        self.after = False
        self.error: BaseException = OSError(errno.ENOSPC, "No space left on device")

    def arm(self, step: int, after: bool, error: BaseException) -> None:
        self.left, self.after, self.error = step, after, error

    @property
    def met(self) -> bool:
        return self.left < 0

    def around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == -1 and not self.after:
                raise self.error
            result = change(*arguments, **options)
            if self.left == -1:
                raise self.error
            return result

        return changed


class LocalDisk(fs.LocalFileSystem):
    """A local file system as ArchiveTable uses it."""


class RemoteDisk:
    """A file system that is not local: no locks and no hard links."""

    def __init__(self) -> None:
        self._files = fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Inject faults into all tables opened by `opened`, and into the system calls that a table makes."""
    faults = Faults()
    for name in ("link", "fsync", "unlink"):
        monkeypatch.setattr(f"cometmq.pipeline.table.directory.os.{name}", faults.around(getattr(os, name)))
    return faults


def test_files_that_are_gone_need_no_deletion(tmp_path: Path) -> None:
    """A compaction that was interrupted while it deleted files goes on, also on HDFS."""

    class Hdfs(RemoteDisk):
        def delete_file(self, path: str) -> None:
            if not os.path.exists(path):
                raise OSError(errno.EIO, "HDFS delete failed")
            raise PermissionError(errno.EACCES, "not yours")

    table = ArchiveTable(str(tmp_path / "archive"))
    table.filesystem = Hdfs()
    assert table._delete_files([str(tmp_path / "gone")]) == 1  # noqa: SLF001
    (tmp_path / "kept").touch()
    with pytest.raises(PermissionError):
        table._delete_files([str(tmp_path / "kept")])  # noqa: SLF001


def opened(output: str, local: bool, faults: Faults) -> ArchiveTable:
    table = ArchiveTable(output)
    disk: Any = LocalDisk() if local else RemoteDisk()
    for name in CHANGES:
        setattr(disk, name, faults.around(getattr(disk, name)))
    table.filesystem = disk
    return table


def commit_of(table: ArchiveTable, batch: int, names: list[str]) -> dict[str, Any]:
    """Stage a batch's files and return its commit."""
    staging = table.staging(batch)
    staged = [f"{staging}/{os.path.basename(name)}" for name in names]
    for name in staged:
        Path(table.root, name).write_text(f"batch {batch}")
    files = [{"staged": source, "path": name} for source, name in zip(staged, names, strict=True)]
    time = "2026-11-23T00:00:00.000+00:00"
    return {"batch": batch, "run": table.run_id, "time": time, "files": files, "quarantine": []}


def published(output: str) -> list[str]:
    return sorted(str(path.relative_to(output)) for path in Path(output).glob("topic=*/**/*.parquet"))


def staged(output: str) -> list[Path]:
    return list(Path(output).glob("_cometmq/staging/**/*.parquet"))


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize("ending", ["error", "interrupt", "kill"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_commit_that_fails_at_any_step_is_finished_or_done_again(
    tmp_path: Path, faults: Faults, local: bool, ending: str, after: bool
) -> None:
    error = KeyboardInterrupt() if ending == "interrupt" else OSError(errno.ENOSPC, "No space left on device")
    for step in range(100):
        output = str(tmp_path / str(step))
        table = opened(output, local, faults)
        table.prepare()
        table.commit(commit_of(table, 0, FILES[:1]))
        commit = commit_of(table, 1, FILES[1:])
        faults.arm(step, after, error)
        with suppress(type(error)):
            table.commit(commit)
        reached = faults.met
        faults.arm(10_000, False, error)
        (table.abandon if ending == "kill" else table.close)()

        again = opened(output, local, faults)
        last = again.prepare()
        assert last is not None
        if last["batch"] == 0:  # the commit failed: its batch is read and written again
            again.commit(commit_of(again, 1, FILES[1:]))
        assert published(output) == FILES, f"step {step}"
        again.close()
        if local:
            assert not staged(output)
        if not reached:
            assert step >= len(FILES)
            return
    pytest.fail("the commit never came through")


@pytest.mark.parametrize("local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize("ending", ["error", "kill"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_compaction_that_fails_at_any_step_is_finished_or_done_again(
    tmp_path: Path, faults: Faults, local: bool, ending: str, after: bool
) -> None:
    """A reader without knowledge of the log never finds duplicate rows."""
    error = OSError(errno.ENOSPC, "No space left on device")
    old, new = FILES[:2], [name.replace("part-", "whole-") for name in FILES[:2]]
    for step in range(100):
        output = str(tmp_path / str(step))
        table = opened(output, local, faults)
        table.prepare()
        table.commit(commit_of(table, 0, FILES))
        commit = commit_of(table, 1, new) | {"removes": old}
        faults.arm(step, after, error)
        with suppress(OSError):
            table.commit(commit)
        reached = faults.met
        faults.arm(10_000, False, error)
        (table.abandon if ending == "kill" else table.close)()
        seen = Counter(os.path.dirname(name) for name in published(output))
        assert not seen or max(seen.values()) == 1, f"step {step}"

        again = opened(output, local, faults)
        last = again.prepare()
        assert last is not None
        if last["batch"] == 0:
            assert published(output) == FILES
            again.commit(commit_of(again, 1, new) | {"removes": old})
        assert published(output) == [*new, FILES[2]], f"step {step}"
        again.close()
        if not reached:
            assert step >= len(old) + len(new)
            return
    pytest.fail("the commit never came through")


def interrupted(output: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Create an archive whose job was killed after its first commit; return the commit."""
    table = ArchiveTable(output)
    table.prepare()
    commit = commit_of(table, 0, FILES)
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTable, "publish", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.commit(commit)
    table.close()
    return commit


def test_readers_wait_for_the_renames_of_a_commit(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(output, monkeypatch)
    assert ArchiveTable(output).log().files.num_rows == len(FILES), "no mark yet: the log is all there is"
    Path(output, "_cometmq/published").write_text("-1")
    table = ArchiveTable(output)
    table.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTable, "publish", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.commit(commit_of(table, 1, ["topic=t/dt=2026-11-22/hour=09/part-9.parquet"]))
    table.close()
    assert table.log().files["path"].to_pylist() == FILES
    ArchiveTable(output).prepare()
    assert table.log().files.num_rows == len(FILES) + 1


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_committed_file_in_neither_place_is_named(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = interrupted(output, monkeypatch)
    Path(output, commit["files"][1]["staged"]).unlink()
    for _ in range(2):
        table = ArchiveTable(output)
        with pytest.raises(ArchiveError, match=r"of batch 0 .*part-1\.parquet nor "):
            table.prepare()
        table.close()
        assert len(staged(output)) + len(published(output)) == 2
    Path(output, "_cometmq/published").write_text("0")  # the remedy that the error suggests
    last = ArchiveTable(output).prepare()
    assert last is not None
    assert last["batch"] == 0


def test_files_that_were_published_are_their_owners(output: str) -> None:
    table = ArchiveTable(output)
    table.prepare()
    table.commit(commit_of(table, 0, FILES))
    table.close()
    Path(output, FILES[0]).unlink()  # deleted by retention or a compaction
    assert ArchiveTable(output).prepare() is not None
    assert published(output) == FILES[1:]


@pytest.mark.parametrize("mark", ["", "nonsense", "-1"])
def test_after_an_unreadable_mark_the_next_run_looks(
    output: str, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    interrupted(output, monkeypatch)
    Path(output, "_cometmq/published").write_text(mark)
    ArchiveTable(output).prepare()
    assert published(output) == FILES


@pytest.mark.parametrize(
    "name",
    [
        f"{1:020d}.json.0123456789ab.tmp",  # left by a job that was killed while it wrote its commit
        f"{1:020d}.json.tmp",
        f"{1:019d}.json",
        f"{1:021d}.json",
        f"{1:020d}.json~",
        "\u0661".rjust(20, "0") + ".json",  # a digit for Python's isdigit()
    ],
)
def test_only_commit_files_are_read_as_commits(output: str, name: str) -> None:
    table = ArchiveTable(output)
    table.prepare()
    table.commit(commit_of(table, 0, FILES))
    Path(output, "_cometmq/commits", name).write_text('{"batch": 1, "files": [], "quarantine": []}')
    last = table.last_commit()
    assert last is not None
    assert last["batch"] == 0
    table.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EWOULDBLOCK, "another archive job is running"),
        (errno.EACCES, "cannot be locked: Permission denied"),
        (errno.EIO, "cannot be locked: Input/output error"),
    ],
)
def test_a_lock_that_is_refused_says_why(
    output: str, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    refuse_locks(monkeypatch, code)
    with pytest.raises(ArchiveError, match=words):
        ArchiveTable(output).prepare()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\0"])
def test_a_damaged_archive_json_is_named_and_keeps_no_lock(output: str, content: str) -> None:
    table = ArchiveTable(output)
    table.prepare()
    table.close()
    path = Path(output, "_cometmq/archive.json")
    whole = path.read_text()
    path.write_text(content)
    damaged = [ArchiveTable(output), open_table(output, "delta")]
    for each in damaged:
        with pytest.raises(ArchiveError, match=r"archive\.json: the file is damaged"):
            each.prepare()
    with pytest.raises(ArchiveError, match=r"archive\.json: the file is damaged"):
        open_lake(output)
    path.write_text(whole)
    with closing(ArchiveTable(output)) as again:
        again.prepare()


@pytest.mark.parametrize("table_format", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("below", ["", "/archive"])
def test_a_file_is_no_directory(tmp_path: Path, table_format: str, below: str) -> None:
    (tmp_path / "file").touch()
    output = f"{tmp_path}/file{below}"
    assert open_lake(output) is None
    with (
        closing(open_table(output, table_format)) as table,
        pytest.raises(ConfigError, match=r"output = .*/file.*: expected a directory"),
    ):
        table.prepare()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_used_without_one(
    output: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refuse_locks(monkeypatch, code)
    first, second = ArchiveTable(output), ArchiveTable(output)
    first.prepare()
    assert "one archive job at a time" in caplog.text
    commit = commit_of(first, 0, FILES)
    second.prepare()
    second.close()
    first.commit(commit)  # files that another job staged today are kept
    with pytest.raises(ArchiveError, match="another job"):
        second.commit(commit_of(second, 0, FILES))
    assert published(output) == FILES


def refuse_locks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
