"""Each extra brings all that its modules import, and names of extras in texts exist."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import make_dist
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.long_form import long_form

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SPARK = ("cometmq.pipeline", "cometmq.pipeline.live.source", "pyspark_cometmq", "pyspark_cometmq_store")
MODULES: dict[str, tuple[str, ...]] = {
    "spark": (*SPARK, "cometmq.pipeline.metrics", "zstandard", "lz4.frame"),
    "report": ("cometmq.pipeline.base.report", "matplotlib.figure"),
    "connect": (*SPARK, "pyspark.sql.connect.session"),
    "delta": ("cometmq.pipeline.table.delta",),
    "iceberg": ("cometmq.pipeline.table.iceberg",),
    "bodies": ("cometmq.pipeline.table.body_avro", "cometmq.pipeline.table.body_protobuf"),
    "s3": ("cometmq.pipeline.table.objects", "obstore.store"),
    "zstd": ("zstandard", "lz4.frame"),
    "console": ("cometmq.console.app",),
    "redis": ("cometmq.client.idempotency.redis_marks", "redis.asyncio"),
    "metrics": ("cometmq.metrics.port",),
    "otlp": ("cometmq.metrics.otlp",),
    "otel": ("cometmq.client.cluster.telemetry", "opentelemetry.trace"),
    "grpc": ("cometmq.grpc.service", "cometmq.grpc.rpc.messages", "cryptography.x509"),
    "celery": ("cometmq.integrations.kombu", "celery"),
    "taskiq": ("cometmq.integrations.taskiq",),
    "faststream": ("cometmq.integrations.faststream", "typer"),
    "dramatiq": ("cometmq.integrations.dramatiq",),
    "mcp": ("cometmq.integrations.mcp", "uvicorn"),
    "http": ("cometmq.grpc.http1.connection", "cometmq.grpc.service"),
    "tiered": ("cometmq.broker.object_store", "obstore.store"),
    "testcontainers": ("cometmq.testing.containers",),
    "filter-server": ("cometmq.filtersrv.confine",),
}
"""What can be imported with an extra alone: our modules, and packages that they import later."""
FOR_THIS_REPOSITORY = {"demo", "docs", "test"}

IMPORTS = """
import importlib.machinery, json, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in absent else super().find_spec(name, path, target)

absent, wanted = json.load(sys.stdin)
absent = set(absent)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
for each in wanted:
    importlib.import_module(each)
"""


def requirements(extra: str) -> list[Requirement]:
    """Return what an extra of this project requires beside the base, with its own extras resolved."""
    found = []
    for each in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if each.name == PROJECT["name"]:
            found += [more for name in sorted(each.extras) for more in requirements(name)]
        else:
            found.append(each)
    return found


def closure(wanted: list[Requirement]) -> set[str]:
    """Return the names of all installed distributions that requirements bring."""
    return {canonicalize_name(each.name) for each in all_requirements(wanted)}


def all_requirements(wanted: list[Requirement]) -> Iterator[Requirement]:
    """Yield requirements, and those of the installed distributions that they bring."""
    done: set[tuple[str, str]] = set()
    waiting = [(each, "") for each in wanted]
    while waiting:
        requirement, of_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        yield requirement
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) not in done:
                done.add((name, extra))
                needs = metadata.requires(name) or []
                waiting += [(each, extra) for each in map(Requirement, needs)]


@cache
def owners() -> dict[str, set[str]]:
    """Return the distributions that have files in each installed module or package."""
    found: dict[str, set[str]] = defaultdict(set)
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.name)
        for file in distribution.files or ():
            if file.suffix in {".py", ".so"} and ".." not in file.parts:
                parts = (*file.parts[:-1], file.name.partition(".")[0])
                for count in range(1, len(parts) + 1):
                    found[".".join(parts[:count])].add(name)
    return found


def test_the_table_has_every_extra_of_users() -> None:
    assert set(MODULES) | FOR_THIS_REPOSITORY == set(PROJECT["optional-dependencies"])


def test_the_versions_of_constraints_satisfy_all_requirements() -> None:
    """`make install` would fail, but nothing that is installed already: pip does not check extras again."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (each.partition("==") for each in lines)}
    wanted = list(map(Requirement, PROJECT["dependencies"])) + requirements("test")
    unmet = {
        str(each) for each in all_requirements(wanted)
        if (pin := pins.get(canonicalize_name(each.name), "").partition(" ")[0]) and pin not in each.specifier
    }  # fmt: skip

    assert unmet == set()


def test_every_extra_that_a_text_or_a_page_names_exists() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        extra
        for path in texts
        for extras in re.findall(r"cometmq\[([a-z0-9, -]+)\]", path.read_text("utf-8"))
        for extra in re.split(r"[, ]+", extras)
    }

    assert named - set(PROJECT["optional-dependencies"]) == set()
    assert len(named) > 10


@pytest.mark.slow("imports Spark, the console and others, each in a process of its own")
@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_need_no_package_of_another(extra: str) -> None:
    base = list(map(Requirement, PROJECT["dependencies"]))
    allowed = {PROJECT["name"], "pip", "setuptools", *closure(base + requirements(extra))}
    absent = [module for module, names in owners().items() if not names & allowed]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        input=json.dumps([absent, MODULES[extra]]),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr


@long_form("it installs Spark, among others")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_can_be_installed_and_its_modules_imported(extra: str, tmp_path: Path) -> None:
    python = make_dist.install(f"{ROOT}[{extra}]", tmp_path / "venv")
    imports = "import importlib, sys; [importlib.import_module(each) for each in sys.argv[1:]]"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    subprocess.run([python, "-c", imports, *MODULES[extra]], cwd=tmp_path, env=clean, check=True, timeout=120)
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "check"], check=True)
