"""Declared options: an option is one field of a dataclass, with a default, a range and a description.

`job` builds a job's public Python function from the fields: the signature, the checks and the Args section of
the docstring. The command line builds its options from the same fields (cli/pipeline/job.py), and `Given`
uses them to read the options of a Spark format. The descriptions are the Args sections of the dataclasses;
the tables in docs/pipeline.md and docs/jobs.md are generated from them (`python -m tests.option_tables`).
This module does not import SparkSession, so that `--help` starts quickly.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

from cometmq.errors import ConfigError
from cometmq.settings import BOOLEANS, LONG_MAX, camel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_DECLARED = "cometmq"  # the key under which a field's metadata holds its Option
_WIDTH = 106  # maximum length of a line of a generated docstring
_LAST = ("on_progress", "stop")
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SPARK = "The Spark session that runs the job."

MAX_PLAIN_BYTES = 64 * 1024 * 1024
"""Default limit for the size of a decompressed body, in bytes. A message with a larger body is a bad record.

By default, producers accept bodies of up to 4 MiB before compression. The limit is 64 MiB because a worker
with 512 MB of memory can hold the copies that decoding makes of such a body.
"""
MOST_BYTES = 512 * 1024 * 1024
"""Maximum size of a batch, in bytes.

A JVM with a heap of 1 GiB can process a batch of this size, but not a batch of 1.5 GiB.

See docs/reference/spark.md, Size of a batch. Arrow's offsets have 31 bits, which must suffice for the stored
bytes, the decompressed bytes and one further message together.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a job or of a Spark format.

    Attributes:
        low: Minimum of a number.
        high: Maximum of a number.
        above: A limit that the number must exceed.
        typed_low: Minimum on the command line, if it is stricter than the other limits.
        flags: Names on the command line. None: `--` and the field's name without the unit of a duration.
            Empty: the option is for Python only.
        metavar: Placeholder of the value in `--help`. None: the unit of a duration, or N for a number.
        shown: Form of the default in `--help` and in the tables of the documentation.
        keys: Names of the Spark options from which the value is built. Empty: there is one Spark option,
            whose name is the field's name in camel case, without `_s`.
        query: The only kind of query that has the Spark option, `batch` or `stream`. Empty: both kinds have
            it.
        default: The value when the option is not given; `inspect.Parameter.empty` if the option is required.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    typed_low: float | None = None
    flags: tuple[str, ...] | None = None
    metavar: str | None = None
    shown: str | None = None
    keys: tuple[str, ...] = ()
    query: str = ""
    # The following fields are derived from the dataclass that declares the option.
    name: str = ""
    kind: Any = None
    default: Any = inspect.Parameter.empty
    kw_only: bool = False
    text: str = ""
    spark: Mapping[str, str] = field(default_factory=dict)  # descriptions by the name of the Spark option

    @property
    def type(self) -> Any:
        """The type of the option's value; if None is permitted, the type without None."""
        found = get_args(self.kind)
        return next(each for each in found if each is not NoneType) if NoneType in found else self.kind

    @property
    def words(self) -> tuple[str, ...]:
        """The permitted words. Empty: the option is not restricted to certain words."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def problem(self, value: Any) -> str | None:
        """Return None if the value is valid, else a description of the values that are expected."""
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
    """Return a dataclass field that declares an option. `how` holds the values of `Option`'s fields."""
    made: T = field(default=default, metadata={_DECLARED: Option(**how)})
    return made


def declared(struct: Any) -> list[Option]:
    """Return the options of a dataclass: positional options first, options for Python only last."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        args = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
        texts |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(args)}
    found = []
    for each in fields(struct):
        how = each.metadata.get(_DECLARED, Option(flags=()))
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        text = texts.get(each.name, "")
        spark = {key: texts.get(key, "") for key in how.keys} or {camel(each.name.removesuffix("_s")): text}
        own = {"name": each.name, "kind": each.type, "kw_only": each.kw_only, "default": default}
        found.append(replace(how, text=text, spark=spark, **own))
    return sorted(found, key=lambda each: (each.kw_only, each.name in _LAST))


def check(given: Any) -> None:
    """Raise ConfigError for a number outside its range, or for a word that is not permitted."""
    for each in declared(type(given)):
        value = getattr(given, each.name)
        if (expected := each.problem(value)) is not None:
            raise ConfigError(each.name, str(value), expected)


def check_pattern(option: str, pattern: str) -> None:
    """Raise ConfigError if the pattern is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(option, pattern, f"a regular expression ({error})") from None


