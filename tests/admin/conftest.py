"""Fixtures: a real cluster for the tests of commands, and a way to run commands as a user does."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cometmq.admin.commands import mqadmin
from cometmq.cli.outcome import ADMIN_EXITS, run_command
from cometmq.client import ConsumeFromWhere, PushConsumer, PushOptions
from cometmq.message import MessageExt
from cometmq.testing import LocalBroker, local_broker


@dataclass(frozen=True)
class Outcome:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """A runner of `mqadmin` in this process, with the error handling of its entry point."""

    def __init__(
        self, broker: LocalBroker, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.broker = broker
        self._capsys = capsys
        self._patch = patch

    def run(self, *arguments: str) -> Outcome:
        """Run a command against the cluster."""
        return self.plain(arguments[0], "-n", self.broker.namesrv, *arguments[1:])

    def ok(self, *arguments: str) -> Outcome:
        """Run a command that must succeed."""
        outcome = self.run(*arguments)
        assert outcome.code == 0, outcome
        return outcome

    def plain(self, *arguments: str) -> Outcome:
        """Run exactly these arguments, without the cluster's address."""
        self._patch.setattr(sys, "argv", ["mqadmin", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command(mqadmin, "mqadmin", ADMIN_EXITS)
        out, err = self._capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)


async def consume(namesrv: str, group: str, topic: str, count: int) -> None:
    """Consume `count` messages as a group and store the offsets."""
    seen = 0
    enough = asyncio.Event()

    async def take(messages: list[MessageExt]) -> None:
        nonlocal seen
        seen += len(messages)
        if seen >= count:
            enough.set()

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer(group, take, topic, namesrv=namesrv, options=options):
        await asyncio.wait_for(enough.wait(), 30)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    data: Path = tmp_path_factory.mktemp("cluster")
    with local_broker(data) as broker:
        yield broker


@pytest.fixture
def mq(
    broker: LocalBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Shell:
    # Bodies of shown messages are written below this directory.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Shell(broker, capsys, monkeypatch)
