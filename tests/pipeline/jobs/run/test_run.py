"""Pipelines from a file: the check against real tables, batches and streams."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.s3_server import BUCKET, KEY, S3, SECRET

from cometmq.cli.pipeline.writing import report_run as report
from cometmq.pipeline.base.errors import JobFailed, PipelineFileError
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.run.run import RunSummary, SinkSummary, run
from cometmq.pipeline.table.formats import TableFormat

BATCH = """\
sources:
  orders:
    format: cometmq
    options: {{namesrv: "${{COMET_NS}}", topic: {topic}}}
steps:
  by_tag: |
    SELECT tags, count(*) AS n FROM orders
    GROUP BY tags ORDER BY tags
  back: SELECT body, tags, keys FROM orders
sinks:
  totals: {{from: by_tag, format: parquet, path: {tmp}/totals, save: overwrite}}
  copies: {{from: back, format: cometmq, options: {{topic: {topic}_copy, namesrv: "${{COMET_NS}}"}}}}
  shown: {{from: by_tag, format: console}}
"""
STREAM = """\
mode: stream
sources:
  orders:
    format: cometmq
    columns: tags string, body binary, store_timestamp timestamp
    options:
      {{namesrv: "${{COMET_NS}}", topic: {topic}, startingOffsets: earliest, maxOffsetsPerTrigger: 40}}
    watermark: {{column: store_timestamp, delay: 1 second}}
  names: {{format: parquet, path: {tmp}/names}}
steps:
  named: SELECT o.body, n.name AS tags FROM orders o JOIN names n ON o.tags = n.tag
sinks:
  files: {{from: named, format: parquet, path: {tmp}/out, checkpoint: {tmp}/cp-out, trigger: {trigger}}}
  copies:
    from: named
    format: cometmq
    options: {{topic: {topic}_copy, namesrv: "${{COMET_NS}}"}}
    checkpoint: {tmp}/cp-copies
    trigger: {trigger}
"""
DEEP = f"{'a struct<' * 2000}a int{'>' * 2000}"
Write = Callable[..., str]


@pytest.fixture
def write(topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a pipeline over the topic to a file."""
    monkeypatch.setenv("COMET_NS", topic.namesrv)
    pq.write_table(pa.table({"tag": ["A", "B", "C"], "name": ["a", "b", "c"]}), tmp_path / "names")

    def make(text: str, **words: str) -> str:
        (tmp_path / "f.yml").write_text(text.format(topic=topic.name, tmp=tmp_path, **words))
        return str(tmp_path / "f.yml")

    return make


def test_a_batch_goes_to_all_sinks(spark: SparkSession, topic: Topic, write: Write, tmp_path: Path) -> None:
    topic.send(90)
    lines: list[str] = []
    rows: list[int] = []

    for _ in range(2):  # the second run replaces the output (`overwrite`)
        lines.clear()
        done = run(spark, write(BATCH), show=lines.append, on_progress=lambda done, _total: rows.append(done))

    assert done.complete
    assert [(sink.name, sink.rows, sink.batches) for sink in done.sinks] == [
        ("totals", 3, 1), ("copies", 90, 1), ("shown", 3, 1),
    ]  # fmt: skip
    assert rows[-1] == 96
    totals = pq.read_table(tmp_path / "totals").to_pydict()
    assert sorted(zip(totals["tags"], totals["n"], strict=True)) == [("A", 30), ("B", 30), ("C", 30)]
    assert lines[0] == 'shown 0: {"tags":"A","n":30}\n'
    copies = spark.read.format("cometmq").options(namesrv=topic.namesrv, topic=f"{topic.name}_copy").load()
    assert copies.select("keys").distinct().count() == 90
    assert copies.count() == 180  # sent twice: each run sends the sink's rows as new messages


@pytest.mark.parametrize(
    ("kind", "prefix"), [("parquet", ""), ("parquet", "file:"), ("delta", "file://"), ("iceberg", "file://")]
)
def test_an_archive_is_a_source(
    spark: SparkSession, topic: Topic, write: Write, output: str, kind: TableFormat, prefix: str
) -> None:
    topic.send(30)
    archive(spark, topic.namesrv, [topic.name], output, table_format=kind)
    lines: list[str] = []
    text = "sources:\n  a: {{format: archive, path: {output}}}\nsteps:\n  n: SELECT count(*) AS n FROM a\n"

    run(
        spark,
        write(text + "sinks:\n  s: {{from: n, format: console}}\n", output=prefix + output),
        show=lines.append,
    )

    assert lines == ['s 0: {"n":30}\n']


