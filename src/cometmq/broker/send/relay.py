"""Sends that reach a raft member while it hands its leadership over, and shortly afterwards.

RocketMQ's Java clients try a send three times without a pause after SERVICE_NOT_AVAILABLE, and read the route
every 30 s (docs/reference/client.md, Sends and retries). Without the relay their sends would fail until then.
The former leader therefore passes sends on to its successor. While no member accepts sends, it holds them for
up to two seconds.

One task passes the requests on, in the order of their arrival and over one connection, so that the messages
of a queue keep their order. It passes the first one alone, at intervals that double, until the leader accepts
it. Then it passes on all others without waiting for their answers.
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
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Handler, RemotingClient, Shortcut

RELAY_S = 60.0
"""Time, in seconds, for which a former leader relays sends: two route updates of Java's clients."""
HOLD_S = 2.0
"""Time, in seconds, that a send is held: longer than a handoff that is aborted."""
ANSWER_S = 2.8
"""Time, in seconds, from the arrival of a send to its answer: below the timeout of Java's clients (3 s)."""
RETRY_INTERVAL_S = 0.05
MAX_RETRY_INTERVAL_S = 0.2
MAX_HELD_BYTES = 64 << 20
"""Limit, in bytes, of the held or relayed requests. Further requests are answered immediately."""
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
    def leader_addr(self) -> str | None:
        """The broker address of another member that leads.

        "" if no leader is known, None if this member takes no part any more and will not learn of a leader.
        """


class _Held(NamedTuple):
    """A request that waits for a leader. `answer` becomes None if this member must answer it."""

    number: int
    since: float
    frame: Frame
    answer: asyncio.Future[Frame | None]


class Relay:
    """Holds requests and passes them on during a handoff. At other times it costs one comparison per send."""

    def __init__(self, client: RemotingClient, group: Successor) -> None:
        self._client = client
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._active = False
        self._until = 0.0
        self._held_bytes = 0  # of the requests that are held, or passed on and not answered
        self._held: list[_Held] = []  # in the order of their arrival
        self._numbers = count()
        self._passed = 0  # number of requests that are passed on and not answered
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._leader = ""
        self._open = False  # whether this leader has accepted a request
        self._retry_at = 0.0
        self._retry_s = RETRY_INTERVAL_S

    def begin(self) -> None:
        """Begin to relay: this leader transfers its leadership, or has lost it."""
        self._active = True
        self._until = self._loop.time() + RELAY_S
        self._leader = ""

    def end(self) -> None:
        """Take no more requests, because the broker stops. Those that are held are still passed on."""
        self._until = 0.0

    def handlers(self, handlers: Mapping[int, Handler], codes: Collection[int]) -> dict[int, Handler]:
        """Return the handlers with those of the requests with these codes replaced."""
        return {code: self._handler(each) if code in codes else each for code, each in handlers.items()}

    def shortcuts(self, shortcuts: Mapping[bytes, Shortcut]) -> dict[bytes, Shortcut]:
        """Return the shortcuts of sends, not used while the relay is active."""
        return {start: self._shortcut(each) for start, each in shortcuts.items()}

    def _shortcut(self, shortcut: Shortcut) -> Shortcut:
        def send(connection: Connection, buffer: memoryview, start: int, end: int, stop: int) -> bool:
            return not self._active and shortcut(connection, buffer, start, end, stop)

        return send

    def _handler(self, handler: Handler) -> Handler:
        def send(connection: Connection, frame: Frame) -> Frame | Awaitable[Frame | None] | None:
            if frame.flag & RELAYED_FLAG:
                if not self._group.accepts:  # The tables may be old, and a refusal for their sake wrong.
                    return frame.response(ResponseCode.SERVICE_NOT_AVAILABLE, "not the leader")
            elif self._active and self._takes():
                if self._held_bytes >= MAX_HELD_BYTES:
                    return frame.response(ResponseCode.SERVICE_NOT_AVAILABLE, "the leader is changing")
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
        """Pass requests on until none is held."""
        try:
            while self._held_bytes:
                self._wake.clear()
                await self._step()
                if self._group.accepts and not self._passed:
                    await asyncio.sleep(0)  # The handlers run; requests that arrive meanwhile follow them.
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_INTERVAL_S):
                        await self._wake.wait()
        finally:
            self._task = None
            self._answer_here(all_of_them=True)

    async def _step(self) -> None:
        """Pass on what can be passed on now."""
        addr = None if self._group.accepts else self._group.leader_addr
        self._answer_here(all_of_them=addr is None)
        if not addr or not self._held:
            return
        if addr != self._leader:
            self._leader, self._open, self._retry_at, self._retry_s = addr, False, 0.0, RETRY_INTERVAL_S
        if not self._open and (self._passed or self._loop.time() < self._retry_at):
            return
        try:
            connection = await self._client.connect(addr, RETRY_INTERVAL_S)
            for held in self._held[: None if self._open else 1]:
                self._pass(connection, held)
                del self._held[0]
        except RemotingError:  # nothing was sent
            self._back_off()

    def _answer_here(self, all_of_them: bool) -> None:
        """Let this member answer the requests that were held for too long, or all of them."""
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
        """Pass a request on. Raises RemotingError if nothing was sent."""
        frame = held.frame
        request = Frame.request(
            frame.code, body=frame.body, ext=frame.ext, language=frame.language, version=frame.version
        )
        request.flag = RELAYED_FLAG
        try:
            answer = connection.request(request, held.since + ANSWER_S - self._loop.time())
        except RemotingError:
            raise
        except CometError as error:  # With the broker's signature it is longer than a frame may be.
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
            held.answer.set_exception(CommandError(ResponseCode.SYSTEM_ERROR, remark))
        elif refused:
            insort(self._held, held)
        else:
            held.answer.set_result(held.frame.response(given.code, given.remark, ext=given.ext))

    def _back_off(self) -> None:
        self._open = False
        self._retry_at = self._loop.time() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_INTERVAL_S)


def _size_of(frame: Frame) -> int:
    """Return the memory, in bytes, that a request takes: body, header and decoded fields."""
    texts = chain.from_iterable((frame.ext or {}).items())
    return len(frame.body) + len(frame.raw_header) + sum(map(sys.getsizeof, texts)) + _FRAME_BYTES
