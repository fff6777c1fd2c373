"""Options of jobs are declared once; signatures, docstrings, checks and commands are derived from them."""

import inspect
import os
import subprocess
import sys
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import click
import pytest

from cometmq import pipeline
from cometmq.cli.app import pipeline as commands
from cometmq.cli.pipeline.job import options_of
from cometmq.errors import ConfigError
from cometmq.pipeline.base import job_options
from cometmq.pipeline.base.declare import check, declared, job, option

STRUCTS = {
    name: value
    for name, value in vars(job_options).items()
    if name.endswith("Options") and isinstance(value, type)
}
JOBS = (
    "archive",
    "audit",
    "compact",
    "dedup",
    "dlq",
    "lag",
    "rebuild",
    "redrive",
    "replay",
    "throughput",
    "trace",
)


@dataclass(frozen=True)
class Some:
    """Some options.

    Args:
        place: The place, whose description has
            two lines. None: nowhere.
        count: How many.
        share_s: A share.
        word: A word for `count`.
        on: Whether it is on.
    """

    place: str
    _: KW_ONLY
    count: int = option(3, low=1, high=9)
    share_s: float | None = option(None, above=0, typed_low=0.5)
    word: Literal["a", "b"] = option("a")
    on: bool = option(True)


@dataclass
class Summary:
    """The result of a job."""

    given: Some
    seconds: float = 0.0


@job(Some)
def run(spark: Any, given: Some) -> Summary:
    """Run it.

    Returns:
        The options.
    """
    return Summary(given, spark or 0.0)


def test_a_function_of_options_is_one_of_keyword_arguments() -> None:
    assert run(None, "here", count=4).given == Some("here", count=4)
    expected = "(spark, place, *, count=3, share_s=None, word='a', on=True)"
    shown = inspect.signature(run)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in shown.parameters.values()]
    assert str(shown.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == expected
    lines = (run.__doc__ or "").splitlines()
    assert "    place: The place, whose description has two lines. None: nowhere." in lines
    assert lines.index("Args:") < lines.index("Returns:")
    with pytest.raises(TypeError, match="wrong"):
        run(None, "here", wrong=1)  # type: ignore[call-arg]


def test_a_summary_has_the_duration_of_its_job_unless_the_job_has_set_another() -> None:
    assert run(None, "here").seconds > 0
    assert run(2.5, "here").seconds == 2.5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": 0}, "count = '0': expected 1 to 9"),
        ({"count": 10}, "count = '10': expected 1 to 9"),
        ({"share_s": 0.0}, "share_s = '0.0': expected more than 0"),
        ({"share_s": float("nan")}, "share_s = 'nan': expected more than 0"),
        ({"word": "c"}, "word = 'c': expected a or b"),
    ],
)
def test_a_value_that_is_not_permitted_is_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(Some("here", **given))

    assert str(caught.value) == expected


def test_the_command_line_has_the_declared_options() -> None:
    @click.command()
    @options_of(Some)
    def command(**given: Any) -> None:
        del given

    shown = click.Context(command, show_default=True).command.get_help(
        click.Context(command, show_default=True)
    )
    options = {each.name: each for each in command.params}
    assert list(options) == ["count", "share_s", "word", "on"]
    assert [each.opts + each.secondary_opts for each in options.values()] == [
        ["--count"], ["--share"], ["--word"], ["--on", "--no-on"],
    ]  # fmt: skip
    assert "A word for --count." in shown
    assert "SECONDS" in shown
    with pytest.raises(click.UsageError):
        command.parse_args(click.Context(command), ["--share", "0.1"])


@pytest.mark.parametrize("name", STRUCTS)
def test_every_option_is_described(name: str) -> None:
    assert [each.name for each in declared(STRUCTS[name]) if not each.text] == []


@pytest.mark.parametrize("name", JOBS)
def test_help_of_a_job_is_a_whole_page(name: str) -> None:
    function = getattr(pipeline, name)
    doc = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter}: " in doc, parameter
    for section in ("Args:", "Returns:", "Raises:"):
        assert f"\n{section}\n" in doc


@pytest.mark.parametrize("name", [name for name in JOBS if name != "redrive"])
def test_a_command_has_the_defaults_of_its_job(name: str) -> None:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    parameters = inspect.signature(getattr(pipeline, name)).parameters
    for each in command.params:
        if (
            each.name in parameters
            and not each.required
            and each.name not in ("namesrv", "source", "mapping")
        ):
            wanted = parameters[each.name].default
            assert each.default in (wanted, None) or not wanted, each.name


def test_help_of_a_command_does_not_import_spark() -> None:
    code = (
        "import sys; from cometmq.cli.pipeline.writing import archive; "
        "print([name for name in ('pyspark', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "[]"
