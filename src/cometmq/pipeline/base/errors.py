"""What can go wrong in the pipeline beyond what a broker or the network answers."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import CometError, Transient
from cometmq.message import MessageQueue


class PipelineError(CometError):
    """Root of the pipeline's own errors."""


class DataLossError(PipelineError):
    """Records that were to be read are gone from the broker: retention deleted them, or the topic was made
    anew. `failOnDataLoss=false` reads on without them; `setting` is how the caller spells that."""

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
            f"Set {self.setting} to go on with what is left"
        )


class UnreadableError(PipelineError):
    """Messages lie in queues that their brokers do not let be read (live/unreadable.py). problem: names the
    queues and counts the messages."""

    problem: str

    def __str__(self) -> str:
        return f"{self.problem}. Set failOnDataLoss=false to read without them"


class BadRecordError(PipelineError):
    """A record of the range cannot be decoded, and the reader was told to fail on those."""

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
    """A record in a store directory, or a stretch of its log, cannot be read, and the reader was told to
    fail on those. position: in the log."""

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
    """Log positions `start` to `stop` of a store directory cannot be read, because their file is gone."""

    path: str
    start: int
    stop: int
    problem: str

    def __str__(self) -> str:
        return (
            f"log positions {self.start} to {self.stop} of {self.path}: {self.problem}. "
            "Set failOnDataLoss=false to go on with what is left"
        )


class ReplicaBehindError(PipelineError, Transient):
    """A broker's master is away and the replica that stands in for it does not hold the records. It may not
    have got them yet, so nothing is taken for lost."""

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
    """A row that cannot become a message."""

    row: int
    field: str
    problem: str

    def __str__(self) -> str:
        return f"row {self.row} of this partition: {self.field}: {self.problem}"


class JobStopped(PipelineError):
    """A Spark job was cancelled because its caller asked for it."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} was stopped"


class JobFailed(PipelineError):
    """Spark gave up a job: a task failed as often as it may, or the session is gone."""

    name: str
    problem: str

    def __str__(self) -> str:
        return f"{self.name} failed: {self.problem}"


class ArchiveError(PipelineError):
    """The archive directory is not what this job expects, or a batch must not become part of it. setting:
    which limit was met, if any."""

    path: str
    problem: str
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" + (f". Raise {self.setting} to go on" if self.setting else "")


class PipelineFileError(PipelineError):
    """A file that describes a pipeline cannot be used. problems: (line, what is wrong there)."""

    path: str
    problems: Sequence[tuple[int, str]]

    def __str__(self) -> str:
        return "\n".join(f"{self.path}:{line}: {problem}" for line, problem in self.problems)


class ReplayError(PipelineError):
    """A replay cannot begin or go on: of `what`, a state directory or a source queue, something is wrong."""

    what: str
    problem: str

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


def _named(queue: MessageQueue) -> str:
    return f"{queue.topic} {queue.broker_name} {queue.queue_id}"
