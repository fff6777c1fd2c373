"""Requests to many brokers at once, without waiting long for a broker that does not respond.

Only the responses that arrive within a timeout are returned. A request without a response by then continues.
Until it has ended, no second request is sent to the same broker. When it has ended, a callback is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cometmq.errors import CometError

T = TypeVar("T")

TIMEOUT_S = 2.0
"""Maximum time, in seconds, to wait for slow brokers before the responses of all others are returned."""
LATE_RESPONSE_MAX_AGE_S = 5.0
"""Maximum age, in seconds, at which a late response is still used. Older responses are discarded."""


class NoResponseYet(CometError):
    """A server has not responded yet."""

    addr: str
    span_s: float

    def __str__(self) -> str:
        return f"{self.addr} has not responded for {self.span_s:.0f} s; the request is still pending"


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The responses of brokers to one request.

    Attributes:
        values: The responses, by broker name.
        missing: The errors of brokers without a response, by name.
    """

    values: dict[str, T]
    missing: dict[str, CometError]

    @property
    def problems(self) -> dict[str, str]:
        """The error texts of the brokers that did not respond, by broker name."""
        return {name: str(error) for name, error in self.missing.items()}

    def raise_if_none(self) -> None:
        """Raise the first error if requests were sent and no broker responded."""
        if self.missing and not self.values:
            raise next(iter(self.missing.values()))


@dataclass
class _Pending(Generic[T]):
    task: asyncio.Future[T]
    began_s: float
    ended_s: float | None = None
    late: bool = False


class Fanout(Generic[T]):
    """A sender of one kind of request to many brokers.

    Args:
        on_late: Called when a request ends after its timeout.
        timeout_s: Timeout in seconds, if it differs from TIMEOUT_S.
    """

    def __init__(self, on_late: Callable[[], None], timeout_s: float | None = None) -> None:
        self._on_late = on_late
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._pending: dict[tuple[str, str], _Pending[T]] = {}

    async def request(self, addrs: Mapping[str, str], send: Callable[[str], Awaitable[T]]) -> Answers[T]:
        """Call `send(addr)` for each broker of `addrs` (name -> address).

        Return the responses that arrive in time, and for each other broker an error.

        Raises any exception of `send` that is not a CometError.
        """
        now_s = asyncio.get_running_loop().time()
        for key, pending in list(self._pending.items()):
            if pending.ended_s is not None and now_s - pending.ended_s > LATE_RESPONSE_MAX_AGE_S:
                del self._pending[key]
        for broker in addrs.items():
            if broker not in self._pending:
                self._begin(broker, send)
        requests = {broker: self._pending[broker] for broker in addrs.items()}
        if requests:
            await asyncio.wait([each.task for each in requests.values()], timeout=self._timeout_s)
        values: dict[str, T] = {}
        missing: dict[str, CometError] = {}
        for (name, addr), pending in sorted(requests.items()):
            if not pending.task.done():
                pending.late = True
                span_s = asyncio.get_running_loop().time() - pending.began_s
                missing[name] = NoResponseYet(addr, span_s)
                continue
            self._pending.pop((name, addr), None)
            try:
                values[name] = pending.task.result()
            except CometError as error:
                missing[name] = error
        return Answers(values, missing)

    def _begin(self, broker: tuple[str, str], send: Callable[[str], Awaitable[T]]) -> None:
        loop = asyncio.get_running_loop()
        pending: _Pending[T] = _Pending(asyncio.ensure_future(send(broker[1])), loop.time())
        self._pending[broker] = pending

        def ended(task: asyncio.Future[T]) -> None:
            pending.ended_s = loop.time()
            if not task.cancelled():
                # Otherwise asyncio would log an error that no caller has read.
                task.exception()
            if pending.late:
                self._on_late()

        pending.task.add_done_callback(ended)
