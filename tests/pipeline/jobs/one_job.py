"""A job as a separate program that a test kills.

Arguments: its name, and its keyword arguments as JSON. Prints a line for each step of progress.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.store.kit import small

from cometmq.pipeline.jobs.dlq import redrive
from cometmq.pipeline.jobs.rebuild import rebuild
from cometmq.pipeline.jobs.replay.replay import replay
from cometmq.pipeline.session import spark_session


def main() -> None:
    name, given = sys.argv[1], json.loads(sys.argv[2])
    jobs: dict[str, Any] = {"replay": replay, "redrive": redrive, "rebuild": rebuild}
    if name == "rebuild":
        given["config"] = small(Path(given["root"]))
    spark = spark_session(name, master="local[2]", memory="512m", quick_start=True)

    def show(done: int, total: int | None) -> None:
        print("progress", done, total, flush=True)

    print("ready", flush=True)
    jobs[name](spark, **given, on_progress=show)
    spark.stop()


if __name__ == "__main__":
    main()
