"""`cometmq pipeline compact`: merge the small files of an archive into a few large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import COUNT, HELP
from cometmq.cli.pipeline.job import job_options, run_job
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.compaction import CompactSummary

_OWN_TOOLS = {"delta": "optimize.compact of deltalake", "iceberg": "rewrite_data_files of Spark"}
SECONDS = click.FloatRange(min=0)


@click.command(context_settings=HELP)
@click.argument("output", metavar="ARCHIVE")
@click.option("--target-bytes", type=COUNT, default=256 * 1024 * 1024, show_default="256 MiB", metavar="N",
              help="Target size of a file; files smaller than half of it are merged.")  # fmt: skip
@click.option("--older-than", "older_than_s", type=SECONDS, default=3600.0, metavar="SECONDS",
              help="Merge only files of hours that ended this long ago.")  # fmt: skip
@click.option("--retention", "retention_s", type=SECONDS, default=86_400.0, metavar="SECONDS",
              help="On object stores: how long replaced files are kept for current readers.")  # fmt: skip
@job_options
def compact(**settings: Any) -> None:
    """Merge the small files of each topic and hour of ARCHIVE, a path or a URI."""
    run_job("compacting", "compact", report, **settings)


def report(summary: CompactSummary) -> None:
    """Print the result of the run."""
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
