"""`cometmq pipeline compact`: merge the small files of an archive into a few large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import job_options, options_of, run_job
from cometmq.pipeline.base.job_options import CompactOptions
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.compaction import CompactSummary

_OWN_TOOLS = {"delta": "optimize.compact of deltalake", "iceberg": "rewrite_data_files of Spark"}


@click.command(context_settings=HELP)
@click.argument("output", metavar="ARCHIVE")
@options_of(CompactOptions)
@job_options
def compact(**settings: Any) -> None:
    """Merge the small files of each topic and hour of ARCHIVE, a path or a URI."""
    run_job("compacting", "compact", report, **settings)


def report(summary: CompactSummary) -> None:
    where = printable(summary.output, None)
    if summary.files_before:
        click.echo(
            f"merged {counted(summary.files_before, 'file')} ({counted(summary.bytes_before, 'byte')}) to "
            f"{counted(summary.files_after, 'file')} ({counted(summary.bytes_after, 'byte')}) with "
            f"{counted(summary.rows, 'message')} in {summary.seconds:.2f} s in {where}"
        )
    elif own := _OWN_TOOLS.get(summary.table_format):
        click.echo(
            f"{where} is a table of format {summary.table_format}, which is merged by {own}, never here"
        )
    else:
        click.echo(f"nothing to merge in {where}")
    if summary.deleted:
        click.echo(f"deleted {counted(summary.deleted, 'file')} that are not part of the table")
    if summary.checkpoint_problem:
        click.echo(f"warning: {printable(summary.checkpoint_problem, None)}", err=True)
