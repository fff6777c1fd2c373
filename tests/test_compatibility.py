"""Names that users depend on beside the Python API stay: commands, JSON, settings, Spark, metrics, HTTP.

tests/data/interfaces.txt has their names, a line each. Nothing may be missing from the code. New names may be
missing from the file until a release: `python -m tests.test_compatibility` adds them, and removes those that
a deliberate change removes. docs/compatibility.md describes what is promised.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from docs_site import command_contexts
from tests.test_release_notes import PAGE, read

import cometmq
from cometmq import admin
from cometmq.broker.base.config import FIELD_OF_KEY, STORE_KEYS
from cometmq.grpc.gateway.openapi import openapi_document
from cometmq.namesrv.config import FIELDS
from cometmq.pipeline.base import options
from cometmq.pipeline.base.declare import declared

STORED = Path(__file__).parent / "data/interfaces.txt"
PACKAGE = Path(cometmq.__file__).parent
METRIC = re.compile(r"(?:rocketmq|cometmq)_(?:[a-z_]*(?:\{\w+\}[a-z_]*)+|[a-z_]*[a-z])")
METRIC_MODULES = ("**/metrics.py", "metrics/*.py", "grpc/**/*.py")


def command_lines() -> Iterator[str]:
    """Yield each option and argument of each command."""
    for context in command_contexts():
        path = context.command_path
        yield f"command {path}"
        for each in context.command.params:
            if isinstance(each, click.Option) and not each.hidden:
                yield from (f"option {path} {name}" for name in (*each.opts, *each.secondary_opts))
            elif isinstance(each, click.Argument):
                yield f"argument {path} {each.name}"


def metrics() -> Iterator[str]:
    """Yield the names of metrics in the modules that make them; a part that varies is in braces."""
    paths = {path for pattern in METRIC_MODULES for path in PACKAGE.glob(pattern)}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                text = ast.unparse(node).removeprefix("f")[1:-1]
                if METRIC.fullmatch(text):
                    yield f"metric {text}"


def results() -> Iterator[str]:
    """Yield the fields of the results of `Admin`, which are those of the commands' JSON."""
    for name in admin.__all__:
        value = getattr(admin, name)
        if isinstance(value, type) and issubclass(value, msgspec.Struct):
            yield from (f"json {name} {field.encode_name}" for field in msgspec.structs.fields(value))
        elif isinstance(value, type) and dataclasses.is_dataclass(value):
            yield from (f"json {name} {field.name}" for field in dataclasses.fields(value))


def gateway() -> Iterator[str]:
    """Yield the routes of the HTTP gateway, with their parameters, and the fields of its JSON."""
    document = openapi_document()
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            yield f"http {verb} {path}"
            yield from (f"http {verb} {path} {each['name']}" for each in operation.get("parameters", ()))
    for name, schema in document["components"]["schemas"].items():
        yield from (f"http {name} {field}" for field in schema["properties"])


def interfaces() -> list[str]:
    keys = [f"setting broker {key}" for key in {*STORE_KEYS, *FIELD_OF_KEY}]
    keys += [f"setting namesrv {key}" for key in FIELDS]
    for struct in (options.ReadOptions, options.StoreOptions, options.WriteOptions):
        keys += [f"spark {struct.__name__} {key}" for each in declared(struct) for key in each.spark]
    return sorted({*keys, *command_lines(), *results(), *metrics(), *gateway()})


def test_no_command_option_field_setting_or_metric_has_gone() -> None:
    stored = STORED.read_text().splitlines()
    now = interfaces()

    assert sorted(set(stored) - set(now)) == []
    assert {line.partition(" ")[0] for line in stored} == {
        *("argument", "command", "http", "json", "metric", "option", "setting", "spark")
    }
    if read(PAGE.read_text("utf-8"))[0].released is not None:
        assert stored == now, "python -m tests.test_compatibility"


if __name__ == "__main__":
    STORED.write_text("".join(f"{line}\n" for line in interfaces()))
