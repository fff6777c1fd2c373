"""The `cometmq` command: its subcommands and their modules."""

from __future__ import annotations

import click

from cometmq import __version__
from cometmq.cli.lazy import LazyGroup

SECTIONS = {
    "First steps": {
        "standalone": ("cometmq.cli.standalone:standalone", "Run a name server and brokers on this machine."),
        "send": ("cometmq.cli.send:send", "Send messages to a topic."),
        "tail": ("cometmq.cli.tail:tail", "Print a topic's messages without joining a group."),
        "consume": ("cometmq.cli.consume:consume", "Consume a topic's messages as a member of a group."),
    },
    "Operate": {
        "admin": ("cometmq.admin.commands:mqadmin", "Manage topics, groups and brokers (same as mqadmin)."),
        "console": ("cometmq.cli.console:console", "Run the web console."),
        "doctor": ("cometmq.cli.doctor:doctor", "Explain why a cluster does not work."),
        "dlq": ("cometmq.cli.dlq:dlq", "List, show and resend dead letters."),
        "timers": (
            "cometmq.cli.timers:timers",
            "List delayed and scheduled messages, and cancel them.",
        ),
        "bench": ("cometmq.cli.bench:bench", "Measure sends, consumption and latency."),
        "acl": ("cometmq.cli.acl:acl", "Explain an account's permissions."),
        "store": ("cometmq.cli.store:store", "Verify, show, rebuild and measure a store directory."),
    },
    "Jobs": {
        "archive": ("cometmq.cli.pipeline.archive:archive", "Write topics to Parquet (pipeline archive)."),
        "pipeline": ("cometmq.cli.pipeline.group:pipeline", "Run jobs on Spark."),
    },
    "Servers": {
        "namesrv": ("cometmq.cli.servers:mqnamesrv", "Run a name server (same as mqnamesrv)."),
        "broker": ("cometmq.cli.servers:mqbroker", "Run a broker (same as mqbroker)."),
        "cluster": (
            "cometmq.cli.cluster:cluster",
            "Run a cluster of processes; stop and restart its servers.",
        ),
        "raft": ("cometmq.cli.raft:raft", "Show a raft group, change its leader and its members."),
        "conf": ("cometmq.cli.conf:conf", "List, show and copy the package's configuration files."),
    },
}
EPILOG = """
\b
Example, the last two in another terminal:
  cometmq standalone --data /tmp/comet
  cometmq send greetings "hello"
  cometmq tail greetings --from first

\b
Environment variables:
  NAMESRV_ADDR             Name servers of commands, clients and brokers,
                           separated by ';'.
  COMETMQ_ACCESS_KEY, COMETMQ_SECRET_KEY, COMETMQ_SECURITY_TOKEN
                           Account that signs the requests.
  COMETMQ_TLS              TLS of clients: RocketMQ's settings file, or true.
  COMETMQ_ADDRESS_MAP      Other addresses for brokers: 'FROM=TO;FROM=TO'.
  COMETMQ_LOG_LEVEL        Minimum level of log lines, for example DEBUG.
  COMETMQ_LOG_FORMAT       json: a JSON object for each log line.
  COMETMQ_RUN_DIR          Directory of the running servers' process ids.
  COMETMQ_TRACEBACK        1: print the traceback of an error.
  ROCKETMQ_HOME            RocketMQ's directory, with conf/ and tools.yml.
  SPARK_REMOTE, SPARK_MASTER
                           Spark of jobs without --master.
  JAVA_HOME, PYSPARK_PYTHON
                           Java and Python of a local Spark.
  AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3
                           Address of an S3-compatible storage for jobs.
  XDG_RUNTIME_DIR, XDG_CACHE_HOME
                           Parents of the default directories for process ids
                           and for message bodies.
"""


@click.command(
    cls=LazyGroup,
    sections=SECTIONS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "-V", "--version", prog_name="cometmq")
def cometmq() -> None:
    """Run and use a message queue compatible with RocketMQ, with its data pipeline on Spark."""
