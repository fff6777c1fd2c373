"""Dispatches requests to handlers by request code, and responds with what a handler returns or raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from cometmq import logs
from cometmq.errors import CommandError, FrameError, ProtocolError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting.connection import Connection, Handler
from cometmq.text import shortened

log = logs.logger(__name__)

MAX_REMARK_LENGTH = 4096  # Maximum length of a response's remark, as an error may quote the whole request


class Dispatcher:
    """Calls handlers, and converts their results and exceptions to responses."""

    __slots__ = ("_default", "_log_limit", "handlers", "tasks")

    def __init__(self, handlers: Mapping[int, Handler], default: Handler | None = None) -> None:
        self.handlers = dict(handlers)
        self._default = default
        self._log_limit = logs.LogLimiter()
        self.tasks: set[asyncio.Task[None]] = set()

    def __call__(self, connection: Connection, request: Frame) -> None:
        """Handle one request. An asynchronous handler continues as a task."""
        handler = self.handlers.get(request.code, self._default)
        if handler is None:
            # The remark is the text of Apache's servers, including the leading blank.
            remark = f" request type {request.code} not supported"
            connection.respond(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
            return
        try:
            answer = handler(connection, request)
            if isinstance(answer, Frame):
                _answer(connection, request, answer)
            elif answer is not None:
                self._start_task(connection, request, answer)
        except Exception as error:
            self._fail(connection, request, error)

    def _start_task(self, connection: Connection, request: Frame, answer: Awaitable[Frame | None]) -> None:
        # The coroutine has not run yet. So it will read only this copy of the body, and never the view into
        # the receive buffer, which the next read overwrites.
        if type(request.body) is not bytes:
            request.body = bytes(request.body)
        size = len(request.body)
        connection.hold(size)
        task = asyncio.ensure_future(self._finish(connection, request, answer))
        self.tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            connection.release(size)

        task.add_done_callback(done)

    async def _finish(
        self, connection: Connection, request: Frame, awaitable: Awaitable[Frame | None]
    ) -> None:
        try:
            answer = await awaitable
            if answer is not None:
                _answer(connection, request, answer)
        except Exception as error:
            self._fail(connection, request, error)

    def _fail(self, connection: Connection, request: Frame, error: Exception) -> None:
        ext: dict[str, str] | None = None
        if isinstance(error, CommandError):
            code, remark, ext = error.code, error.remark, error.ext
        else:
            code, remark = ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}"
            # Requests that cannot be decoded are errors of the peer, so they are reported to the peer and not
            # logged. A FrameError is logged, because this side caused it: its response is too long for a
            # frame.
            ours = isinstance(error, FrameError) or not isinstance(error, ProtocolError)
            if ours and self._log_limit.allows():
                log.error("request %d from %s failed", request.code, connection.peer, exc_info=error)
        connection.respond(request, code, remark=shortened(remark, MAX_REMARK_LENGTH), ext=ext)


def _answer(connection: Connection, request: Frame, answer: Frame) -> None:
    if not request.is_oneway:
        connection.answer(answer)
