"""Sends that reach a raft member while it hands its leadership over, and shortly afterwards.

RocketMQ's Java clients try a send three times without a pause after SERVICE_NOT_AVAILABLE, and read the route
every 30 s (docs/reference/client.md, Sends and retries). Without the relay their sends would fail until then.
The former leader therefore passes sends on to its successor. While no successor is known, it holds the sends
for up to two seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Protocol

from cometmq.errors import CommandError, ConnectError, RemotingError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Handler, RemotingClient, Shortcut

RELAY_S = 60.0
"""Time, in seconds, for which a former leader relays sends: two route updates of Java's clients."""
HOLD_S = 2.0
"""Time, in seconds, that a send is held: longer than a handoff that is aborted, and below Java's timeout."""
RETRY_INTERVAL_S = 0.05
MAX_HELD_BYTES = 64 << 20
"""Limit, in bytes, of the held or relayed bodies. Further sends are answered immediately."""
RELAYED_FLAG = 4
"""Marks a relayed request in `Frame.flag`, so that no member relays it again."""
SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_FRAME_BYTES = 1024


class Successor(Protocol):
    """The view of the raft group that the relay needs."""

    @property
    def accepts(self) -> bool:
        """Whether this member leads and does not transfer its leadership."""

    @property
    def leader_addr(self) -> str:
        """The broker address of another member that leads, "" if none is known."""


class Relay:
    """Holds sends and passes them on during a handoff. At other times it costs one comparison per send."""

    def __init__(self, client: RemotingClient, group: Successor) -> None:
        self._client = client
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._active = False
        self._until = 0.0
        self._held_bytes = 0

    def begin(self) -> None:
        """Begin to relay: this leader transfers its leadership, or has lost it."""
        self._active = True
        self._until = self._loop.time() + RELAY_S

    def handlers(self, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
        """Return the handlers with those of sends replaced."""
        return {code: self._handler(each) if code in SENDS else each for code, each in handlers.items()}

    def shortcuts(self, shortcuts: Mapping[bytes, Shortcut]) -> dict[bytes, Shortcut]:
        """Return the shortcuts of sends, not used while the relay is active."""
        return {start: self._shortcut(each) for start, each in shortcuts.items()}

    def _shortcut(self, shortcut: Shortcut) -> Shortcut:
        def send(connection: Connection, buffer: memoryview, start: int, end: int, stop: int) -> bool:
            return not self._active and shortcut(connection, buffer, start, end, stop)

        return send

    def _handler(self, handler: Handler) -> Handler:
        def send(connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
            if not (self._active and self._takes(frame)):
                return handler(connection, frame)
            self._held_bytes += len(frame.body) + _FRAME_BYTES
            return self._relay(connection, frame, handler)

        return send

    def _takes(self, frame: Frame) -> bool:
        if self._group.accepts or self._loop.time() > self._until:
            self._active = False
        return self._active and frame.flag == 0 and self._held_bytes < MAX_HELD_BYTES

    async def _relay(self, connection: Connection, frame: Frame, handler: Handler) -> Frame | None:
        try:
            answer = await self._passed_on(frame) or handler(connection, frame)
        finally:
            self._held_bytes -= len(frame.body) + _FRAME_BYTES
        return await answer if isinstance(answer, Awaitable) else answer

    async def _passed_on(self, frame: Frame) -> Frame | None:
        """Return the answer of the leader, or None if this member itself must answer."""
        ends = self._loop.time() + HOLD_S
        while (left_s := ends - self._loop.time()) > 0 and not self._group.accepts:
            addr = self._group.leader_addr
            if addr:
                request = Frame.request(
                    frame.code, body=frame.body, ext=frame.ext, language=frame.language, version=frame.version
                )
                request.flag = RELAYED_FLAG
                try:
                    answer = await self._client.call(addr, request, left_s)
                except ConnectError:
                    pass  # the request was not sent
                except RemotingError as error:
                    raise CommandError(
                        ResponseCode.SYSTEM_ERROR, f"the new leader may have stored the message: {error}"
                    ) from error
                else:
                    if answer.code != ResponseCode.SERVICE_NOT_AVAILABLE:
                        return frame.response(answer.code, answer.remark, ext=answer.ext)
            await asyncio.sleep(min(RETRY_INTERVAL_S, left_s))
        return None