_DURATION = re.compile(r"(\d{1,15})\s*(ms|s|m|min|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class Given:
    """The options of a Spark format: strings by case-insensitive names, parsed according to a dataclass.

    Args:
        options: The strings, as Spark passes them.
        struct: The dataclass whose fields are the options.
        spellings: Alternative names of options, each with the name of its option.
        ignored: Names that are permitted but are not options of the format.

    Raises:
        ConfigError: A name is unknown, or an option has two different values. For an unknown name the error
            suggests the most similar known name: if a misspelt option were ignored, the query would read
            everything.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        struct: type,
        spellings: Mapping[str, str],
        ignored: Sequence[str] = (),
    ) -> None:
        self._declared = [each for each in declared(struct) if each.flags != ()]
        known = [*ignored, *(name for each in self._declared for name in each.spark)]
        names = {name.lower(): name for name in known}
        others = {name.lower(): key.lower() for name, key in spellings.items()}
        self._values: dict[str, str] = {}
        for key, value in options.items():
            name = key.lower()
            name = name if name in names else others.get(name, name)
            if name not in names:
                near = difflib.get_close_matches(name, [*names, *others], 1)
                hint = f"; did you mean {names.get(near[0], near[0])}?" if near else ""
                raise ConfigError(key, _shown(name, value), f"one of {', '.join(sorted(known))}{hint}")
            if self._values.setdefault(name, value) != value:
                before = _shown(name, self._values[name])
                raise ConfigError(
                    key, _shown(name, value), f"one value, but {names[name]} is {before!r} already"
                )

    def values(self, **made: Any) -> dict[str, Any]:
        """Return the value of each option by field name, or the value that `made` has for the field."""
        return {
            each.name: made[each.name] if each.name in made else self._value(each) for each in self._declared
        }

    def refuse_ends(self) -> None:
        """Raise ConfigError if an option is given that only batch queries have."""
        for each in self._declared:
            for name in each.spark if each.query == "batch" else ():
                if (text := self.text(name)) is not None:
                    raise ConfigError(name, text, "a batch query (a stream has no end)")

    def text(self, name: str) -> str | None:
        """Return the string of an option, or None if the option is not given."""
        return self._values.get(name.lower())

    def _value(self, each: Option) -> Any:
        (name,) = each.spark
        text = self.text(name)
        if text is None:
            return each.default
        if each.type is int:
            return self.integer(name, int(each.low or 0), int(each.high or LONG_MAX))
        if each.type is bool:
            if (flag := BOOLEANS.get(text.strip().lower())) is None:
                raise ConfigError(name, text, "true or false")
            return flag
        if each.type is float:
            if (match := _DURATION.fullmatch(text.strip().lower())) is None:
                raise ConfigError(name, text, "a time such as 90s, 15m or 1h")
            return int(match[1]) * _UNITS_S[match[2] or "ms"]
        if (expected := each.problem(text)) is not None:
            raise ConfigError(name, text, expected)
        return text if each.default is None else text or each.default

    def integer(self, name: str, low: int, high: int = LONG_MAX) -> int | None:
        """Return an option's number, or None. Raises ConfigError if the number is out of range."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text.strip())
        except ValueError:
            value = low - 1
        if value < low:
            raise ConfigError(name, text, f"a whole number of {low} or more")
        if value > high:
            raise ConfigError(name, text, f"a whole number of at most {high}")
        return value


def _shown(name: str, value: str) -> str:
    """Return an option's value for an error message, masked if the value may be a secret."""
    return "******" if "secret" in name or "token" in name else value


def job(
    struct: Callable[P, T],
) -> Callable[[Callable[[SparkSession, T], R]], Callable[Concatenate[SparkSession, P], R]]:
    """Turn a function of a session and an options struct into a function of a session and single options.

    The new function has one parameter for each field of the struct, also in its signature and docstring. It
    creates the struct, checks its values, calls the original function, and enters the duration in the
    summary's field `seconds` unless the function has done so.
    """

    def decorate(run: Callable[[SparkSession, T], R]) -> Callable[Concatenate[SparkSession, P], R]:
        @functools.wraps(run)
        def call(spark: SparkSession, *args: P.args, **kwargs: P.kwargs) -> R:
            given = struct(*args, **kwargs)
            check(given)
            began = time.monotonic()
            summary: Any = run(spark, given)
            summary.seconds = summary.seconds or time.monotonic() - began
            return summary  # type: ignore[no-any-return]

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
