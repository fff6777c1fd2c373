"""The Dramatiq application of the tests, which workers load as `tests.integrations.dramatiq_app`.

The environment names the name server, and a file to which each run of a task adds a line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq

from cometmq.integrations.dramatiq import CometMQBroker

broker = CometMQBroker(os.environ.get("TEST_NAMESRV"), lease_s=2.0)
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=os.environ.get("TEST_QUEUE", "runs"))
def run(name: str) -> None:
    """Record the run shortly after its start."""
    time.sleep(0.01)
    with Path(os.environ["TEST_RUNS"]).open("a") as runs:
        runs.write(f"{name}\n")
