"""`make run` at a small scale: it must work, give correct results, and report failures."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
FIRST_RUN = ROOT / "examples" / "first_run.py"


@pytest.mark.slow("the whole of `make run`")
@pytest.mark.foreign("Spark")
@pytest.mark.timeout(600)
def test_a_small_run_archives_every_order_and_checks_it(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    data = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(FIRST_RUN), "--scale", "0.002", "--data", str(data)],
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the archive holds every event exactly" in done.stdout
    assert str(data / "archive") in done.stdout
    assert str(data / "report.html") in done.stdout
    assert "holds every event exactly" in (data / "report.html").read_text()
    # This check is independent of Spark and of the example: each order key once, each event unchanged.
    table = pq.read_table(data / "archive", columns=["keys", "tags", "body", "properties"])
    source = pq.read_table(data / "source" / "orders.parquet")
    assert table.num_rows == source.num_rows == 3000
    keys = {str(key) for key in source["o_orderkey"].to_pylist()}
    assert set(table["keys"].to_pylist()) == keys
    assert sorted(table["tags"].to_pylist()) == sorted(source["o_orderstatus"].to_pylist())
    assert {"priority", "clerk"} <= set(dict(table["properties"][0].as_py()))


@pytest.fixture
def first_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module with its long stages replaced, so that only main() is tested."""
    spec = importlib.util.spec_from_file_location("first_run", FIRST_RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_run", module)
    spec.loader.exec_module(module)

    @contextmanager
    def cluster(data: Path) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(namesrv="")

    async def sent(*arguments: object) -> object:
        return module.Stage("send", 2, 10, 0.1)

    monkeypatch.setattr(module, "make_source", lambda *arguments: None)
    monkeypatch.setattr(module, "StandaloneProcess", cluster)
    monkeypatch.setattr(module, "send_orders", sent)
    monkeypatch.setattr(module, "start_spark", lambda progress: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(module, "archive_topic", lambda *arguments: module.Stage("archive", 2, 10, 0.1))
    monkeypatch.setattr(module, "totals_of_source", lambda *arguments: {"O": (2, Decimal("10.00"))})
    return module


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ({"O": (2, Decimal("10.00"))}, 0, "holds every event exactly"),
        ({"O": (2, Decimal("10.01"))}, 1, "NOT WHAT WAS SENT"),
        ({"O": (1, Decimal("10.00"))}, 1, "NOT WHAT WAS SENT"),
        ({}, 1, "NOT WHAT WAS SENT"),
        ({"O": (2, Decimal("10.00")), "X": (0, Decimal(0))}, 1, "NOT WHAT WAS SENT"),
    ],
)
def test_the_exit_code_is_the_checks_verdict(
    first_run: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    found: dict[str, tuple[int, Decimal]],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(first_run, "sum_up", lambda *arguments: (first_run.Stage("sum up"), found))
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--data", str(tmp_path / "new")])

    assert first_run.main() == code
    assert words in capsys.readouterr().out


def test_without_java_it_says_so_before_it_does_anything(
    first_run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--data", str(tmp_path / "new")])

    with pytest.raises(SystemExit, match="Java 17"):
        first_run.main()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("home", [{}, {"JAVA_HOME": "/nowhere"}])
def test_make_run_says_so_before_it_installs_anything(tmp_path: Path, home: dict[str, str]) -> None:
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "-f", str(ROOT / "Makefile"), "run"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), **home},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode != 0
    assert "Java 17 or newer is needed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(first_run: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()

    with pytest.raises(SystemExit) as raised:
        first_run.prepare_directory(tmp_path)

    assert "is not empty" in str(raised.value)
    assert (tmp_path / "precious").exists()


# -- Memory figures of `make run-large`; the run itself takes too long for the tests


@pytest.fixture
def large_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The large example as a module; it imports the module beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    before = set(sys.modules)
    yield importlib.import_module("large_run")
    for name in {"large_run", "first_run"} - before:
        sys.modules.pop(name, None)


def test_memory_is_told_by_stage(large_run: ModuleType) -> None:
    memory = large_run.Memory(os.getpid())
    memory.stages = [("send", 1.0), ("archive", 3.0), ("", 5.0)]
    memory.samples = {
        "broker": [(0.0, 9.0), (1.0, 50.0), (2.0, 70.0), (2.9, 60.0), (3.0, 61.0)],
        "JVM": [(1.0, 0.0), (4.0, 5.0)],
    }

    assert memory.rows() == [
        ("send", "broker", 50.0, 60.0, 70.0),
        ("archive", "broker", 61.0, 61.0, 61.0),
        ("archive", "JVM", 5.0, 5.0, 5.0),
    ]


def test_a_broker_that_grows_is_named(large_run: ModuleType) -> None:
    memory = large_run.Memory(os.getpid())
    memory.samples = {"broker": [(0.0, 90.0), (1.0, 200.0)], "program": [(0.0, 300.0)]}
    assert memory.too_much() == []
    memory.samples["broker"].append((2.0, 200.5))
    assert memory.too_much() == ["broker 200 MB"]


def test_memory_is_measured_until_the_end(large_run: ModuleType) -> None:
    memory = large_run.Memory(os.getpid())
    memory.stage("all")
    memory.start()
    while not memory.samples:
        memory.join(0.1)
    memory.end()

    assert not memory.is_alive()
    assert memory.samples["program"][0][1] > 10  # MB of this process
    assert [name for name, _ in memory.stages] == ["all", ""]
