"""Declared options: an option of a job is one field of a dataclass, which has default, range and description.

`job` makes the Python function of a job from the fields: the signature, the checks and the Args section of
the docstring. The command line makes its options from the same fields (cli/pipeline/job.py). The descriptions
are the Args sections of the dataclasses. This module does not import SparkSession, so that `--help` is quick.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

from cometmq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_DECLARED = "cometmq"  # key of an Option in the metadata of a field
_WIDTH = 106  # maximum characters of a docstring's line
_LAST = ("on_progress", "stop")
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SPARK = "The Spark session that runs the job."

MAX_PLAIN_BYTES = 64 * 1024 * 1024
"""Default for the maximum bytes of a decompressed body. A message with a larger body is a bad record.

Producers accept bodies of 4 MiB (before compression) by default. A worker with 512 MB can hold the copies of
a body of 64 MiB.
"""
MOST_BYTES = 512 * 1024 * 1024
"""Maximum bytes of a batch, which a JVM of 1 GiB can process; 1.5 GiB end the JVM.

See docs/reference/spark.md, Size of a batch. Arrow has 31 bits for the sum of stored bytes, plain bytes and
one message.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a job.

    Attributes:
        low: Minimum of a number.
        high: Maximum of a number.
        above: A limit that the number must exceed.
        typed_low: Minimum on the command line, if it is stricter than the other limits.
        flags: Names on the command line. None: `--` and the field's name without the unit of a duration.
        Empty: the option is for Python only.
        metavar: Placeholder of the value in `--help`. None: the unit of a duration, or N for a number.
        shown: Form of the default in `--help`.
        default: Value without an argument; `inspect.Parameter.empty` if the option is required.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    typed_low: float | None = None
    flags: tuple[str, ...] | None = None
    metavar: str | None = None
    shown: str | None = None
    # These values come from the dataclass.
    name: str = ""
    kind: Any = None
    default: Any = inspect.Parameter.empty
    kw_only: bool = False
    text: str = ""

    @property
    def type(self) -> Any:
        """The type of the values other than None."""
        found = get_args(self.kind)
        return next(each for each in found if each is not NoneType) if NoneType in found else self.kind

    @property
    def words(self) -> tuple[str, ...]:
        """The permitted words. Empty: the option has none."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def problem(self, value: Any) -> str | None:
        """Return a description of the expected values if a value is invalid, None if it is valid."""
        if self.words:
            expected = f"{', '.join(self.words[:-1])} or {self.words[-1]}"
            return None if value is None or value in self.words else expected
        low, high, above = self.low, self.high, self.above
        if not isinstance(value, int | float):
            return None
        large = (low is None or value >= low) and (above is None or value > above)
        if large and (high is None or value <= high):
            return None
        if above is not None:
            return f"more than {above}" + ("" if high is None else f", at most {high}")
        return f"{low} or more" if high is None else f"{low} to {high}"


def option(default: T, **how: Any) -> T:
    """Return a field of a dataclass that is an option of the command line, too. `how`: fields of Option."""
    made: T = field(default=default, metadata={_DECLARED: Option(**how)})
    return made


def declared(struct: Any) -> list[Option]:
    """Return the options of a dataclass: positional ones first, and last those for Python only."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        args = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
        texts |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(args)}
    found = []
    for each in fields(struct):
        how = each.metadata.get(_DECLARED, Option(flags=()))
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        own = {"name": each.name, "kind": each.type, "kw_only": each.kw_only, "default": default}
        found.append(replace(how, text=texts.get(each.name, ""), **own))
    return sorted(found, key=lambda each: (each.kw_only, each.name in _LAST))


def check(given: Any) -> None:
    """Raise ConfigError for a number out of its range, or a word that is none of the permitted ones."""
    for each in declared(type(given)):
        value = getattr(given, each.name)
        if (expected := each.problem(value)) is not None:
            raise ConfigError(each.name, str(value), expected)


def job(
    struct: Callable[P, T],
) -> Callable[[Callable[[SparkSession, T], R]], Callable[Concatenate[SparkSession, P], R]]:
    """Make a function of a session and options into one of a session and keyword arguments.

    The options are checked first. Signature and docstring list the fields of the struct.
    """

    def decorate(run: Callable[[SparkSession, T], R]) -> Callable[Concatenate[SparkSession, P], R]:
        @functools.wraps(run)
        def call(spark: SparkSession, *args: P.args, **kwargs: P.kwargs) -> R:
            given = struct(*args, **kwargs)
            check(given)
            return run(spark, given)

        own = inspect.signature(run)
        parameters = [own.parameters["spark"]]
        for each in declared(struct):
            kind = inspect.Parameter.KEYWORD_ONLY if each.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(each.name, kind, default=each.default, annotation=each.kind))
        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        call.__doc__ = _with_args(run, struct)
        return call  # type: ignore[return-value]  # `spark` may be passed by its name, too

    return decorate


def _with_args(run: Callable[..., Any], struct: Any) -> str:
    arguments = [("spark", _SPARK), *((each.name, each.text) for each in declared(struct))]
    fill = functools.partial(
        textwrap.fill, width=_WIDTH, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False
    )
    lines = [fill(f"{name}: {text}") for name, text in arguments]
    before, returns, after = inspect.cleandoc(run.__doc__ or "").partition("Returns:")
    return "\n".join([f"{before}Args:", *lines, "", f"{returns}{after}"])
