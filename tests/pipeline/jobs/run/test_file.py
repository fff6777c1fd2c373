"""The file of `cometmq pipeline run`: every mistake that is detectable without Spark is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.pipeline.base.errors import PipelineFileError
from cometmq.pipeline.jobs.run.file import load_pipeline

GOOD = """\
mode: stream
sources:
  orders:
    format: cometmq
    options: {namesrv: "${NS}", topic: orders, startingOffsets: '{"orders": {"b": {"0": 3}}}'}
    columns: tags string, store_timestamp timestamp
    watermark: {column: store_timestamp, delay: 10 minutes}
  names:
    format: csv
    path: /data/${DIR}/names
    options:
      header: true
steps:
  one: SELECT * FROM orders
  two:
    sql: |
      SELECT o.* FROM one o
      JOIN names USING (tags);
    watermark: {column: store_timestamp, delay: 1 hour}
sinks:
  files:
    from: two
    format: parquet
    path: /data/out
    checkpoint: /data/cp/out
    trigger: available now
    partition_by: tags
  copies:
    from: one
    format: cometmq
    options: {namesrv: "${NS}", topic: copies}
    checkpoint: /data/cp/copies
"""
ENVIRONMENT = {"NS": "s3cret:9876", "DIR": "deep"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "f.yml"


def problems(file: Path, text: str) -> list[str]:
    file.write_text(text)
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(str(file), ENVIRONMENT)
    return str(caught.value).replace(f"{file}:", "").splitlines()


def test_a_good_file_is_read_whole(file: Path) -> None:
    file.write_text(GOOD)
    pipeline = load_pipeline(str(file), ENVIRONMENT)

    orders, names = pipeline.sources
    assert pipeline.streaming
    assert orders.plain()["namesrv"] == "s3cret:9876"
    assert names.path is not None
    assert (names.path.value, names.path.shown) == ("/data/deep/names", "/data/${DIR}/names")
    one, two = pipeline.steps
    assert (one.sql, one.line_of(1)) == ("SELECT * FROM orders", 14)
    assert two.sql.endswith("USING (tags)")
    assert (two.line_of(1), two.line_of(2)) == (17, 18)
    files, copies = pipeline.sinks
    assert (files.trigger, [item.value for item in files.partition_by]) == ("available now", ["tags"])
    assert (copies.trigger, copies.output) == ("10 seconds", "append")
    assert pipeline.hide("at s3cret:9876") == "at ${NS}"
    assert "s3cret" not in repr(pipeline.secrets.values())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("mode: stream", "mode: streams", "1: mode 'streams' is none of: batch, stream"),
        ("mode: stream", "mode: stream\nmood: x", "2: the file has no 'mood'; it may have: mode, sources"),
        ("format: csv", "format: xls", "9: format 'xls' is none of: cometmq, "),
        ("format: csv", "format: iceberg", "9: format 'iceberg' is no format here: archive topics with"),
        ("format: parquet", "format: delta", "23: format 'delta' is read, not written: write parquet"),
        ("format: parquet", "format: archive", "23: format 'archive' is written by `cometmq archive` alone"),
        ("format: csv", "format: delta", "11: format delta has no options"),
        ("    format: csv\n", "", "8: source names needs format"),
        ("    path: /data/${DIR}/names\n", "", "8: format csv needs a path"),
        ("path: /data/${DIR}/names", "path: /data/${NO}/names", "10: ${NO} is not set in the environment"),
        ("header: true", "header: [a]", "12: option 'header' must be a text (quote JSON)"),
        ("header: true", "path: /x", "12: 'path' is a key of its own here, no option"),
        ("startingOffsets", "startingOfsets", "5: startingOfsets = "),
        ("startingOffsets: '{", "startingOffsets: '{{", "5: startingOffsets = "),
        ("${NS}\", topic: orders", "${NS}x\", topic: orders", "5: namesrv = '${NS}x': expected host:port"),
        ("delay: 10 minutes", "delay: soon", "7: delay 'soon': a time as `10 minutes`"),
        ("delay: 10 minutes", "dely: 10 minutes", "7: watermark has no 'dely'; it may have: column, delay"),
        ("  one: SELECT * FROM orders", "  one: ''", "14: step one needs a query in SQL"),
        ("  one: SELECT * FROM orders", "  one: SELECT '${NS}'", "14: variables of the environment are for"),
        ("  one: ", "  ORDERS: ", "14: the name 'ORDERS' is taken in line 3"),
        ("  one: ", "  1 one: ", "14: '1 one' is no name: letters, digits and _, at most 64"),
        ("from: two", "from: three", "22: from: 'three' is none of orders, names, one, two"),
        ("path: /data/out\n", "path: /data/deep/names/x\n", "24: /data/${DIR}/names/x: source"),
        ("checkpoint: /data/cp/out", "checkpoint: /data/out/cp", "25: /data/out/cp: sink files writes there"),
        ("path: /data/out\n", "path: file:/data/deep/names\n", "24: file:/data/${DIR}/names: source"),
        ("path: /data/out\n", f"path: /data/{',' * 5000}\n", "24: a path of 5006 characters: at most 4096"),
        ("checkpoint: /data/cp/out", "checkpoint: file:///data/out/cp", "25: file:///data/out/cp: sink"),
        ("topic: copies}", "topic: copies, badRecordsPath: /data/out}", "31: /data/out: sink files writes"),
        ("    checkpoint: /data/cp/copies\n", "", "28: sink copies needs a checkpoint"),
        ("trigger: available now", "trigger: 0 seconds", "26: trigger '0 seconds': a time as"),
        ("trigger: available now", "save: append", "26: save is for mode: batch"),
        ("trigger: available now", "output: complete", "26: parquet files can only be appended by a stream"),
        ("topic: copies", "topci: copies", "31: topci = 'copies': expected one of "),
        ("    checkpoint: /data/cp/copies", "    output: complete\n    checkpoint: /c", "32: messages can"),
        ("    checkpoint: /data/cp/copies", "    partition_by: a\n    checkpoint: /c", "32: cometmq has"),
        ("    format: cometmq\n    options: {namesrv: \"${NS}\", topic: orders", "    format: cometmq-store\n"
         "    path: /s\n    options: {topic: orders", "6: startingOffsets = "),
    ],
)  # fmt: skip
def test_each_mistake_has_its_line(file: Path, old: str, new: str, expected: str) -> None:
    assert GOOD.count(old) >= 1
    found = problems(file, GOOD.replace(old, new, 1))

    assert any(problem.startswith(expected) for problem in found), found
    assert "s3cret" not in "".join(found)


@pytest.mark.parametrize("secret", ["long" * 50, "it's\\a\nline"])
def test_a_secret_is_hidden_however_an_error_would_write_it(file: Path, secret: str) -> None:
    file.write_text(GOOD.replace("topic: orders,", 'topic: orders, minPartitions: "${PASS}",'))
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(str(file), ENVIRONMENT | {"PASS": secret})

    assert str(caught.value) == f"{file}:5: minPartitions = '${{PASS}}': expected a whole number of 1 or more"


def test_all_mistakes_are_said_at_once(file: Path) -> None:
    found = problems(file, "mode: x\nsources: [a]\nsteps: {a: [b]}\nsinks:\n  s: {format: json}\n")

    assert [problem.partition(":")[0] for problem in found] == ["1", "2", "3", "3", "5", "5"]


def test_a_stream_needs_a_topic(file: Path) -> None:
    text = "mode: stream\nsources:\n  a: {format: json, path: /a}\nsinks:\n  s: {from: a, format: console}\n"

    assert problems(file, text) == ["1: a stream needs a source of format cometmq; the others are tables"]


def test_the_example_of_the_docs_says_what_they_say(file: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "run.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    file.write_text(example)
    with pytest.raises(PipelineFileError) as caught:
        load_pipeline(str(file), {"NAMESRV": "127.0.0.1:9876"})

    assert str(caught.value).replace(str(file), "cometmq: paid.yml") in page
    file.write_text(example.replace("paid_as_json", "totals"))
    assert load_pipeline(str(file), {"NAMESRV": "127.0.0.1:9876"}).streaming
