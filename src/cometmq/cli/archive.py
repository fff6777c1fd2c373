"""`cometmq archive`: the Spark archive job from the command line."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import COUNT, HELP, namesrv_option
from cometmq.cli.progress import progress_bar
from cometmq.errors import ConfigError
from cometmq.text import counted, printable, printable_json

if TYPE_CHECKING:
    from cometmq.pipeline.archive import ArchiveSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@click.option("-o", "--output", required=True, metavar="DIR", help="The Parquet table: a path or a URI.")
@namesrv_option
@click.option(
    "--pattern", metavar="REGEX", help="Archive the topics whose names match, instead of naming them."
)
@click.option(
    "--continuous", is_flag=True, help="Go on until Ctrl-C instead of ending with what is there now."
)
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), default=10.0, metavar="SECONDS",
              help="With --continuous: time between two looks for new messages.")  # fmt: skip
@click.option("--starting", default="earliest", metavar="WHERE",
              help="For queues new to the archive: earliest, latest or offsets as JSON.")  # fmt: skip
@click.option("--batch-records", type=COUNT, default=1_000_000, help="Messages per commit.")
@click.option(
    "-g", "--group", "consumer_group", metavar="NAME", help="Consumer group to publish the progress to."
)
@click.option("--compression", default="zstd", metavar="CODEC",
              help="Of the Parquet files: zstd, snappy, gzip, lz4, brotli or none.")  # fmt: skip
@click.option("--compression-level", type=int, metavar="N", help="Of the codec, its own by default.")
@click.option(
    "--fail-on-data-loss/--no-fail-on-data-loss",
    default=True,
    help="End if messages were deleted before they were archived, or count them as lost.",
)
@click.option("--max-bad-records", type=click.IntRange(min=0), metavar="N",
              help="End once more than N messages went to quarantine.")  # fmt: skip
@click.option(
    "--pull-batch-size", type=COUNT, default=1024, metavar="N", help="Messages asked for in one pull."
)
@click.option("--pulls-in-flight", type=COUNT, default=8, metavar="N", help="On each task's connection.")
@click.option("--timeout-ms", type=COUNT, default=30_000, metavar="MS",
              help="Of a pull, and how long a restarting broker is waited for.")  # fmt: skip
@click.option("--check-crc/--no-check-crc", default=True, help="Compare bodies with their checksums.")
@click.option("--decompress/--no-decompress", default=True, help="Keep bodies plain, or as stored.")
@click.option("--max-plain-bytes", type=COUNT, default=64 * 1024 * 1024, show_default="64 MiB", metavar="N",
              help="Of a body when it is decompressed; larger ones go to quarantine.")  # fmt: skip
@click.option("--master", metavar="URL",
              help="Spark's, or sc://HOST:PORT for Spark Connect; SPARK_REMOTE or SPARK_MASTER.")  # fmt: skip
@click.option("--memory", default="1g", metavar="SIZE", help="Heap of Spark's driver, if it is not remote.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def archive(
    topics: tuple[str, ...],
    pattern: str | None,
    continuous: bool,
    master: str | None,
    memory: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write TOPICS to Parquet, each message exactly once; run again, it goes on where it stopped."""
    if topics and pattern:
        raise click.UsageError("Give topics or --pattern, not both.")
    if not topics and not pattern:
        raise click.UsageError("Give the topics to archive, or --pattern.")
    check_spark(master)
    from cometmq.pipeline.archive import ArchiveProgress
    from cometmq.pipeline.archive import archive as run_archive
    from cometmq.pipeline.session import spark_session

    spark = spark_session("cometmq archive", master=master, memory=memory, quick_start=True)
    try:
        with own_names(), stop_event() as stop, progress_bar("archiving") as report_progress:

            def show(at: ArchiveProgress) -> None:
                report_progress(at.records, at.total)

            summary = run_archive(
                spark,
                topics=topics,
                pattern=pattern,
                mode="continuous" if continuous else "available_now",
                on_progress=show,
                stop=stop,
                **settings,
            )
    finally:
        spark.stop()
    report(summary, as_json)
    if not summary.complete:
        raise click.exceptions.Exit(1)


@contextmanager
def own_names() -> Iterator[None]:
    """Let errors name the command's options, where they name the arguments of `archive()`."""
    from cometmq.pipeline.base.errors import ArchiveError, DataLossError

    options = {str(item.name): item.opts[-1] for item in archive.params if isinstance(item, click.Option)} | {
        "fail_on_data_loss=False": "--no-fail-on-data-loss",
        "offsets": "--starting",
    }
    try:
        yield
    except ConfigError as error:
        key = options.get(error.key, error.key)
        raise ConfigError(key, error.value, error.expected) from error
    except (ArchiveError, DataLossError) as error:
        error.setting = options.get(error.setting, error.setting)
        raise


def check_spark(master: str | None) -> None:
    """Raises ClickException where a package or Java is missing: their own errors say it in fifty lines."""
    _check_extra("spark", "the archive needs Spark", "pyspark", "pyarrow", "pandas")
    from cometmq.pipeline.session import CONNECT, chosen_master

    if chosen_master(master).startswith(CONNECT):
        _check_extra("connect", "Spark Connect needs gRPC", "grpc", "grpc_status")
        return  # the server has its own Java
    home = os.environ.get("JAVA_HOME")
    if not (os.access(os.path.join(home, "bin", "java"), os.X_OK) if home else shutil.which("java")):
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is no java on the PATH"
        raise click.ClickException(f"Spark needs Java 17 or newer: {where}")


def _check_extra(extra: str, problem: str, *modules: str) -> None:
    if any(find_spec(name) is None for name in modules):
        raise click.ClickException(f"{problem}: pip install 'cometmq[{extra}]'")


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, to finish the batch under way. A second signal acts as usual.

    To be entered after the Spark session was made, which sets a handler of its own.
    """
    stop = threading.Event()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def ask(signum: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signum, before[signal.Signals(signum)])
        click.echo("finishing the batch under way ...", err=True)

    for signum in before:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def report(summary: ArchiveSummary, as_json: bool) -> None:
    """Say what the run did."""
    if as_json:
        import msgspec

        click.echo(printable_json(msgspec.json.format(msgspec.json.encode(summary), indent=2)))
        return
    rate = summary.records / max(summary.seconds, 1e-9)
    click.echo(
        f"archived {counted(summary.records, 'message')} ({counted(summary.bytes, 'byte')}) "
        f"in {summary.seconds:.2f} s ({rate:,.0f}/s) to {counted(summary.files, 'file')} "
        f"({counted(summary.file_bytes, 'byte')}) in {printable(summary.output, None)}"
    )
    if summary.resumed_behind_batch is not None:
        click.echo(f"went on behind batch {summary.resumed_behind_batch}")
    if summary.lost or summary.bad:
        lost = counted(summary.lost, "message")
        click.echo(f"lost before it was archived: {lost}; bad: {counted(summary.bad, 'message')}", err=True)
    for problem in (
        f"brokers away: {', '.join(summary.away)}" if summary.away else "",
        f"began anew: {counted(summary.replaced, 'queue')}" if summary.replaced else "",
        summary.put_off,
    ):
        if problem:
            click.echo(f"not complete: {printable(problem, None)}", err=True)
