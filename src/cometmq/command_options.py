"""Parts of which the options of all command lines are made."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

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


def stacked(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds several options, which the help lists in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


namesrv = partial(
    opt,
    metavar="LIST",
    envvar="NAMESRV_ADDR",
    default="127.0.0.1:9876",
    show_default="NAMESRV_ADDR, else 127.0.0.1:9876",
    help="Name servers, separated by ';'.",
)
