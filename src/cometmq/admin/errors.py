"""Errors that only administration operations raise."""

from __future__ import annotations

from difflib import get_close_matches

from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.errors import BrokerError, CometError, NoRouteError, Terminal, Transient
from cometmq.protocol.codes import ResponseCode

MAX_LISTED_NAMES = 16  # Maximum number of names that an error text lists


class UnknownNameError(CometError, Terminal):
    """A name does not exist.

    Attributes:
        kind: Kind of the name, for example "cluster", "broker", "consumer group" or "queue".
        name: The name.
        known: Existing names of this kind, at most MAX_LISTED_NAMES. The name that is most similar to `name`
            is included.
        more: Number of further existing names.
    """

    kind: str
    name: str
    known: list[str]
    more: int = 0

    def __post_init__(self) -> None:
        if len(self.known) > MAX_LISTED_NAMES:
            near = get_close_matches(self.name, self.known, n=1)
            listed = [*near, *(name for name in self.known if name not in near)][:MAX_LISTED_NAMES]
            self.more += len(self.known) - len(listed)
            self.known = listed
        super().__post_init__()

    def __str__(self) -> str:
        near = get_close_matches(self.name, self.known, n=1)
        if near:
            return f"no {self.kind} named {self.name}; did you mean {near[0]}?"
        listed = ", ".join(self.known) or "none"
        more = f" and {self.more} more" if self.more else ""
        return f"no {self.kind} named {self.name}; known: {listed}{more}"


class Incomplete(CometError, Transient):
    """Brokers did not answer, so a result is incomplete. `problems` has their errors, with the addresses."""

    problems: list[str]

    def __str__(self) -> str:
        return f"the result is incomplete: {'; '.join(self.problems)}"


class AllQueuesOnly(CometError, Terminal):
    """A broker of Apache 4.9 cannot reset a single queue of a group that is online."""

    broker_addr: str

    def __str__(self) -> str:
        whole = f"{self.broker_addr} resets all queues of an online group together"
        return f"{whole}: stop the group, or name no queue"


class NoLeaderError(CometError, Transient):
    """No member of a raft group is the leader. `broker_name` is the group's name, or "" if none was given."""

    broker_name: str

    def __str__(self) -> str:
        return f"the raft group {self.broker_name or 'of this cluster'} has no leader"


class DeadLettersHidden(CometError, Terminal):
    """A dead-letter topic does not permit reading at some brokers.

    RocketMQ 3.2.4 created dead-letter topics without the permission to read them.
    """

    topic: str
    brokers: list[str]

    def __str__(self) -> str:
        return (
            f"topic {self.topic} is not readable at {', '.join(self.brokers)}; allow reading at each with "
            f"mqadmin updateTopic -b HOST:PORT -t {self.topic} -r 1 -w 1 -p 6"
        )


class IndexSilent(CometError, Terminal):
    """A broker's index cannot answer whether a dead letter was already resent. `problem` is the reason."""

    problem: str

    def __str__(self) -> str:
        return f"unknown which dead letters were resent before: {self.problem}; `again` resends them anyway"


class ResendStopped(CometError, Transient):
    """A resend run stopped; `problem` is the reason. The next run skips the dead letters that were resent."""

    problem: str

    def __str__(self) -> str:
        return f"resending stopped: {self.problem}"


def was_deleted(error: CometError) -> bool:
    """Return whether an error means that a topic was deleted after it was listed."""
    if isinstance(error, BrokerError):
        return error.code == ResponseCode.TOPIC_NOT_EXIST
    return isinstance(error, NoRouteError) and not isinstance(error, NameServersUnreachable)
