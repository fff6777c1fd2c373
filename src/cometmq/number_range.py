"""A range of finite numbers, the type of the command line's options for times and rates."""

from __future__ import annotations

from typing import Any

import click

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