def test_a_delta_table_on_an_object_store_is_a_source(
    spark: SparkSession, write: Write, s3: S3, at: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"endpoint": f"http://{s3.host}", "access_key_id": KEY, "secret_access_key": SECRET}
    rows = pa.table({"c": ["a", "b", "a"], "id": [1, 2, 3], "added": ["x", None, None], "at": [1, 2, 3]})
    options = settings | {"allow_http": "true", "conditional_put": "etag", "region": "us-east-1"}
    write_deltalake(f"s3://{BUCKET}/{at}", rows, partition_by=["c"], storage_options=options)
    lines: list[str] = []

    run(spark, write(DELTA, uri=s3.uri(at)), show=lines.append)

    assert [json.loads(line.partition(": ")[2])["ids"] for line in lines] == [4, 2]
    with pytest.raises(
        PipelineFileError, match=rf"t: path = 's3://{BUCKET}/{at}-no': expected a Delta"
    ) as no:
        run(spark, write(DELTA, uri=s3.uri(f"{at}-no")))
    assert SECRET not in str(no.value)


DELTA = """\
sources:
  t: {{format: delta, path: "{uri}"}}
steps:
  n: SELECT c, sum(id) AS ids, count(added) AS added, min(at) AS at FROM t GROUP BY c ORDER BY c
sinks:
  s: {{from: n, format: console}}
"""


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_any_delta_table_is_a_source(spark: SparkSession, write: Write, tmp_path: Path, prefix: str) -> None:
    at = pa.array([1_000_000] * 3, pa.timestamp("us", "UTC"))
    place = tmp_path / "of others"
    write_deltalake(place, pa.table({"c": ["a", None, "a/ü"], "id": [1, 2, 3], "at": at}), partition_by=["c"])
    more = pa.table({"c": ["a"], "id": [4], "at": at[:1], "added": ["x"]})
    write_deltalake(place, more, mode="append", schema_mode="merge")
    lines: list[str] = []

    run(spark, write(DELTA, uri=f"{prefix}{place}"), show=lines.append)

    rows = [json.loads(line.partition(": ")[2]) for line in lines]
    assert [(row.get("c"), row["ids"], row["added"]) for row in rows] == [
        (None, 2, 0), ("a", 5, 1), ("a/ü", 3, 0),
    ]  # fmt: skip
    DeltaTable(place).delete()
    lines.clear()
    run(spark, write(DELTA, uri=f"{prefix}{place}"), show=lines.append)
    assert lines == []


