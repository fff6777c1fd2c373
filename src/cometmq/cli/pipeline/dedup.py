"""`cometmq pipeline dedup`: keep one message for each business key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import job_options, options_of, run_job
from cometmq.cli.pipeline.reports import print_absent, print_table, source_options
from cometmq.pipeline.base.job_options import DedupOptions
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.dedup import DedupSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@source_options
@click.option(
    "-o", "--output", required=True, metavar="DIR", help="The table: a directory for this job only."
)
@options_of(DedupOptions)
@job_options
def dedup(**settings: Any) -> None:
    """Write TOPICS to a table with one message for each key, and write the duplicates to a second table."""
    if settings["topics"] and settings["pattern"]:
        raise click.UsageError("Give topics or --pattern, not both.")
    run_job("deduplicating", "dedup", report, **settings)


def report(summary: DedupSummary) -> None:
    """Print the numbers of kept and removed messages."""
    click.echo(
        f"{counted(summary.messages, 'message')}: {summary.kept:,} kept, {summary.removed:,} removed, "
        f"{summary.without_key:,} without a key; {summary.seconds:.1f} s; "
        f"in {printable(summary.output, None)}"
    )
    print_absent(summary.absent)
    columns = {"topic": "topic", "messages": "messages", "without key": "without_key", "removed": "removed"}
    print_table(summary.topics, columns)
    for one in summary.samples:
        place = f"{one.broker_name}/{one.queue_id}@{one.queue_offset}"
        kept = f"{one.kept_broker_name}/{one.kept_queue_id}@{one.kept_queue_offset}"
        click.echo(printable(f"removed {one.topic} {place} for {kept}, key {one.key}", None))
