"""The tiers of the tests, and the output of a run with them (tests/tiers.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import exceeded_twice

FILES = {
    "tests/room/test_room.py": """
import pytest

def test_plain(): pass

@pytest.fixture
def spark(): return "session"

def test_spark(spark): pass

@pytest.mark.slow("waits for a stop of ten seconds")
def test_slow(): pass

@pytest.mark.representative
@pytest.mark.foreign("Spark")
def test_starts_spark(): pass

@pytest.mark.representative("2")
@pytest.mark.parametrize("row", [1, 2])
def test_rows(spark, row): pass
""",
    "tests/interop/test_java.py": "def test_java(): pass\n",
    "tests/faults/test_kill.py": "def test_kill(): pass\n",
}
FAST = {"test_plain"}
TEST = {*FAST, "test_starts_spark", "test_rows[2]", "test_kill"}
ALL = {*TEST, "test_spark", "test_slow", "test_rows[1]", "test_java"}


def run_pytest(directory: Path, *options: str) -> str:
    """Run pytest with the plugin on tests in a directory; return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "COMETMQ_TEST_CACHE": str(directory / "cache"),
        "PYTEST_ADDOPTS": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # their imports take half a second of CPU
        "FORCE_COLOR": "1",  # as in many CI systems; the output is no terminal all the same
    }
    command = [sys.executable, "-m", "pytest", "-p", "tests.tiers", "-p", "xdist.plugin", *options, "tests"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
    return re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


@pytest.mark.parametrize(
    ("tier", "tests"), [("fast", FAST), ("test", TEST), ("rest", ALL - TEST), ("all", ALL)]
)
def test_each_tier_contains_the_one_before_and_the_rest_repeats_nothing(
    suite: Path, tier: str, tests: set[str]
) -> None:
    output = run_pytest(suite, "--collect-only", "-q", "--tier", tier)
    assert {line.rpartition("::")[2] for line in output.splitlines() if "::" in line} == tests, output


def test_a_mark_without_a_reason_is_refused(suite: Path) -> None:
    (suite / "tests/room/test_room.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n"
    )
    assert "test_slow: a mark slow says why" in run_pytest(suite)


@pytest.mark.parametrize("row", ["3", "1"])
def test_a_representative_row_that_does_not_exist_is_refused(suite: Path, row: str) -> None:
    (suite / "tests/room/test_room.py").write_text(
        f"import pytest\n@pytest.mark.representative({row!r})\n"
        "@pytest.mark.parametrize('names', [1, 2])\ndef test_rows(names): pass\n"
    )
    refused = "test_rows has no row '3', which its mark representative names"
    assert (refused in run_pytest(suite)) == (row == "3")


@pytest.mark.parametrize(
    ("codes", "green"),
    [((0, 0), True), ((5, 0), True), ((0, 5), True), ((5, 5), False), ((1, 0), False), ((5, 1), False)],
)
def test_a_selection_may_leave_out_one_half_of_all_tests(
    tmp_path: Path, codes: tuple[int, int], green: bool
) -> None:
    """pytest's exit code is 5 if no test is selected, and 1 if one fails."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"--tier test"*) exit {codes[0]};; *) exit {codes[1]};; esac\n'
    )
    python.chmod(0o755)
    made = [option for target in ("java", "lint", ".venv/.compiled") for option in ("-o", target)]
    command = ["make", "-f", str(Path(__file__).parents[1] / "Makefile"), *made, "test-all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == green, done.stdout + done.stderr
    assert done.stdout.count("no test is selected by: ") == codes.count(5)


def test_a_run_whose_cache_cannot_be_written_is_green_all_the_same(suite: Path) -> None:
    (suite / "cache").write_text("a file, not a directory")
    output = run_pytest(suite, "--tier", "fast")
    assert "the slow tests of this run are not recorded" in output
    assert "1 passed" in output


def test_a_run_without_a_terminal_prints_its_progress_and_its_slowest_files(suite: Path) -> None:
    (suite / "tests/room/test_many.py").write_text(
        "import pytest, time, tests.tiers\n"
        "def test_fails(): assert False\n"
        "@pytest.mark.parametrize('n', range(12))\ndef test_one(n): time.sleep(0.02)\n"
    )
    (suite / "conftest.py").write_text("import tests.tiers\ntests.tiers.PROGRESS_INTERVAL_S = 0.05\n")
    output = run_pytest(suite, "-n", "1")
    assert " of 21 tests" in output
    assert "\nFAILED tests/room/test_many.py::test_fails\n" in output
    assert "running: tests/room/test_many.py" in output
    assert "slowest files" in output
    assert "s  tests/room/test_many.py" in output


def test_a_test_that_ends_its_worker_runs_once_and_the_others_run(tmp_path: Path) -> None:
    end = "__import__('os')._exit(1)"
    files = {
        "tests/room/test_a.py": f"def test_a(): pass\ndef test_ends(): {end}\ndef test_b(): pass\n",
        "tests/room/test_b.py": f"def test_last(): {end}\n",
        "tests/room/test_c.py": "def test_c(): pass\ndef test_d(): pass\n",
    }
    for name, text in files.items():
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    output = run_pytest(tmp_path, "-p", "tests.scheduling", "--dist", "loadgroup", "-n", "2", "--tier", "all")
    assert "2 failed, 4 passed" in output, output


def test_the_only_test_left_for_the_successor_of_a_worker_runs(tmp_path: Path) -> None:
    for name, text in {"a": "def test_ends(): __import__('os')._exit(1)", "b": "def test_b(): pass"}.items():
        (path := tmp_path / f"tests/room/test_{name}.py").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    output = run_pytest(tmp_path, "-p", "tests.scheduling", "--dist", "loadgroup", "-n", "1")
    assert "1 failed, 1 passed" in output, output


def test_an_unmarked_test_is_named_once_it_has_been_slow_in_two_runs(tmp_path: Path) -> None:
    record = tmp_path / "slow-tests.json"
    record.write_text('[["no name"]]')
    assert exceeded_twice(record, {"a": 5.1, "b": 1.0}) == []
    assert exceeded_twice(record, {"b": 6.0}) == []  # the run has no "a", which stays in the record
    assert exceeded_twice(record, {"a": 7.0, "b": 1.0}) == ["a"]
    assert exceeded_twice(record, {"a": 1.0, "b": 6.0}) == []
    assert exceeded_twice(record, {"a": 6.0, "b": 6.0}) == ["b"]
    assert json.loads(record.read_text()) == ["a", "b"]
