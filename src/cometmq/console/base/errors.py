"""Errors of the console. Their text is complete and may be shown to users."""

from __future__ import annotations

from cometmq.errors import CometError


class ConsoleError(CometError):
    """A request of the console failed, or the console cannot start. `problem` is the complete text."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class NotAllowed(ConsoleError):
    """The user's role does not permit the action, or the session has ended."""


class PartlyDone(ConsoleError):
    """An action was stopped or failed at some of its targets; the text lists the outcome."""
