"""A range of finite numbers, the type of the command line's options for times and rates."""

from __future__ import annotations

from typing import Any

import click

MAX_NUMBER = 1e9  # 31 years in seconds; every timer and sleep accepts such a time


class FiniteRange(click.FloatRange):
    """A `click.FloatRange` that refuses NaN, infinity and numbers over MAX_NUMBER.

    NaN is in every range of click, because each comparison with NaN is false.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not number <= MAX_NUMBER:
            self.fail(f"{number} is not a number up to {MAX_NUMBER:.0f}.", param, ctx)
        return number
