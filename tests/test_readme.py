"""The commands and programs in the README and the docs are run as they are written there, and must work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from cometmq import ConsumeFromWhere, Message, PushOptions, SyncProducer, SyncPushConsumer
from cometmq.testing import StandaloneProcess

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = README.partition("## Five minutes")[2].partition("\n## ")[0]


def blocks(language: str, text: str = TOUR) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


DOC_PROGRAMS = [
    program
    for page in ("client.md", "server.md", "admin.md", "migration-clients.md")
    for program in blocks("python", (ROOT / "docs" / page).read_text(encoding="utf-8"))
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneProcess]:
    """The cluster of the README's tour, on free ports instead of the usual ones."""
    with StandaloneProcess(tmp_path / "comet") as cluster:
        yield cluster


def environment(cluster: StandaloneProcess) -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NAMESRV_ADDR": cluster.namesrv, "SPARK_MASTER": "local[1]"}


@pytest.mark.slow("each command is a process, the last one Spark")
@pytest.mark.foreign("Spark")
def test_every_command_of_the_tour_works(cluster: StandaloneProcess, tmp_path: Path) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [line for line in lines if not line.startswith(("export", "cometmq standalone"))]
    assert len(commands) >= 7
    assert "cometmq standalone --data /tmp/comet" in lines

    outputs = {}
    for command in commands:
        done = subprocess.run(
            ["bash", "-ec", command.replace("/tmp/comet-archive", str(tmp_path / "archive"))],
            capture_output=True,
            text=True,
            env=environment(cluster),
            timeout=120,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        outputs[command.split(" -")[0]] = done.stdout

    assert outputs["seq 1 10000 | cometmq send numbers"].startswith("sent 10000 messages")
    assert "good morning" in outputs["cometmq consume greetings"]
    assert outputs["mqadmin queryMsgByKey"].count("\n") == 3
    assert "Diff Total: 0" in outputs["mqadmin consumerProgress"]
    assert outputs["cometmq archive greetings numbers"].startswith("archived 10002 messages")


def test_the_program_of_the_tour_works(cluster: StandaloneProcess) -> None:
    (program,) = blocks("python")

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=environment(cluster),
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert "SEND_OK" in done.stdout
    assert "('1',) b'{\"id\": 1}'" in done.stdout


@pytest.mark.representative("0")
@pytest.mark.thorough("each program of the pages")
@pytest.mark.parametrize("number", range(len(DOC_PROGRAMS)))
def test_the_programs_of_the_pages_work(cluster: StandaloneProcess, tmp_path: Path, number: int) -> None:
    program = DOC_PROGRAMS[number].replace("/tmp/comet-test", str(tmp_path / "comet-test"))
    program = program.replace("127.0.0.1:9876", cluster.namesrv)
    handled = Event()
    with SyncProducer("shop", namesrv=cluster.namesrv) as producer:
        producer.send(Message("orders", b"x"))  # a consumer needs an existing topic
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPushConsumer(
        "billing", lambda _messages: handled.set(), "orders", namesrv=cluster.namesrv, options=options
    ):
        assert handled.wait(30)  # a broker then knows the group that the programs query

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=environment(cluster),
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(("command", "extra"), [("--console", "console"), ("cometmq archive", "spark")])
def test_the_tour_names_the_extra_where_it_is_needed(command: str, extra: str) -> None:
    step = next(step for step in TOUR.split("\n**") if command in step)
    assert re.search(rf"extra\b.*\b{extra}\b", step, re.DOTALL)
