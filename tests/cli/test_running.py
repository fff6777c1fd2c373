"""The list of running servers: files that are locked while their process lives."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from cometmq.cli.running import RunFile, run_directory, running
from cometmq.settings import PACKAGED_CONF

HOLD = """
import sys
from cometmq.cli.running import RunFile
with RunFile("broker"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMETMQ_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def hold() -> subprocess.Popen[str]:
    """Start a process that locks a broker's run file until its standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)


def test_a_living_server_is_found_under_its_kind_until_it_ends() -> None:
    process = hold()

    assert list(running("broker")) == [process.pid]
    assert list(running("namesrv")) == []
    end(process)
    assert list(running("broker")) == []


def test_a_look_at_a_server_that_announces_itself_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def look_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert list(running("broker")) == []
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", look_before)
    with RunFile("broker"):
        assert list(running("broker")) == [os.getpid()]
    assert list(running("broker")) == []


def test_what_kill_9_left_behind_is_not_running_and_is_removed(directory: Path) -> None:
    process = hold()
    process.kill()
    end(process)

    assert len(list(directory.iterdir())) == 1
    assert list(running("broker")) == []
    assert list(directory.iterdir()) == []


def test_the_own_file_goes_when_the_server_stops(directory: Path) -> None:
    with RunFile("namesrv") as file:
        assert Path(file.path).read_text() == f"{os.getpid()}\n"

    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMETMQ_RUN_DIR", str(tmp_path / "file" / "run"))

    with caplog.at_level(logging.WARNING), RunFile("broker"):
        pass

    assert "mqshutdown cannot find this process" in caplog.text


@pytest.mark.parametrize(
    ("runtime", "expected"), [("/run/user/1", "/run/user/1/cometmq"), (None, "/home/u/.cometmq/run")]
)
def test_without_a_setting_the_directory_is_the_users(
    monkeypatch: pytest.MonkeyPatch, runtime: str | None, expected: str
) -> None:
    monkeypatch.delenv("COMETMQ_RUN_DIR")
    monkeypatch.setenv("HOME", "/home/u")
    if runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    assert run_directory() == expected


# -- `cometmq conf` copies the files of the package


PACKAGED = Path(PACKAGED_CONF)


def test_list_names_what_there_is(run: Run) -> None:
    lines = run("cometmq", "conf", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.name for path in PACKAGED.iterdir())
    (pair,) = [line.split() for line in lines if line.startswith("2m-noslave")]
    assert pair[1:] == ["broker-a.properties", "broker-b.properties"]


def test_show_prints_a_file_as_it_is_and_a_directory_with_names(run: Run) -> None:
    text = (PACKAGED / "raft-3" / "broker-n1.conf").read_text()
    assert run("cometmq", "conf", "show", "raft-3/broker-n1.conf").stdout == text
    shown = run("cometmq", "conf", "show", "raft-3").stdout
    assert shown.startswith("==> raft-3/broker-n0.conf <==\n")
    assert f"\n==> raft-3/broker-n1.conf <==\n{text}" in shown


def test_copy_makes_the_directory_and_replaces_nothing(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "etc" / "cometmq"
    done = run("cometmq", "conf", "copy", "2m-2s-async", str(target))
    assert done.stdout.splitlines() == sorted(str(path) for path in target.iterdir())
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in (PACKAGED / "2m-2s-async").iterdir()
    }
    (target / "broker-b.properties").write_text("mine")
    again = run("cometmq", "conf", "copy", "2m-noslave", str(target))
    assert again.returncode == 1
    assert "broker-a.properties, broker-b.properties; nothing was copied" in again.stderr
    assert (target / "broker-b.properties").read_text() == "mine"


def test_a_copy_keeps_the_folders_of_a_directory(run: Run, tmp_path: Path) -> None:
    target, chart = tmp_path / "chart", PACKAGED / "helm" / "cometmq"
    run("cometmq", "conf", "copy", "helm/cometmq/", str(target))
    assert (target / "templates" / "NOTES.txt").is_file()
    assert {path.relative_to(target) for path in target.rglob("*") if path.is_file()} == {
        path.relative_to(chart) for path in chart.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("name", ["nothing", "..", "../settings.py", "/etc/passwd", ""])
def test_other_names_are_refused(run: Run, name: str) -> None:
    done = run("cometmq", "conf", "show", name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "`cometmq conf list` lists them" in done.stderr


def test_a_name_that_is_near_is_suggested(run: Run) -> None:
    assert "2m-2s-sync" in run("cometmq", "conf", "show", "2m-2s-sinc").stderr
