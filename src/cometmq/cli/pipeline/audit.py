"""`cometmq pipeline audit`: find lost, duplicate, disordered and late messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP
from cometmq.cli.pipeline.job import job_options, options_of, report_option, run_job
from cometmq.cli.pipeline.reports import print_absent, print_table, source_options
from cometmq.pipeline.base.job_options import AuditOptions
from cometmq.text import counted, local_time, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.audit import AuditSummary, Finding


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@source_options
@options_of(AuditOptions)
@report_option
@job_options
def audit(**settings: Any) -> None:
    """Find lost, duplicate, disordered and late messages of TOPICS. The exit code is 1 if any are lost."""
    run_job("auditing", "audit", report, **settings)


def report(summary: AuditSummary) -> None:
    opened = f", {summary.open_windows:,} of them still open and not counted" if summary.open_windows else ""
    click.echo(f"{counted(summary.messages, 'message')} in {counted(summary.windows, 'window')}{opened}")
    if summary.windows and summary.windows == summary.open_windows:
        click.echo("no window is closed: --to TIME closes those before it", err=True)
    print_absent(summary.absent)
    columns = ("messages", "missing", "doubled", "out_of_order", "late", "anew", "sent", "lost")
    if summary.topics:
        print_table(summary.topics, {"topic": "topic"} | {name: name for name in columns})
    if summary.groups:
        click.echo()
        print_table(summary.groups, {name: name for name in summary.groups[0].__struct_fields__}, words=2)
    for count, what in ((summary.bad_traces, "bad trace record"), (summary.left_out, "group")):
        if count:
            click.echo(f"left out: {counted(count, what)}", err=True)
    for finding in summary.samples:
        click.echo(printable(line(finding), None), err=True)


def line(finding: Finding) -> str:
    """Return a line like `missing 2: T broker-a/0@5 ID, window of 2026-11-23 05:00:00`."""
    place = "" if finding.broker_name is None else f" {finding.broker_name}/{finding.queue_id}"
    place += "" if finding.queue_offset is None else f"@{finding.queue_offset}"
    group = "" if finding.group is None else f" for {finding.group}"
    what = f"{finding.kind} {finding.value}: {finding.topic}{place} {finding.msg_id}{group}"
    return f"{what}, window of {local_time(finding.window_ms)}"
