"""`cometmq pipeline trace`: latencies and failures from the trace records of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import job_options, options_of, report_option, run_job
from cometmq.cli.pipeline.reports import print_table, source_options
from cometmq.pipeline.base.job_options import TraceOptions
from cometmq.text import printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.trace import TraceSummary


@click.command(context_settings=HELP)
@source_options
@options_of(TraceOptions)
@report_option
@job_options
def trace(**settings: Any) -> None:
    """Report the latencies of sends, deliveries and listeners, and their failures."""
    run_job("reading traces", "trace", report, **settings)


def report(summary: TraceSummary) -> None:
    """Print the latencies (ms) and the numbers of failures that the job found in trace records."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(summary.records.items()))
    click.echo(f"trace records: {kinds or 'none'}; {summary.bad:,} bad; {summary.seconds:.1f} s")
    costs = {f"cost {part}": f"cost_{part}" for part in ("p50", "p95", "p99", "max")}
    delays = {f"delay {part}": f"delay_{part}" for part in ("p50", "p95", "p99", "max")}
    if summary.sends:
        click.echo("\nslowest sends")
        counts = {"topic": "topic", "producer group": "group", "sends": "sends", "failed": "failures"}
        print_table(summary.sends, counts | costs, words=2)
    if summary.groups:
        click.echo(
            "\nslowest consumer groups: delay from storing to the first delivery, duration of the listener"
        )
        counts = {"topic": "topic", "group": "group", "delivered": "deliveries", "again": "redeliveries"}
        counts |= {"failed": "failures", "open": "unfinished"}
        print_table(summary.groups, counts | delays | costs, words=2)
        if skewed := sum(row.negative_delays for row in summary.groups):
            click.echo(f"deliveries before the message was sent, by the clients' clocks: {skewed:,}")
    for bad in summary.bad_samples:
        place = f"{bad.broker_name}/{bad.queue_id}@{bad.queue_offset}"
        click.echo(printable(f"bad: {place}: {bad.problem}: {bad.raw}", None), err=True)
