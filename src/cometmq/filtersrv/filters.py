"""An uploaded filter class and its worker process, as seen by the filter server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from typing import NoReturn

from cometmq import logs
from cometmq.errors import CommandError
from cometmq.filtersrv import worker
from cometmq.filtersrv.confine import CannotConfine
from cometmq.periodic import Backoff
from cometmq.protocol.codes import ResponseCode
from cometmq.text import printable, seconds

log = logs.logger(__name__)

LOAD_TIMEOUT_S = 5.0
"""Maximum time, in seconds, for a new worker process to start and load its class."""
BATCH_TIMEOUT_S = 5.0
"""Maximum time, in seconds, for a worker process to filter the messages of one pull."""
QUEUE_TIMEOUT_S = 5.0
"""Maximum time, in seconds, that a pull waits while its filter class filters for earlier pulls."""
_RESTART_DELAY_S = 1.0  # first delay before a failed worker is replaced; it grows with each failure
_AGAIN_MOST_S = 60.0
REPLACED = "the class was replaced, or is no longer used"


def worker_command() -> list[str]:
    """Return the command that starts a worker process.

    The worker has a lower priority than the broker (nice). The kernel kills the worker when the filter server
    ends, even if the filter server was killed (setpriv).
    """
    script = os.path.abspath(worker.__file__)
    around = ["nice", "-n", "5", "setpriv", "--pdeathsig", "KILL", "--"]
    return [*around, sys.executable, "-I", script, str(os.getpid())]


def check() -> None:
    """Check that this machine can confine a worker process. It ends at once, because its input is empty.

    Raises CannotConfine, or OSError if a process cannot be started at present.
    """
    try:
        found = subprocess.run(
            worker_command(), stdin=subprocess.DEVNULL, capture_output=True, env={}, cwd="/"
        )
    except (FileNotFoundError, PermissionError) as error:
        raise CannotConfine(str(error)) from error
    if found.returncode:
        said = found.stdout[worker.ANSWER.size :] or found.stderr
        raise CannotConfine(said.decode("utf-8", "replace"))


class Process:
    """A worker process, which the constructor starts, and the server's end of its socket. Raises OSError."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with theirs:
            try:
                # The worker inherits no environment variables and no file descriptors except its socket.
                self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                    worker_command(),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                )
            except OSError:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def ask(self, request: bytes, expected: int) -> tuple[bool, bytes]:
        """Send a request to the worker. Return whether the request succeeded, and the answer.

        A success has an answer of `expected` bytes. Raises asyncio.IncompleteReadError if the process has
        ended or its answer is invalid, and OSError if the socket failed.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
        reader, writer = self._streams
        writer.write(worker.LENGTH.pack(len(request)) + request)
        await writer.drain()
        done, size = worker.ANSWER.unpack(await reader.readexactly(worker.ANSWER.size))
        if size != expected if done else not 0 < size <= worker.REASON_BYTES:
            raise asyncio.IncompleteReadError(b"", expected)
        return done, await reader.readexactly(size)

    async def end(self) -> int:
        """Kill the process if it still runs. Return its exit code, which is -9 if it was killed."""
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].transport.abort()
        self._popen.kill()
        return await asyncio.to_thread(self._popen.wait)


@dataclass(eq=False)
class Filter:
    """The filter class that one consumer group has uploaded for one topic, and its worker process.

    If the class cannot be loaded, raises an exception, exceeds its time or ends its process, the consumer
    receives SYSTEM_ERROR; if the class cannot filter at present, FLOW_CONTROL.
    """

    name: str
    source: str
    used_at: float = 0.0  # The time of the last use, on the loop's clock
    judged: int = 0  # The size in bytes of the messages that this class is filtering or has yet to filter
    process: Process | None = None
    _line: asyncio.Lock = field(default_factory=asyncio.Lock)
    _problem: str = ""
    _again_at: float = 0.0
    _restarts: Backoff = field(default_factory=lambda: Backoff(_RESTART_DELAY_S, _AGAIN_MOST_S))
    _closed: bool = False

    async def load(self) -> None:
        """Start the worker process and load the filter class in it. Raises CommandError."""
        async with self._line:
            await self._start()

    async def judge(self, records: bytes, count: int) -> bytes:
        """Filter `count` records. Return one byte each: 1 if it matches, otherwise 0. Raises CommandError."""
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await self._line.acquire()
        except TimeoutError:
            raise self._busy(
                f"the request waited longer than {seconds(QUEUE_TIMEOUT_S)} for earlier requests"
            ) from None
        try:
            if self._closed:
                raise self._busy(REPLACED)
            if self.process is None:
                await self._start()
            verdicts = await self._ask(records, count, BATCH_TIMEOUT_S)
            self._restarts.reset()
            return verdicts
        finally:
            self._line.release()

    async def close(self) -> None:
        """End the process. No later request starts a new process."""
        self._closed = True
        await self._end()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._again_at:
            left = seconds(self._again_at - loop.time())
            raise self._failed(f"{self._problem}; the filter process is started again in {left}")
        try:
            self.process = Process()
        except OSError as error:
            self._lost(f"the filter process cannot be started: {error.strerror}")
        try:
            await self._ask(
                json.dumps({"name": self.name, "source": self.source}).encode(), 0, LOAD_TIMEOUT_S
            )
        except CommandError:
            await self._end()  # a process that could not load its class is of no use
            raise

    async def _ask(self, request: bytes, expected: int, limit_s: float) -> bytes:
        """Return the worker's answer to a request within `limit_s` seconds. Raises CommandError.

        The process keeps running if the worker itself reported the failure; otherwise it has been ended.
        """
        assert self.process is not None
        try:
            async with asyncio.timeout(limit_s):
                done, answer = await self.process.ask(request, expected)
        except TimeoutError:
            await self._end()
            self._lost(f"a request took longer than {seconds(limit_s)}")
        except (asyncio.IncompleteReadError, OSError):
            code = await self._end()
            if self._closed:
                raise self._busy(REPLACED) from None
            self._lost(f"the filter process ended or sent an invalid answer (exit code {code})")
        except asyncio.CancelledError:
            await self._end()  # end the process: its late answer would be taken for the next request's answer
            raise
        if not done:
            raise self._failed(printable(answer.decode("utf-8", "replace"), None))
        return answer

    def _failed(self, problem: str) -> CommandError:
        return CommandError.failed(f"filter class {self.name}: {problem}")

    def _busy(self, problem: str) -> CommandError:
        return CommandError(ResponseCode.FLOW_CONTROL, f"filter class {self.name}: {problem}")

    def _lost(self, problem: str) -> NoReturn:
        """Record that the worker process was lost and when it may be restarted. Always raise CommandError."""
        self._problem = problem
        self._again_at = asyncio.get_running_loop().time() + self._restarts.next_s()
        log.warning("filter class %s: %s", self.name, problem)
        raise self._failed(problem)

    async def _end(self) -> int:
        process, self.process = self.process, None
        return 0 if process is None else await process.end()
