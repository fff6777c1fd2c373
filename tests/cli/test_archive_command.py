"""`cometmq archive` with a real Spark: its output, its continuation, and stops."""

from __future__ import annotations

import json
import re
import signal
from inspect import signature
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Run, Serve
from tests.kit.waiting import wait_until
from tests.long_form import long_form

from cometmq.cli.pipeline.job import own_names
from cometmq.cli.pipeline.writing import archive
from cometmq.cli.pipeline.writing import report_archive as report
from cometmq.cli.pipeline.writing import report_compact as compact_report
from cometmq.errors import CometError, ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.jobs.archive import ArchiveSummary
from cometmq.pipeline.jobs.archive import archive as run_archive
from cometmq.pipeline.jobs.compaction import CompactSummary
from cometmq.testing import local_broker


def bodies(archive: Path) -> list[bytes]:
    return sorted(pq.read_table(archive, columns=["body"])["body"].to_pylist())


@pytest.mark.slow("starts Spark twice")
@pytest.mark.foreign("Spark")
@pytest.mark.timeout(1200)
def test_each_run_adds_what_is_new_until_a_signal_ends_the_last(
    run: Run, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive"
    with local_broker(tmp_path / "cluster") as broker:
        monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)
        monkeypatch.setenv("SPARK_MASTER", "local[1]")
        run("cometmq", "send", "events", "a", "b", "c")
        page = tmp_path / "report.html"
        wanted = ("--json", "--report", str(page))
        first = run("cometmq", "pipeline", "archive", "events", "-o", str(archive), *wanted)
        run("cometmq", "send", "events", "d")
        arguments = ("--pattern", "event.*", "-o", str(archive), "--continuous", "--interval", "0.2")
        commits = archive / "_cometmq" / "commits"
        known = len(list(commits.iterdir()))
        job = serve("cometmq", "archive", *arguments)
        try:
            wait_until(
                "a commit or the end",
                lambda: len(list(commits.iterdir())) > known or job.process.poll() is not None,
                timeout_s=300,
            )
            assert job.stop(signal.SIGINT, timeout_s=300) == 0
        finally:
            job.kill()

    summary = json.loads(first.stdout)
    assert (first.returncode, summary["records"], summary["lost"], summary["bad"]) == (0, 3, 0, 0)
    shown = page.read_text()
    assert f"report: {page}\n" in first.stderr
    assert "<td>events</td><td>broker-a</td>" in shown
    assert shown.count("<img ") == 3
    assert "archived 1 message (" in job.output
    assert "continued after batch" in job.output
    assert bodies(archive) == [b"a", b"b", b"c", b"d"]


@pytest.mark.foreign("Spark")
@long_form("starts Spark for each setting")
def test_settings_that_cannot_be_used_are_named_as_the_command_spells_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "archive"
    with local_broker(tmp_path / "cluster") as broker:
        monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)
        monkeypatch.setenv("SPARK_MASTER", "local[1]")
        run("cometmq", "send", "events", "a", "b", "c")

        def failed(*arguments: str) -> str:
            done = run("cometmq", "archive", "events", "-o", str(output), *arguments)
            assert done.returncode == 1
            return done.stderr.splitlines()[-1]  # the last line follows the JVM's own messages

        assert failed("--compression", "zip").startswith("cometmq: --compression = 'zip': expected zstd, ")
        offsets = json.dumps({"events": {broker_name: {"0": 9} for broker_name in ["broker-a"]}})
        lost = failed("--starting", offsets)
        assert "Set --no-fail-on-data-loss to continue" in lost
        assert "failOnDataLoss" not in lost
        assert not list(output.glob("topic=*"))
        done = run(
            "cometmq", "archive", "events", "-o", str(tmp_path / "plain"), "--compression", "none",
            "--no-fail-on-data-loss", "--max-bad-records", "0", "--pull-batch-size", "2",
            "--pulls-in-flight", "1", "--timeout-ms", "9000", "--no-check-crc", "--no-decompress",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "plain").glob("topic=*/**/*.parquet")
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "UNCOMPRESSED"


def test_a_report_that_cannot_be_written_is_refused_before_the_job(run: Run, tmp_path: Path) -> None:
    failed = run(
        "cometmq", "archive", "events", "-o", str(tmp_path), "--report", str(tmp_path / "no" / "r.html")
    )

    assert failed.returncode == 2
    assert "'--report': " in failed.stderr
    assert "no is not a writable directory" in failed.stderr


def test_the_command_and_the_function_agree_on_what_is_usual() -> None:
    usual = {name: item.default for name, item in signature(run_archive).parameters.items()}
    given = archive.make_context("archive", ["events", "-o", "/a"]).params
    shared = (usual.keys() & given.keys()) - {"namesrv", "topics", "output"}
    assert {"compression", "fail_on_data_loss", "max_bad_records", "timeout_ms"} <= shared
    assert {name: given[name] for name in shared} == {name: usual[name] for name in shared}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("starting", "soon", "a word"), "--starting = 'soon': expected a word"),
        (ConfigError("offsets", "x", "a queue"), "--starting = 'x': expected a queue"),
        (ConfigError("timeout_ms", "0", "1 or more"), "--timeout-ms = '0': expected 1 or more"),
        (ArchiveError("/a", "3 bad records", "max_bad_records"), "Raise --max-bad-records to continue"),
        (ArchiveError("/a", "is in use"), "/a: is in use"),
    ],
)
def test_errors_name_the_options_of_the_command(error: CometError, words: str) -> None:
    with pytest.raises(type(error), match=re.escape(words)), own_names(archive):
        raise error


def test_what_is_not_complete_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    summary = ArchiveSummary(
        "/a", 1, 7, 70, 1, 7, 0, 0, 1.0, None, [], away=["broker-b"], replaced=2, put_off="no route"
    )
    report(summary)
    assert not summary.complete
    assert capsys.readouterr().err == (
        "not complete: unreachable brokers: broker-b\n"
        "not complete: began anew: 2 queues\nnot complete: no route\n"
    )


def test_what_went_wrong_beside_the_messages_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    problem = "the log has no checkpoint of batch 9: No space left on device"
    summary = ArchiveSummary("/a", checkpoint_problem=problem, groups_left_out=3)
    assert summary.complete
    report(summary)
    compact_report(CompactSummary("/a", checkpoint_problem=problem))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {problem}",
        "warning: positions of 3 consumer groups were not recorded: there are too many",
        f"warning: {problem}",
    ]


def test_without_java_it_says_so_at_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))

    failed = run("cometmq", "archive", "events", "-o", str(tmp_path / "archive"))

    assert failed.returncode == 1
    assert failed.stderr.startswith("cometmq: Spark needs Java 17 or newer: JAVA_HOME is ")
    assert failed.stderr.count("\n") == 1
