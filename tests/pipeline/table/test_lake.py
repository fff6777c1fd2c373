"""Archives as Delta and Iceberg tables: the table's transaction is the commit and stores the positions."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyarrow import fs
from tests.pipeline.s3_server import S3

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.table import lake
from cometmq.pipeline.table import log as table_log
from cometmq.pipeline.table.body_schema import column_in, columns_in, with_column
from cometmq.pipeline.table.directory import ArchiveTable
from cometmq.pipeline.table.formats import TableFormat, open_lake, open_table
from cometmq.pipeline.table.lake import LakeTable
from cometmq.pipeline.table.partition_writer import PartitionWriter

if TYPE_CHECKING:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.table import Table as IcebergTable

MS = int(datetime(2026, 11, 23, 7, 30, tzinfo=UTC).timestamp() * 1000)
LONG = "a-topic-whose-name-is-longer-than-sixteen-bytes"


@pytest.fixture(params=["delta", "iceberg"])
def kind(request: pytest.FixtureRequest) -> TableFormat:
    name: TableFormat = request.param
    return name


@pytest.fixture
def table(kind: TableFormat, output: str) -> Iterator[LakeTable]:
    with closing(opened(kind, output)) as table:
        yield table


@pytest.fixture
def output(tmp_path: Path) -> str:
    return str(tmp_path / "archive")


def opened(kind: TableFormat, output: str) -> LakeTable:
    table = open_table(output, kind)
    assert isinstance(table, LakeTable)
    return table


def batch(
    table: LakeTable, number: int, topics: tuple[str, ...] = ("orders",), column: pa.StructType | None = None
) -> dict[str, Any]:
    """Return the commit of batch `number`: a file of two rows for each topic."""
    base: dict[str, Any] = {"batch": number, "run": table.run_id, "offsets": {"orders": {"b": {"0": number}}}}
    base["quarantine"] = []
    commit = with_column(base, column)
    writer = PartitionWriter(
        fs.LocalFileSystem(), table.root, table.staging(number),
        compression="zstd", level=None, topic_in_files=table.topic_in_files,
    )  # fmt: skip
    for topic in topics:
        writer.write(rows(topic, number, columns_in(commit)))
    writer.close()
    return commit | {"files": writer.files}


def rows(topic: str, number: int, columns: pa.Schema) -> pa.RecordBatch:
    given: dict[str, Any] = {
        "topic": topic,
        "queue_offset": number,
        "store_timestamp": datetime.fromtimestamp(MS / 1000, UTC),
        "properties": {"KEYS": "k"},
        "value": {"id": number},
    }
    row = {name: given.get(name) for name in columns.names}
    return pa.RecordBatch.from_pylist([row, row], columns)


def offsets(kind: TableFormat, output: str) -> list[tuple[str, int]]:
    """Return (topic, queue offset) of each row, read by the format's own library."""
    found = read(kind, output)
    return sorted(zip(found["topic"].to_pylist(), found["queue_offset"].to_pylist(), strict=True))


def read(kind: TableFormat, output: str) -> pa.Table:
    if kind == "delta":
        query = QueryBuilder().register("t", DeltaTable(output))
        return pa.table(query.execute("select * from t"))
    with closing(catalogue(output)) as opened:
        return iceberg(opened).scan().to_arrow()


def catalogue(output: str) -> SqlCatalog:
    """Open the catalogue as docs/pipeline.md shows."""
    from pyiceberg.catalog.sql import SqlCatalog

    return SqlCatalog("cometmq", uri=f"sqlite:///{output}/_cometmq/catalog.db")


def iceberg(opened: SqlCatalog) -> IcebergTable:
    return opened.load_table("cometmq.archive")


