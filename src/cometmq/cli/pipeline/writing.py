"""`cometmq pipeline`: the jobs that write tables, stores and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.options import HELP, check_utf8, echo_json, moment, namesrv_option
from cometmq.cli.pipeline.job import (
    finish,
    job_options,
    measured,
    metrics_option,
    options_of,
    print_absent,
    report_option,
    run_job,
    running,
    warn_of_unread,
    write_report,
)
from cometmq.cli.store import store_config
from cometmq.command_options import opt
from cometmq.pipeline.base.job_options import ArchiveOptions, CompactOptions, RebuildOptions, ReplayOptions
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from cometmq.pipeline.base.job_options import ArchiveProgress
    from cometmq.pipeline.jobs.archive import ArchiveSummary
    from cometmq.pipeline.jobs.compaction import CompactSummary
    from cometmq.pipeline.jobs.rebuild import RebuildSummary
    from cometmq.pipeline.jobs.replay.replay import ReplayQueue, ReplaySummary
    from cometmq.pipeline.jobs.run.run import RunSummary


@click.command(context_settings=HELP)
@click.argument("topics", nargs=-1)
@opt("-o --output", required=True, metavar="DIR", help="The table: a path or a URI.")
@namesrv_option
@opt("--continuous", is_flag=True, help="Continue until Ctrl-C instead of ending with the current messages.")
@options_of(ArchiveOptions)
@metrics_option
@report_option
@job_options
def archive(
    topics: tuple[str, ...],
    continuous: bool,
    metrics_at: str | None,
    report_path: str | None,
    master: str | None,
    memory: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Write TOPICS to a table, each message exactly once.

    A further run continues where the last one stopped.
    """
    if topics and settings["pattern"]:
        raise click.UsageError("Give topics or --pattern, not both.")
    if not topics and not settings["pattern"]:
        raise click.UsageError("Give the topics to archive, or --pattern.")
    with running("archiving", master, memory) as job:
        from cometmq.pipeline.jobs.archive import archive as run_archive

        with measured(metrics_at, job.spark) as metrics:

            def on_progress(at: ArchiveProgress) -> None:
                job.show(at.records, at.total)
                if metrics is not None:
                    metrics.archived(at)

            summary = run_archive(
                job.spark,
                topics=topics,
                mode="continuous" if continuous else "available_now",
                on_progress=on_progress,
                stop=job.stop,
                **settings,
            )
        if report_path is not None:
            from cometmq.pipeline.jobs.reports import archive_report

            write_report(archive_report(job.spark, summary), report_path)
    finish(summary, as_json, report_archive)


def report_archive(summary: ArchiveSummary) -> None:
    click.echo(
        f"archived {counted(summary.records, 'message')} ({counted(summary.bytes, 'byte')}) "
        f"in {summary.seconds:.2f} s ({rate(summary.records, summary.seconds)}) to "
        f"{counted(summary.files, 'file')} ({counted(summary.file_bytes, 'byte')}) in "
        f"{printable(summary.output, None)}"
    )
    if summary.resumed_behind_batch is not None:
        click.echo(f"continued after batch {summary.resumed_behind_batch}")
    if summary.lost or summary.bad:
        lost = counted(summary.lost, "message")
        click.echo(f"lost before it was archived: {lost}; bad: {counted(summary.bad, 'message')}", err=True)
    for problem in (
        f"unreachable brokers: {', '.join(summary.away)}" if summary.away else "",
        f"began anew: {counted(summary.replaced, 'queue')}" if summary.replaced else "",
        summary.put_off,
    ):
        if problem:
            click.echo(f"not complete: {printable(problem, None)}", err=True)
    if summary.checkpoint_problem:
        click.echo(f"warning: {printable(summary.checkpoint_problem, None)}", err=True)
    if summary.groups_left_out:
        what = f"positions of {counted(summary.groups_left_out, 'consumer group')} were not recorded"
        click.echo(f"warning: {what}: there are too many", err=True)


_OWN_TOOLS = {"delta": "optimize.compact of deltalake", "iceberg": "rewrite_data_files of Spark"}


@click.command(context_settings=HELP)
@click.argument("output", metavar="ARCHIVE")
@options_of(CompactOptions)
@job_options
def compact(**settings: Any) -> None:
    """Merge the small files of each topic and hour of ARCHIVE, a path or a URI."""
    run_job("compacting", "compact", report_compact, **settings)


def report_compact(summary: CompactSummary) -> None:
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


