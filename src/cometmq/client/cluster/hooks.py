"""User-defined hooks for sends and consumption.

An exception of a `check_forbidden` function ends the send. An exception of any other hook is logged and has
no other effect, as with Java's hooks. Hooks run on the event loop and must not block.
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

log = logs.logger("cometmq.client")

C = TypeVar("C")
S = TypeVar("S", bound=Enum)


@dataclass(slots=True)
class Sending:
    """One try of a send, the argument of send hooks.

    Attributes:
        group: The producer group.
        messages: The message, or the messages of a batch. Empty for messages that the client itself creates.
        queue: The queue.
        broker_addr: The address of the broker.
        oneway: Whether the send has no answer.
        result: The result after a successful try. None after a oneway send.
        error: The exception after a failed try.
    """

    group: str
    messages: Sequence[Message]
    queue: MessageQueue
    broker_addr: str
    oneway: bool = False
    result: SendResult | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class EndingTransaction:
    """The end of a transaction, the argument of end-transaction hooks.

    Attributes:
        group: The producer group.
        message: The half message.
        state: The state that is sent to the broker.
        broker_addr: The address of the broker.
        from_check: Whether this answers a transaction check of the broker.
    """

    group: str
    message: MessageExt
    state: TransactionState
    broker_addr: str
    from_check: bool


EndTransactionHook = Callable[[EndingTransaction], None]
"""A function called before the state of a transaction is sent to a broker."""


class SendHook(Protocol):
    """An object called before and after each try of a send."""

    def before_send(self, sending: Sending, /) -> None:
        """Called before each attempt to send."""

    def after_send(self, sending: Sending, /) -> None:
        """Called after each attempt to send, with the result or error of the attempt."""


@dataclass(slots=True)
class Consuming:
    """One call of a listener, the argument of consume hooks.

    Attributes:
        group: The consumer group.
        queue: The queue.
        messages: The messages of the call.
        status: The result of the listener after the call. None if the listener raised an exception.
        error: The exception of the listener after the call.
        took_s: The duration of the call in seconds.
    """

    group: str
    queue: MessageQueue
    messages: Sequence[MessageExt]
    status: Enum | None = None
    error: BaseException | None = None
    took_s: float = 0.0


class ConsumeHook(Protocol):
    """An object called before and after each call of a listener."""

    def before_consume(self, consuming: Consuming, /) -> None:
        """Called before each listener call."""

    def after_consume(self, consuming: Consuming, /) -> None:
        """Called after each listener call, with the listener's status or error."""


FilterHook = Callable[[MessageExt], bool]
"""A function that accepts or rejects a pulled message. A rejected message counts as consumed."""

_log_limit = logs.LogLimiter()


def check_hooks(key: str, hooks: Sequence[Any], *methods: str) -> None:
    """Raise ConfigError for a hook that lacks a method (without `methods`: is no callable), or is async."""
    for hook in hooks:
        for method in [getattr(hook, name, None) for name in methods] or [hook]:
            calls = (method, type(method).__call__) if callable(method) else ()
            if not calls or any(map(inspect.iscoroutinefunction, calls)):
                expected = " ".join(["plain functions", " and ".join(methods)]).strip()
                raise ConfigError(key, repr(hook), f"{expected}, not async ones")


def notify_hooks(hooks: Sequence[Any], method: str, subject: object) -> None:
    """Call the method named `method` of each hook with `subject`. Exceptions are logged."""
    for hook in hooks:
        try:
            call_hook(getattr(hook, method), subject)
        except Exception as error:
            _failed(hook, error)


def kept(hooks: Sequence[FilterHook], messages: list[MessageExt]) -> list[MessageExt]:
    """Return the messages that all hooks accept. A hook that raises an exception counts as accepting."""
    if not hooks:
        return messages
    return [message for message in messages if all(_accepts(hook, message) for hook in hooks)]


def _accepts(hook: FilterHook, message: MessageExt) -> bool:
    try:
        return bool(call_hook(hook, message))
    except Exception as error:
        _failed(hook, error)
        return True


def _failed(hook: object, error: Exception) -> None:
    if _log_limit.allows():
        log.error("hook %r failed", hook, exc_info=error)


def with_consume_hooks(
    listener: Callable[[list[MessageExt], C], Awaitable[S]], hooks: Sequence[ConsumeHook], group: str
) -> Callable[[list[MessageExt], C], Awaitable[S]]:
    """Return a listener that calls `listener`, and the consume hooks before and after each call."""
    if not hooks:
        return listener

    async def call(messages: list[MessageExt], context: C) -> S:
        queue: MessageQueue = context.queue  # type: ignore[attr-defined] # as every context has
        consuming = Consuming(group, queue, tuple(messages))
        notify_hooks(hooks, "before_consume", consuming)
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
            notify_hooks(hooks, "after_consume", consuming)

    return call
