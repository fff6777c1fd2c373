"""`cometmq pipeline`: the jobs on Spark."""

from __future__ import annotations

import click

from cometmq.cli.lazy import LazyGroup

JOBS = {
    "archive": ("cometmq.cli.pipeline.archive:archive", "Write topics to Parquet, each message once."),
    "audit": ("cometmq.cli.pipeline.audit:audit", "What was lost, doubled, out of order or late."),
    "dedup": ("cometmq.cli.pipeline.dedup:dedup", "One message for each business key."),
    "dlq": ("cometmq.cli.pipeline.dlq:dlq", "Dead letters by reason; some are sent again."),
    "lag": ("cometmq.cli.pipeline.lag:lag", "How far consumer groups are behind, and whether they keep up."),
    "rebuild": ("cometmq.cli.pipeline.rebuild:rebuild", "Queues and index of a large store, from its log."),
    "replay": ("cometmq.cli.pipeline.replay:replay", "Send messages of an archive or store again."),
    "throughput": ("cometmq.cli.pipeline.throughput:throughput", "Messages and bytes over time, top topics."),
    "trace": ("cometmq.cli.pipeline.trace:trace", "Latencies and failures by the clients' trace records."),
    "run": ("cometmq.cli.pipeline.run:run", "Run a file of sources, SQL steps and sinks."),
    "compact": ("cometmq.cli.pipeline.compact:compact", "Merge the small files of an archive."),
}


@click.command(cls=LazyGroup, lazy=JOBS, context_settings={"help_option_names": ["-h", "--help"]})
def pipeline() -> None:
    """Jobs on Spark: on this machine's cores, or on any Spark master by --master."""
