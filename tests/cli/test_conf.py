"""`cometmq conf` brings the files of the package out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Run

from cometmq.settings import PACKAGED_CONF

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
    assert "broker-a.properties, broker-b.properties already; nothing was copied" in again.stderr
    assert (target / "broker-b.properties").read_text() == "mine"


@pytest.mark.parametrize("name", ["nothing", "..", "../settings.py", "/etc/passwd", ""])
def test_other_names_are_refused(run: Run, name: str) -> None:
    done = run("cometmq", "conf", "show", name)
    assert (done.returncode, done.stdout) == (1, "")
    assert "`cometmq conf list` lists them" in done.stderr


def test_a_name_that_is_near_is_suggested(run: Run) -> None:
    assert "2m-2s-sync" in run("cometmq", "conf", "show", "2m-2s-sinc").stderr
