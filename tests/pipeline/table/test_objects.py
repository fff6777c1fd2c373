"""The archive on an object store: commits are exclusive, and the log is right after any interruption."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.pipeline.s3_server import BUCKET, KEY, S3, SECRET
from tests.pipeline.table.test_directory import Faults

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table import directory, log
from cometmq.pipeline.table.directory import ArchiveTable, open_filesystem
from cometmq.pipeline.table.objects import conditional_put, joined, shown

CHANGES = ("open_output_stream", "delete_file")
NOW = timedelta(seconds=-5)  # a retention that has passed for all files: a store may round times up
TIME = "2026-11-23T00:00:00.000+00:00"


class Store:
    """A pyarrow file system whose changes may fail."""

    def __init__(self, filesystem: Any, faults: Faults) -> None:
        self._filesystem = filesystem
        for name in CHANGES:
            setattr(self, name, faults.around(getattr(filesystem, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._filesystem, name)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Inject faults into all opened tables."""
    faults, real, real_put = Faults(), open_filesystem, conditional_put

    def opened(output: str) -> tuple[Any, str]:
        filesystem, root = real(output)
        return Store(filesystem, faults), root

    def put(uri: str, filesystem: Any) -> Any:
        made = real_put(uri, filesystem)
        return made and faults.around(made)

    monkeypatch.setattr(directory, "open_filesystem", opened)
    monkeypatch.setattr(directory, "conditional_put", put)
    return faults


def written(table: ArchiveTable, name: str) -> dict[str, Any]:
    """Write a file under its final name, as a task does; `name` is a hexadecimal digit."""
    path = f"topic=t/dt=2026-11-22/hour=00/part-{name:0>32}.parquet"
    with table.filesystem.open_output_stream(f"{table.root}/{path}") as stream:
        stream.write(name.encode())
    return {"path": path, "topic": "t", "dt": "2026-11-22", "hour": 0, "rows": 1, "bytes": len(name)}


def batch(table: ArchiveTable, number: int, *names: str, **more: Any) -> dict[str, Any]:
    files = [written(table, name) for name in names]
    facts = {"batch": number, "run": table.run_id, "time": TIME, "ranges": [], "files": files}
    return facts | {"quarantine": [], "offsets": {}} | more


def live(table: ArchiveTable) -> list[str]:
    return sorted(path[-9:-8] for path in table.log().files["path"].to_pylist())


def test_an_object_is_created_once(s3: S3, at: str) -> None:
    put = conditional_put(s3.uri(at), open_filesystem(s3.uri(at))[0])
    assert put is not None
    with ThreadPoolExecutor(8) as threads:
        made = list(
            threads.map(lambda number: put(f"{BUCKET}/{at}/{number // 8}", b"%d" % number), range(400))
        )
    assert [sum(made[first : first + 8]) for first in range(0, 400, 8)] == [1] * 50
    with s3.files.open_input_stream(f"{BUCKET}/{at}/3") as stream:
        assert stream.read() == b"%d" % (24 + made[24:32].index(True))


def test_disks_rename_instead(tmp_path: Any) -> None:
    assert conditional_put(str(tmp_path), open_filesystem(str(tmp_path))[0]) is None
    uri = f"file://{tmp_path}"
    assert conditional_put(uri, open_filesystem(uri)[0]) is None


def test_key_and_secret_may_come_from_the_environment(
    s3: S3, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    table = ArchiveTable(f"s3://{BUCKET}/{at}")
    table.prepare()
    table.commit(batch(table, 0, "a"))
    assert live(ArchiveTable(s3.uri(at))) == ["a"]


@pytest.mark.parametrize(("ending", "words"), [("&nonsense=1", "nonsense"), ("&region=%zz", "URI")])
def test_a_bad_uri_is_named_without_its_secret(ending: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ArchiveTable(f"s3://{KEY}:geheim@bucket/path?endpoint_override=127.0.0.1:1{ending}")
    assert caught.value.value == "s3://bucket/path"
    assert KEY not in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "people_see"),
    [
        ("/data/a?b", "/data/a?b"),
        ("s3://k:s%2F@bucket/a/b?endpoint_override=x", "s3://bucket/a/b"),
        ("hdfs://me@host:9000/a", "hdfs://host:9000/a"),
        ("s3://k:s/e?c#r@t@bucket/a?region=x", "s3://bucket/a"),
        ("store:s3://k:s/@b/x", "store:s3://b/x"),
        ("store:s3://k:s@b/x?region=x,s3://l:t/,@c/y,/d?e", "store:s3://b/x,s3://c/y,/d?e"),
        ("live:h:1;h:2", "live:h:1;h:2"),
    ],
)
def test_what_people_see_of_a_uri(uri: str, people_see: str) -> None:
    assert shown(uri) == people_see


