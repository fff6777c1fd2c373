"""`cometmq pipeline`: the jobs on Spark."""

from __future__ import annotations

import click

from cometmq.cli.lazy import LazyGroup

JOBS = {
    "archive": ("cometmq.cli.pipeline.archive:archive", "Write topics to Parquet, each message once."),
    "audit": ("cometmq.cli.pipeline.audit:audit", "Find lost, duplicate, disordered and late messages."),
    "dedup": ("cometmq.cli.pipeline.dedup:dedup", "Write one message for each business key."),
    "dlq": ("cometmq.cli.pipeline.dlq:dlq", "Count dead letters by reason, or resend them."),
    "lag": ("cometmq.cli.pipeline.lag:lag", "Show and forecast the lag of consumer groups."),
    "rebuild": (
        "cometmq.cli.pipeline.rebuild:rebuild",
        "Rebuild queues and index of a large store.",
    ),
    "replay": ("cometmq.cli.pipeline.replay:replay", "Send the messages of an archive or store to topics."),
    "throughput": (
        "cometmq.cli.pipeline.throughput:throughput",
        "Count messages and bytes by time and topic.",
    ),
    "trace": ("cometmq.cli.pipeline.trace:trace", "Report latencies and failures from clients' traces."),
    "run": ("cometmq.cli.pipeline.run:run", "Run a file of sources, SQL steps and sinks."),
    "compact": ("cometmq.cli.pipeline.compact:compact", "Merge the small files of an archive."),
}


@click.command(
    cls=LazyGroup, sections={"Jobs": JOBS}, context_settings={"help_option_names": ["-h", "--help"]}
)
def pipeline() -> None:
    """Run jobs on Spark: on this machine's cores, or on the Spark master of --master."""
