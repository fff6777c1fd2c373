"""Passes calls to the handlers of their methods, and responds with what a handler returns or raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from cometmq import logs
from cometmq.grpc.rpc.calls import Call, Kind, Message, Method
from cometmq.grpc.rpc.status import GrpcStatus, RpcError, ServiceError

log = logs.logger(__name__)


class Dispatcher:
    """Calls handlers, and converts their results and exceptions to responses."""

    __slots__ = ("_log_limit", "ended", "tasks")

    def __init__(self) -> None:
        self._log_limit = logs.LogLimiter()
        self.tasks: set[asyncio.Future[Message | None]] = set()
        self.ended: dict[tuple[str, int], int] = {}
        """The number of calls that have ended, by method and outcome (`Call.outcome`)."""

    def begin(self, call: Call, request: bytes | None) -> None:
        """Handle a call with its encoded request, or with None: a bidi call begins before its first request.

        An asynchronous handler continues as a task, which is cancelled with the call.
        """
        method = call.method
        try:
            if request is None:
                answer = method.handler(call)
            else:
                answer = method.handler(call, _parse(method, request))
            if answer is None:
                pass  # The handler responds, or has responded
            elif isinstance(answer, Awaitable):
                self._start_task(call, answer)
            else:
                call.respond(answer)
        except Exception as error:
            self.fail(call, error)

    def deliver(self, call: Call, message: bytes) -> None:
        """Pass a message of a bidi call to its handler."""
        if call.on_message is not None:
            try:
                call.on_message(_parse(call.method, message))
            except Exception as error:
                self.fail(call, error)
                self.notify(call, call.on_cancel)

    def notify(self, call: Call, callback: Callable[[], object] | None) -> None:
        """Call a callback of a call, if it is set."""
        if callback is not None:
            try:
                callback()
            except Exception as error:
                self.fail(call, error)

    def fail(self, call: Call, error: Exception) -> None:
        """End a call with the response to an exception, and log it unless it is meant for the client."""
        if isinstance(error, ServiceError):
            call.respond(call.method.status_response(error.code, error.problem))
        elif isinstance(error, RpcError):
            call.finish(error.status, error.problem)
        else:
            call.finish(GrpcStatus.INTERNAL, f"{type(error).__name__}: {error}")
            if self._log_limit.allows():
                log.error("%s from %s failed", call.method.name, call.connection.peer, exc_info=error)

    def count(self, call: Call) -> None:
        """Count a call that ends."""
        key = call.method.name, call.outcome
        self.ended[key] = self.ended.get(key, 0) + 1

    def _start_task(self, call: Call, answer: Awaitable[Message | None]) -> None:
        # The task runs the handler itself. A wrapper that is cancelled before its first step would never
        # await the handler's coroutine.
        task = asyncio.ensure_future(answer)
        self.tasks.add(task)
        task.add_done_callback(partial(self._finish, call))
        call.on_cancel = task.cancel

    def _finish(self, call: Call, task: asyncio.Future[Message | None]) -> None:
        self.tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self.fail(call, error)
        elif error is None and (answer := task.result()) is not None:
            call.respond(answer)
        elif call.method.kind is not Kind.UNARY:
            call.finish()


def _parse(method: Method, request: bytes) -> Any:
    if len(request) > method.max_request:
        problem = f"a request of {method.name} has {len(request)} bytes, at most {method.max_request}"
        raise RpcError(GrpcStatus.RESOURCE_EXHAUSTED, problem)
    try:
        return method.parse(request)
    except Exception as error:  # protobuf's DecodeError, or ValueError
        problem = f"a request of {method.name} is no valid message: {error}"
        raise RpcError(GrpcStatus.INVALID_ARGUMENT, problem) from None
