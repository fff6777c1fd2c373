"""`cometmq pipeline rebuild`: rebuild consume queues and index of a large store with many tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import job_options, options_of, run_job
from cometmq.cli.store import store_config
from cometmq.pipeline.base.job_options import RebuildOptions
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.rebuild import RebuildSummary


@click.command(context_settings=HELP)
@click.argument("root", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option(
    "-o", "--output", required=True, metavar="DIR", help="Directory for the rebuilt queues and index."
)
@click.option("-c", "--config", "config_file", metavar="FILE",
              help="The broker's configuration, if there is no broker.conf in DIR.")  # fmt: skip
@options_of(RebuildOptions)
@job_options
def rebuild(config_file: str | None, **settings: Any) -> None:
    """Rebuild the consume queues and the index of the store in DIR, and write them to another directory.

    The broker must be stopped. Nothing in DIR changes.
    """
    run_job("rebuilding", "rebuild", report, config=store_config(config_file), **settings)


def report(summary: RebuildSummary) -> None:
    """Print how many files of each kind were rebuilt, and the result of `verify`."""
    click.echo(
        f"{printable(summary.output, None)}: {counted(summary.queues, 'queue')} with {summary.units:,} "
        f"units, {counted(summary.index_files, 'index file')} with {summary.index_entries:,} entries, "
        f"made from {counted(summary.records, 'record')} in {summary.seconds:.1f} s"
    )
    if summary.errors is not None:
        click.echo(
            f"verified in {summary.verify_seconds:.1f} s: {counted(summary.errors, 'error')}, "
            f"{counted(summary.warnings or 0, 'warning')}"
        )
    if summary.not_served:
        click.echo(
            f"not complete: {counted(summary.not_served, 'record')} that do not fit their queue", err=True
        )
    for finding in summary.findings:
        click.echo(printable(finding, None), err=True)
