"""`cometmq pipeline replay`: send messages of an archive or store to topics again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP, check_utf8, moment, namesrv_option
from cometmq.cli.pipeline.job import job_options, options_of, print_json, running
from cometmq.cli.pipeline.reports import print_absent
from cometmq.pipeline.base.job_options import ReplayOptions
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from cometmq.pipeline.jobs.replay import ReplayQueue, ReplaySummary

MAX_PRINTED_QUEUES = 50  # maximum number of source queues that are printed


@click.command(context_settings=HELP)
@click.option("-s", "--source", required=True, metavar="SOURCE",
              help="An archive (directory or URI), store:DIR[,DIR...] or live:HOST:PORT.")  # fmt: skip
@namesrv_option
@click.option("--from", "begin_ms", type=moment, metavar="TIME",
              help="Only messages stored at or after this time: 10m (s, m, h, d ago), ms since 1970 "
                   "or yyyy-MM-dd#HH:mm:ss:SSS.",
              )  # fmt: skip
@click.option("--to", "end_ms", type=moment, metavar="TIME", help="Only messages stored before this time.")
@click.option(
    "--map",
    "mapping",
    multiple=True,
    metavar="TOPIC=TARGET",
    help="Send the messages of TOPIC to TARGET. Topics whose names begin with % are sent only with a target.",
)
@options_of(ReplayOptions)
@job_options
def replay(
    topics: tuple[str, ...],
    mapping: tuple[str, ...],
    dry_run: bool,
    master: str | None,
    memory: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Send the messages of SOURCE to topics. The messages of each source queue are sent in their order."""
    check_utf8(*topics, *mapping, settings["pattern"], settings["into"])
    pairs = [text.partition("=") for text in mapping]
    if any(not topic or not target for topic, _, target in pairs):
        raise click.UsageError(f"--map: TOPIC=TARGET is expected, not {', '.join(mapping)}")
    if not dry_run and not settings["state"]:
        raise click.UsageError("Specify --state DIR or --dry-run.")
    with running("replaying", master, memory) as job:
        from cometmq.pipeline.jobs.replay import replay as run_replay

        summary = run_replay(
            job.spark,
            topics=topics,
            mapping={topic: target for topic, _, target in pairs},
            dry_run=dry_run,
            on_progress=job.show,
            stop=job.stop,
            **settings,
        )
    if as_json:
        print_json(summary)
    else:
        report(summary)
    if not dry_run and not summary.complete:
        raise click.exceptions.Exit(1)


def report(summary: ReplaySummary) -> None:
    """Print the result of the run, or the plan of a dry run."""
    if summary.dry_run:
        for queue in summary.queues[:MAX_PRINTED_QUEUES]:
            click.echo(printable(line(queue), None))
        if len(summary.queues) > MAX_PRINTED_QUEUES:
            click.echo(f"... and {counted(len(summary.queues) - MAX_PRINTED_QUEUES, 'queue')} more")
        size = counted(summary.planned_bytes, "byte")
        click.echo(f"would send {counted(summary.planned, 'message')} ({size} as stored)")
    else:
        size = counted(summary.bytes, "byte")
        click.echo(
            f"sent {counted(summary.messages, 'message')} ({size}) in {summary.seconds:.2f} s "
            f"({rate(summary.messages, summary.seconds)})"
        )
    for count, what in (
        (summary.sent_before, "sent by earlier runs"),
        (summary.doubled, "duplicated in the source, sent once"),
        (summary.system, "skipped, in system, retry and dead-letter topics"),
        (summary.own, "skipped, sent by this replay itself"),
    ):
        if count:
            click.echo(f"{counted(count, 'message')} {what}")
    if summary.targets_read:
        names = ", ".join(summary.targets_read[:MAX_PRINTED_QUEUES])
        click.echo(printable(f"topics skipped, to which this replay sends: {names}", None))
    if summary.positions_before:
        many = counted(summary.positions_before, "position")
        click.echo(f"{many} of groups set by an earlier run, and not again")
    if summary.positions:
        click.echo(f"{counted(summary.positions, 'position')} of groups set")
    print_absent(summary.absent)
    if summary.bad:
        where = printable(f"{summary.state}/bad", None)
        click.echo(f"not complete: {counted(summary.bad, 'message')} could not be sent: {where}", err=True)
    if summary.left and not summary.dry_run:
        click.echo(
            f"not complete: {counted(summary.left, 'message')} left; run the command again to continue",
            err=True,
        )


def line(queue: ReplayQueue) -> str:
    """Return one line: a source queue, its offset range, the number of messages to send and their target."""
    place = f"{queue.topic} {queue.broker_name}/{queue.queue_id} {queue.start}-{queue.end}"
    return f"{place}: {counted(queue.messages, 'message')} to {queue.target}"
