"""`cometmq pipeline`: the jobs on Spark."""

from __future__ import annotations

import click

from cometmq.cli.lazy import LazyGroup

JOBS = {
    "archive": ("cometmq.cli.pipeline.archive:archive", "Write topics to Parquet, each message once."),
    "compact": ("cometmq.cli.pipeline.compact:compact", "Merge the small files of an archive."),
}


@click.command(cls=LazyGroup, lazy=JOBS, context_settings={"help_option_names": ["-h", "--help"]})
def pipeline() -> None:
    """Jobs on Spark: on this machine's cores, or on any Spark master by --master."""
