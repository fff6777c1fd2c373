"""The `cometmq` command: its subcommands and where each is."""

from __future__ import annotations

from importlib.metadata import version

import click

from cometmq.cli.lazy import LazyGroup

COMMANDS = {
    "standalone": ("cometmq.cli.standalone:standalone", "Run a whole cluster on this machine."),
    "cluster": ("cometmq.cli.cluster:cluster", "Run a cluster of several processes, kill parts and heal it."),
    "console": ("cometmq.cli.console:console", "Show a cluster in a browser."),
    "raft": ("cometmq.cli.raft:raft", "Look at a raft group, change its leader and its members."),
    "acl": ("cometmq.cli.acl:acl", "Say what an account may do, and which rule decides."),
    "doctor": ("cometmq.cli.doctor:doctor", "Explain why a cluster does not work."),
    "namesrv": ("cometmq.cli.servers:mqnamesrv", "Run a name server (the same as mqnamesrv)."),
    "broker": ("cometmq.cli.servers:mqbroker", "Run a broker (the same as mqbroker)."),
    "send": ("cometmq.cli.send:send", "Send messages to a topic."),
    "consume": ("cometmq.cli.consume:consume", "Receive messages of a topic and print them."),
    "tail": ("cometmq.cli.tail:tail", "Watch a topic without a group: from now, or from a time."),
    "dlq": ("cometmq.cli.dlq:dlq", "List, show and send again what groups gave up on."),
    "timers": ("cometmq.cli.timers:timers", "Show messages that wait for their time, and take them back."),
    "pipeline": ("cometmq.cli.pipeline.group:pipeline", "Jobs on Spark over topics, archives and stores."),
    "archive": ("cometmq.cli.pipeline.archive:archive", "Write topics to Parquet (pipeline archive)."),
    "store": ("cometmq.cli.store:store", "Check, show, rebuild and measure a store directory."),
    "admin": (
        "cometmq.admin.commands:mqadmin",
        "Look after topics, groups and brokers (the same as mqadmin).",
    ),
}


@click.command(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("cometmq"), "-V", "--version", prog_name="cometmq")
def cometmq() -> None:
    """A message queue compatible with RocketMQ, with its data pipeline on Spark."""
