"""The Celery application of the tests, which workers load as `tests.integrations.celery_app`.

The environment names the broker, the store of results, and a file to which each run of a task adds a line.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery, Task, shared_task

import cometmq.integrations.kombu  # noqa: F401 - registers the URL scheme

VISIBILITY_S = 3.0


def make_app() -> Celery:
    """Return an application with the shared tasks below, and make it the current application."""
    made = Celery("tests", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_RESULTS"))
    made.conf.update(
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": VISIBILITY_S},
        worker_hijack_root_logger=False,
    )
    return made


def note(line: str) -> None:
    """Append a line to the file of the runs in one write."""
    with Path(os.environ["TEST_RUNS"]).open("a") as runs:
        runs.write(f"{line}\n")


@shared_task
def add(a: int, b: int) -> int:
    return a + b


@shared_task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task(acks_late=True, reject_on_worker_lost=True)
def run(name: str) -> float:
    """Record the run, and return its time."""
    note(name)
    return time.time()


@shared_task(acks_late=True, reject_on_worker_lost=True)
def begin(name: str, file: str) -> None:
    """Record the start, wait until a file exists, and record the end."""
    note(f"{name} begins")
    while not Path(file).exists():
        time.sleep(0.02)
    note(f"{name} ends")


@shared_task(bind=True, max_retries=3)
def fail_twice(self: Task) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


app = make_app()
