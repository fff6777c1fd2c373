"""The client without the packages that only make it faster, or that only servers need."""

from __future__ import annotations

import subprocess
import sys

from cometmq.testing import LocalBroker

ABSENT = ("uvloop", "numpy", "isal", "lark", "click", "rich", "zstandard", "lz4", "redis", "opentelemetry")
PROGRAM = """
import asyncio, sys
for name in {absent}:
    sys.modules[name] = None  # importing it raises ImportError
from cometmq import *

async def main(namesrv):
    async with Producer("p", namesrv=namesrv) as producer:
        await producer.send(Message("Bare", b"plain"))
        await producer.send(Message("Bare", b"x" * 5000))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with MessageStream("g-bare", "Bare", namesrv=namesrv, options=options) as stream:
        for _ in range(2):
            message = await anext(stream)
            await stream.ack(message)
            print(len(message.body))
    print(type(asyncio.get_running_loop()).__module__)

asyncio.run(main({namesrv!r}))
with SyncProducer("p", namesrv={namesrv!r}) as producer:
    print(producer.send(Message("Bare", b"blocking")).status.name)
"""


def test_the_client_works_without_what_it_can_do_without(local: LocalBroker) -> None:
    program = PROGRAM.format(absent=ABSENT, namesrv=local.namesrv)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert sorted(lines[:2]) == ["5", "5000"]
    assert lines[2:] == ["asyncio.unix_events", "SEND_OK"]


def test_a_name_that_needs_an_extra_says_which(local: LocalBroker) -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from cometmq import *
try:
    Telemetry()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install 'cometmq[otel]'" in done.stdout, done.stderr
