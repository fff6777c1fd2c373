"""Errors of the pipeline, other than error responses of brokers and network errors."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import CometError, Transient
from cometmq.message import MessageQueue


class PipelineError(CometError):
    """Base class of the pipeline's own errors."""


class DataLossError(PipelineError):
    """Records to read no longer exist on the broker: retention deleted them, or the topic was replaced.

    With `failOnDataLoss=false` a read continues without the records. `setting` names that option as the
    caller spells it (in Spark or on the command line).
    """

    setting = "failOnDataLoss=false"

    queue: MessageQueue
    start: int
    end: int
    minimum: int
    maximum: int
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.problem}: wanted offsets {self.start} to {self.end} of queue {_named(self.queue)}, "
            f"the broker holds {self.minimum} to {self.maximum}. "
            f"Set {self.setting} to continue with the remaining messages"
        )


class UnreadableError(PipelineError):
    """Messages, which `problem` counts, are in queues that brokers do not permit to read (unreadable.py)."""

    problem: str

    def __str__(self) -> str:
        return f"{self.problem}. A read with failOnDataLoss=false leaves them out"


class BadRecordError(PipelineError):
    """A record in the range cannot be decoded, and the option onBadRecord does not let the read skip it."""

    queue: MessageQueue
    queue_offset: int | None
    stage: str
    problem: str

    def __str__(self) -> str:
        return (
            f"bad record at {_named(self.queue)} offset {self.queue_offset} ({self.stage}): {self.problem}. "
            "Set onBadRecord=skip to leave such records out"
        )


class BadStoreRecordError(PipelineError):
    """A store's log is unreadable at `position`, and the option onBadRecord does not let the read skip it."""

    path: str
    position: int
    stage: str
    problem: str

    def __str__(self) -> str:
        return (
            f"bad record at log position {self.position} ({self.stage}) in {self.path}: {self.problem}. "
            "Set onBadRecord=skip to leave such records out"
        )


class LogLossError(PipelineError):
    """Log positions `start` to `stop` of a store directory are unreadable, because their file is missing."""

    path: str
    start: int
    stop: int
    problem: str

    def __str__(self) -> str:
        return (
            f"log positions {self.start} to {self.stop} of {self.path}: {self.problem}. "
            "Set failOnDataLoss=false to continue with the remaining messages"
        )


class ReplicaBehindError(PipelineError, Transient):
    """A replica lacks records, perhaps only for now, so they are not lost, and its master is unreachable."""

    queue: MessageQueue
    offset: int
    address: str
    minimum: int
    maximum: int

    def __str__(self) -> str:
        return (
            f"the replica {self.address} does not hold offset {self.offset} of queue {_named(self.queue)} "
            f"(it holds {self.minimum} to {self.maximum}), and no name server shows a master"
        )


class SinkRowError(PipelineError):
    """A row that cannot be converted to a message."""

    row: int
    field: str
    problem: str

    def __str__(self) -> str:
        return f"row {self.row} of this partition: {self.field}: {self.problem}"


class JobStopped(PipelineError):
    """A Spark job was cancelled at the request of its caller."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} was stopped"


class JobFailed(PipelineError):
    """Spark abandoned a job: a task exhausted its attempts, or the session has ended."""

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name} failed: {self.problem}"


class ArchiveError(PipelineError):
    """The archive is unsuitable, or a batch cannot be committed. `setting`: the option that limits it."""

    path: str
    problem: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" + (
            f". Raise {self.setting} to continue" if self.setting else ""
        )


class PipelineFileError(PipelineError):
    """A pipeline file is invalid. `problems` holds pairs of a line number and a description."""

    path: str
    problems: Sequence[tuple[int, str]]

    def __str__(self) -> str:
        return "\n".join(f"{self.path}:{line}: {problem}" for line, problem in self.problems)


class ReplayError(PipelineError):
    """A replay cannot begin or continue. `what` names the cause: a state directory or a source queue."""

    what: str
    problem: str

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


def _named(queue: MessageQueue) -> str:
    return f"{queue.topic} {queue.broker_name} {queue.queue_id}"
