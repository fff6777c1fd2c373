"""Errors that only administration raises."""

from __future__ import annotations

from difflib import get_close_matches

from cometmq.errors import CometError, Terminal, Transient

SHOWN_MAX = 16  # names in a text


class UnknownNameError(CometError, Terminal):
    """A name nobody knows. kind: "cluster", "broker", "consumer group" or "queue"; known: existing names."""

    kind: str
    name: str
    known: list[str]

    def __str__(self) -> str:
        near = get_close_matches(self.name, self.known, n=1)
        if near:
            return f"no {self.kind} named {self.name}; did you mean {near[0]}?"
        more = f" and {len(self.known) - SHOWN_MAX} more" if len(self.known) > SHOWN_MAX else ""
        return f"no {self.kind} named {self.name}; known: {', '.join(self.known[:SHOWN_MAX]) or 'none'}{more}"


class AllQueuesOnly(CometError, Terminal):
    """A broker of Apache's 4.9 cannot tell the members of a group about one queue alone."""

    broker_addr: str

    def __str__(self) -> str:
        whole = f"{self.broker_addr} moves a group that runs in all queues at once"
        return f"{whole}: stop the group, or name no queue"


class NoLeaderError(CometError, Transient):
    """No member of a raft group says that it leads. broker_name: the group's, "" for the only one."""

    broker_name: str

    def __str__(self) -> str:
        return f"nobody leads the raft group {self.broker_name or 'of this cluster'} just now"


class DeadLettersHidden(CometError, Terminal):
    """A dead-letter topic that may not be read at some brokers: RocketMQ 3.2.4 made it so."""

    topic: str
    brokers: list[str]

    def __str__(self) -> str:
        return (
            f"topic {self.topic} may not be read at {', '.join(self.brokers)}; allow it at each with "
            f"mqadmin updateTopic -b HOST:PORT -t {self.topic} -r 1 -w 1 -p 6"
        )


class IndexSilent(CometError, Terminal):
    """A broker's index does not tell whether a dead letter was sent again already; problem: what it says."""

    problem: str

    def __str__(self) -> str:
        return f"nobody can tell what was sent again already: {self.problem}; `again` sends it anyhow"


class ResendStopped(CometError, Transient):
    """Dead letters are sent no further; problem: why. What was sent is known to the next run."""

    problem: str

    def __str__(self) -> str:
        return f"no more dead letters are sent: {self.problem}"
