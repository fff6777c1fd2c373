"""Shell completion of commands, options, and names of topics, groups, brokers and clusters.

The cluster that the command would use returns the names. A completion prints no errors. If the cluster is
slow or fails, no names are offered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    _resolve_context,
    _resolve_incomplete,
    add_completion_class,
    split_arg_string,
)

from cometmq import contexts
from cometmq.cli.options import HELP

if TYPE_CHECKING:
    from cometmq.admin import Admin

MAX_NAMES = 200
"""The maximum number of offered names."""
TIMEOUT_S = 1.0
"""The timeout of the requests to servers, in seconds."""
EXIT_S = 2.0
"""The time in seconds after which the process exits, even if a call such as a name lookup blocks it."""
INERT = re.compile(r"[\w%.:][\w%.:-]*", re.ASCII)
"""Names that are safe to offer: no shell interprets their characters, and none looks like an option."""


async def _topics(admin: Admin, start: str) -> Iterable[str]:
    from cometmq.protocol.codes import is_system_topic

    # Every group has a retry topic, so these and dead-letter topics are offered only after a typed `%`.
    found = [each for each in await admin.topics() if start.startswith("%") or not each.startswith("%")]
    return [each for each in found if not is_system_topic(each)]


async def _groups(admin: Admin, _start: str) -> Iterable[str]:
    return await admin.group_names(missing={})


async def _clusters(admin: Admin, _start: str) -> Iterable[str]:
    return (await admin.cluster_info()).cluster_addr_table


async def _broker_names(admin: Admin, _start: str) -> Iterable[str]:
    return (await admin.cluster_info()).broker_addr_table


async def _broker_addrs(admin: Admin, _start: str) -> Iterable[str]:
    brokers = (await admin.cluster_info()).broker_addr_table.values()
    return [addr for each in brokers for addr in each.broker_addrs.values()]


Ask = Callable[["Admin", str], Awaitable[Iterable[str]]]
ASKS: dict[str, Ask] = {
    **dict.fromkeys(("topic", "topics", "parent", "trace_topic", "into"), _topics),
    **dict.fromkeys(("group", "groups", "consumer_group", "source", "target"), _groups),
    "cluster": _clusters,
    **dict.fromkeys(("broker_name", "broker"), _broker_names),
    "broker_addr": _broker_addrs,
}
"""The functions that request names for a parameter of a command, by the parameter's name."""
VALUES = ("NAME", "TOPIC", "ADDR", "HOST:PORT", None)
"""The metavars of parameters whose value is one name. Values of other parameters are lists or paths."""


def ask_for(command: click.Command, param: click.Parameter) -> Ask | None:
    """Return the function that requests names for a parameter of a command, or None."""
    if param.metavar not in VALUES or all(each.name != "namesrv" for each in command.params):
        return None
    if param.name == "broker" and param.metavar != "NAME":
        return _broker_addrs
    return ASKS.get(param.name or "")


def is_context(ctx: click.Context, param: click.Parameter) -> bool:
    """Return whether the value of a parameter is the name of a context."""
    command = (ctx.parent.info_name if ctx.parent is not None else "", ctx.info_name)
    return param.name == "name" and command in {("context", "use"), ("context", "remove")}


def names(ctx: click.Context, ask: Ask, args: list[str], start: str) -> Iterable[str]:
    """Request names from the cluster that the command line `args` would use."""
    from cometmq.admin import Admin
    from cometmq.admin.commands.shell import tools_options
    from cometmq.client import ClientOptions

    # Parse again: the end of click's context has removed the account from the environment.
    given, _, _ = ctx.command.make_parser(ctx).parse_args(list(args))
    namesrv, as_mqadmin = "", False
    for param in ctx.command.params:
        if param.name == "namesrv" and param.callback is not None:
            as_mqadmin = "--namesrvAddr" in param.opts
            value = given.get("namesrv", ctx.params["namesrv"])
            ctx.resilient_parsing = False  # otherwise the callback would ignore CometMQ's contexts
            namesrv = param.callback(ctx, param, value)
        elif param.name in given and not param.expose_value and param.callback is not None:
            param.callback(ctx, param, given[param.name])

    async def run() -> Iterable[str]:
        options = tools_options() if as_mqadmin else ClientOptions()
        async with asyncio.timeout(TIMEOUT_S), Admin(namesrv, TIMEOUT_S, options) as admin:
            return await ask(admin, start)

    if hasattr(signal, "setitimer"):
        # At exit the interpreter waits for threads, for example for a thread that resolves a host name.
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, EXIT_S)
    return asyncio.run(run())


class _Live(ShellComplete):
    """A completion that also offers names from the cluster."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        ctx = _resolve_context(self.cli, self.ctx_args, self.prog_name, args)
        param, start = _resolve_incomplete(ctx, args, incomplete)
        if not isinstance(param, click.Parameter):
            return param.shell_complete(ctx, start)
        found: Iterable[str] = ()
        if is_context(ctx, param):
            found = contexts.load().contexts
        elif (ask := ask_for(ctx.command, param)) is not None:
            found = names(ctx, ask, args, start)
        else:
            return param.shell_complete(ctx, start)
        word = incomplete[: len(incomplete) - len(start)]  # `--topic=` of `--topic=or`
        fit = [each for each in set(found) if each.startswith(start) and INERT.fullmatch(each)]
        return [CompletionItem(word + each) for each in sorted(fit)[:MAX_NAMES]]

    def complete(self) -> str:
        logging.disable()
        try:
            return super().complete()
        except Exception:  # a traceback would be printed into the command line
            return ""


@add_completion_class
class _Bash(_Live, BashComplete):
    # Click's own function splits `host:port` and `--topic=name` into words, as bash does, and expands
    # patterns in names.
    source_template = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
%(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        incomplete = words.pop() if words and not line[-1:].isspace() else ""
        # Bash replaces only the text after the last of its word breaks.
        breaks = set(os.environ.get("COMP_WORDBREAKS", "")) & {":", "="}
        self._kept = max((incomplete.rfind(each) + 1 for each in breaks), default=0)
        return words, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value[self._kept :] if item.type == 'plain' else item.value}"


@add_completion_class
class _Zsh(_Live, ZshComplete):
    pass


@add_completion_class
class _Fish(_Live, FishComplete):
    pass


SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


@click.command(context_settings=HELP)
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.argument("program", type=click.Choice(["cometmq", "mqadmin"]), default="cometmq")
def completion(shell: str, program: str) -> None:
    """Print the script by which SHELL completes the arguments of PROGRAM.

    \b
    bash  ~/.bashrc:  eval "$(cometmq completion bash)"
    zsh   ~/.zshrc, after compinit:  eval "$(cometmq completion zsh)"
    fish  cometmq completion fish > ~/.config/fish/completions/cometmq.fish

    Topics, groups, brokers and clusters are those of the cluster that the command line would use.
    """
    writer = SHELLS[shell](click.Command(program), {}, program, f"_{program.upper()}_COMPLETE")
    # `source()` would check the version of bash on this machine, where the script may not be used.
    click.echo(writer.source_template % writer.source_vars())
