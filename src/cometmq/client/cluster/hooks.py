"""What users may hang into sends and into consumption: checks, and functions called before and after.

What a check of `check_forbidden` raises ends the send. What any other hook raises is logged, and nothing else
happens, as with Java's hooks. Hooks run on the loop: they must not block.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from cometmq import logs
from cometmq.client.cluster.workers import call_hook
from cometmq.errors import ConfigError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, TransactionState
from cometmq.remoting import LogBudget

__all__ = [
    "ConsumeHook",
    "Consuming",
    "EndTransactionHook",
    "EndingTransaction",
    "FilterHook",
    "SendHook",
    "Sending",
    "called_between",
    "check_hooks",
    "kept",
    "tell",
]

log = logs.logger("cometmq.client")

C = TypeVar("C")
S = TypeVar("S", bound=Enum)


@dataclass(slots=True)
class Sending:
    """One try of a send. messages: several of a batch, none of what the client sends by itself. `result` or
    `error` is there afterwards, neither after a oneway send."""

    group: str
    messages: Sequence[Message]
    queue: MessageQueue
    broker_addr: str
    oneway: bool = False
    result: SendResult | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class EndingTransaction:
    """A broker is about to be told how a transaction ended. from_check: it had asked."""

    group: str
    message: MessageExt
    state: TransactionState
    broker_addr: str
    from_check: bool


EndTransactionHook = Callable[[EndingTransaction], None]
"""Is told of each end of a transaction."""


class SendHook(Protocol):
    """Is told of each try of a send."""

    def before_send(self, sending: Sending, /) -> None:
        """The try begins."""

    def after_send(self, sending: Sending, /) -> None:
        """The try has ended."""


@dataclass(slots=True)
class Consuming:
    """One call of a listener. Afterwards: `status`, what the listener returned (None: it raised), `error`,
    what it raised, and `took_s`."""

    group: str
    queue: MessageQueue
    messages: Sequence[MessageExt]
    status: Enum | None = None
    error: BaseException | None = None
    took_s: float = 0.0


class ConsumeHook(Protocol):
    """Is told of each call of a listener."""

    def before_consume(self, consuming: Consuming, /) -> None:
        """The call begins."""

    def after_consume(self, consuming: Consuming, /) -> None:
        """The call has ended."""


FilterHook = Callable[[MessageExt], bool]
"""Whether a listener is to get a pulled message. One that it does not get counts as handled."""

_budget = LogBudget()


def check_hooks(key: str, hooks: Sequence[Any], *methods: str) -> None:
    """Raise ConfigError for a hook that lacks one of these methods (none: that cannot be called itself), or
    whose call would give a coroutine, which nobody awaits."""
    for hook in hooks:
        for method in [getattr(hook, name, None) for name in methods] or [hook]:
            calls = (method, type(method).__call__) if callable(method) else ()
            if not calls or any(map(inspect.iscoroutinefunction, calls)):
                expected = " ".join(["plain functions", " and ".join(methods)]).strip()
                raise ConfigError(key, repr(hook), f"{expected}, not async ones")


def tell(hooks: Sequence[Any], method: str, subject: object) -> None:
    """Call this method of each hook."""
    for hook in hooks:
        try:
            call_hook(getattr(hook, method), subject)
        except Exception as error:
            _failed(hook, error)


def kept(hooks: Sequence[FilterHook], messages: list[MessageExt]) -> list[MessageExt]:
    """The messages that every hook lets pass; those of which a hook cannot say do."""
    if not hooks:
        return messages
    return [message for message in messages if all(_passes(hook, message) for hook in hooks)]


def _passes(hook: FilterHook, message: MessageExt) -> bool:
    try:
        return bool(call_hook(hook, message))
    except Exception as error:
        _failed(hook, error)
        return True


def _failed(hook: object, error: Exception) -> None:
    if _budget.allows():
        log.error("the hook %r failed", hook, exc_info=error)


def called_between(
    listener: Callable[[list[MessageExt], C], Awaitable[S]], hooks: Sequence[ConsumeHook], group: str
) -> Callable[[list[MessageExt], C], Awaitable[S]]:
    """The listener, with the hooks before and after each call."""
    if not hooks:
        return listener

    async def call(messages: list[MessageExt], context: C) -> S:
        queue: MessageQueue = context.queue  # type: ignore[attr-defined] # as every context has
        consuming = Consuming(group, queue, tuple(messages))
        tell(hooks, "before_consume", consuming)
        begun = time.monotonic()
        try:
            status = await listener(messages, context)
            consuming.status = status
            return status
        except BaseException as error:
            consuming.error = error
            raise
        finally:
            consuming.took_s = time.monotonic() - begun
            tell(hooks, "after_consume", consuming)

    return call
