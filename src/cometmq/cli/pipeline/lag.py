"""`cometmq pipeline lag`: the lag of consumer groups and its forecast."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import COUNT, HELP, namesrv_option
from cometmq.cli.pipeline.job import job_options, report_option, run_job
from cometmq.cli.pipeline.reports import print_table
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.lag import LagSummary

SPAN = click.FloatRange(min=0, min_open=True)


@click.command(context_settings=HELP)
@click.argument("groups", nargs=-1)
@namesrv_option
@click.option(
    "-o", "--output", metavar="DIR", help="Directory for the table of samples, to which every run appends."
)
@click.option("--samples", type=click.IntRange(min=0), default=2, metavar="N", help="0: until Ctrl-C.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.1), default=10.0, metavar="SECONDS",
              help="Interval between two samples; the table stores one per interval.")  # fmt: skip
@click.option("--keep", "keep_days", type=SPAN, default=30.0, metavar="DAYS",
              help="Remove older samples from the table.")  # fmt: skip
@click.option("--retention", "retention_h", type=SPAN, default=72.0,
              metavar="HOURS", help="Retention of the brokers (fileReservedTime).")  # fmt: skip
@click.option(
    "--timeout-ms", type=COUNT, default=30_000, metavar="MS", help="Timeout of a request to a broker."
)
@report_option
@job_options
def lag(**settings: Any) -> None:
    """Show the lag of GROUPS (default: all) in messages and in time, with rates and a forecast."""
    run_job("sampling", "lag", report, **settings)


def report(summary: LagSummary) -> None:
    """Print the lag of the groups, a line for each window."""
    click.echo(f"{counted(summary.group_count, 'group')}, {counted(summary.samples, 'sample')}")
    columns: dict[str, str | Callable[[Any], object]] = {
        "group": "group",
        "window": lambda row: _span(row.window_s),
        "queues": "queues",
        "lag": "lag",
        "time lag": lambda row: _span(None if row.time_lag_ms is None else row.time_lag_ms / 1000),
        "lost": "lost",
        "consumed/s": "consumed_per_s",
        "stored/s": "stored_per_s",
        "expires in": lambda row: _span(row.expires_in_s),
    }
    if summary.groups:
        print_table(summary.groups, columns)
    for problem in summary.problems:
        click.echo(f"not complete: {printable(problem, None)}", err=True)


def _span(span_s: float | None) -> str | None:
    return None if span_s is None else str(timedelta(seconds=round(span_s)))
