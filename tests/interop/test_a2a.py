"""The PyPI program `rocketmq-a2a`, unmodified: an agent answers its callers through lite topics."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.interop.grpc_clients import GrpcServers
from tests.interop.jars import FETCH_TIMEOUT_S, FetchError, fetching, locked

from cometmq.admin import Admin, TopicSettings
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.testing import ServerProcess

pytestmark = pytest.mark.foreign("rocketmq-a2a and Apache's Python client of 5.x")
REQUIREMENTS = ("rocketmq-a2a[cli]==0.0.5", "a2a-sdk==1.3.0", "mcp==2.3.0")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
ANSWER_S = 120.0


def packages() -> Path:
    """Return the directory into which the program is installed, apart from our own packages."""
    with locked("pip") as cache:
        home = cache / f"pip-{REQUIREMENTS[0]}"
        if not home.exists():
            with fetching(cache, home.name), TemporaryDirectory(dir=cache) as fresh:
                target = Path(fresh, "installed")
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
                command += ["--constraint", str(CONSTRAINTS), *REQUIREMENTS]
                done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
                if done.returncode != 0:
                    raise FetchError(f"pip could not install {REQUIREMENTS}: {done.stderr}")
                target.rename(home)
        return home


async def set_up(servers: GrpcServers) -> None:
    """Create the agent's topic, and the parent topic of the replies with a group for each side."""
    async with Admin(servers.namesrv) as admin:
        for topic, kind in (("Agent", "NORMAL"), ("Replies", "LITE")):
            settings = TopicSettings(topic=topic, attributes=f"+message.type={kind}")
            async for _ in admin.create_topic(settings, broker_addr=servers.broker_addr):
                pass
        for group in ("callers", "agent-replies"):
            config = SubscriptionGroupConfig(group_name=group, attributes={"lite.bind.topic": "Replies"})
            async for _ in admin.update_group(config, broker_addr=servers.broker_addr):
                pass


def test_an_agent_answers_its_caller(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "PYTHONPATH": str(packages())}
    servers = GrpcServers(tmp_path / "servers")
    try:
        asyncio.run(set_up(servers))
        env |= {
            "ROCKETMQ_ENDPOINT": servers.endpoint,
            "ROCKETMQ_NAMESPACE": "agents",  # The program requires one; the broker ignores it
            "ROCKETMQ_WORK_AGENT_RESPONSE_TOPIC": "Replies",
            "ROCKETMQ_WORK_AGENT_RESPONSE_GROUP_ID": "callers",
        }

        def call(*command: str) -> str:
            program = [sys.executable, "-m", "rocketmq_a2a.cli.cli_main", *command]
            given = {**os.environ, **env}
            done = subprocess.run(program, env=given, capture_output=True, text=True, timeout=ANSWER_S)
            assert done.returncode == 0, done.stderr
            return done.stdout

        agent = [sys.executable, "-m", "rocketmq_a2a.agentd", "--executor", "echo", "--biz-topic", "Agent"]
        agent += ["--consumer-group", "agents", "--response-topic", "Replies"]
        with ServerProcess([*agent, "--response-group-id", "agent-replies"], "Agent daemon started", env):
            call("register-agent", "echo", "Agent")
            for number in range(2):  # Each call has a lite topic of its own
                assert f"Echo: hello {number}" in call("send-message", "echo", f"hello {number}")
    finally:
        servers.stop()