def test_batches_become_rows_and_the_position_comes_back(
    kind: TableFormat, table: LakeTable, output: str
) -> None:
    assert table.prepare() is None
    table.commit({"batch": 0, "run": table.run_id, "files": [], "quarantine": [], "offsets": {"@last": {}}})
    assert table.prepare() == {
        "batch": 0, "run": table.run_id, "files": [], "quarantine": [], "offsets": {"@last": {}}
    }  # fmt: skip
    topics = ("%RETRY%g", "__HIVE_DEFAULT_PARTITION__", LONG, LONG + "2", "123", "ü")
    commit = batch(table, 1, topics)
    table.commit(commit)
    assert offsets(kind, output) == sorted([(topic, 1) for topic in topics] * 2)
    with closing(opened(kind, output)) as again:
        assert again.prepare() == commit
        assert again.run_id != commit["run"]
    found = read(kind, output)
    assert found["properties"][0].as_py() == [("KEYS", "k")]
    assert found["store_timestamp"].type == pa.timestamp("us", "UTC")
    if kind == "delta":
        assert (found["dt"][0].as_py().isoformat(), found["hour"][0].as_py()) == ("2026-11-23", 7)


def test_of_two_jobs_one_wins(kind: TableFormat, table: LakeTable, output: str) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    with closing(opened(kind, output)) as other:
        other.prepare()
        mine, theirs = batch(table, 1) | {"by": "process 1 on one"}, batch(other, 1)
        table.commit(mine)
        winner = re.escape(f"another job writes here ({mine['by']}, run {table.run_id}, batch 1): batch 1")
        with pytest.raises(ArchiveError, match=winner):
            other.commit(theirs)
    with closing(opened(kind, output)) as again:
        assert again.prepare() == mine
    assert offsets(kind, output) == [("orders", 0)] * 2 + [("orders", 1)] * 2


def test_of_jobs_that_begin_at_once_each_one_that_fails_names_the_winner(
    kind: TableFormat, output: str
) -> None:
    barrier, errors = threading.Barrier(4), []
    tables = [opened(kind, output) for _ in range(4)]

    def job(table: LakeTable) -> None:
        with closing(table):
            barrier.wait(30)
            try:
                table.prepare()
                table.commit(batch(table, 0))
            except ArchiveError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=job, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with closing(opened(kind, output)) as again:
        winner = (again.prepare() or {})["run"]
    assert len(errors) == 3
    assert [
        error for error in errors if f"another job writes here (run {winner}, batch 0)" not in error
    ] == []