@pytest.mark.parametrize(
    ("uri", "below"),
    [
        ("/data/a?b/", "/data/a?b/n"),
        ("s3://k:s@bucket/a/?endpoint_override=x&scheme=http", "s3://k:s@bucket/a/n?endpoint_override=x&scheme=http"),
        ("hdfs://host:9000/a", "hdfs://host:9000/a/n"),
    ],
)  # fmt: skip
def test_a_name_is_joined_to_the_path_of_a_uri(uri: str, below: str) -> None:
    assert joined(uri, "n") == below


def test_errors_of_the_store_do_not_name_the_secret(s3: S3, at: str) -> None:
    wrong = s3.uri(at).replace("secret", "wrong")
    filesystem, _ = open_filesystem(wrong)
    put = conditional_put(wrong, filesystem)
    assert put is not None
    with pytest.raises(OSError, match="403") as caught:
        put(f"{BUCKET}/{at}", b"")
    assert "\n" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_without_the_extra_it_is_named(s3: S3, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"cometmq\[s3\]"):
        ArchiveTable(s3.uri(at))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_job_killed_at_any_step_of_a_commit(
    s3: S3, at: str, faults: Faults, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 writes the batch's file, the next step the commit, and the last ones a checkpoint."""
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(log, "KEEP", timedelta(0))
    for step in range(20):
        uri = s3.uri(f"{at}/{step}")
        table = ArchiveTable(uri)
        table.prepare()
        for number, name in enumerate("abc"):
            table.commit(batch(table, number, name))
        faults.arm(step, after, KeyboardInterrupt())
        with suppress(KeyboardInterrupt):
            table.commit(batch(table, 3, "d"))
        reached = faults.met
        faults.arm(10_000, False, KeyboardInterrupt())

        again = ArchiveTable(uri)
        last = again.prepare()
        assert last is not None
        if last["batch"] == 2:  # the commit failed: its batch is read and written again
            again.commit(batch(again, 3, "e"))
        assert live(again)[:3] == ["a", "b", "c"]
        assert len(live(again)) == 4, f"step {step}"
        again.vacuum(NOW, NOW)
        objects = s3.paths(f"{at}/{step}", ".parquet")
        assert len([path for path in objects if path.startswith("topic=")]) == 4
        if not reached:
            assert step >= 4, "the file, the commit, the checkpoint, what it covers"
            return
    pytest.fail("the commit never came through")


def test_of_two_jobs_one_commits_a_batch(s3: S3, at: str) -> None:
    tables = [ArchiveTable(s3.uri(at)) for _ in range(4)]
    barrier, won, lost = threading.Barrier(4), [], []

    def job(table: ArchiveTable) -> None:
        table.prepare()
        commit = batch(table, 0, table.run_id[:1])
        barrier.wait(30)
        try:
            table.commit(commit)
            won.append(table.run_id)
        except ArchiveError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=job, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    others = f"s3://{BUCKET}/{at}: _cometmq/commits/{0:020d}.json exists: another job writes to this archive"
    (winner,) = [table for table in tables if table.run_id in won]
    named = f"{others} (run {winner.run_id}, batch 0 at "
    assert len(lost) == 3
    assert [text for text in lost if not text.startswith(named)] == []
    assert len(live(tables[0])) == 1


@pytest.mark.parametrize("made", [True, False])
def test_an_answer_that_got_lost(s3: S3, at: str, monkeypatch: pytest.MonkeyPatch, made: bool) -> None:
    real: Callable[..., Any] = conditional_put

    def losing(uri: str, filesystem: Any) -> Any:
        put = real(uri, filesystem)

        def lost(path: str, content: bytes) -> bool:
            if "commits" not in path:
                return bool(put(path, content))
            if made:
                put(path, content)
            raise OSError("no answer within 30 s")

        return lost

    monkeypatch.setattr(directory, "conditional_put", losing)
    table = ArchiveTable(s3.uri(at))
    table.prepare()
    if made:
        table.commit(batch(table, 0, "a"))
        assert live(table) == ["a"]
    else:
        with pytest.raises(ArchiveError, match="perhaps not written: no answer within 30 s"):
            table.commit(batch(table, 0, "a"))
        assert live(table) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [(True, "ignores If-None-Match"), (OSError("501 Not Implemented"), "rejects a conditional put: 501")],
)
def test_a_store_without_conditional_puts_is_refused(
    s3: S3, at: str, monkeypatch: pytest.MonkeyPatch, answer: Any, words: str
) -> None:
    ArchiveTable(s3.uri(at)).prepare()

    def put(path: str, content: bytes) -> bool:
        if isinstance(answer, OSError):
            raise answer
        return bool(answer)

    monkeypatch.setattr(directory, "conditional_put", lambda *_: put)
    with pytest.raises(ArchiveError, match=words):
        ArchiveTable(s3.uri(at)).prepare()


