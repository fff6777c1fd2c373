"""Errors that only administration raises."""

from __future__ import annotations

from difflib import get_close_matches

from cometmq.errors import CometError, Terminal

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


class MessageNotFound(CometError, Terminal):
    """No message has this id; problem: where it was looked for."""

    msg_id: str
    problem: str

    def __str__(self) -> str:
        return f"no message with id {self.msg_id} {self.problem}"
