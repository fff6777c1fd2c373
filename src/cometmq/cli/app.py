"""The `cometmq` command: its subcommands with their modules, and the Click groups of all commands."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from cometmq import __version__
from cometmq.command_options import color_option
from cometmq.text import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

MAX_LIST_LINE_CHARS = 500  # maximum characters of a line in the list of commands; click's default is 45
Commands = Mapping[str, tuple[str, str]]
"""A mapping from each command name to its "module:attribute" and its line in the list of commands."""


class CometGroup(click.Group):
    """A Click group that prints its help if called without arguments, and suggests similar commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            # Print the help here: Click 8.2 and later would raise it as a usage error.
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"No such command {args[0]!r}.{did_you_mean(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)

    def lines(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the commands under each heading, as pairs of the command's name and its line of help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return {
            "Commands": [
                (name, each.get_short_help_str(MAX_LIST_LINE_CHARS)) for name, each in commands if each
            ]
        }

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = self.lines(ctx)
        width = max(len(name) for lines in sections.values() for name, _ in lines)
        for heading, lines in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in lines])


class LazyGroup(CometGroup):
    """A Click group that imports the module of a command only when the command is used.

    The help lines of the commands are constants, so that `cometmq --help` imports no server, client or Spark.

    Args:
        sections: Maps each heading of the help to the commands under it, in their order.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Commands], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        self._lazy = {name: place for commands in sections.values() for name, (place, _) in commands.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            pair for pairs in self.lines(ctx).values() for pair in pairs if pair[0].startswith(incomplete)
        ]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name, help=line) for name, line in found] + options

    def lines(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:  # noqa: ARG002
        return {
            heading: [(name, line) for name, (_, line) in commands.items()]
            for heading, commands in self.sections.items()
        }


READING, WRITING = "cometmq.cli.pipeline.reading", "cometmq.cli.pipeline.writing"
JOBS = {
    "archive": (f"{WRITING}:archive", "Write topics to Parquet, each message once."),
    "audit": (f"{READING}:audit", "Find lost, duplicate, disordered and late messages."),
    "dedup": (f"{READING}:dedup", "Write one message for each business key."),
    "dlq": (f"{READING}:dlq", "Count dead letters by reason, or resend them."),
    "lag": (f"{READING}:lag", "Show and forecast the lag of consumer groups."),
    "rebuild": (f"{WRITING}:rebuild", "Rebuild queues and index of a large store."),
    "replay": (f"{WRITING}:replay", "Send the messages of an archive or store to topics."),
    "throughput": (f"{READING}:throughput", "Count messages and bytes by time and topic."),
    "trace": (f"{READING}:trace", "Report latencies and failures from clients' traces."),
    "run": (f"{WRITING}:run", "Run a file of sources, SQL steps and sinks."),
    "compact": (f"{WRITING}:compact", "Merge the small files of an archive."),
}
SECTIONS = {
    "First steps": {
        "standalone": ("cometmq.cli.standalone:standalone", "Run a name server and brokers on this machine."),
        "send": ("cometmq.cli.send:send", "Send messages to a topic."),
        "tail": ("cometmq.cli.listening:tail", "Print a topic's messages without joining a group."),
        "consume": ("cometmq.cli.listening:consume", "Consume a topic's messages as a member of a group."),
    },
    "Operate": {
        "admin": ("cometmq.admin.commands:mqadmin", "Manage topics, groups and brokers (same as mqadmin)."),
        "console": ("cometmq.cli.standalone:console", "Run the web console."),
        "top": (
            "cometmq.cli.top:top",
            "Show live rates and lags of brokers, groups and topics.",
        ),
        "context": ("cometmq.cli.conf:context", "Name clusters, and choose the one that commands use."),
        "completion": (
            "cometmq.cli.completion:completion",
            "Print the completion script of bash, zsh or fish.",
        ),
        "doctor": ("cometmq.cli.doctor:doctor", "Explain why a cluster does not work."),
        "dlq": ("cometmq.cli.operate:dlq", "List, show and resend dead letters."),
        "timers": ("cometmq.cli.operate:timers", "List delayed and scheduled messages, and cancel them."),
        "mcp": ("cometmq.cli.mcp:mcp", "Serve tools for agents (Model Context Protocol)."),
        "bench": ("cometmq.cli.bench:bench", "Measure sends, consumption and latency."),
        "acl": ("cometmq.cli.conf:acl", "Explain an account's permissions."),
        "store": ("cometmq.cli.store:store", "Verify, show, rebuild and measure a store directory."),
    },
    "Jobs": {
        "archive": (f"{WRITING}:archive", "Write topics to Parquet (pipeline archive)."),
        "pipeline": ("cometmq.cli.app:pipeline", "Run jobs on Spark."),
    },
    "Servers": {
        "namesrv": ("cometmq.cli.servers:mqnamesrv", "Run a name server (same as mqnamesrv)."),
        "broker": ("cometmq.cli.servers:mqbroker", "Run a broker (same as mqbroker)."),
        "cluster": (
            "cometmq.cli.cluster:cluster",
            "Run a cluster of processes; stop and restart its servers.",
        ),
        "raft": ("cometmq.cli.operate:raft", "Show a raft group, change its leader and its members."),
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
  COMETMQ_NAMESRV, NAMESRV_ADDR
                           Name servers of commands, clients and brokers,
                           separated by ';'.
  COMETMQ_CONTEXT          Context of commands without name servers.
  COMETMQ_ACCESS_KEY, COMETMQ_SECRET_KEY, COMETMQ_SECURITY_TOKEN
                           Account that signs the requests.
  COMETMQ_TLS              TLS of clients: RocketMQ's settings file, or true.
  COMETMQ_ADDRESS_MAP      Other addresses for brokers: 'FROM=TO;FROM=TO'.
  COMETMQ_MCP_TOKEN        Token of the clients of cometmq mcp --http.
  COMETMQ_LOG_LEVEL        Minimum level of log lines, for example DEBUG.
  COMETMQ_LOG_FORMAT       json: a JSON object for each log line.
  COMETMQ_RUN_DIR          Directory of the running servers' process ids.
  COMETMQ_TRACEBACK        1: print the traceback of an error.
  NO_COLOR, FORCE_COLOR    Not empty: output without colours, or with colours
                           also in a pipe or a file.
  ROCKETMQ_HOME            RocketMQ's directory, with conf/ and tools.yml.
  SPARK_REMOTE, SPARK_MASTER
                           Spark of jobs without --master.
  JAVA_HOME, PYSPARK_PYTHON
                           Java and Python of a local Spark.
  AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3
                           Address of an S3-compatible storage for jobs and
                           tiered storage.
  XDG_RUNTIME_DIR, XDG_CACHE_HOME, XDG_CONFIG_HOME
                           Parents of the default directories for process ids,
                           for message bodies and for contexts.
"""


NAMES = {"help_option_names": ["-h", "--help"]}


@click.command(cls=LazyGroup, sections={"Jobs": JOBS}, context_settings=NAMES)
def pipeline() -> None:
    """Run jobs on Spark: on this machine's cores, or on the Spark master of --master."""


@click.command(cls=LazyGroup, sections=SECTIONS, epilog=EPILOG, context_settings=NAMES)
@click.version_option(__version__, "-V", "--version", prog_name="cometmq")
@color_option
def cometmq() -> None:
    """Run and use a message queue compatible with RocketMQ, with its data pipeline on Spark."""
