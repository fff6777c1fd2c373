"""Errors of the console. The text of each error is complete and may be shown to users."""

from __future__ import annotations

from cometmq.errors import CometError


class ConsoleError(CometError):
    """A request of the console failed, or the console cannot start. `problem` is the complete error text."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class NotAllowed(ConsoleError):
    """The user's role does not permit the action, or the session has ended."""


class TargetsChanged(ConsoleError):
    """The servers or steps of an operation have changed since the user was asked to confirm the operation."""


class PartlyDone(ConsoleError):
    """An action was stopped, or failed at some of its targets. The text lists the outcome for each target."""
