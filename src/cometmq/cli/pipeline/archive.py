"""`cometmq pipeline archive`, short `cometmq archive`: write topics to a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP, namesrv_option
from cometmq.cli.pipeline.job import (
    finish,
    job_options,
    measured,
    metrics_option,
    options_of,
    report_option,
    running,
    write_report,
)
from cometmq.pipeline.base.job_options import ArchiveOptions
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from cometmq.pipeline.base.job_options import ArchiveProgress
    from cometmq.pipeline.jobs.archive import ArchiveSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@click.option("-o", "--output", required=True, metavar="DIR", help="The table: a path or a URI.")
@namesrv_option
@click.option(
    "--continuous", is_flag=True, help="Continue until Ctrl-C instead of ending with the current messages."
)
@options_of(ArchiveOptions)
@metrics_option
@report_option
@job_options
def archive(
    topics: tuple[str, ...],
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
    if topics and settings["pattern"]:
        raise click.UsageError("Give topics or --pattern, not both.")
    if not topics and not settings["pattern"]:
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
