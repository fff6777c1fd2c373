"""The commands of docs/http.md, run as they are shown, with real curl."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.broker.access.test_files import write
from tests.grpc.gateway.conftest import port_of
from tests.grpc.gateway.test_gateway import ACL
from tests.grpc.service.caller import SETTINGS

PAGE = Path(__file__).parents[3] / "docs" / "http.md"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def commands() -> list[str]:
    """Return the blocks of the page that run curl."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if block.startswith("curl")]


def run(block: str, port: int, handle: str = "") -> list[str]:
    """Run a block with bash, and return the output of each command."""
    script = 'set -eu\ncurl() { command curl -sS --fail-with-body "$@"; echo; }\n'
    script += block.replace("127.0.0.1:8081", f"127.0.0.1:{port}")
    environment = {**os.environ, "HANDLE": handle}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, (block, done.stdout, done.stderr)
    return done.stdout.splitlines()


async def test_the_commands_do_what_the_page_says(cluster):
    handle, outputs = "", []
    for block in commands():
        if "-u " not in block:
            outputs += await asyncio.to_thread(run, block, port_of(cluster), handle)
            found = re.search(r'"handle":"([^"]+)', outputs[-1])
            handle = found[1] if found else handle

    sent, received, acked, with_headers, batch, *_, events = map(json.loads, outputs)
    assert set(sent) == set(with_headers) == {"message_id", "queue", "offset"}
    assert (received["messages"][0]["message_id"], received["messages"][0]["body"]) == (
        sent["message_id"],
        "hello",
    )
    assert acked["results"][0]["code"] == "OK"
    assert len(batch["results"]) == 2
    assert events[0]["data"]["total"] in (7, 8)


async def test_the_commands_with_an_account(start_cluster, tmp_path):
    acl = ACL.replace("secret:of-program", "secret-of-program")
    write(tmp_path / "home" / "conf" / "plain_acl.yml", acl)
    guarded = await start_cluster(**SETTINGS, aclEnable="true", rocketmqHome=str(tmp_path / "home"))
    (block,) = (each for each in commands() if "-u " in each)
    (output,) = await asyncio.to_thread(run, block, port_of(guarded))
    assert "message_id" in json.loads(output)
