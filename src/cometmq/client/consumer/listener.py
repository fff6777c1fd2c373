"""The interface of listeners, and the conversion of a user's listener to the form that consumers call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, cast

from cometmq import logs
from cometmq.client.cluster.workers import call_in_thread, failure_of, is_async
from cometmq.errors import ConfigError
from cometmq.message import MessageExt, MessageQueue
from cometmq.text import printable


class ConsumeStatus(Enum):
    """The result of a listener.

    Attributes:
        SUCCESS: The messages are consumed.
        RECONSUME_LATER: The messages are sent back to the broker and consumed again later.
    """

    SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


@dataclass(slots=True)
class ConsumeContext:
    """The second argument of a listener: the queue of the messages, and settings that the listener may set.

    Attributes:
        queue: The queue of the messages.
        ack_index: With SUCCESS: the index of the last consumed message. The messages after it are consumed
            again. None: all messages are consumed.
        delay_level: The delay before messages are consumed again. 0: the broker chooses it. 1 to 18: a delay
            level. -1: the messages go to the dead-letter queue immediately.
    """

    queue: MessageQueue
    ack_index: int | None = None
    delay_level: int = 0


class OrderlyStatus(Enum):
    """The result of an orderly listener.

    Attributes:
        SUCCESS: The messages are consumed. Without auto_commit their offset is stored after a later COMMIT.
        SUSPEND_CURRENT_QUEUE_A_MOMENT: The same messages are consumed again after a moment, before any other
            message of the queue.
        COMMIT: These messages and all messages of the queue since the last COMMIT are consumed.
        ROLLBACK: All messages of the queue since the last COMMIT are consumed again after a moment. Only
            without auto_commit.
    """

    SUCCESS = "SUCCESS"
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"
    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"


@dataclass(slots=True)
class OrderlyContext:
    """The second argument of an orderly listener: the queue of the messages, and settings for the listener.

    Attributes:
        queue: The queue of the messages.
        auto_commit: False: SUCCESS of this call does not move the offset; a later COMMIT does. The listener
            must set auto_commit in each call.
        suspend_current_queue_s: The delay before the next call after SUSPEND_CURRENT_QUEUE_A_MOMENT and
            ROLLBACK, 0.01 to 30 seconds. None: PushOptions.suspend_current_queue_s.
    """

    queue: MessageQueue
    auto_commit: bool = True
    suspend_current_queue_s: float | None = None


Listener = (
    Callable[[list[MessageExt]], "Awaitable[ConsumeStatus | None] | ConsumeStatus | None"]
    | Callable[[list[MessageExt], ConsumeContext], "Awaitable[ConsumeStatus | None] | ConsumeStatus | None"]
)
"""A listener: an async function, which runs on the event loop, or a plain function, which runs in a thread.

SUCCESS means that the messages are consumed. RECONSUME_LATER or an exception means that they are consumed
again later. None means SUCCESS unless PushOptions.none_means is set: Java treats null as RECONSUME_LATER, but
in Python each function without a `return` returns None.
"""

OrderlyListener = (
    Callable[[list[MessageExt]], "Awaitable[OrderlyStatus | None] | OrderlyStatus | None"]
    | Callable[[list[MessageExt], OrderlyContext], "Awaitable[OrderlyStatus | None] | OrderlyStatus | None"]
)
"""A listener for PushOptions(orderly=True).

SUCCESS, COMMIT and, unless PushOptions.none_means is set, None mean that the messages are consumed. After
SUSPEND_CURRENT_QUEUE_A_MOMENT or an exception the same messages are consumed again after a moment.
"""

log = logs.logger("cometmq.client.consumer")

C = TypeVar("C")
S = TypeVar("S", bound=Enum)
BoundListener = Callable[[list[MessageExt], C], Awaitable[S]]
NoneMeans = Literal["success", "retry", "error"]
HANDLED: Any = object()
"""The result of an internal listener for success in both consume modes, whatever none_means is."""


def check_listener(listener: object) -> None:
    """Raise ConfigError unless the object can be called as a listener."""
    if not callable(listener):
        hint = (
            "; a coroutine is the result of a call, pass the function"
            if inspect.iscoroutine(listener)
            else ""
        )
        raise ConfigError("listener", str(listener), f"a function of (messages) or (messages, context){hint}")
    _takes_context(cast("Listener", listener))


def name_of(listener: Listener | OrderlyListener) -> str:
    """Return the name of a listener for use in log and error messages."""
    return str(getattr(listener, "__qualname__", type(listener).__qualname__))


def bind_listener(
    listener: Listener | OrderlyListener,
    executor: ThreadPoolExecutor | None,
    statuses: type[S],
    none_means: NoneMeans = "success",
) -> BoundListener[Any, S]:
    """Return an async function of (messages, context) that calls a listener of any kind.

    `executor` runs plain functions, `statuses` is the enum of the possible results.
    """
    as_status = _converter(name_of(listener), statuses, none_means)
    takes_context = _takes_context(listener)
    call = cast("Callable[..., Any]", listener)
    if is_async(listener):
        # This repeats the code of `call_on_loop`: awaiting that function would take 0.25 µs per call.
        async def on_loop(messages: list[MessageExt], context: object) -> S:
            task = asyncio.current_task()
            try:
                result = await (call(messages, context) if takes_context else call(messages))
            except BaseException as error:
                if (failure := failure_of(error, task)) is None:
                    raise
                raise failure from error
            return as_status(result)

        return on_loop

    async def in_a_thread(messages: list[MessageExt], context: object) -> S:
        arguments = (messages, context) if takes_context else (messages,)
        return as_status(await call_in_thread(executor, call, *arguments))

    return in_a_thread


def cancelled_after(timeout_s: float, listener: BoundListener[C, S]) -> BoundListener[C, S]:
    """Return an async listener whose calls are cancelled and fail after `timeout_s` seconds."""

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
    except (TypeError, ValueError):  # a built-in function such as list.extend has no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if len(required) > 2 or (not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        taken = str(inspect.signature(listener))
        raise ConfigError("listener", taken, "a function of (messages) or (messages, context)")
    return len(required) == 2 or any(p.name == "context" for p in positional[1:2])


def _converter(listener: str, statuses: type[S], none_means: NoneMeans) -> Callable[[object], S]:
    """Return a function that converts the results of one listener to statuses."""
    success = statuses["SUCCESS"]
    concurrently = "RECONSUME_LATER" in statuses.__members__
    later = statuses["RECONSUME_LATER" if concurrently else "SUSPEND_CURRENT_QUEUE_A_MOMENT"]
    returned: set[bool] = set()  # whether the listener has returned None (True), anything else (False)

    def as_status(result: object) -> S:
        if result is HANDLED:
            return success
        if (result is None) not in returned:
            returned.add(result is None)
            if len(returned) == 2 and none_means == "success":
                log.warning(
                    "the listener %s returns None for some calls and a status for others: None counts as "
                    'SUCCESS here, and not in Java; PushOptions(none_means="retry") has such messages '
                    "consumed again",
                    printable(listener),
                )
        if isinstance(result, statuses):
            return result
        if result is None and none_means != "error":
            return success if none_means == "success" else later
        allowed = f"{'' if none_means == 'error' else 'None or '}one of {statuses.__name__}"
        raise TypeError(f"this listener must return {allowed}, not {result!r}")

    return as_status
