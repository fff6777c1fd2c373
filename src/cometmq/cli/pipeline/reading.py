"""`cometmq pipeline`: the jobs that report on messages, dead letters, groups and traces."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP, check_utf8, namesrv_option, print_table
from cometmq.cli.pipeline.job import (
    job_options,
    options_of,
    print_absent,
    report_option,
    run_job,
    source_options,
)
from cometmq.command_options import opt
from cometmq.pipeline.base import job_options as jobs
from cometmq.text import counted, local_time, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.audit import AuditSummary, Finding
    from cometmq.pipeline.jobs.dedup import DedupSummary
    from cometmq.pipeline.jobs.dlq import DlqSummary, RedriveSummary
    from cometmq.pipeline.jobs.lag import LagSummary
    from cometmq.pipeline.jobs.throughput import ThroughputSummary
    from cometmq.pipeline.jobs.trace import TraceSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@source_options
@options_of(jobs.AuditOptions)
@report_option
@job_options
def audit(**settings: Any) -> None:
    """Find lost, duplicate, disordered and late messages of TOPICS. The exit code is 1 if any are lost."""
    run_job("auditing", "audit", report_audit, **settings)


def report_audit(summary: AuditSummary) -> None:
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
        click.echo(printable(finding_line(finding), None), err=True)


def finding_line(finding: Finding) -> str:
    """Return a line like `missing 2: T broker-a/0@5 ID, window of 2026-11-23 05:00:00`."""
    place = "" if finding.broker_name is None else f" {finding.broker_name}/{finding.queue_id}"
    place += "" if finding.queue_offset is None else f"@{finding.queue_offset}"
    group = "" if finding.group is None else f" for {finding.group}"
    what = f"{finding.kind} {finding.value}: {finding.topic}{place} {finding.msg_id}{group}"
    return f"{what}, window of {local_time(finding.window_ms)}"


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@source_options
@opt("-o --output", required=True, metavar="DIR", help="The table: a directory for this job only.")
@options_of(jobs.DedupOptions)
@job_options
def dedup(**settings: Any) -> None:
    """Write TOPICS to a table with one message for each key, and write the duplicates to a second table."""
    if settings["topics"] and settings["pattern"]:
        raise click.UsageError("Give topics or --pattern, not both.")
    run_job("deduplicating", "dedup", report_dedup, **settings)


def report_dedup(summary: DedupSummary) -> None:
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


SENDING = ("to_topic", "again", "max_resends", "rate", "dry_run", "namesrv")


@click.command(context_settings=HELP)
@click.argument("groups", nargs=-1)
@partial(source_options, give_namesrv=True)
@options_of(jobs.DlqOptions)
@opt("--redrive", is_flag=True, help="Resend the dead letters that --where selects (true: all).")
@opt(
    "--into",
    type=click.Choice(["group", "topic"]),
    default="group",
    help="group: resend to the group only. topic: resend to all groups of the original topic.",
)
@options_of(jobs.RedriveOptions)
@job_options
def dlq(groups: tuple[str, ...], redrive: bool, into: str, **settings: Any) -> None:
    """Count the dead letters of GROUPS by group, topic, reason and hour, or resend some of them.

    Without GROUPS, all groups are read. Each dead letter is resent once: a second run skips those that an
    earlier run sent.
    """
    check_utf8(*groups, settings["where"], settings["reason"])
    if redrive and settings["where"] is None:
        raise click.UsageError("With --redrive, select dead letters: --where EXPR, or --where true.")
    if redrive and not settings["dry_run"] and settings["output"] is None:
        raise click.UsageError("With --redrive, specify --output DIR or --dry-run.")
    settings["to_topic"] = into == "topic"
    if not redrive:
        settings = {job: value for job, value in settings.items() if job not in SENDING}
    job, say = ("redrive", report_redrive) if redrive else ("dlq", report_dlq)
    run_job("reading dead letters", job, say, groups=groups, **settings)


def report_dlq(summary: DlqSummary) -> None:
    """Print the numbers of dead letters by group, topic, reason and hour."""
    click.echo(f"{counted(summary.messages, 'dead letter')} of {counted(summary.kinds, 'kind')}")
    if summary.counts:
        print_table(
            summary.counts,
            {
                "group": "group",
                "topic": "topic",
                "reason": "reason",
                "hour": lambda row: local_time(row.hour_ms),
                "messages": "messages",
                "resends": "most_resends",
                "last": lambda row: local_time(row.last_ms),
                "sample": "sample_msg_id",
            },
            words=4,
        )


def report_redrive(summary: RedriveSummary) -> None:
    """Print the outcomes of the resent dead letters."""
    done = f"{summary.planned:,} would be sent again" if summary.dry_run else f"{summary.resent:,} sent again"
    others = {"skipped": summary.skipped, "refused": summary.refused, "failed": summary.failed,
              "left": summary.left, "without a body": summary.without_body}  # fmt: skip
    parts = [done, *(f"{count:,} {word}" for word, count in others.items() if count)]
    click.echo(f"{counted(summary.chosen, 'dead letter')}: {', '.join(parts)}")
    if summary.output and (summary.refused or summary.without_body or summary.failed):
        click.echo(printable(f"not sent: {summary.output}/quarantine/run={summary.run}", None), err=True)
    for problem in summary.problems:
        click.echo(printable(problem, None), err=True)


@click.command(context_settings=HELP)
@click.argument("groups", nargs=-1)
@namesrv_option
@options_of(jobs.LagOptions)
@report_option
@job_options
def lag(**settings: Any) -> None:
    """Show the lag of GROUPS (default: all) in messages and in time, with rates and a forecast."""
    run_job("sampling", "lag", report_lag, **settings)


def report_lag(summary: LagSummary) -> None:
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


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@source_options
@options_of(jobs.ThroughputOptions)
@report_option
@job_options
def throughput(**settings: Any) -> None:
    """Count messages and bytes of TOPICS (default: all) by store time: rates, peaks, top topics."""
    if settings["topics"] and settings["pattern"]:
        raise click.UsageError("Give topics or --pattern, not both.")
    if not settings["topics"] and not settings["pattern"] and settings["source"].startswith("live:"):
        settings["pattern"] = ".*"
    run_job("counting", "throughput", report_throughput, **settings)


def report_throughput(summary: ThroughputSummary) -> None:
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


@click.command(context_settings=HELP)
@source_options
@options_of(jobs.TraceOptions)
@report_option
@job_options
def trace(**settings: Any) -> None:
    """Report the latencies of sends, deliveries and listeners, and their failures."""
    run_job("reading traces", "trace", report_trace, **settings)


def report_trace(summary: TraceSummary) -> None:
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