def test_what_is_no_delta_table_is_said_with_its_line(
    spark: SparkSession, write: Write, tmp_path: Path
) -> None:
    with pytest.raises(PipelineFileError, match=r"f\.yml:2: t: path = .* expected a Delta table that"):
        run(spark, write(DELTA, uri=f"{tmp_path}/names"))


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("FROM orders\n", "FROM orders,\n", 8, "[PARSE_SYNTAX_ERROR]"),
        ("GROUP BY tags", "GROUP BY tag", 8, "`tag` cannot be resolved"),
        ("FROM orders\n", "FROM order\n", 7, "`order` cannot be found"),
        ("SELECT body, tags, keys FROM orders", "DROP TABLE orders", 9, "[PARSE_SYNTAX_ERROR]"),
        ("SELECT body, tags, keys FROM orders", "SELECT 1) a; DROP TABLE (x", 9, "[PARSE_SYNTAX_ERROR]"),
        ("SELECT body, tags", "SELECT body, 1 AS tag", 12, "sink copies: columns = 'tag': expected col"),
        ("SELECT body, tags", "SELECT body, body", 12, "columns = 'body': expected each name once"),
        ("SELECT tags, ", "SELECT null AS tags, ", 11, "columns = 'tags void': expected a type that parquet"),
        ("save: overwrite", "partition_by: x", 11, "partition_by = 'x': expected one of tags, n"),
        ("path: {tmp}/totals, save: overwrite", "path: {tmp}/names", 11, "path = '"),
        ("    options:", "    columns: body int\n    options:", 4, "schema = 'body int32': expected"),
        ("    options:", f"    columns: {DEEP}\n    options:", 4, "nested too deep for Spark"),
        ("    options:", "    columns: body in,\n    options:", 4, "[PARSE_SYNTAX_ERROR]"),
        ("topic: {topic}}}\nsteps", "topic: nowhere}}\nsteps", 2, "no route to topic nowhere: ${COMET_NS} "),
        ("path: {tmp}/totals", "path: s3://bucket/totals", 11, "s3://bucket/totals: this Spark knows no s3:"),
        ("format: cometmq\n    options: {{namesrv: \"${{COMET_NS}}\", topic: {topic}}}",
         "format: parquet\n    path: s3://b/a", 2, 'orders: No FileSystem for scheme "s3"'),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_tables_is_said_with_its_line(
    spark: SparkSession, topic: Topic, write: Write, tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    topic.send(3)
    assert old in BATCH
    file = write(BATCH.replace(old, new, 1))

    with pytest.raises(PipelineFileError) as caught:
        run(spark, file)

    assert str(caught.value).startswith(f"{file}:{line}: ")
    assert words in str(caught.value)
    assert not (tmp_path / "totals").exists()


@pytest.mark.slow("several starts of a stream")
def test_a_stream_ends_after_the_batch_and_goes_on_from_there(
    spark: SparkSession, topic: Topic, write: Write, tmp_path: Path
) -> None:
    topic.send(100)
    first = run(spark, write(STREAM, trigger="available now"))
    topic.send(20)
    stop, rows = threading.Event(), [0]

    def on_progress(done: int, _total: int | None) -> None:
        rows.append(done)
        if done >= 40:
            stop.set()

    second = run(spark, write(STREAM, trigger="1 second"), stop=stop, on_progress=on_progress)

    assert [(sink.rows, sink.batches, sink.complete) for sink in first.sinks] == [(100, 3, True)] * 2
    assert [sink.rows for sink in second.sinks] == [20, 20]
    assert second.complete
    bodies = spark.read.parquet(f"{tmp_path}/out").select("body")
    assert sorted(bytes(row.body).decode() for row in bodies.collect()) == sorted(topic.sent)
    copies = spark.read.format("cometmq").options(namesrv=topic.namesrv, topic=f"{topic.name}_copy").load()
    assert {row.tags for row in copies.select("tags").collect()} == {"a", "b", "c"}
    assert copies.select("msg_id").distinct().count() == 120


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("SELECT o.body, n.name AS tags", "SELECT count(*) AS body", 13, "[STREAMING_OUTPUT_MODE"),
        (
            "from: named, format",
            "from: names, format",
            13,
            "a table that comes from a source of format cometmq",
        ),
        ("column: store_timestamp", "column: store_time", 8, "`store_time` cannot be resolved"),
        ("topic: {topic}, st", "topic: nowhere, st", 3, "no route to topic nowhere"),
        ("topic: {topic}_copy", "topic: {topic}", 17, "source orders reads the topic T"),
        ("topic: {topic}, st", "subscribePattern: '{topic}.*', st", 17, "source orders reads the topic T"),
    ],
)
def test_what_a_stream_cannot_do_is_said_before_it_starts(
    spark: SparkSession, topic: Topic, write: Write, tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    topic.send(3)
    assert old in STREAM
    file = write(STREAM.replace(old, new, 1), trigger="available now")

    with pytest.raises(PipelineFileError) as caught:
        run(spark, file)

    assert str(caught.value).startswith(f"{file}:{line}: ")
    assert words in str(caught.value)
    assert not (tmp_path / "cp-out").exists()


def test_a_sink_that_fails_while_it_runs_is_named(spark: SparkSession, topic: Topic, write: Write) -> None:
    topic.send(3)
    text = BATCH.replace(
        "SELECT body, tags,", "SELECT string(raise_error(concat('no ', tags))) AS body, tags,"
    )
    file = write(text)

    with pytest.raises(JobFailed) as caught:
        run(spark, file, show=lambda _line: None)

    assert str(caught.value).startswith(f"{file}:12: sink copies failed: ")
    assert "[USER_RAISED_EXCEPTION] no " in str(caught.value)


@long_form("a JVM of its own, and three commands")
def test_the_command_runs_through_spark_connect(
    connect_address: str, topic: Topic, write: Write, tmp_path: Path
) -> None:
    topic.send(90)

    def command(file: str, *options: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(sys.executable).parent / "cometmq")
        words = [program, "pipeline", "run", file, "--master", connect_address, *options]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    numbers = tmp_path / "run.prom"
    done = command(write(STREAM, trigger="available now"), "--json", "--metrics", str(numbers))
    wrong = command(write(BATCH.replace("FROM orders\n", "FROM order\n")), "--check")
    early = command(write(BATCH.replace("sources", "sorces")))

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [(sink["rows"], sink["complete"]) for sink in summary["sinks"]] == [(90, True)] * 2
    assert 'cometmq_pipeline_rows_total{query="files"}' in numbers.read_text()
    assert wrong.returncode == early.returncode == 1
    assert f"cometmq: {tmp_path}/f.yml:7: by_tag: [TABLE_OR_VIEW_NOT_FOUND]" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert early.stderr.startswith(f"cometmq: {tmp_path}/f.yml:1: the file has no 'sorces'; it may have")


@pytest.mark.parametrize(
    ("check", "words"),
    [(True, "f.yml is valid: 1 sink"), (False, "a: 2 rows in 1 batch to json /x; not fini")],
)
def test_people_read_what_came_to_each_sink(
    check: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report(RunSummary("f.yml", "batch", [SinkSummary("a", "json", "/x", 2, 1)], 1.0), False, check)

    assert words in capsys.readouterr().out
