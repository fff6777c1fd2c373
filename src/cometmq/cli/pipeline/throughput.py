"""`cometmq pipeline throughput`: messages and bytes of topics and queues over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import job_options, options_of, report_option, run_job
from cometmq.cli.pipeline.reports import print_absent, print_table, source_options
from cometmq.pipeline.base.job_options import ThroughputOptions
from cometmq.text import counted, local_time

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.throughput import ThroughputSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@source_options
@options_of(ThroughputOptions)
@report_option
@job_options
def throughput(**settings: Any) -> None:
    """Count messages and bytes of TOPICS (default: all) by store time: rates, peaks, top topics."""
    if settings["topics"] and settings["pattern"]:
        raise click.UsageError("Give topics or --pattern, not both.")
    if not settings["topics"] and not settings["pattern"] and settings["source"].startswith("live:"):
        settings["pattern"] = ".*"
    run_job("counting", "throughput", report, **settings)


def report(summary: ThroughputSummary) -> None:
    click.echo(
        f"{counted(summary.messages, 'message')} ({counted(summary.bytes, 'byte')}) of "
        f"{counted(summary.topic_count, 'topic')}; {summary.seconds:.1f} s"
    )
    print_absent(summary.absent)
    if summary.first_ms is None or summary.last_ms is None:
        return
    click.echo(
        f"stored {local_time(summary.first_ms)} to {local_time(summary.last_ms)}: "
        f"{summary.messages_per_s:,.1f} messages/s, {summary.bytes_per_s:,.0f} bytes/s; "
        f"peaks are means of {summary.window_s} s"
    )
    columns = {
        **{name: name for name in ("topic", "queues", "messages", "bytes")},
        "peak messages/s": "peak_messages_per_s",
        "peak bytes/s": "peak_bytes_per_s",
        "peak at": lambda row: local_time(row.peak_ms),
    }
    print_table(summary.topics, columns)
