"""`cometmq pipeline dlq`: count and resend dead letters in bulk."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP, check_utf8
from cometmq.cli.pipeline.job import job_options, options_of, run_job
from cometmq.cli.pipeline.reports import print_table, source_options
from cometmq.pipeline.base.job_options import DlqOptions, RedriveOptions
from cometmq.text import counted, local_time, printable

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.dlq import DlqSummary, RedriveSummary

SENDING = ("to_topic", "again", "max_resends", "rate", "dry_run", "namesrv")


@click.command(context_settings=HELP)
@click.argument("groups", nargs=-1)
@partial(source_options, give_namesrv=True)
@options_of(DlqOptions)
@click.option("--redrive", is_flag=True, help="Resend the dead letters that --where selects (true: all).")
@click.option("--into", type=click.Choice(["group", "topic"]), default="group",
              help="group: resend to the group only. "
                   "topic: resend to all groups of the original topic.")  # fmt: skip
@options_of(RedriveOptions)
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
        settings = {name: value for name, value in settings.items() if name not in SENDING}
    name, say = ("redrive", report_redrive) if redrive else ("dlq", report)
    run_job("reading dead letters", name, say, groups=groups, **settings)


def report(summary: DlqSummary) -> None:
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
