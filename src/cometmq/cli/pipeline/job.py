"""Parts that the commands `cometmq pipeline JOB` share: options, Spark session, Ctrl-C, progress, output."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any, get_origin

import click
from click.core import ParameterSource

from cometmq import contexts
from cometmq.cli.options import echo_json, moment, namesrv_option, progress_bar
from cometmq.command_options import F, FiniteRange, opt, stacked
from cometmq.errors import ConfigError
from cometmq.pipeline.base.declare import Option, declared
from cometmq.text import counted, printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cometmq.pipeline.base.report import Report
    from cometmq.pipeline.metrics import PipelineMetrics


def _sources_of_context(command: F) -> F:
    """Refuse live sources at other name servers than those of the context, whose account they would get."""

    @functools.wraps(command)
    def checked(**options: Any) -> Any:
        at = click.get_current_context().get_parameter_source("namesrv")
        context = contexts.chosen() if at is ParameterSource.DEFAULT else None
        if context is None or not context.variables():
            return command(**options)
        for source in (options.get("source"), options.get("traces")):
            elsewhere = _addresses(str(source).removeprefix("live:")) - _addresses(context.namesrv)
            if str(source).startswith("live:") and elsewhere:
                raise click.UsageError(
                    f"{printable(str(source))} is not the cluster of the context, whose account would go "
                    "there: name the name servers with -n."
                )
        return command(**options)

    return checked  # type: ignore[return-value]


def _addresses(namesrv: str) -> set[str]:
    return {part.strip() for part in re.split("[;,]", namesrv) if part.strip()}


job_options = stacked(
    _sources_of_context,
    opt(
        "--master",
        metavar="URL",
        help="Spark master, or sc://HOST:PORT (Spark Connect); else SPARK_REMOTE or SPARK_MASTER.",
    ),
    opt("--memory", default="1g", metavar="SIZE", help="Heap size of a local Spark driver."),
    opt("--json as_json", is_flag=True, help="Print the summary as JSON."),
)
_UNITS = (("_s", "SECONDS"), ("_ms", "MS"), ("_h", "HOURS"), ("_days", "DAYS"))
_ELSEWHERE = {"topics": "TOPICS", "begin_ms": "--from", "end_ms": "--to"}


def options_of(struct: type) -> Callable[[F], F]:
    """Return a decorator that adds the options that a struct of pipeline/base/job_options.py declares."""
    shown = [each for each in declared(struct) if each.flags != ()]
    flags = {each.name: each.flags or (_flag(each),) for each in shown}
    named = _ELSEWHERE | {name: found[-1].partition("/")[0] for name, found in flags.items()}

    def add(command: F) -> F:
        for each in reversed(shown):
            text = re.sub("`([a-z_]+)`", lambda found: named.get(found[1], found[0]), each.text)
            if get_origin(each.type) is Sequence:
                text += " May be repeated."
            command = click.option(
                *flags[each.name], each.name, help=text.replace("None: ", "Default: "), default=each.default,
                show_default=each.shown or each.default != "", **_typed(each),
            )(command)  # fmt: skip
        return command

    return add


def _flag(each: Option) -> str:
    """Return the command-line form of an option's name: `--poll-interval` for `poll_interval_s`.

    A duration's unit is omitted, except `_ms`. A switch that is on by default also gets a `--no-` form.
    """
    units = [unit for unit, _ in _UNITS if unit != "_ms" and each.name.endswith(unit)]
    flag = each.name.removesuffix(*units or ("",)).replace("_", "-")
    return f"--{flag}/--no-{flag}" if each.type is bool and each.default else f"--{flag}"


def _typed(each: Option) -> dict[str, Any]:
    """Return the arguments of `click.option` that follow from the type of an option."""
    kind = each.type
    if kind is bool:
        return {} if each.default else {"is_flag": True}
    if kind in (int, float):
        metavar = each.metavar or next((word for unit, word in _UNITS if each.name.endswith(unit)), "N")
        low = next((low for low in (each.typed_low, each.low, each.above) if low is not None), None)
        scale: Any = click.IntRange if kind is int else FiniteRange
        above = each.above is not None and each.typed_low is None
        return {"type": kind if low is None else scale(low, min_open=above), "metavar": metavar}
    if each.words and each.metavar is None:
        return {"type": click.Choice(each.words)}
    return {"metavar": each.metavar, "multiple": get_origin(kind) is Sequence}


def _checked_report(_context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    """Check before the job, which may take hours, that the report can be written."""
    if path is None:
        return None
    _check_extra("report", "reports need matplotlib", "matplotlib")
    place = os.path.dirname(os.path.abspath(path))
    if not os.access(place, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{place} is not a writable directory")
    return path


report_option = opt(
    "--report report_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    callback=_checked_report,
    help="Write a report to this HTML file, with tables and plots.",
)
metrics_option = opt(
    "--metrics metrics_at",
    metavar="PORT|FILE",
    help="Metrics for Prometheus: on this port of 127.0.0.1, or in a file NAME.prom.",
)


@contextmanager
def measured(where: str | None, spark: SparkSession) -> Iterator[PipelineMetrics | None]:
    """Collect metrics of the session's streaming queries while the block runs, and yield the metrics.

    If `where` is None, metrics are not enabled: yield None.
    """
    if where is None:
        yield None
        return
    from cometmq.pipeline.metrics import PipelineMetrics

    with PipelineMetrics(where) as metrics:
        spark.streams.addListener(metrics.listener)
        try:
            yield metrics
        finally:
            spark.streams.removeListener(metrics.listener)


@dataclass(frozen=True, slots=True)
class Running:
    """The Spark session, the stop event and the progress function that a command passes to its job."""

    spark: SparkSession
    stop: threading.Event  # set by SIGINT and SIGTERM; the job then ends after its current batch
    show: Callable[[int, int | None], None]  # receives the number of processed items, and the total or None


@contextmanager
def running(doing: str, master: str | None, memory: str) -> Iterator[Running]:
    """Yield a Spark session for the current command, and show a progress bar labelled `doing`.

    If the job raises an error about one of its arguments, the error contains the command's option instead.
    """
    context = click.get_current_context()
    check_spark(master)
    from pyspark.sql import SparkSession

    from cometmq.pipeline.session import spark_session

    # At the end, stop only a session that was created here, not one that the caller had created.
    found = SparkSession.getActiveSession()
    spark = spark_session(f"cometmq {context.command.name}", master=master, memory=memory, quick_start=True)
    try:
        with own_names(context.command), stop_event() as stop, progress_bar(doing) as show:
            yield Running(spark, stop, show)
    finally:
        if found is None:
            spark.stop()


@contextmanager
def own_names(command: click.Command) -> Iterator[None]:
    """In errors that the block raises, replace the name of a job argument by that of the command's option."""
    from cometmq.pipeline.base.errors import ArchiveError, DataLossError

    options = [item for item in command.params if isinstance(item, click.Option)]
    names = {str(item.name): item.opts[-1] for item in options}
    names |= {f"{item.name}=False": item.secondary_opts[0] for item in options if item.secondary_opts}
    names |= {"metrics": "--metrics", "begin": "--from", "end": "--to"}
    names["offsets"] = names.get("starting", "offsets")
    try:
        yield
    except ConfigError as error:
        raise ConfigError(names.get(error.key, error.key), error.value, error.expected) from error
    except (ArchiveError, DataLossError) as error:
        error.setting = names.get(error.setting, error.setting)
        raise


