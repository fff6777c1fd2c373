"""What a recovery has found."""

from __future__ import annotations

from dataclasses import dataclass, field

from cometmq.store.log.scan import Damage

_MOST_NAMED = 200  # of the records that are not served; a stranger may have sent any number


@dataclass
class Recovered:
    """What recovery found. Positions are bytes in the log, times epoch ms."""

    clean: bool
    start: int = 0
    end: int = 0
    last_store_ms: int = 0
    last_position: int = -1  # of the last record walked over
    records: int = 0
    rebuilt: bool = False  # queues or index were built anew, and are not durable yet
    not_served: int = 0  # records of the walk that fit no queue; the first of them are among the notes
    notes: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)

    def note_not_served(self, note: str) -> None:
        """A record of the walk fits no queue."""
        self.not_served += 1
        if self.not_served <= _MOST_NAMED:
            self.notes.append(f"{note}, not served")

    @property
    def some_not_named(self) -> bool:
        """Whether the notes name only some of the records that are not served."""
        return self.not_served > _MOST_NAMED
