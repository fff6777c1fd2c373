"""The user's side of a push consumer: what a listener looks like and how one is called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from cometmq.errors import ConfigError
from cometmq.message import MessageExt, MessageQueue

__all__ = [
    "BoundListener",
    "ConsumeContext",
    "ConsumeStatus",
    "Listener",
    "bind_listener",
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


Listener = (
    Callable[[list[MessageExt]], "Awaitable[ConsumeStatus | None] | ConsumeStatus | None"]
    | Callable[[list[MessageExt], ConsumeContext], "Awaitable[ConsumeStatus | None] | ConsumeStatus | None"]
)
"""An async function (runs on the loop) or a plain one (runs in a thread).

Returning None or SUCCESS means handled; RECONSUME_LATER or an exception means: again later. (Java takes null
for "later"; in Python None is what a function returns that has nothing to say.)
"""

BoundListener = Callable[[list[MessageExt], ConsumeContext], Awaitable[ConsumeStatus]]


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


def name_of(listener: Listener) -> str:
    """As a sentence calls it."""
    return str(getattr(listener, "__qualname__", type(listener).__qualname__))


def bind_listener(listener: Listener, executor: ThreadPoolExecutor | None) -> BoundListener:
    """One form for all four kinds of listener. executor: for plain functions (see is_async)."""
    takes_context = _takes_context(listener)
    call = cast("Callable[..., Any]", listener)
    if is_async(listener):

        async def on_loop(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
            return _status(await (call(messages, context) if takes_context else call(messages)))

        return on_loop

    async def in_thread(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        arguments = (messages, context) if takes_context else (messages,)
        return _status(await asyncio.get_running_loop().run_in_executor(executor, call, *arguments))

    return in_thread


def is_async(listener: Listener) -> bool:
    # functools.partial and objects with an async __call__ count as well.
    call = type(listener).__call__ if callable(listener) else None
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)


def _takes_context(listener: Listener) -> bool:
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


def _status(result: object) -> ConsumeStatus:
    if result is None:
        return ConsumeStatus.SUCCESS
    if isinstance(result, ConsumeStatus):
        return result
    raise TypeError(f"a listener returns None or a ConsumeStatus, not {result!r}")
