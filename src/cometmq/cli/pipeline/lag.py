"""`cometmq pipeline lag`: the lag of consumer groups and its forecast."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP, namesrv_option
from cometmq.cli.pipeline.job import job_options, options_of, report_option, run_job
from cometmq.cli.pipeline.reports import print_table
from cometmq.pipeline.base.job_options import LagOptions
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.lag import LagSummary


@click.command(context_settings=HELP)
@click.argument("groups", nargs=-1)
@namesrv_option
@options_of(LagOptions)
@report_option
@job_options
def lag(**settings: Any) -> None:
    """Show the lag of GROUPS (default: all) in messages and in time, with rates and a forecast."""
    run_job("sampling", "lag", report, **settings)


def report(summary: LagSummary) -> None:
    """Print a table of the lag with a row for each group and time window."""
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
