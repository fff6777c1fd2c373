"""Features that all `mqadmin` commands share: names in any case, `help X`, `-n`, `--json`, `--dry-run`."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem

from cometmq import yaml_file
from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.watching import repeated
from cometmq.admin.errors import Incomplete
from cometmq.admin.operations import Operation
from cometmq.client import ClientOptions
from cometmq.client.cluster.options import environment_credentials
from cometmq.command_options import F, name_option, namesrv, number, opt, say, watch_interval_s
from cometmq.errors import BodyError, CometError, ConfigError, YamlError
from cometmq.protocol.json_body import Body
from cometmq.protocol.lenient import loads
from cometmq.text import did_you_mean, is_utf8, printable, printable_json

B = TypeVar("B", bound=Body)
V = TypeVar("V")


class AtBroker(Protocol):
    """A value with the name of the broker to which it belongs."""

    @property
    def broker_name(self) -> str: ...


R = TypeVar("R", bound=AtBroker)
MAX_LIST_BYTES = 16 << 20  # Maximum size, in bytes, of a file that contains a JSON list
Work = Callable[..., Awaitable[None]]
MAX_PROBLEM_CHARS = 4096  # Maximum length of a printed error; a server's remark may be very long


TOPIC = name_option("-t --topic", required=True, help="Topic name.")
BROKER = opt("-b --brokerAddr", metavar="HOST:PORT", help="This broker.")
NAMESRV = namesrv("-n --namesrvAddr namesrv")
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


ALIASES = {"deleteaccessconfig": "deleteaclconfig"}
"""Other names that RocketMQ has for a command."""


MAX_LIST_LINE_CHARS = 500  # Maximum length of a line of help. No command's description is longer
COMMON = (
    "See 'mqadmin help <command>' for more information on a specific command.",
    "Every command takes -n/--namesrvAddr LIST (else COMETMQ_NAMESRV, NAMESRV_ADDR, the context, or",
    "127.0.0.1:9876) and --json, which prints JSON instead of columns.",
)


class MqAdmin(click.Group):
    """The command group `mqadmin`, which follows RocketMQ's conventions.

    Command names are case-insensitive, `help <command>` shows a command's options, and the help lists all
    commands without click's formatting.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections: dict[str, list[click.Command]] = {}

    def add_section(self, heading: str, commands: Iterable[click.Command]) -> None:
        """Add commands, which the help lists under a heading."""
        self.sections[heading] = list(commands)
        for command in self.sections[heading]:
            self.add_command(command)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        name = cmd_name.lower()
        return {known.lower(): found for known, found in self.commands.items()}.get(ALIASES.get(name, name))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        start = incomplete.lower()
        found = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in self.commands.items()
            if name.lower().startswith(start)
        ]
        return found or super().shell_complete(ctx, incomplete)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            if not is_utf8(word):
                # A request can contain only UTF-8 text, so other bytes would be lost.
                raise click.UsageError(f"{word!r} is not UTF-8 text", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.ClickException(f"The sub command {args[0]} not exist.{self.nearest(args[0])}")
        return super().resolve_command(ctx, args)

    def nearest(self, name: str) -> str:
        """Return a hint that names the most similar command, or "" if no command is similar."""
        return did_you_mean(name, self.commands)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(self.listing(ctx) + "\n")

    def listing(self, ctx: click.Context) -> str:
        """Return the output of `mqadmin` without arguments: the commands under their headings."""
        lines = [ctx.get_usage(), "", "The most commonly used mqadmin commands are:"]
        width = max(map(len, self.commands))
        for heading, commands in self.sections.items():
            lines += ["", f"{heading}:"]
            lines += [
                f"   {each.name:<{width}}  {each.get_short_help_str(MAX_LIST_LINE_CHARS)}"
                for each in commands
            ]
        return "\n".join([*lines, "", *COMMON])


JSON, RAW, DRY_RUN = "cometmq.admin.json", "cometmq.admin.raw", "cometmq.admin.dry_run"


def _meta_flag(flag: str, key: str, text: str) -> Callable[[F], F]:
    """Return a decorator for a flag that is stored in the context's meta data, not passed to the command."""
    return click.option(
        flag,
        is_flag=True,
        expose_value=False,
        callback=lambda ctx, _param, given: ctx.meta.update({key: given}),
        help=text,
    )


def result_options(command: F) -> F:
    """Add `--json` and `--raw` to a command. The function `tell` reads both when it prints the result."""
    text = "Print names and bodies unchanged instead of escaping control characters."
    as_json = _meta_flag("--json", JSON, "Print JSON instead of columns.")
    return _meta_flag("--raw", RAW, text)(as_json(command))


def wants_json() -> bool:
    """Return whether the command was called with `--json`."""
    return bool(click.get_current_context().meta.get(JSON))


def tell(value: Any, lines: Iterable[str], *, indent: int | None = 2) -> None:
    """Print the result of a command: the value as JSON with `--json` (see `show_json`), else the lines."""
    show_json(value, indent=indent) if wants_json() else show(lines)


async def tell_known(
    ask: Callable[[dict[str, CometError]], Awaitable[V]], lines: Callable[[V], Iterable[str]]
) -> None:
    """Print the result that `ask` returns, and raise Incomplete if it has stored errors of brokers."""
    missing: dict[str, CometError] = {}
    found = await ask(missing)
    tell(found, lines(found))
    raise_if_incomplete(missing)


def show_if_text(line: str) -> None:
    """Print a progress line, except with `--json`, which prints a single value at the end."""
    if not wants_json():
        show([line])


def charset(name: str) -> str:
    """Check that Python supports a charset. Return its name. Raises click.BadParameter."""
    try:
        b"-".decode(name.strip())  # Python checks the charset only if there are bytes to decode
    except LookupError:
        raise click.BadParameter(f"unknown charset {name!r}") from None
    return name.strip()


def changes(command: F) -> F:
    """Add `--dry-run` to a command that changes the cluster. The function `announce` reads this option."""
    return _meta_flag("--dry-run", DRY_RUN, "Print the actions without executing them.")(command)


def announce(*deeds: str, danger: bool = False) -> None:
    """Print what a command is about to do.

    With `--dry-run`, print all actions to standard output and end the command. Otherwise, print only
    dangerous actions, to standard error.
    """
    if click.get_current_context().meta.get(DRY_RUN):
        lines = [*(f"would {deed}" for deed in deeds), "Nothing was done: this was a dry run."]
        tell({"dryRun": True, "would": list(deeds)}, lines)
        raise click.exceptions.Exit(0)
    if danger and not wants_json():  # With --json, standard error contains only errors, as objects
        for deed in deeds:
            show_problem(f"will {deed}")


async def execute(operation: Operation, show_result: Callable[[Any], None] | None = None) -> list[Any]:
    """Announce an operation, run it, print its lines, and return the results of its requests.

    `show_result` prints more about the result of a request, except with `--json`.
    """
    announce(*operation.describe(), danger=operation.danger)
    results = []
    async for step, addr, result in operation.run():
        results.append(result)
        if step.at_each:
            show_if_text(step.at_each.replace("{addr}", addr))
        if show_result is not None and not wants_json():
            show_result(result)
        if step.at_end and addr == step.addrs[-1]:
            show_if_text(step.at_end)
    return results


ROUNDS = number("--rounds", low=1, help="Stop after N rounds (CometMQ only).")
CLUSTER = name_option("-c --cluster", help="Only the brokers of this cluster.")
BODY_FORMAT = opt(
    "-f --bodyFormat charset", type=charset, metavar="CHARSET", help="Print the body, in this charset."
)
FILE = opt("-f --filename", required=True, metavar="FILE", help="File with a JSON list of the values to set.")


class Target(NamedTuple):
    """The value of `target_options`: one broker, or the masters of a cluster."""

    broker_addr: str | None
    cluster: str | None

    @property
    def kind(self) -> str:
        return "broker" if self.broker_addr else "cluster"

    async def addrs(self, admin: Admin) -> list[str]:
        """Return the address of the broker, or those of the cluster's masters."""
        return await admin.target_addrs(self.broker_addr, self.cluster)


def target_options(command: F) -> F:
    """Add `-b/--brokerAddr` and `-c/--clusterName`, exactly one of which is required.

    The command receives them as one Target, `at`.
    """

    @functools.wraps(command)
    def checked(*args: Any, broker_addr: str | None, cluster: str | None, **options: Any) -> Any:
        if broker_addr and cluster:
            raise click.UsageError("Give -b/--brokerAddr or -c/--clusterName, not both.")
        if not (broker_addr or cluster):
            raise click.UsageError("Missing option: -b/--brokerAddr or -c/--clusterName.")
        return command(*args, at=Target(broker_addr, cluster), **options)

    name = opt("-c --clusterName cluster", metavar="NAME", help="All masters of this cluster.")
    name(BROKER(checked))
    return checked  # type: ignore[return-value]


async def set_list(
    at: Target, admin: Admin, nouns: str, names: list[str], sends: AsyncIterator[str], what: str
) -> None:
    """Announce and execute a change of many topics or groups (`nouns`), one request for each broker."""
    addrs = await at.addrs(admin)
    announce(f"create or change {nouns} {', '.join(names)} at {', '.join(addrs)}")
    async for addr in sends:
        show_if_text(f"submit batch of {what} config to {addr} success, please check the result later.")
    tell({nouns: names, "brokerAddrs": addrs}, [])


def admin_command(name: str, *options: Callable[[Any], Any]) -> Callable[[Work], click.Command]:
    """Return a decorator that makes a function an `mqadmin` command with RocketMQ's name and these options.

    The function receives an Admin for the name servers of `-n`, and the values of its own options. The Admin
    is always closed at the end. Every command also has `--json` and `--raw`.
    """

    def decorate(work: Work) -> click.Command:
        for option in reversed((*options, result_options)):
            work = option(work)

        @functools.wraps(work)
        def command(namesrv: str, **options: Any) -> None:
            async def run() -> None:
                async with Admin(namesrv, options=tools_options()) as admin:
                    turn = functools.partial(work, admin, **options)
                    await repeated(turn, watch_interval_s(), show_error, as_json=wants_json())

            asyncio.run(run())

        return click.command(name, context_settings=SETTINGS)(NAMESRV(command))

    return decorate


def tools_options() -> ClientOptions:
    """Return options with the account in ROCKETMQ_HOME/conf/tools.yml, like RocketMQ's tools.

    An account in the environment takes precedence. Raises ConfigError.
    """
    home = os.environ.get("ROCKETMQ_HOME")
    path = os.path.join(home, "conf", "tools.yml") if home else ""
    if environment_credentials() is not None or not os.path.exists(path):
        return ClientOptions()
    with open(path, "rb") as file:
        data = file.read(yaml_file.BYTES_MAX + 1)
    try:
        found = yaml_file.load(data).value if data.strip() else {}
    except YamlError as error:
        raise ConfigError("tools.yml", "", error.problem, f"{path} line {error.line}") from None
    keys = {}
    for name in ("accessKey", "secretKey"):
        node = found.get(name) if isinstance(found, dict) else None
        keys[name] = node.value.strip() if node is not None and isinstance(node.value, str) else ""
    return ClientOptions(access_key=keys["accessKey"], secret_key=keys["secretKey"])


def show(lines: Iterable[str]) -> None:
    """Print lines to standard output, with control characters escaped unless `--raw` is set."""
    raw = click.get_current_context().meta.get(RAW, False)
    for line in lines:
        if raw:
            click.echo(
                line, color=True
            )  # without `color`, click removes escape sequences from a pipe's output
        else:
            say(printable(line, None), **({"bold": True} if line.startswith("#") else {}))  # a heading


def show_problem(text: str) -> None:
    """Print one line to standard error, with control characters escaped."""
    say(printable(text, MAX_PROBLEM_CHARS), err=True, fg="red")


def show_error(error: CometError | click.ClickException) -> None:
    """Print an error after which the command continues: a line, or a JSON object with `--json`."""
    if wants_json():
        value = {"error": type(error).__name__, "message": str(error)}
        click.echo(printable_json(msgspec.json.encode(value)), err=True)
    else:
        show_problem(f"{click.get_current_context().find_root().info_name}: {error}")


def incomplete(missing: Mapping[str, CometError]) -> Incomplete | None:
    """Return an error that contains each distinct error of `missing` once, or None if `missing` is empty."""
    return Incomplete(list(dict.fromkeys(map(str, missing.values())))) if missing else None


def raise_if_incomplete(missing: Mapping[str, CometError]) -> None:
    """Raise Incomplete if brokers did not answer. The command has already printed the rest of the result."""
    if error := incomplete(missing):
        raise error


def show_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value as JSON, over several lines or (`indent` None, or with `--watch`) in one line."""
    data = msgspec.json.encode(value)
    if watch_interval_s() is not None:
        indent = None
    click.echo(printable_json(data if indent is None else msgspec.json.format(data, indent=indent)))


async def in_cluster(admin: Admin, cluster: str | None, rows: Iterable[R]) -> list[R]:
    """Return the values whose broker belongs to this cluster; if the cluster is None, all values."""
    if cluster is None:
        return list(rows)
    names = await admin.names_in(cluster)
    return [row for row in rows if row.broker_name in names]


def list_of(path: str, kind: type[B]) -> list[B]:
    """Return the items of a file that contains a JSON list. Raises click.ClickException."""
    try:
        with open(path, "rb") as file:
            found = loads(file.read(MAX_LIST_BYTES))
        if not isinstance(found, list) or not found:
            raise click.ClickException(f"{path}: expected a non-empty JSON list")
        return [kind.decode(msgspec.json.encode(each)) for each in found]
    except (OSError, BodyError) as error:
        raise click.ClickException(f"{path}: {error}") from None


def time_ms(text: str) -> int:
    """Convert the text of a time (see `formats.parse_time`) to ms since 1970. Raises click.BadParameter."""
    try:
        return formats.parse_time(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a time: expected ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS"
        ) from None
