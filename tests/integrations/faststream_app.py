"""The FastStream application of the tests, which runs as `tests.integrations.faststream_app:app`.

The environment names the name server, a file to which each handled message adds a line, and what the members
of the group share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from faststream import FastStream

from cometmq import PushOptions
from cometmq.client import ConsumeFromWhere
from cometmq.integrations.faststream import CometMQBroker

SHARE: Any = os.environ.get("TEST_SHARE", "messages")
broker = CometMQBroker(os.environ.get("TEST_NAMESRV"), graceful_timeout=1.0)
app = FastStream(broker)


@broker.subscriber(
    "runs",
    group="runners",
    max_workers=4,
    options=PushOptions(share=SHARE, invisible_s=2.0, consume_from_where=ConsumeFromWhere.FIRST_OFFSET),
)
def run(name: str) -> None:
    """Record the message shortly after its start."""
    time.sleep(0.01)
    with Path(os.environ["TEST_RUNS"]).open("a") as runs:
        runs.write(f"{name}\n")
