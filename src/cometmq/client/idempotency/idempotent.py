"""Listeners that process each message once, however often it is delivered.

    marks = SqliteMarks("orders.db")

    def book(message, cursor):
        cursor.execute("INSERT INTO bookings VALUES (?)", (message.body.decode(),))

    consumer = PushConsumer("billing", idempotent("billing", book, marks), "orders")

A message may be delivered again after a crash, a rebalance or a lost answer (docs/reference/client.md,
Duplicates). The idempotency key of a processed message is stored beside its effect, and a message with a
stored key is not processed again. The degree of safety depends on the storage: see MemoryMarks, DatabaseMarks
and RedisMarks.
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

_MAX_KEY_LENGTH = 255
_HANDLED = (None, ConsumeStatus.SUCCESS, OrderlyStatus.SUCCESS, OrderlyStatus.COMMIT)

Handler = Callable[[MessageExt], object] | Callable[[MessageExt, Any], object]
"""A plain handler: a function of (message) or (message, transaction), which runs in a thread."""
AsyncHandler = Callable[[MessageExt], Awaitable[object]] | Callable[[MessageExt, Any], Awaitable[object]]
"""An async handler: a function of (message) or (message, transaction), which runs on the event loop."""


class Marks(Protocol):
    """A storage of idempotency keys for plain handlers."""

    def once(self, scope: str, key: str, act: Callable[[Any], object]) -> bool:
        """Call `act` unless the key is stored in the scope, and store the key if `act` raises nothing.

        `act` is called with the transaction, or None if the storage has none. Return whether it was called.
        Raises BeingHandled if another consumer is processing a message with this key.
        """


class AsyncMarks(Protocol):
    """A storage of idempotency keys for async handlers, see Marks."""

    async def once_async(self, scope: str, key: str, act: Callable[[Any], Awaitable[object]]) -> bool:
        """Call and await `act` unless the key is stored, as described in `Marks.once`."""


def unique_key(message: MessageExt) -> str:
    """Return the unique key of a message, or its offset id if the producer assigned no unique key.

    A program that sends the same content again as a new message gets another unique key. Such duplicates are
    only detected with a key that is derived from the content.
    """
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
    """Return a listener that calls `handler` once for each message, even if a message is delivered again.

    Orderly consumers can use the listener, too. If the handler raises an exception, no key is stored, and the
    message is delivered and handled again.

    Args:
        scope: The scope of the effects, usually the consumer group: 1 to 255 printable characters. The same
            message is processed once in each scope.
        handler: Called with one message and, if it has a second parameter, the transaction that stores the
            key.
        marks: The storage of the keys.
        key: Returns the idempotency key of a message. Default: its unique key.

    Raises:
        ConfigError: The storage does not support the handler, or the scope is invalid.
    """
    if not isinstance(scope, str) or not 1 <= len(scope) <= _MAX_KEY_LENGTH or not scope.isprintable():
        raise ConfigError("scope", shown(scope), f"1 to {_MAX_KEY_LENGTH} printable characters")
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
    """Raise TypeError for a result that asks for a retry, or that was not awaited or executed."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"the handler returned {type(result).__name__}, which was not awaited: an async handler "
            "must be an `async def` function, not a wrapper of one"
        )
    if isinstance(result, ConsumeStatus | OrderlyStatus) and result not in _HANDLED:
        raise TypeError(f"an idempotent handler must raise an exception for a retry; it returned {result}")


def _key_of(message: MessageExt, key: Callable[[MessageExt], str]) -> str:
    """Return the idempotency key of a message. Raises TypeError if `key` returns no text or an empty one.

    A key that is too long for a database index or contains unprintable characters is replaced by its hash.
    """
    found = key(message)
    if not isinstance(found, str) or not found:
        raise TypeError(f"the key of message {message.msg_id} must be a non-empty text, not {shown(found)}")
    if len(found) <= _MAX_KEY_LENGTH and found.isprintable():
        return found
    return f"sha256:{hashlib.sha256(found.encode('utf-8', 'surrogatepass')).hexdigest()}"
