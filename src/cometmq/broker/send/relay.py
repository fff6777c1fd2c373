"""Relays sends that reach a raft member while it transfers its leadership, and for some time afterwards.

RocketMQ's Java clients retry a send that was refused with SERVICE_NOT_AVAILABLE three times without a pause,
and they update their routes only every 30 s (docs/reference/client.md, Sends and retries). So without the
relay, their sends would fail until the next update. The former leader therefore forwards sends to its
successor. While no member accepts sends, it holds them for up to two seconds.

One task forwards the requests in the order of their arrival, over one connection, so that the messages of a
queue keep their order. It forwards only the first one, at increasing intervals, until the new leader accepts
it. Then it forwards all others without waiting for responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from bisect import insort
from collections.abc import Awaitable, Collection, Mapping
from functools import partial
from itertools import chain, count
from typing import NamedTuple, Protocol

from cometmq.errors import CometError, CommandError, RemotingError
from cometmq.periodic import Backoff
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Handler, RemotingClient, Shortcut

RELAY_S = 60.0
"""How long, in seconds, a former leader relays sends: two intervals of the Java clients' route updates."""
HOLD_S = 2.0
"""The maximum time, in seconds, for which a send is held. A leadership transfer ends or is aborted sooner."""
ANSWER_S = 2.8
"""The time, in seconds, within which a send is answered. It is less than the Java clients' timeout of 3 s."""
RETRY_INTERVAL_S = 0.05
MAX_RETRY_INTERVAL_S = 0.2
MAX_HELD_BYTES = 64 << 20
"""The maximum size, in bytes, of all held and forwarded requests. Further requests are not relayed."""
RELAYED_FLAG = 4
"""A flag in `Frame.flag` of relayed requests, so that no member relays them again."""
SENDS = (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
_FRAME_BYTES = 1024


class Successor(Protocol):
    """The properties of a raft group that Relay requires."""

    @property
    def accepts(self) -> bool:
        """Whether this member leads and is not transferring its leadership."""

    @property
    def leader_addr(self) -> str | None:
        """The broker address of the leader, if that is another member.

        It is "" if no other leader is known yet, and None if this member will not learn of a new leader.
        """


class _Held(NamedTuple):
    """A request that waits for a leader. If `answer` becomes None, this broker itself handles the request."""

    number: int
    since: float
    frame: Frame
    answer: asyncio.Future[Frame | None]


class Relay:
    """Holds and forwards requests around a transfer of the leadership. Else it costs one comparison."""

    def __init__(self, client: RemotingClient, group: Successor) -> None:
        self._client = client
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._active = False
        self._until = 0.0
        self._held_bytes = 0  # Total size of requests that are held, or forwarded and not answered yet
        self._held: list[_Held] = []
        self._numbers = count()
        self._passed = 0  # Number of requests that are forwarded and not answered yet
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._leader = ""
        self._open = False  # Whether the new leader has accepted a request
        self._retry_at = 0.0
        self._failures = Backoff(RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S)

    def begin(self) -> None:
        """Begin to relay requests, because this leader begins to transfer its leadership, or has lost it."""
        self._active = True
        self._until = self._loop.time() + RELAY_S
        self._leader = ""

    def end(self) -> None:
        """Relay no new requests, because the broker is stopping. Held requests are still forwarded."""
        self._until = 0.0

    def handlers(self, handlers: Mapping[int, Handler], codes: Collection[int]) -> dict[int, Handler]:
        """Return all handlers. The handlers for `codes` can also relay requests."""
        return {code: self._handler(each) if code in codes else each for code, each in handlers.items()}

    def shortcuts(self, shortcuts: Mapping[bytes, Shortcut]) -> dict[bytes, Shortcut]:
        """Return the shortcuts for sends, each disabled while the relay is active."""
        return {start: self._shortcut(each) for start, each in shortcuts.items()}

    def _shortcut(self, shortcut: Shortcut) -> Shortcut:
        def send(connection: Connection, buffer: memoryview, start: int, end: int, stop: int) -> bool:
            return not self._active and shortcut(connection, buffer, start, end, stop)

        return send

    def _handler(self, handler: Handler) -> Handler:
        def send(connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
            if frame.flag & RELAYED_FLAG:
                # Refuse without further checks: this member's tables may be outdated.
                if not self._group.accepts:
                    return frame.response(ResponseCode.SERVICE_NOT_AVAILABLE, "not the leader")
            elif self._active and self._takes():
                if self._held_bytes >= MAX_HELD_BYTES:
                    return frame.response(
                        ResponseCode.SERVICE_NOT_AVAILABLE, "the leadership is being transferred"
                    )
                size = _size_of(frame)
                self._held_bytes += size
                return self._relay(connection, frame, handler, size)
            return handler(connection, frame)

        return send

    def _takes(self) -> bool:
        late = self._loop.time() > self._until
        if late or (not self._held_bytes and (self._group.accepts or self._group.leader_addr is None)):
            self._active = False
        return self._active

    async def _relay(self, connection: Connection, frame: Frame, handler: Handler, size: int) -> Frame | None:
        held = _Held(next(self._numbers), self._loop.time(), frame, self._loop.create_future())
        self._held.append(held)
        self._wake.set()
        if self._task is None:
            self._task = self._loop.create_task(self._pass_on())
        try:
            answer = await held.answer or handler(connection, frame)
        finally:
            self._held_bytes -= size
            self._wake.set()
        return await answer if isinstance(answer, Awaitable) else answer

    async def _pass_on(self) -> None:
        """Forward requests until none is held or unanswered."""
        try:
            while self._held_bytes:
                self._wake.clear()
                await self._step()
                if self._group.accepts and not self._passed:
                    # Let the handlers of held requests, which this broker itself now handles, run before
                    # those of later requests.
                    await asyncio.sleep(0)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL_S):
                        await self._wake.wait()
        finally:
            self._task = None
            self._answer_here(all_of_them=True)

    async def _step(self) -> None:
        """Forward held requests: one until the new leader has accepted it, and then all others."""
        addr = None if self._group.accepts else self._group.leader_addr
        self._answer_here(all_of_them=addr is None)
        if not addr or not self._held:
            return
        if addr != self._leader:
            self._leader, self._open, self._retry_at = addr, False, 0.0
            self._failures.reset()
        if not self._open and (self._passed or self._loop.time() < self._retry_at):
            return
        try:
            connection = await self._client.connect(addr, RETRY_INTERVAL_S)
            for held in self._held[: None if self._open else 1]:
                self._pass(connection, held)
                del self._held[0]
        except RemotingError:  # Nothing was sent, so the requests are still held
            self._back_off()

    def _answer_here(self, all_of_them: bool) -> None:
        """Let this broker itself handle held requests: all, or those held for at least HOLD_S."""
        since = self._loop.time() - HOLD_S
        held, self._held = self._held, []
        for each in held:
            if each.answer.done():
                continue
            if all_of_them or each.since <= since:
                each.answer.set_result(None)
            else:
                self._held.append(each)

    def _pass(self, connection: Connection, held: _Held) -> None:
        """Forward a request. Raises RemotingError if nothing was sent."""
        frame = held.frame
        request = Frame.request(
            frame.code, body=frame.body, ext=frame.ext, language=frame.language, version=frame.version
        )
        request.flag = RELAYED_FLAG
        try:
            answer = connection.request(request, held.since + ANSWER_S - self._loop.time())
        except RemotingError:
            raise
        except CometError as error:  # The request is invalid, for instance because its frame is too long
            held.answer.set_exception(error)
            return
        self._passed += 1
        answer.add_done_callback(partial(self._answered, held, self._leader, not self._open))

    def _answered(self, held: _Held, addr: str, alone: bool, answer: asyncio.Future[Frame]) -> None:
        self._passed -= 1
        self._wake.set()
        error = answer.exception()
        given = None if error is not None else answer.result()
        refused = given is not None and given.code == ResponseCode.SERVICE_NOT_AVAILABLE
        if addr == self._leader and (alone or self._open):
            self._open = given is not None and not refused
            if not self._open:
                self._back_off()
        if held.answer.done():
            return
        if given is None:
            remark = f"the new leader may have stored the message: {error}"
            held.answer.set_exception(CommandError.failed(remark))
        elif refused:
            insort(self._held, held)
        else:
            held.answer.set_result(held.frame.response(given.code, given.remark, ext=given.ext))

    def _back_off(self) -> None:
        self._open = False
        self._retry_at = self._loop.time() + self._failures.next_s()


def _size_of(frame: Frame) -> int:
    """Return the memory that a request takes, in bytes: body, header and decoded fields."""
    texts = chain.from_iterable((frame.ext or {}).items())
    return len(frame.body) + len(frame.raw_header) + sum(map(sys.getsizeof, texts)) + _FRAME_BYTES