def test_a_job_that_is_overtaken_between_look_and_commit_fails(
    kind: TableFormat, table: LakeTable, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    with closing(opened(kind, output)) as other:
        other.prepare()
        look = other.last_commit

        def look_and_wait() -> dict[str, Any] | None:
            seen = look()
            if (seen or {})["batch"] == 0:
                table.commit(batch(table, 1))
            return seen

        monkeypatch.setattr(other, "last_commit", look_and_wait)
        with pytest.raises(ArchiveError, match="another job writes here"):
            other.commit(batch(other, 1))
    assert offsets(kind, output) == [("orders", 0)] * 2 + [("orders", 1)] * 2


def test_maintenance_between_look_and_commit_does_no_harm(
    kind: TableFormat, table: LakeTable, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    table.commit(batch(table, 1))
    look, maintained = table.last_commit, []

    def look_and_wait() -> dict[str, Any] | None:
        seen = look()
        if not maintained:
            maintained.append(compact(kind, output))
        return seen

    monkeypatch.setattr(table, "last_commit", look_and_wait)
    table.commit(batch(table, 2))
    assert maintained
    assert offsets(kind, output) == [("orders", n) for n in (0, 0, 1, 1, 2, 2)]


def compact(kind: TableFormat, output: str) -> bool:
    """Change the table as its owner may: compact its files in Delta, or add an empty snapshot in Iceberg."""
    if kind == "delta":
        DeltaTable(output).optimize.compact()
        return True
    with closing(catalogue(output)) as opened:
        table = iceberg(opened)
        with table.transaction() as transaction, transaction.update_snapshot().fast_append():
            pass
    return True


def forget(kind: TableFormat, output: str) -> None:
    """Age the table: delete old log entries in Delta, or expire snapshots in Iceberg."""
    if kind == "delta":
        table = DeltaTable(output)
        table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
        table = DeltaTable(output)
        table.create_checkpoint()
        table.cleanup_metadata()
        return
    with closing(catalogue(output)) as opened:
        iceberg(opened).maintenance.expire_snapshots().older_than(datetime.now() + timedelta(days=1)).commit()


def test_the_position_survives_compaction_and_clean_up(
    kind: TableFormat, table: LakeTable, output: str
) -> None:
    table.prepare()
    for number in range(3):
        table.commit(batch(table, number))
    kept = table.last_commit()
    compact(kind, output)
    forget(kind, output)
    if kind == "delta":
        logs = [path.name for path in Path(output, "_delta_log").glob("*.json")]
        assert "00000000000000000003.json" not in logs, "the batch's own entry is gone"
    with closing(opened(kind, output)) as again:
        assert again.prepare() == kept
        again.commit(batch(again, 3))
    assert offsets(kind, output) == [("orders", n) for n in (0, 0, 1, 1, 2, 2, 3, 3)]


@pytest.mark.parametrize("step", ["transaction", "copy"])
def test_killed_at_any_step_of_a_commit_the_next_run_goes_on(
    kind: TableFormat, table: LakeTable, output: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.prepare()
    table.commit(batch(table, 0))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        if step == "copy":
            dying.setattr(lake, "replace_json", die)
        else:
            dying.setattr(table, "last_commit", die)
        with pytest.raises(KeyboardInterrupt):
            table.commit(batch(table, 1))
    done = 1 if step == "copy" else 0
    with closing(opened(kind, output)) as again:
        last = again.prepare()
        assert last is not None
        assert last["batch"] == done
        again.commit(batch(again, done + 1))
    assert offsets(kind, output) == [("orders", n) for n in range(done + 2) for _ in range(2)]
    copies = sorted(Path(output, "_cometmq/commits").glob("*.json"))
    assert [json.loads(path.read_text())["batch"] for path in copies] == list(range(done + 2))


def test_an_answer_that_was_lost_does_not_double_the_batch(
    kind: TableFormat, table: LakeTable, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.prepare()
    transact = table._transact  # noqa: SLF001  what the format does is what is cut here

    def lose(commit: dict[str, Any]) -> None:
        transact(commit)
        raise lake.Overtaken("no answer")

    monkeypatch.setattr(table, "_transact", lose)
    table.commit(batch(table, 0))
    assert offsets(kind, output) == [("orders", 0)] * 2


def test_the_whole_history_is_read_only_without_a_copy(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened("delta", output)) as table:
        table.prepare()
        table.commit(batch(table, 0))
        DeltaTable(output).alter.set_table_properties({"delta.appendOnly": "false"})
        history, limits = DeltaTable.history, list[Any]()

        def noted(self: DeltaTable, limit: int | None = None) -> list[dict[str, Any]]:
            limits.append(limit)
            return history(self, limit)

        monkeypatch.setattr(DeltaTable, "history", noted)
        last = table.last_commit()
    assert last is not None
    assert (last["batch"], limits) == (0, [1])


def test_a_position_that_is_nowhere_is_an_error(output: str) -> None:
    with closing(opened("delta", output)) as table:
        table.prepare()
        table.commit(batch(table, 0))
    Path(output, "_cometmq/commits/00000000000000000000.json").unlink()
    compact("delta", output)
    forget("delta", output)
    with closing(opened("delta", output)) as table, pytest.raises(ArchiveError, match="where batch 0"):
        table.prepare()


@pytest.mark.parametrize("loss", ["all", "older"])
def test_a_table_that_was_lost_is_not_made_anew(
    kind: TableFormat, table: LakeTable, output: str, tmp_path: Path, loss: str
) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    shutil.copytree(output, tmp_path / "older")
    table.commit(batch(table, 1))
    table.close()
    its_own = Path(output, "_delta_log" if kind == "delta" else "_cometmq/catalog.db")
    kept = tmp_path / "kept"
    shutil.move(its_own, kept)
    if loss == "older":
        shutil.move(tmp_path / "older" / its_own.relative_to(output), its_own)
    before = sorted(Path(output).rglob("*.*"))
    stands = "none" if loss == "all" else "only 0"
    for _ in range(2):
        with (
            closing(opened(kind, output)) as again,
            pytest.raises(ArchiveError, match=f"_cometmq/commits contains batch 1, but the table {stands}"),
        ):
            again.prepare()
    assert set(before) <= set(Path(output).rglob("*.*"))
    if its_own.is_file():
        its_own.unlink()
    shutil.rmtree(its_own, ignore_errors=True)
    shutil.move(kept, its_own)
    with closing(opened(kind, output)) as again:
        last = again.prepare()
    assert last is not None
    assert last["batch"] == 1


def test_a_damaged_catalogue_is_named(output: str) -> None:
    with closing(opened("iceberg", output)) as table:
        table.prepare()
        table.commit(batch(table, 0))
    Path(output, "_cometmq/catalog.db").write_bytes(b"no database" * 100)
    with (
        closing(opened("iceberg", output)) as again,
        pytest.raises(ArchiveError, match=r"catalog\.db cannot"),
    ):
        again.prepare()


def test_a_table_may_go_on_from_where_it_was_put_back_to(table: LakeTable, output: str) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    later = Path(output, f"_cometmq/commits/{1:020d}.json")
    later.write_text("{}")
    with pytest.raises(ArchiveError, match="remove the later files"):
        table.prepare()
    later.unlink()
    assert table.prepare() is not None


def test_columns_are_added_as_bodies_get_more(kind: TableFormat, table: LakeTable, output: str) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    first = pa.struct([("id", pa.int64())])
    table.commit(batch(table, 1, column=first))
    more = pa.struct([("id", pa.int64()), ("items", pa.list_(pa.struct([("n", pa.string())])))])
    table.commit(batch(table, 2, column=more))
    found = sorted(read(kind, output).to_pylist(), key=lambda row: row["queue_offset"])
    assert [row["value"] and row["value"]["id"] for row in found] == [None, None, 1, 1, 2, 2]
    assert set(found[-1]["value"]) == {"id", "items"}
    assert column_in(table.prepare()) == more


def test_numbers_may_become_wider_in_iceberg(output: str) -> None:
    with closing(opened("iceberg", output)) as table:
        table.prepare()
        for number, kind in enumerate((pa.int32(), pa.int64())):
            table.commit(batch(table, number, column=pa.struct([("id", kind)])))
    found = sorted(read("iceberg", output).to_pylist(), key=lambda row: row["queue_offset"])
    assert [row["value"]["id"] for row in found] == [0, 0, 1, 1]


def test_an_archive_keeps_its_format(kind: TableFormat, table: LakeTable, output: str) -> None:
    table.prepare()
    for other in {"parquet", "delta", "iceberg"} - {kind}:
        with closing(open_table(output, other)) as wrong, pytest.raises(ArchiveError, match=f"format {kind}"):
            wrong.prepare()
    found = open_lake(output)
    assert found is not None
    assert found.kind == kind


def test_a_directory_with_strange_files_is_refused(table: LakeTable, output: str) -> None:
    Path(output).mkdir()
    Path(output, "letter.txt").touch()
    with pytest.raises(ArchiveError, match=r"no archive job wrote \(letter.txt"):
        table.prepare()


def test_what_no_archive_can_be() -> None:
    with pytest.raises(ConfigError, match="parquet, delta, iceberg"):
        open_table("/tmp/x", "hudi")
    for kind in ("delta", "iceberg"):
        with pytest.raises(ConfigError, match=f"a path.*, as archives of format {kind} need") as caught:
            open_table("gs://key:secret@bucket/x", kind)
        assert "secret" not in str(caught.value)
        with pytest.raises(ConfigError, match=f"a path without %, as {kind} needs"):
            open_table("/tmp/a%20b", kind)


def test_files_that_a_killed_job_left_are_deleted_when_they_are_old(
    kind: TableFormat, table: LakeTable, output: str
) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    left = batch(table, 1)["files"]  # from a job killed before its transaction
    expired, live = batch(table, 1), batch(table, 2)
    table.commit(expired)
    table.commit(live)
    forget(kind, output)
    paths = sorted(Path(output).rglob("*.parquet"))
    strange = Path(output, "topic=orders/part-00000-of-somebody-else.parquet")
    strange.touch()
    assert table.vacuum(timedelta(0)) == 0, "they may be those of a running job"
    for path in [*paths, strange]:
        os.utime(path, (0, 0))
    assert table.vacuum(timedelta(0)) == 1
    gone = [str(path.relative_to(output)) for path in paths if not path.exists()]
    assert gone == [file["path"] for file in left]
    assert strange.exists()
    assert offsets(kind, output) == [("orders", n) for n in (0, 0, 1, 1, 2, 2)]
    with pytest.raises(ArchiveError, match="removed before its batch was committed"):
        table.commit(batch(table, 3) | {"files": left})


def test_the_age_of_files_is_told_by_the_clock_of_the_store(table: LakeTable) -> None:
    table.prepare()
    table.commit(batch(table, 0))
    batch(table, 1)  # staged by a job that is about to commit

    class Late:
        """A store whose clock is three days behind."""

        def __getattr__(self, name: str) -> Any:
            return getattr(fs.LocalFileSystem(), name)

        def get_file_info(self, asked: Any) -> Any:
            found = fs.LocalFileSystem().get_file_info(asked)
            return [late(info) for info in found] if isinstance(found, list) else late(found)

    def late(info: fs.FileInfo) -> fs.FileInfo:
        mtime = info.mtime and info.mtime - timedelta(days=3)
        return fs.FileInfo(info.path, info.type, mtime=mtime, size=info.size)

    store: Any = Late()
    table.filesystem = store
    assert table.vacuum(timedelta(days=1)) == 0


def test_no_file_is_deleted_while_a_copy_is_missing(table: LakeTable, output: str) -> None:
    table.prepare()
    for number in range(3):
        table.commit(batch(table, number))
    Path(output, "_cometmq/commits/00000000000000000001.json").unlink()
    with pytest.raises(ArchiveError, match="none is deleted"):
        table.vacuum(timedelta(0))


def test_copies_are_summed_up(
    kind: TableFormat, table: LakeTable, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_log, "CHECKPOINT_EVERY", 2)
    table.prepare()
    for number in range(5):
        table.commit(batch(table, number))
    checkpoints = Path(output, table_log.CHECKPOINTS)
    assert sorted(int(path.stem) for path in checkpoints.iterdir()) == [1, 3]
    Path(output, "_cometmq/commits/00000000000000000000.json").unlink()
    assert ArchiveTable(output).log().files["batch"].to_pylist() == list(range(5))
    (checkpoints / f"{9:020d}.parquet").touch()
    with closing(opened(kind, output)) as again, pytest.raises(ArchiveError, match="contains batch 9"):
        again.prepare()  # the table was restored to an older version
    assert sorted(int(path.stem) for path in checkpoints.iterdir()) == [1, 3, 9]


def test_where_the_catalogue_may_be(s3: S3, at: str, tmp_path: Path) -> None:
    uri, file = s3.uri(at), str(tmp_path / "catalog.db")
    for place, kind, catalogue, words in (
        (uri, "iceberg", None, "a local file for the SQL catalogue"),
        (uri, "iceberg", str(tmp_path / "nowhere/catalog.db"), "a local file for the SQL catalogue"),
        (uri, "delta", file, "only Iceberg tables"),
        (str(tmp_path / "x"), "iceberg", file, "the table contains its catalogue"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_table(place, kind, catalogue)
    with closing(open_table(uri, "iceberg", file)) as table:
        table.prepare()
    with (
        closing(open_table(s3.uri(at + "-2"), "iceberg", file)) as other,
        pytest.raises(ArchiveError, match=f"catalog.db is that of s3://bucket/{at}"),
    ):
        other.prepare()
    with pytest.raises(ConfigError, match=r"the catalogue of the archive: .*/catalog\.db"):
        open_table(uri, "iceberg", str(tmp_path / "other.db"))
