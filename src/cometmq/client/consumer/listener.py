"""The user's side of a push consumer: what a listener looks like and how one is called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from cometmq.client.cluster.workers import call_in_thread, call_on_loop, is_async
from cometmq.errors import ConfigError
from cometmq.message import MessageExt, MessageQueue

__all__ = [
    "BoundListener",
    "ConsumeContext",
    "ConsumeStatus",
    "Listener",
    "OrderlyContext",
    "OrderlyListener",
    "OrderlyStatus",
    "bind_listener",
    "cancelled_after",
    "check_listener",
    "name_of",
]


class ConsumeStatus(Enum):
    """What a listener says about its messages."""

    SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


@dataclass(slots=True)
class ConsumeContext:
    """What a listener may look at and set beside its result."""

    queue: MessageQueue
    ack_index: int | None = None
    """With SUCCESS: index of the last handled message, None for all; the others are consumed again."""
    delay_level: int = 0
    """Wait before the next try: 0 the broker's choice, 1-18 a level, -1 dead letter at once."""


class OrderlyStatus(Enum):
    """What an orderly listener says about its messages."""

    SUCCESS = "SUCCESS"
    """Handled. Without auto_commit they wait for a COMMIT."""
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"
    """These again in a moment, and nothing else of the queue before them."""
    COMMIT = "COMMIT"
    """Handled, and with them all that this queue gave since the last COMMIT."""
    ROLLBACK = "ROLLBACK"
    """All that this queue gave since the last COMMIT again in a moment. Without auto_commit only."""


@dataclass(slots=True)
class OrderlyContext:
    """What an orderly listener may look at and set beside its result."""

    queue: MessageQueue
    auto_commit: bool = True
    """False: this call's SUCCESS moves no offset, a later COMMIT does. Set it in each call."""
    suspend_current_queue_s: float | None = None
    """After SUSPEND_CURRENT_QUEUE_A_MOMENT and ROLLBACK: seconds to the next call, 0.01 to 30; None:
    PushOptions.suspend_current_queue_s."""


Listener = (
    Callable[[list[MessageExt]], "Awaitable[ConsumeStatus | None] | ConsumeStatus | None"]
    | Callable[[list[MessageExt], ConsumeContext], "Awaitable[ConsumeStatus | None] | ConsumeStatus | None"]
)
"""An async function (runs on the loop) or a plain one (runs in a thread).

Returning None or SUCCESS means handled; RECONSUME_LATER or an exception means: again later. (Java takes null
for "later"; in Python None is what a function returns that has nothing to say.)
"""

OrderlyListener = (
    Callable[[list[MessageExt]], "Awaitable[OrderlyStatus | None] | OrderlyStatus | None"]
    | Callable[[list[MessageExt], OrderlyContext], "Awaitable[OrderlyStatus | None] | OrderlyStatus | None"]
)
"""A listener for PushOptions(orderly=True). Returning None, SUCCESS or COMMIT means handled;
SUSPEND_CURRENT_QUEUE_A_MOMENT or an exception means: the same messages again in a moment."""

C = TypeVar("C")
S = TypeVar("S", bound=Enum)
BoundListener = Callable[[list[MessageExt], C], Awaitable[S]]


def check_listener(listener: object) -> None:
    """Raise ConfigError for what cannot be a listener."""
    if not callable(listener):
        hint = (
            "; a coroutine is the result of a call, give the function"
            if inspect.iscoroutine(listener)
            else ""
        )
        raise ConfigError("listener", str(listener), f"a function of (messages) or (messages, context){hint}")
    _takes_context(cast("Listener", listener))


def name_of(listener: Listener | OrderlyListener) -> str:
    """As a sentence calls it."""
    return str(getattr(listener, "__qualname__", type(listener).__qualname__))


def bind_listener(
    listener: Listener | OrderlyListener, executor: ThreadPoolExecutor | None, statuses: type[S]
) -> BoundListener[Any, S]:
    """One form for all kinds of listener. executor: for plain functions (see is_async); statuses: what it may
    return."""
    takes_context = _takes_context(listener)
    call = cast("Callable[..., Any]", listener)
    if is_async(listener):

        async def on_loop(messages: list[MessageExt], context: object) -> S:
            arguments = (messages, context) if takes_context else (messages,)
            return _status(await call_on_loop(call, *arguments), statuses)

        return on_loop

    async def in_a_thread(messages: list[MessageExt], context: object) -> S:
        arguments = (messages, context) if takes_context else (messages,)
        return _status(await call_in_thread(executor, call, *arguments), statuses)

    return in_a_thread


def cancelled_after(timeout_s: float, listener: BoundListener[C, S]) -> BoundListener[C, S]:
    """Return an async listener whose calls are cancelled, and fail, after `timeout_s` seconds."""

    async def call(messages: list[MessageExt], context: C) -> S:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await listener(messages, context)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the call took longer than {timeout_s:g} s and was cancelled") from error

    return call


def _takes_context(listener: Listener | OrderlyListener) -> bool:
    try:
        parameters = inspect.signature(listener).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature, e.g. list.extend
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if len(required) > 2 or (not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        taken = str(inspect.signature(listener))
        raise ConfigError("listener", taken, "a function of (messages) or (messages, context)")
    return len(required) == 2 or any(p.name == "context" for p in positional[1:2])


def _status(result: object, statuses: type[S]) -> S:
    if result is None:
        return statuses["SUCCESS"]
    if isinstance(result, statuses):
        return result
    raise TypeError(f"this listener returns None or one of {statuses.__name__}, not {result!r}")
