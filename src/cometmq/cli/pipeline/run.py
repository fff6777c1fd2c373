"""`cometmq pipeline run FILE.yml`: run the pipeline that a file describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import (
    job_options,
    measured,
    metrics_option,
    print_json,
    running,
    warn_of_unread,
)
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.run import RunSummary


@click.command(context_settings=HELP)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--check", is_flag=True, help="Only check FILE and its sources; run nothing.")
@metrics_option
@job_options
def run(
    file: str, check: bool, metrics_at: str | None, master: str | None, memory: str, as_json: bool
) -> None:
    """Run the pipeline of FILE: sources, SQL, sinks. The whole file is checked first."""
    from cometmq.pipeline.jobs.run_file import load_pipeline

    # Load the file first, so that its errors are reported before the slow start of Spark.
    load_pipeline(file)
    with running("running", master, memory) as job:
        from cometmq.pipeline.jobs.run import run as run_pipeline

        with measured(metrics_at, job.spark):
            summary = run_pipeline(
                job.spark,
                file,
                check_only=check,
                show=lambda line: click.echo(line, nl=False, err=as_json),
                on_progress=job.show,
                stop=job.stop,
            )
    report(summary, as_json, check)
    if not summary.complete and not check:
        raise click.exceptions.Exit(1)


def report(summary: RunSummary, as_json: bool, check: bool) -> None:
    if as_json:
        print_json(summary)
        return
    if check:
        click.echo(f"{summary.file} is valid: {counted(len(summary.sinks), 'sink')}")
        return
    for sink in summary.sinks:
        done = "" if sink.complete else "; not finished"
        to = f"{sink.format} {printable(sink.to, None)}".rstrip()
        batches = f"{sink.batches} {'batch' if sink.batches == 1 else 'batches'}"
        click.echo(f"{sink.name}: {counted(sink.rows, 'row')} in {batches} to {to}{done}")
    warn_of_unread(summary)
    click.echo(f"done in {summary.seconds:.1f} s")
