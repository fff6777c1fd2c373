"""The file of `cometmq pipeline run`: sources, SQL steps and sinks, read and checked without Spark.

All errors of a file are collected, each with its line. run.py makes the checks that require Spark, such as
whether a query fits its tables. `${NAME}` in options and paths stands for an environment variable; messages
for users show its name, never its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cometmq import yaml_file
from cometmq.errors import ConfigError, YamlError
from cometmq.pipeline.base.errors import PipelineFileError
from cometmq.pipeline.base.options import read_options, store_options, write_options
from cometmq.pipeline.jobs.run.places import overlap
from cometmq.text import is_utf8, printable
from cometmq.yaml_file import Node

PATHS = ("parquet", "json", "csv", "orc")
SOURCES = ("cometmq", "cometmq-store", "archive", "delta", *PATHS)
SINKS = ("cometmq", "console", *PATHS)
MODES = ("batch", "stream")
SAVES = ("error", "append", "overwrite")
OUTPUTS = ("append", "update", "complete")
NOW = "available now"
_REFUSED = {
    "archive": "is written by `cometmq archive` alone, which keeps positions with the rows",
    "delta": "is read, not written: write parquet, or archive topics with --format delta",
    "iceberg": "is no format here: archive topics with --format iceberg, and read them as archive",
}
"""Formats that users may try but that are not supported, each with the format to use instead."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TIME = re.compile(r"[1-9]\d{0,8} (milliseconds?|seconds?|minutes?|hours?|days?)")
_PATH_MAX = 4096
_SECRET = 4  # Minimum length of a value to hide in messages, because shorter values occur in words
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_BAD_RECORDS = "badrecordspath"
_TOP = ("mode", "sources", "steps", "sinks")
_SOURCE = ("format", "path", "options", "columns", "watermark")
_STEP = ("sql", "watermark")
_SINK = ("from", "format", "path", "options", "save", "output", "trigger", "checkpoint", "partition_by")


@dataclass(frozen=True, slots=True)
class Text:
    """A string of a pipeline file. `shown` is the string with names instead of the values of variables."""

    value: str
    shown: str
    line: int


@dataclass(frozen=True, slots=True)
class Watermark:
    """A watermark of a table: the column of the rows' times, and how late rows may arrive."""

    column: str
    delay: str
    line: int


@dataclass(frozen=True, slots=True)
class Table:
    """A source or a query step of a pipeline file. Later steps and sinks refer to it by its name."""

    name: str
    line: int
    watermark: Watermark | None


@dataclass(frozen=True, slots=True)
class Source(Table):
    """A source in a pipeline file. `columns` selects columns, in the form of a DDL schema."""

    format: str
    path: Text | None
    options: Mapping[str, Text]
    columns: Text | None

    def plain(self) -> dict[str, str]:
        return {name: text.value for name, text in self.options.items()}


@dataclass(frozen=True, slots=True)
class Step(Table):
    """A query in a pipeline file, over tables that the file defines earlier."""

    sql: str
    sql_line: int
    own_lines: bool  # Whether each line of `sql` is also a line of the pipeline file

    def line_of(self, line: int) -> int:
        """Convert a line number of the query to one of the pipeline file, both counted from 1."""
        return self.sql_line + line - 1 if self.own_lines else self.sql_line


