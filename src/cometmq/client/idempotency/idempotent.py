"""Listeners whose effects happen once, however often a message comes.

    marks = SqliteMarks("orders.db")

    def book(message, cursor):
        cursor.execute("INSERT INTO bookings VALUES (?)", (message.body.decode(),))

    consumer = PushConsumer("billing", idempotent("billing", book, marks), "orders")

A message may come again after a crash, a rebalance or a lost answer (docs/reference/client.md, Duplicates).
Its key is marked beside its effect, and what is marked is not handled again. How safe that is depends on
where the marks are: see MemoryMarks, DatabaseMarks and RedisMarks.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast, overload

from cometmq.client.consumer.listener import HANDLED, ConsumeStatus, OrderlyStatus
from cometmq.errors import ConfigError, shown
from cometmq.message import MessageExt
from cometmq.protocol.properties.values import ORIGIN_MESSAGE_ID, UNIQ_KEY

__all__ = ["AsyncHandler", "AsyncMarks", "Handler", "Marks", "idempotent", "unique_key"]

_KEY_MAX = 255
_HANDLED = (None, ConsumeStatus.SUCCESS, OrderlyStatus.SUCCESS, OrderlyStatus.COMMIT)

Handler = Callable[[MessageExt], object] | Callable[[MessageExt, Any], object]
"""A plain function of (message) or (message, transaction); runs in a thread."""
AsyncHandler = Callable[[MessageExt], Awaitable[object]] | Callable[[MessageExt, Any], Awaitable[object]]
"""An async function of (message) or (message, transaction); runs on the loop."""


class Marks(Protocol):
    """Where plain handlers' messages are marked."""

    def once(self, scope: str, key: str, act: Callable[[Any], object]) -> bool:
        """Call `act` with the transaction, if there is one, unless the key is marked; mark it if that raises
        nothing. Returns whether it was called. Raises BeingHandled for a key that somebody else works on."""


class AsyncMarks(Protocol):
    """Where async handlers' messages are marked."""

    async def once_async(self, scope: str, key: str, act: Callable[[Any], Awaitable[object]]) -> bool:
        """As Marks.once."""


def unique_key(message: MessageExt) -> str:
    """The id that its producer gave it; for a message without one that of its first storage. A producer that
    sends anew what it sent before gives another id: only a key out of the message's content finds that."""
    properties = message.properties
    return properties.get(UNIQ_KEY) or properties.get(ORIGIN_MESSAGE_ID) or message.offset_msg_id


@overload
def idempotent(
    scope: str, handler: AsyncHandler, marks: AsyncMarks, *, key: Callable[[MessageExt], str] = unique_key
) -> Callable[[list[MessageExt]], Awaitable[None]]: ...


@overload
def idempotent(
    scope: str, handler: Handler, marks: Marks, *, key: Callable[[MessageExt], str] = unique_key
) -> Callable[[list[MessageExt]], None]: ...


def idempotent(
    scope: str,
    handler: Handler | AsyncHandler,
    marks: Marks | AsyncMarks,
    *,
    key: Callable[[MessageExt], str] = unique_key,
) -> Callable[[list[MessageExt]], None] | Callable[[list[MessageExt]], Awaitable[None]]:
    """A listener, also for orderly consumers, that has `handler` handle each message once.

    scope: whose effects these are, usually the group: another scope handles the same message for itself. key:
    what makes two messages the same. The handler gets one message, and as a second argument, if it takes one,
    the transaction that the mark is part of. If it raises, nothing is marked and the message comes again.

    Raises ConfigError for a handler that the marks cannot serve, and for a scope that is no text of 1 to 255
    printable characters.
    """
    if not isinstance(scope, str) or not 1 <= len(scope) <= _KEY_MAX or not scope.isprintable():
        raise ConfigError("scope", shown(scope), f"1 to {_KEY_MAX} printable characters")
    wants_transaction = _wants_transaction(handler)
    call = cast("Callable[..., Any]", handler)
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        once_async = getattr(marks, "once_async", None)
        if once_async is None:
            raise ConfigError(
                "handler", "an async function", f"a plain one: {_name(marks)} would block the loop"
            )

        async def on_loop(messages: list[MessageExt]) -> Any:
            for message in messages:

                async def act(transaction: object, message: MessageExt = message) -> None:
                    _check_result(await (call(message, transaction) if wants_transaction else call(message)))

                await once_async(scope, _key_of(message, key), act)
            return HANDLED

        return on_loop
    once = getattr(marks, "once", None)
    if once is None:
        raise ConfigError("handler", "a plain function", f"an async one: {_name(marks)} works on the loop")

    def in_thread(messages: list[MessageExt]) -> Any:
        for message in messages:

            def act(transaction: object, message: MessageExt = message) -> None:
                _check_result(call(message, transaction) if wants_transaction else call(message))

            once(scope, _key_of(message, key), act)
        return HANDLED

    return in_thread


def _name(marks: object) -> str:
    return type(marks).__name__


def _wants_transaction(handler: object) -> bool:
    if not callable(handler):
        raise ConfigError("handler", shown(handler), "a function of (message) or (message, transaction)")
    parameters = inspect.signature(handler).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind in (0, 1)]
    if not 1 <= len(required) <= 2:
        taken = str(inspect.signature(handler))
        raise ConfigError("handler", taken, "a function of (message) or (message, transaction)")
    return len(required) == 2


def _check_result(result: object) -> None:
    """A status that means "later" must not be marked as done, nor what was not even begun."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"the handler returned {type(result).__name__}, which nobody awaits: an async handler is an "
            "`async def`, and no function around one"
        )
    if isinstance(result, ConsumeStatus | OrderlyStatus) and result not in _HANDLED:
        raise TypeError(
            f"an idempotent handler raises an error to get its message again; it returned {result}"
        )


def _key_of(message: MessageExt, key: Callable[[MessageExt], str]) -> str:
    """The key, or a hash of one that is too long for an index of a database, or that databases refuse."""
    found = key(message)
    if not isinstance(found, str) or not found:
        raise TypeError(
            f"the key of message {message.msg_id} is {shown(found)}, not a text with a letter or more"
        )
    if len(found) <= _KEY_MAX and found.isprintable():
        return found
    return f"sha256:{hashlib.sha256(found.encode('utf-8', 'surrogatepass')).hexdigest()}"
