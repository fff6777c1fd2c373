"""Applications of FastStream as real processes: kills, and the guide's program under FastStream's command."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.waiting import PATIENCE_S, wait_until

from cometmq.integrations.faststream import CometMQBroker
from cometmq.testing import ServerProcess, local_broker

PAGE = Path(__file__).parents[2] / "docs" / "faststream.md"
RUN = [sys.executable, "-m", "faststream", "run"]
READY = "app started successfully"


@pytest.mark.slow("three applications start as processes")
@pytest.mark.parametrize("share", ["messages", "queues"])
def test_no_message_is_lost_when_applications_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    handled = tmp_path / "handled"
    handled.touch()

    def noted() -> list[str]:
        return handled.read_text().splitlines()

    async def send(count: int) -> None:
        async with CometMQBroker(os.environ["TEST_NAMESRV"], logger=None) as broker:
            await (await broker.connect()).ensure_topic("runs")
            for number in range(count):
                await broker.publish(str(number), "runs")

    with local_broker(tmp_path / "broker") as server:
        monkeypatch.setenv("TEST_NAMESRV", server.namesrv)
        monkeypatch.setenv("TEST_RUNS", str(handled))
        monkeypatch.setenv("TEST_SHARE", share)
        asyncio.run(send(300))
        command = [*RUN, "tests.integrations.faststream_app:app"]
        for handled_until_kill in (20, 60):
            with ServerProcess(command, READY) as application:
                wait_until("some", lambda least=handled_until_kill: len(noted()) >= least)
                application.kill()
        with ServerProcess(command, READY):
            wait_until("all", lambda: len(set(noted())) == 300)


@pytest.mark.slow("an application starts as a process")
def test_the_program_of_the_guide(tmp_path: Path) -> None:
    program, test = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[:2]
    with local_broker(tmp_path / "broker") as server:
        (tmp_path / "shop.py").write_text(program.replace("127.0.0.1:9876", server.namesrv))
        (tmp_path / "test_shop.py").write_text(test)
        command = [*RUN, "--app-dir", str(tmp_path), "shop:app"]
        with ServerProcess(command, READY) as application:
            wait_until("the invoice is printed", lambda: "invoice for order 1: 30" in application.output)
            assert application.stop() == 0
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr
