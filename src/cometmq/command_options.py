"""Parts of which the options of all command lines are made."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from cometmq.settings import NAMESRV_ENV
from cometmq.text import in_color

F = TypeVar("F", bound=Callable[..., Any])
MAX_NUMBER = 9e9  # 285 years in seconds, about the longest time for which a thread can wait


class FiniteRange(click.FloatRange):
    """A `click.FloatRange` that refuses NaN, infinity and numbers over MAX_NUMBER.

    NaN is in every range of click, because each comparison with NaN is false.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not -MAX_NUMBER <= number <= MAX_NUMBER:
            self.fail(f"{number} is not a number up to {MAX_NUMBER:.0f}.", param, ctx)
        return number


def opt(names: str, **how: Any) -> Callable[[F], F]:
    """Return a `click.option` with its flags and its parameter name, separated by blanks.

    If `names` contains only flags, the last flag, converted to snake case, is the parameter name.
    """
    words = names.split()
    if words[-1].startswith("-"):
        snake = re.sub("([a-z])([A-Z])", r"\1_\2", words[-1].lstrip("-"))
        words.append(snake.replace("-", "_").lower())
    return click.option(*words, **how)


def number(names: str, low: int = 0, high: int | None = None, **how: Any) -> Callable[[F], F]:
    """Return an option with an integer in a range."""
    return opt(names, type=click.IntRange(low, high), **how)


flag = partial(opt, is_flag=True)


def nonempty_name(text: str) -> str:
    """Return a name without surrounding white space. Raises click.BadParameter if nothing remains."""
    name = text.strip()
    if not name:
        raise click.BadParameter("a name cannot be empty")
    return name


name_option = partial(opt, type=nonempty_name, metavar="NAME")
switch = partial(opt, type=bool, default=False, metavar="BOOL")


def stacked(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds several options, which the help lists in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def set_environment(ctx: click.Context, name: str, value: str) -> None:
    """Set an environment variable for clients while the command runs."""
    before = os.environ.get(name)
    if value == before:
        return
    os.environ[name] = value

    def restore() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    ctx.call_on_close(restore)


def _or_of_context(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return the given name servers. If there are none, use the chosen context, if there is one."""
    from cometmq import contexts  # not at the start of servers, which use none

    given = ctx.get_parameter_source(param.name or "")
    if ctx.resilient_parsing or given is ParameterSource.COMMANDLINE:
        return value
    if given is ParameterSource.ENVIRONMENT:
        if os.environ.get(contexts.CONTEXT_ENV):
            raise click.UsageError(
                f"The environment has name servers ({' or '.join(NAMESRV_ENV)}) and {contexts.CONTEXT_ENV}."
            )
        return value
    context = contexts.chosen()
    if context is None:
        return value
    variables = context.variables()
    if any(map(os.environ.get, context.conflicting())):
        raise click.UsageError(
            "The context has an account or TLS settings, and the environment or an option has some, too: "
            "name the name servers with -n to use the latter."
        )
    for name, text in variables.items():
        set_environment(ctx, name, text)
    return context.namesrv


namesrv = partial(
    opt,
    metavar="LIST",
    envvar=list(NAMESRV_ENV),
    default="127.0.0.1:9876",
    show_default="COMETMQ_NAMESRV, NAMESRV_ADDR, the context, else 127.0.0.1:9876",
    callback=_or_of_context,
    help="Name servers, separated by ';'.",
)

_WATCH = "cometmq.watch"
watch_option = click.option(
    "--watch",
    is_flag=False,
    flag_value=2.0,
    type=FiniteRange(min=0.1),
    metavar="[SECONDS]",
    expose_value=False,
    callback=lambda ctx, _param, given: ctx.meta.update({_WATCH: given}),
    help="Repeat every SECONDS, else every 2 s, until Ctrl-C.",
)
"""Adds `--watch` to a command that lists something (see admin/commands/watching.py)."""


def watch_interval_s() -> float | None:
    """Return the value of `--watch`, None without it."""
    ctx = click.get_current_context(silent=True)
    return ctx.meta.get(_WATCH) if ctx is not None else None


def say(text: str, *, err: bool = False, **style: Any) -> None:
    """Print a line to standard output or standard error, with click's `style` where colours are shown."""
    line = click.style(text, **style) if style else text
    click.echo(line, err=err, color=in_color(sys.stderr if err else sys.stdout))


def color_option(command: F) -> F:
    """Add `--color` to a group of commands. It sets the variables that everything else reads."""

    def choose(_ctx: click.Context, _param: click.Parameter, given: str) -> None:
        for name, when in (("NO_COLOR", "never"), ("FORCE_COLOR", "always")):
            if given != "auto":
                os.environ[name] = "1" if given == when else ""  # until the end: errors are shown last

    return click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        expose_value=False,
        callback=choose,
        help="Colours: auto is on a terminal, unless NO_COLOR or FORCE_COLOR is set.",
    )(command)
