"""A replay as a program of its own, to be killed. Arguments: namesrv, source, state, topic.

Prints a line for each step of progress.
"""

from __future__ import annotations

import sys

from cometmq.pipeline.jobs.replay import replay
from cometmq.pipeline.session import spark_session


def main() -> None:
    namesrv, source, state, topic = sys.argv[1:]
    spark = spark_session("replay", master="local[2]", memory="512m", quick_start=True)

    def show(done: int, total: int | None) -> None:
        print("progress", done, total, flush=True)

    replay(spark, source, namesrv, topics=[topic], state=state, rate=3000, on_progress=show)
    spark.stop()


if __name__ == "__main__":
    main()