@dataclass(frozen=True, slots=True)
class Sink:
    """A destination to which a pipeline writes a table.

    `save` is Spark's save mode and applies only to batch runs. `output` (Spark's output mode) and `trigger`
    apply only to streams.
    """

    name: str
    line: int
    table: Text
    format: str
    path: Text | None
    options: Mapping[str, Text]
    save: str
    output: str
    trigger: str
    checkpoint: Text | None
    partition_by: tuple[Text, ...]

    def plain(self) -> dict[str, str]:
        return {name: text.value for name, text in self.options.items()}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline file that is valid as far as can be checked without Spark."""

    file: str
    streaming: bool
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    secrets: Mapping[str, str] = field(repr=False)  # key: a value to hide; value: its `${NAME}`

    def hide(self, text: str) -> str:
        """Return `text` with the values of environment variables replaced by their names."""
        return _hidden(text, self.secrets)

    def wrong(self, line: int, problem: str) -> PipelineFileError:
        return PipelineFileError(self.file, [(line, self.hide(problem))])


def load_pipeline(file: str, environment: Mapping[str, str] = os.environ) -> Pipeline:
    """Read and check a pipeline file. Raises PipelineFileError with all errors of the file, and OSError."""
    with open(file, "rb") as opened:
        data = opened.read(yaml_file.BYTES_MAX + 1)
    try:
        root = yaml_file.load(data)
    except YamlError as error:
        raise PipelineFileError(file, [(error.line, error.problem)]) from None
    return _Reader(file, environment).pipeline(root)


class _Reader:
    def __init__(self, file: str, environment: Mapping[str, str]) -> None:
        self._file, self._environment = file, environment
        self._problems: list[tuple[int, str]] = []
        self._secrets: dict[str, str] = {}

    def pipeline(self, root: Node) -> Pipeline:
        top = self._section(root, "the file", _TOP, required=("sources", "sinks"))
        streaming = self._word(top, "mode", MODES, "batch") == "stream"
        sources = [self._source(*item, streaming) for item in self._named(top, "sources")]
        steps = [self._step(*item, streaming) for item in self._named(top, "steps")]
        sinks = [self._sink(*item, streaming) for item in self._named(top, "sinks")]
        self._check_names([*sources, *steps], sinks)
        self._check_places(sources, sinks)
        if streaming and not any(source.format == "cometmq" for source in sources):
            self._wrong(top["mode"].line, "a stream needs a source of format cometmq; the others are tables")
        pipeline = Pipeline(
            self._file, streaming, tuple(sources), tuple(steps), tuple(sinks), dict(self._secrets)
        )
        if self._problems:
            found = sorted({(line, pipeline.hide(problem)) for line, problem in self._problems})
            raise PipelineFileError(self._file, found)
        return pipeline

    def _wrong(self, line: int, problem: str) -> None:
        self._problems.append((line, problem))

    # -- parts

    def _source(self, name: str, node: Node, streaming: bool) -> Source:
        given = self._section(node, f"source {name}", _SOURCE, required=("format",))
        kind = self._word(given, "format", SOURCES, "")
        path = self._path(given, node, kind, ("cometmq-store", "archive", "delta", *PATHS))
        options = self._options(given)
        watermark, columns = self._watermark(given, streaming), self._text(given, "columns")
        source = Source(name, node.line, watermark, kind, path, options, columns)
        if kind == "cometmq":
            self._check(given, node, lambda: read_options(source.plain(), streaming=streaming))
        elif kind == "cometmq-store" and path:
            self._check(given, node, lambda: store_options(source.plain() | {"path": path.value}))
        elif kind in ("archive", "delta"):
            for key in ("options", "columns"):
                if key in given:
                    self._wrong(given[key].line, f"format {kind} has no {key}")
        return source

    def _step(self, name: str, node: Node, streaming: bool) -> Step:
        given = (
            {"sql": node}
            if isinstance(node.value, str)
            else self._section(node, f"step {name}", _STEP, ("sql",))
        )
        sql = given.get("sql", node)
        text = sql.value if isinstance(sql.value, str) else ""
        if not text.strip():
            self._wrong(sql.line, f"step {name} needs a query in SQL")
        if "${" in text:
            self._wrong(sql.line, "variables of the environment are for options and paths, not for SQL")
        own_lines = sql.text_line is not None
        return Step(
            name, node.line, self._watermark(given, streaming), text.rstrip().rstrip(";"),
            sql.text_line or sql.line, own_lines,
        )  # fmt: skip

    def _sink(self, name: str, node: Node, streaming: bool) -> Sink:
        given = self._section(node, f"sink {name}", _SINK, required=("from", "format"))
        kind = self._word(given, "format", SINKS, "")
        for key in ("save",) if streaming else ("output", "trigger", "checkpoint"):
            if key in given:
                self._wrong(given[key].line, f"{key} is for mode: {'batch' if streaming else 'stream'}")
        checkpoint = self._text(given, "checkpoint", variables=True)
        if streaming and kind != "console" and "checkpoint" not in given:
            self._wrong(
                node.line, f"sink {name} needs a checkpoint: a directory of its own, kept between runs"
            )
        trigger = self._text(given, "trigger")
        if trigger and trigger.value != NOW and not _TIME.fullmatch(trigger.value):
            self._wrong(trigger.line, f"trigger {_said(trigger.value)}: a time as `10 seconds`, or `{NOW}`")
        sink = Sink(
            name=name,
            line=node.line,
            table=self._text(given, "from") or Text("", "", node.line),
            format=kind,
            path=self._path(given, node, kind, PATHS),
            options=self._options(given),
            save=self._word(given, "save", SAVES, "append" if kind == "cometmq" else "error"),
            output=self._word(given, "output", OUTPUTS, "append"),
            trigger=trigger.value if trigger else "10 seconds",
            checkpoint=checkpoint,
            partition_by=self._list(given, "partition_by"),
        )
        self._check_sink(sink, given, node)
        return sink

    def _check_sink(self, sink: Sink, given: dict[str, Node], node: Node) -> None:
        if sink.format == "cometmq":
            self._check(given, node, lambda: write_options(sink.plain()))
            if sink.save != "append" or sink.output == "complete":
                line = given["save" if "save" in given else "output"].line
                self._wrong(line, "messages can only be appended")
        elif sink.format in PATHS and sink.output != "append":
            self._wrong(given["output"].line, f"{sink.format} files can only be appended by a stream")
        elif sink.format == "console" and "options" in given:
            self._wrong(given["options"].line, "console has no options")
        if sink.format not in PATHS and "partition_by" in given:
            self._wrong(given["partition_by"].line, f"{sink.format} has no partition_by")

    def _check_names(self, tables: list[Any], sinks: list[Sink]) -> None:
        known: dict[str, int] = {}
        for table in tables:  # Names are compared in lower case, because Spark ignores case
            if (first := known.setdefault(table.name.lower(), table.line)) != table.line:
                self._wrong(table.line, f"the name {_said(table.name)} is taken in line {first}")
        for sink in sinks:
            if sink.table.value and sink.table.value.lower() not in known:
                names = ", ".join(table.name for table in tables)
                self._wrong(sink.table.line, f"from: {_said(sink.table.shown)} is none of {names}")

    def _check_places(self, sources: list[Source], sinks: list[Sink]) -> None:
        """Record an error for each path to which a sink writes if another source or sink uses it, too."""
        places = [
            (source.path, f"source {source.name} reads")
            for source in sources
            if source.path and not self._too_long(source.path)
        ]
        for sink in sinks:
            bad = [text for key, text in sink.options.items() if key.lower() == _BAD_RECORDS]
            for text in (sink.path, sink.checkpoint, *bad):
                if text is None or not text.value.strip() or self._too_long(text):
                    continue
                for other, what in places:
                    if overlap(text.value, other.value):
                        self._wrong(text.line, f"{text.shown}: {what} there, or above or below it")
                places.append((text, f"sink {sink.name} writes"))

    def _too_long(self, path: Text) -> bool:
        if len(path.value) <= _PATH_MAX:
            return False
        self._wrong(path.line, f"a path of {len(path.value)} characters: at most {_PATH_MAX}")
        return True

    # -- values

    def _section(
        self, node: Node, what: str, known: tuple[str, ...], required: tuple[str, ...] = ()
    ) -> dict[str, Node]:
        """Return the nodes of a section's known keys. Unknown and missing keys are recorded as errors."""
        if not isinstance(node.value, dict):
            self._wrong(node.line, f"{what} must be a mapping with: {', '.join(known)}")
            return {}
        for key, value in node.value.items():
            if key not in known:
                self._wrong(value.line, f"{what} has no {_said(key)}; it may have: {', '.join(known)}")
        for key in required:
            if key not in node.value:
                self._wrong(node.line, f"{what} needs {key}")
        return {key: value for key, value in node.value.items() if key in known}

    def _named(self, top: dict[str, Node], key: str) -> list[tuple[str, Node]]:
        if key not in top:
            return []
        parts = top[key].value
        if not isinstance(parts, dict) or not parts:
            self._wrong(top[key].line, f"{key} must be a mapping of names to {key}")
            return []
        for name, node in parts.items():
            if not _NAME.fullmatch(name):
                self._wrong(node.line, f"{_said(name)} is no name: letters, digits and _, at most 64")
        return list(parts.items())

    def _text(self, given: dict[str, Node], key: str, *, variables: bool = False) -> Text | None:
        if key not in given:
            return None
        node = given[key]
        if not isinstance(node.value, str) or not node.value.strip():
            self._wrong(node.line, f"{key} must be a text")
            return None
        return self._filled(node, node.value) if variables else Text(node.value, node.value, node.line)

    def _word(self, given: dict[str, Node], key: str, words: tuple[str, ...], default: str) -> str:
        text = self._text(given, key)
        if text is None or text.value in words:
            return text.value if text else default
        known = ", ".join(words)
        refused = _REFUSED.get(text.value) if key == "format" else None
        self._wrong(text.line, f"{key} {_said(text.value)} {refused or f'is none of: {known}'}")
        return default

    def _list(self, given: dict[str, Node], key: str) -> tuple[Text, ...]:
        if key not in given:
            return ()
        node = given[key]
        items = node.value if isinstance(node.value, list) else [node]
        if not items or not all(isinstance(item.value, str) and item.value for item in items):
            self._wrong(node.line, f"{key} must be a list of texts")
            return ()
        return tuple(Text(str(item.value), str(item.value), item.line) for item in items)

    def _options(self, given: dict[str, Node]) -> dict[str, Text]:
        if "options" not in given:
            return {}
        options = given["options"].value
        if not isinstance(options, dict):
            self._wrong(given["options"].line, "options must be a mapping")
            return {}
        found: dict[str, Text] = {}
        for key, node in options.items():
            if not isinstance(node.value, str):
                self._wrong(node.line, f"option {_said(key)} must be a text (quote JSON)")
            elif key.lower() in ("path", "checkpointlocation"):
                self._wrong(node.line, f"{_said(key)} is a key of its own here, no option")
            else:
                found[key] = self._filled(node, node.value)
        return found

    def _path(self, given: dict[str, Node], node: Node, kind: str, wanted: tuple[str, ...]) -> Text | None:
        if kind in wanted and "path" not in given:
            self._wrong(node.line, f"format {kind} needs a path")
        elif kind and kind not in wanted and "path" in given:
            self._wrong(given["path"].line, f"format {kind} has no path")
        return self._text(given, "path", variables=True)

    def _watermark(self, given: dict[str, Node], streaming: bool) -> Watermark | None:
        if "watermark" not in given:
            return None
        node = given["watermark"]
        parts = self._section(node, "watermark", ("column", "delay"), required=("column", "delay"))
        column, delay = self._text(parts, "column"), self._text(parts, "delay")
        if not streaming:
            self._wrong(node.line, "watermark is for mode: stream")
        if delay and not _TIME.fullmatch(delay.value):
            self._wrong(delay.line, f"delay {_said(delay.value)}: a time as `10 minutes`")
        return Watermark(column.value, delay.value, node.line) if column and delay else None

    def _filled(self, node: Node, text: str) -> Text:
        """Return the text with each environment variable replaced by its value."""

        def value(found: re.Match[str]) -> str:
            got = self._environment.get(found[1])
            if not got:
                self._wrong(node.line, f"{printable(found[0], 80)} is not set in the environment")
                return ""
            if not is_utf8(got):
                self._wrong(node.line, f"{found[0]} is no UTF-8 text in the environment")
                return ""
            if len(got) >= _SECRET:
                self._secrets[got] = self._secrets[repr(got)[1:-1]] = found[0]
            return got

        return Text(_VARIABLE.sub(value, text), text, node.line)

    def _check(self, given: dict[str, Node], node: Node, parse: Callable[[], object]) -> None:
        """Call an option parser, and record an invalid option with the option's line."""
        try:
            parse()
        except ConfigError as error:
            options = given["options"].value if "options" in given else {}
            lines = (
                {key.lower(): item.line for key, item in options.items()} if isinstance(options, dict) else {}
            )
            line = lines.get(error.key.lower(), given["options"].line if "options" in given else node.line)
            # The option's value may contain secrets. They must be hidden before ConfigError shortens the
            # value for its message, because a shortened secret would no longer be recognised.
            value = _hidden(error.value, self._secrets)
            self._wrong(line, str(ConfigError(error.key, value, error.expected)))


def _hidden(text: str, secrets: Mapping[str, str]) -> str:
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, secrets[value])
    return text


def _said(text: str) -> str:
    return repr(printable(text, 60))