@click.command(context_settings=HELP)
@click.argument("root", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@opt("-o --output", required=True, metavar="DIR", help="Directory for the rebuilt queues and index.")
@opt(
    "-c --config config_file",
    metavar="FILE",
    help="The broker's configuration, if there is no broker.conf in DIR.",
)
@options_of(RebuildOptions)
@job_options
def rebuild(config_file: str | None, **settings: Any) -> None:
    """Rebuild the consume queues and the index of the store in DIR, and write them to another directory.

    The broker must be stopped. Nothing in DIR changes.
    """
    run_job("rebuilding", "rebuild", report_rebuild, config=store_config(config_file), **settings)


def report_rebuild(summary: RebuildSummary) -> None:
    """Print how many files of each kind were rebuilt, and the result of `verify`."""
    click.echo(
        f"{printable(summary.output, None)}: {counted(summary.queues, 'queue')} with {summary.units:,} "
        f"units, {counted(summary.index_files, 'index file')} with {summary.index_entries:,} entries, "
        f"made from {counted(summary.records, 'record')} in {summary.seconds:.1f} s"
    )
    if summary.errors is not None:
        click.echo(
            f"verified in {summary.verify_seconds:.1f} s: {counted(summary.errors, 'error')}, "
            f"{counted(summary.warnings or 0, 'warning')}"
        )
    if summary.not_served:
        click.echo(
            f"not complete: {counted(summary.not_served, 'record')} that do not fit their queue", err=True
        )
    for finding in summary.findings:
        click.echo(printable(finding, None), err=True)


MAX_PRINTED_QUEUES = 50  # maximum number of source queues that are printed


@click.command(context_settings=HELP)
@opt(
    "-s --source",
    required=True,
    metavar="SOURCE",
    help="An archive (directory or URI), store:DIR[,DIR...] or live:HOST:PORT.",
)
@namesrv_option
@opt(
    "--from begin_ms",
    type=moment,
    metavar="TIME",
    help="Only messages stored at or after this time: 10m (s, m, h, d ago), ms since 1970 "
    "or yyyy-MM-dd#HH:mm:ss:SSS.",
)
@opt("--to end_ms", type=moment, metavar="TIME", help="Only messages stored before this time.")
@opt(
    "--map mapping",
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
        from cometmq.pipeline.jobs.replay.replay import replay as run_replay

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
        echo_json(summary)
    else:
        report_replay(summary)
    if not dry_run and not summary.complete:
        raise click.exceptions.Exit(1)


def report_replay(summary: ReplaySummary) -> None:
    """Print the result of the run, or the plan of a dry run."""
    if summary.dry_run:
        for queue in summary.queues[:MAX_PRINTED_QUEUES]:
            click.echo(printable(queue_line(queue), None))
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


def queue_line(queue: ReplayQueue) -> str:
    """Return one line: a source queue, its offset range, the number of messages to send and their target."""
    place = f"{queue.topic} {queue.broker_name}/{queue.queue_id} {queue.start}-{queue.end}"
    return f"{place}: {counted(queue.messages, 'message')} to {queue.target}"


@click.command(context_settings=HELP)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@opt("--check", is_flag=True, help="Only check FILE and its sources; run nothing.")
@metrics_option
@job_options
def run(
    file: str, check: bool, metrics_at: str | None, master: str | None, memory: str, as_json: bool
) -> None:
    """Run the pipeline of FILE: sources, SQL, sinks. The whole file is checked first."""
    from cometmq.pipeline.jobs.run.file import load_pipeline

    # Load the file first, so that its errors are reported before the slow start of Spark.
    load_pipeline(file)
    with running("running", master, memory) as job:
        from cometmq.pipeline.jobs.run.run import run as run_pipeline

        with measured(metrics_at, job.spark):
            summary = run_pipeline(
                job.spark,
                file,
                check_only=check,
                show=lambda line: click.echo(line, nl=False, err=as_json),
                on_progress=job.show,
                stop=job.stop,
            )
    report_run(summary, as_json, check)
    if not summary.complete and not check:
        raise click.exceptions.Exit(1)


def report_run(summary: RunSummary, as_json: bool, check: bool) -> None:
    if as_json:
        echo_json(summary)
        return
    if check:
        click.echo(f"{summary.file} is valid: {counted(len(summary.sinks), 'sink')}")
        return
    for sink in summary.sinks:
        done = "" if sink.complete else "; not finished"
        to = f"{sink.format} {printable(sink.to, None)}".rstrip()
        batches = f"{sink.batches} {'batch' if sink.batches == 1 else 'batches'}"
        click.echo(f"{sink.name}: {counted(sink.rows, 'row')} in {batches} to {to}{done}")
    warn_of_unread(summary)
    click.echo(f"done in {summary.seconds:.1f} s")
