"""What can go wrong in the pipeline beyond what a broker or the network answers."""

from __future__ import annotations

from cometmq.errors import CometError, Transient
from cometmq.message import MessageQueue


class PipelineError(CometError):
    """Root of the pipeline's own errors."""


class DataLossError(PipelineError):
    """Records that were to be read are gone from the broker.

    They may have been deleted by retention, or the topic was made anew. `failOnDataLoss=false` reads on
    without them; `setting` is how the caller spells that.
    """

    setting = "failOnDataLoss=false"

    def __init__(
        self, queue: MessageQueue, start: int, end: int, minimum: int, maximum: int, problem: str
    ) -> None:
        super().__init__(queue, start, end, minimum, maximum, problem)
        self.queue, self.start, self.end = queue, start, end
        self.minimum, self.maximum, self.problem = minimum, maximum, problem

    def __str__(self) -> str:
        queue = f"{self.queue.topic} {self.queue.broker_name} {self.queue.queue_id}"
        return (
            f"{self.problem}: wanted offsets {self.start} to {self.end} of queue {queue}, "
            f"the broker holds {self.minimum} to {self.maximum}. "
            f"Set {self.setting} to go on with what is left"
        )


class BadRecordError(PipelineError):
    """A record of the range cannot be decoded, and the reader was told to fail on those."""

    def __init__(self, queue: MessageQueue, queue_offset: int | None, stage: str, problem: str) -> None:
        super().__init__(queue, queue_offset, stage, problem)
        self.queue, self.queue_offset, self.stage, self.problem = queue, queue_offset, stage, problem

    def __str__(self) -> str:
        at = f"{self.queue.topic} {self.queue.broker_name} {self.queue.queue_id} offset {self.queue_offset}"
        hint = "Set onBadRecord=skip to leave such records out"
        return f"bad record at {at} ({self.stage}): {self.problem}. {hint}"


class ReplicaBehindError(PipelineError, Transient):
    """A broker's master is away and the replica that stands in for it does not hold the records. It may not
    have got them yet, so nothing is taken for lost."""

    def __init__(self, queue: MessageQueue, offset: int, address: str, minimum: int, maximum: int) -> None:
        super().__init__(queue, offset, address, minimum, maximum)
        self.queue, self.offset, self.address = queue, offset, address
        self.minimum, self.maximum = minimum, maximum

    def __str__(self) -> str:
        queue = f"{self.queue.topic} {self.queue.broker_name} {self.queue.queue_id}"
        return (
            f"the replica {self.address} does not hold offset {self.offset} of queue {queue} "
            f"(it holds {self.minimum} to {self.maximum}), and no name server shows a master"
        )


class SinkRowError(PipelineError):
    """A row that cannot become a message."""

    def __init__(self, row: int, field: str, problem: str) -> None:
        super().__init__(row, field, problem)
        self.row, self.field, self.problem = row, field, problem

    def __str__(self) -> str:
        return f"row {self.row} of this partition: {self.field}: {self.problem}"


class ArchiveError(PipelineError):
    """The archive directory is not what this job expects, or a batch must not become part of it.

    setting: what to raise, where a limit was met.
    """

    def __init__(self, path: str, problem: str, setting: str = "") -> None:
        super().__init__(path, problem, setting)
        self.path, self.problem, self.setting = path, problem, setting

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" + (f". Raise {self.setting} to go on" if self.setting else "")
