"""How far a running Spark job is: finished tasks, seen from a thread beside it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark import SparkContext

_POLL_S = 0.2


@contextmanager
def watch_tasks(
    context: SparkContext, description: str, report: Callable[[int], None] | None
) -> Iterator[None]:
    """Run the body's Spark jobs as one group, and cancel it if the body fails.

    `report(finished tasks)` is called from another thread whenever the number changes.
    """
    group = f"cometmq-{uuid.uuid4().hex}"
    context.setJobGroup(group, description, interruptOnCancel=True)
    over = threading.Event()

    def watch(report: Callable[[int], None]) -> None:
        tracker, seen = context.statusTracker(), 0
        while not over.wait(_POLL_S):
            done = 0
            for job in tracker.getJobIdsForGroup(group):
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info else ():
                    state = tracker.getStageInfo(int(stage))
                    done += state.numCompletedTasks if state else 0
            if done != seen:
                seen = done
                report(done)

    watcher = threading.Thread(target=watch, args=(report,), daemon=True)
    if report is not None:
        watcher.start()
    try:
        yield
    except BaseException:
        context.cancelJobGroup(group)
        raise
    finally:
        over.set()
        if report is not None:
            watcher.join()
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
