"""`cometmq pipeline archive`, short `cometmq archive`: write topics to a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import COUNT, HELP, namesrv_option
from cometmq.cli.pipeline.job import (
    finish,
    job_options,
    measured,
    metrics_option,
    report_option,
    running,
    write_report,
)
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.archive import ArchiveProgress, ArchiveSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@click.option("-o", "--output", required=True, metavar="DIR", help="The table: a path or a URI.")
@namesrv_option
@click.option(
    "--pattern", metavar="REGEX", help="Archive the topics whose names match, instead of naming them."
)
@click.option(
    "--continuous", is_flag=True, help="Continue until Ctrl-C instead of ending with the current messages."
)
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), default=10.0, metavar="SECONDS",
              help="With --continuous: interval between two searches for new messages.")  # fmt: skip
@click.option("--starting", default="earliest", metavar="WHERE",
              help="For queues new to the archive: earliest, latest or offsets as JSON.")  # fmt: skip
@click.option("--batch-records", type=COUNT, default=1_000_000, help="Messages per commit.")
@click.option(
    "-g",
    "--group",
    "consumer_group",
    metavar="NAME",
    help="Consumer group to which the progress is committed.",
)
@click.option("--compression", default="zstd", metavar="CODEC",
              help="Codec of the Parquet files: zstd, snappy, gzip, lz4, brotli or none.")  # fmt: skip
@click.option(
    "--compression-level", type=int, metavar="N", help="Compression level. [default: the codec's own]"
)
@click.option(
    "--fail-on-data-loss/--no-fail-on-data-loss",
    default=True,
    help="If messages were deleted before they were archived: fail, or count them as lost.",
)
@click.option("--max-bad-records", type=click.IntRange(min=0), metavar="N",
              help="Fail once more than N messages are in quarantine.")  # fmt: skip
@click.option("--pull-batch-size", type=COUNT, default=1024, metavar="N", help="Maximum messages per pull.")
@click.option(
    "--pulls-in-flight", type=COUNT, default=8, metavar="N", help="Limit of pulls in flight per task."
)
@click.option("--timeout-ms", type=COUNT, default=30_000, metavar="MS",
              help="Timeout of a pull and of the wait for a restarting broker.")  # fmt: skip
@click.option("--check-crc/--no-check-crc", default=True, help="Compare bodies with their checksums.")
@click.option(
    "--decompress/--no-decompress",
    default=True,
    help="Store bodies decompressed, or as the broker stores them.",
)
@click.option("--max-plain-bytes", type=COUNT, default=64 * 1024 * 1024, show_default="64 MiB", metavar="N",
              help="Maximum size of a decompressed body; larger ones go to quarantine.")  # fmt: skip
@click.option("--format", "table_format", default="parquet", metavar="FORMAT",
              help="Format of the table: parquet, delta or iceberg.")  # fmt: skip
@click.option("--catalogue", metavar="FILE",
              help="Local file for the SQL catalogue of a new Iceberg table on an object store.")  # fmt: skip
@click.option("--body-format", metavar="FORMAT", help="Parse bodies into columns: json, avro or protobuf.")
@click.option("--body-schema", metavar="SCHEMA",
              help="Of the bodies: 'id bigint, name string', FILE.avsc, or FILE.desc:MESSAGE. "
              "Found in the first bodies, if they are JSON.")  # fmt: skip
@click.option("--keep-body/--no-keep-body", default=True, help="Keep the bodies of parsed messages, too.")
@click.option("--groups", multiple=True, metavar="NAME",
              help="Record the offsets of this consumer group; may be repeated; '*' for all.")  # fmt: skip
@metrics_option
@report_option
@job_options
def archive(
    topics: tuple[str, ...],
    pattern: str | None,
    continuous: bool,
    metrics_at: str | None,
    report_path: str | None,
    master: str | None,
    memory: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write TOPICS to a table, each message exactly once.

    A further run continues where the last one stopped.
    """
    if topics and pattern:
        raise click.UsageError("Give topics or --pattern, not both.")
    if not topics and not pattern:
        raise click.UsageError("Give the topics to archive, or --pattern.")
    with running("archiving", master, memory) as job:
        from cometmq.pipeline.jobs.archive import archive as run_archive

        with measured(metrics_at, job.spark) as metrics:

            def on_progress(at: ArchiveProgress) -> None:
                job.show(at.records, at.total)
                if metrics is not None:
                    metrics.archived(at)

            summary = run_archive(
                job.spark,
                topics=topics,
                pattern=pattern,
                mode="continuous" if continuous else "available_now",
                on_progress=on_progress,
                stop=job.stop,
                **settings,
            )
        if report_path is not None:
            from cometmq.pipeline.jobs.archive_report import archive_report

            write_report(archive_report(job.spark, summary), report_path)
    finish(summary, as_json, report)


def report(summary: ArchiveSummary) -> None:
    """Print the result of the run."""
    click.echo(
        f"archived {counted(summary.records, 'message')} ({counted(summary.bytes, 'byte')}) "
        f"in {summary.seconds:.2f} s ({rate(summary.records, summary.seconds)}) to "
        f"{counted(summary.files, 'file')} ({counted(summary.file_bytes, 'byte')}) in "
        f"{printable(summary.output, None)}"
    )
    if summary.resumed_behind_batch is not None:
        click.echo(f"continued after batch {summary.resumed_behind_batch}")
    if summary.lost or summary.bad:
        lost = counted(summary.lost, "message")
        click.echo(f"lost before it was archived: {lost}; bad: {counted(summary.bad, 'message')}", err=True)
    for problem in (
        f"unreachable brokers: {', '.join(summary.away)}" if summary.away else "",
        f"began anew: {counted(summary.replaced, 'queue')}" if summary.replaced else "",
        summary.put_off,
    ):
        if problem:
            click.echo(f"not complete: {printable(problem, None)}", err=True)
    if summary.checkpoint_problem:
        click.echo(f"warning: {printable(summary.checkpoint_problem, None)}", err=True)
    if summary.groups_left_out:
        what = f"positions of {counted(summary.groups_left_out, 'consumer group')} were not recorded"
        click.echo(f"warning: {what}: there are too many", err=True)
