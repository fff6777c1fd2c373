"""The user's side of a push consumer: what a listener looks like and how one is called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, TypeVar, cast

from cometmq import logs
from cometmq.client.cluster.workers import call_in_thread, call_on_loop, is_async
from cometmq.errors import ConfigError
from cometmq.message import MessageExt, MessageQueue
from cometmq.text import printable

__all__ = [
    "HANDLED",
    "BoundListener",
    "ConsumeContext",
    "ConsumeStatus",
    "Listener",
    "NoneMeans",
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

Returning SUCCESS means handled; RECONSUME_LATER or an exception means: again later. None means handled unless
PushOptions.none_means differs: Java takes null for "later", but in Python each function without a `return`
returns None.
"""

OrderlyListener = (
    Callable[[list[MessageExt]], "Awaitable[OrderlyStatus | None] | OrderlyStatus | None"]
    | Callable[[list[MessageExt], OrderlyContext], "Awaitable[OrderlyStatus | None] | OrderlyStatus | None"]
)
"""A listener for PushOptions(orderly=True). Returning SUCCESS or COMMIT, or None as above, means handled;
SUSPEND_CURRENT_QUEUE_A_MOMENT or an exception means: the same messages again in a moment."""

log = logs.logger("cometmq.client.consumer")

C = TypeVar("C")
S = TypeVar("S", bound=Enum)
BoundListener = Callable[[list[MessageExt], C], Awaitable[S]]
NoneMeans = Literal["success", "retry", "error"]
HANDLED: Any = object()
"""What a listener of our own returns for SUCCESS of either kind, whatever None means."""


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
    listener: Listener | OrderlyListener,
    executor: ThreadPoolExecutor | None,
    statuses: type[S],
    none_means: NoneMeans = "success",
) -> BoundListener[Any, S]:
    """Return a listener of any kind in the one form in which it is called.

    Args:
        listener: The user's function.
        executor: Runs plain functions.
        statuses: The enum of what it may return.
        none_means: PushOptions.none_means.
    """
    as_status = _Statuses(name_of(listener), statuses, none_means)
    takes_context = _takes_context(listener)
    call = cast("Callable[..., Any]", listener)
    if is_async(listener):

        async def on_loop(messages: list[MessageExt], context: object) -> S:
            arguments = (messages, context) if takes_context else (messages,)
            return as_status(await call_on_loop(call, *arguments))

        return on_loop

    async def in_a_thread(messages: list[MessageExt], context: object) -> S:
        arguments = (messages, context) if takes_context else (messages,)
        return as_status(await call_in_thread(executor, call, *arguments))

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


@dataclass(slots=True)
class _Statuses(Generic[S]):
    """Converts what a listener returns to a status."""

    _listener: str
    _statuses: type[S]
    _none_means: NoneMeans
    _returned: set[bool] = field(default_factory=set)
    """Whether it has returned None, and whether it has returned a status."""

    def __call__(self, result: object) -> S:
        if result is HANDLED:
            return self._statuses["SUCCESS"]
        if self._none_means == "success" and len(self._returned) < 2:
            self._note(is_none=result is None)
        if result is None and self._none_means != "error":
            return self._statuses["SUCCESS"] if self._none_means == "success" else self._later
        if isinstance(result, self._statuses):
            return result
        allowed = f"one of {self._statuses.__name__}"
        allowed = allowed if self._none_means == "error" else f"None or {allowed}"
        raise TypeError(f"this listener returns {allowed}, not {result!r}")

    @property
    def _later(self) -> S:
        concurrently = "RECONSUME_LATER" in self._statuses.__members__
        return self._statuses["RECONSUME_LATER" if concurrently else "SUSPEND_CURRENT_QUEUE_A_MOMENT"]

    def _note(self, *, is_none: bool) -> None:
        self._returned.add(is_none)
        if len(self._returned) == 2:
            log.warning(
                "the listener %s returns None for some calls and a status for others: None counts as SUCCESS "
                'here, and not in Java; PushOptions(none_means="retry") has such messages consumed again',
                printable(self._listener),
            )