def check_spark(master: str | None) -> None:
    """Raise ClickException if a package or Java is missing, because the original errors have fifty lines."""
    _check_extra("spark", "the pipeline needs Spark", "pyspark", "pyarrow", "pandas")
    from cometmq.pipeline.session import CONNECT, chosen_master

    if chosen_master(master).startswith(CONNECT):
        _check_extra("connect", "Spark Connect needs gRPC", "grpc", "grpc_status")
        return  # no local Java is needed, because Spark runs on a remote server
    home = os.environ.get("JAVA_HOME")
    if not (os.access(os.path.join(home, "bin", "java"), os.X_OK) if home else shutil.which("java")):
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "there is no java on the PATH"
        raise click.ClickException(f"Spark needs Java 17 or newer: {where}")


def _check_extra(extra: str, problem: str, *modules: str) -> None:
    if any(find_spec(name) is None for name in modules):
        raise click.ClickException(f"{problem}: pip install 'cometmq[{extra}]'")


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that the job can finish its current batch.

    A second SIGINT raises KeyboardInterrupt, a second SIGTERM has its previous effect. Enter this context
    after the Spark session was created: its creation installs a SIGINT handler, which would replace the
    handler of this context.
    """
    stop = threading.Event()
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    # Python's handler for SIGINT replaces PySpark's handler, which calls the JVM at an arbitrary moment.
    usual = {**before, signal.SIGINT: signal.default_int_handler}

    def ask(signum: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signum, usual[signal.Signals(signum)])
        click.echo("finishing the current batch ...", err=True)

    for signum in before:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def write_report(report: Report, path: str) -> None:
    """Write the report, and print its path."""
    try:
        report.write(path)
    except OSError as error:
        raise click.ClickException(f"the report {path} cannot be written: {error.strerror}") from error
    click.echo(f"report: {path}", err=True)


def run_job(
    doing: str,
    name: str,
    say: Callable[[Any], None],
    *,
    master: str | None,
    memory: str,
    as_json: bool,
    report_path: str | None = None,
    **arguments: Any,
) -> None:
    """Run the job `cometmq.pipeline.NAME` and report its summary with `finish`.

    If `report_path` is given, first write a report of the job to that path.
    """
    with running(doing, master, memory) as job:
        from cometmq import pipeline

        summary = getattr(pipeline, name)(job.spark, on_progress=job.show, stop=job.stop, **arguments)
        if report_path is not None:
            from cometmq.pipeline.jobs.reports import REPORTS

            write_report(REPORTS[name](job.spark, summary, arguments.get("output")), report_path)
    finish(summary, as_json, say)


def finish(summary: object, as_json: bool, say: Callable[[Any], None]) -> None:
    """Print the summary as JSON, or as text with `say`. The exit code is 1 if the summary is incomplete."""
    if as_json:
        echo_json(summary)
    else:
        say(summary)
        warn_of_unread(summary)
    if not getattr(summary, "complete", True):
        raise click.exceptions.Exit(1)


def warn_of_unread(summary: object) -> None:
    """List on standard error the queues that hold messages and could not be read."""
    for item in getattr(summary, "unreadable", ()):
        place = f"topic {item.topic} in {item.broker_name}/{item.queue_id}"
        problem = f"{counted(item.messages, 'message')} of {place}, which cannot be read"
        click.echo(f"not complete: {printable(problem, None)}", err=True)


def source_options(command: F, *, give_namesrv: bool = False) -> F:
    """Add `--source`, `--namesrv`, `--from`, `--to`.

    The command receives `source`, `begin_ms` and `end_ms`, and with `give_namesrv` also `namesrv`.
    """

    @functools.wraps(command)
    def read(*, source: str | None, namesrv: str, begin: str | None, end: str | None, **options: Any) -> Any:
        if give_namesrv:
            options["namesrv"] = namesrv
        return command(
            source=source or f"live:{namesrv}",
            begin_ms=None if begin is None else moment(begin),
            end_ms=None if end is None else moment(end),
            **options,
        )

    what = "An archive (directory or URI), store:DIR[,DIR...] or live:HOST:PORT; default: live, at --namesrv."
    when = "Store time: 10m (s, m, h, d ago), ms since 1970 or yyyy-MM-dd#HH:mm:ss:SSS."
    for decorate in (
        opt("--to end", metavar="TIME", help="Only messages stored before this time."),
        opt("--from begin", metavar="TIME", help=f"Only messages stored at or after this time. {when}"),
        namesrv_option,
        opt("-s --source", metavar="SOURCE", help=what),
    ):
        decorate(read)
    return read  # type: ignore[return-value]


def print_absent(topics: Iterable[str]) -> None:
    """Print a line to standard error for each of these topics, because no messages of them were found."""
    for topic in topics:
        click.echo(f"not complete: no messages of topic {printable(topic, 200)}", err=True)