def test_a_compaction_and_a_batch_commit_beside_each_other(s3: S3, at: str) -> None:
    table, other = ArchiveTable(s3.uri(at)), ArchiveTable(s3.uri(at))
    table.prepare()
    first = batch(table, 0, "a", "b", offsets={"t": 1})
    table.commit(first)
    old = [file["path"] for file in first["files"]]
    other.prepare()
    merged = batch(other, 1, "0", removes=old, offsets={"t": 1})
    newer = batch(table, 1, "c", offsets={"t": 2})
    table.commit(newer)
    other.commit(merged)  # is placed after the batch and takes over its offsets
    assert (merged["batch"], merged["offsets"]) == (2, {"t": 2})
    more = batch(table, 2, "d", offsets={"t": 3})
    table.commit(more)  # is placed after the compaction
    assert (more["batch"], more["offsets"]) == (3, {"t": 3})
    assert live(table) == ["0", "c", "d"]
    with pytest.raises(ArchiveError, match="another job"):
        table.commit(batch(table, 2, "1", removes=old[:1]))  # already removed
    with pytest.raises(ArchiveError, match="another job"):
        table.commit(batch(table, 3, "2"))
    # Removed files stay for readers until the retention has passed, and uncommitted files stay as long for
    # jobs.
    assert table.vacuum(timedelta(days=30)) == 0
    assert table.vacuum(NOW) == 2, "those that were replaced"
    assert table.vacuum(NOW, NOW) == 2, "those of no commit"
    assert live(table) == ["0", "c", "d"]
    assert len(s3.paths(at, ".parquet")) == 3


def test_a_file_that_is_gone_is_not_committed(s3: S3, at: str) -> None:
    table = ArchiveTable(s3.uri(at))
    table.prepare()
    commit = batch(table, 0, "a")
    assert table.vacuum(NOW) == 0, "a running job's"
    table.vacuum(NOW, NOW)
    with pytest.raises(ArchiveError, match="removed before its batch was committed"):
        table.commit(commit)
    assert SECRET not in repr(table.output)


def test_the_age_of_files_is_told_by_the_clock_of_the_store(
    s3: S3, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ArchiveTable(s3.uri(at))
    table.prepare()
    batch(table, 0, "a")  # staged by a job that is about to commit
    monkeypatch.setattr(log, "now_utc", lambda: datetime.now(UTC) + timedelta(days=3))
    assert table.vacuum(timedelta(days=1)) == 0


def test_no_file_is_deleted_while_a_commit_is_missing(s3: S3, at: str) -> None:
    table = ArchiveTable(s3.uri(at))
    table.prepare()
    for number, name in enumerate("abc"):
        table.commit(batch(table, number, name))
    table.filesystem.delete_file(f"{table.root}/{log.commit_path(1)}")
    with pytest.raises(ArchiveError, match=r"0{19}1\.json is missing: .*none is deleted"):
        table.vacuum(NOW, NOW)
    assert len([path for path in s3.paths(at, ".parquet") if path.startswith("topic=")]) == 3


def test_checkpoints_of_two_jobs(s3: S3, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive job and a compaction commit in turn, and both write checkpoints."""
    monkeypatch.setattr(log, "CHECKPOINT_EVERY", 3)
    monkeypatch.setattr(log, "KEEP", timedelta(days=-1))
    table, other = ArchiveTable(s3.uri(at)), ArchiveTable(s3.uri(at))
    table.prepare()
    names: list[str] = []
    for number in range(0, 20, 2):
        name = "0123456789abcdef"[number // 2]
        first = batch(table, number, name)
        table.commit(first)
        names.append(name)
        if number == 0:
            other.prepare()
        other.commit(batch(other, number + 1, removes=["nothing"]))
    assert live(table) == sorted(names)
    assert not table.log().missing
    assert table.checkpoints.problem is other.checkpoints.problem is None
    assert len(s3.paths(f"{at}/{log.CHECKPOINTS}")) <= 3
