"""Consumers that read from disk, and their share of the loop while messages are sent.

A consumer that reads from disk pulls again as soon as it has its response, and a pull of 32 messages costs
the loop as much as six sends: without a limit, draining a few queues halves the rate of sends. So its pulls
wait until the responses of the tick have been sent. After a tick with sends they get a share of the CPU time
that the loop spends on everything else, and several are served together, because every response wakes the
loop with the next request. After a tick without sends they have no limit. The measure is CPU time, because on
a busy machine other programs take time from sends and pulls alike.

A consumer counts as draining from its first read from disk until it has nearly caught up, however rarely it
reads from disk in between: the system reads ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")
Reader = tuple[str, str, int]  # group, topic, queue id

PART = 0.08  # share of the CPU time of all other work; reading requests and writing responses cost as much
MIN_SAVED_S = 0.0003  # the minimum CPU time that must be available before pulls are served beside sends
NEAR = 64 << 20  # the distance to the log's end, in bytes, at which a reader has nearly caught up
MISS_S = 0.0003  # the additional CPU time of a pull that reads from disk: a task, a thread, the second read
MAX_SAVED_S = 0.001
MAX_OWED_S = 0.002
CALM_S = 0.005  # after this time without sends, several requests are served per tick
AT_ONCE = 16
MAX_READERS = MAX_WAITING_REQUESTS = 1 << 14


class Backlog(Generic[Request]):
    """The draining readers and their waiting requests. All methods must be called on the loop.

    Args:
        serve: Answers a request and raises nothing.
        log_end: Returns a number that grows with every message sent.
        now_s: Any clock in seconds.
        cpu_s: Returns the CPU seconds of this thread.
        part: The share of the CPU time of all other work that pulls may use beside sends.
        at_once: The number of requests served per tick without sends.
    """

    __slots__ = (
        "_at_once", "_begun", "_cpu_s", "_end", "_left_at", "_line", "_log_end", "_now_s", "_part",
        "_saved_s", "_sent_at", "_serve", "readers",
    )  # fmt: skip

    def __init__(
        self,
        serve: Callable[[Request], None],
        log_end: Callable[[], int],
        now_s: Callable[[], float],
        cpu_s: Callable[[], float] = time.thread_time,
        *,
        part: float = PART,
        at_once: int = AT_ONCE,
    ) -> None:
        self.readers: set[Reader] = set()
        self._serve = serve
        self._log_end = log_end
        self._now_s = now_s
        self._cpu_s = cpu_s
        self._part = part
        self._at_once = at_once
        self._line: deque[Request] = deque()
        self._end = log_end()
        self._sent_at = now_s()
        self._left_at = cpu_s()  # CPU time of this thread when requests were last served
        self._saved_s = 0.0  # the CPU time available beside sends; negative if too much was used
        self._begun = False  # whether the available time may be used

    def missed(self, reader: Reader) -> None:
        """Make the requests of this reader wait from now on, because its data is on disk."""
        self._saved_s -= MISS_S
        if len(self.readers) >= MAX_READERS:  # readers that still read from disk will be added again
            self.readers.clear()
        self.readers.add(reader)

    def wait(self, request: Request) -> bool:
        """Queue a request; the caller schedules a tick.

        Returns:
            False if too many requests wait already. The caller should answer the request.
        """
        if len(self._line) >= MAX_WAITING_REQUESTS:
            return False
        self._line.append(request)
        return True

    def __len__(self) -> int:
        return len(self._line)

    def serve_some(self) -> bool:
        """Serve the requests that are due after a tick. Return whether others must wait for another tick."""
        line = self._line
        if not line:
            return False
        at, now, end = self._cpu_s(), self._now_s(), self._log_end()
        self._saved_s = min(self._saved_s + self._part * (at - self._left_at), MAX_SAVED_S)
        sends = end != self._end
        if sends:
            self._end, self._sent_at = end, now
            most = len(line)
        else:
            most = 1 if now - self._sent_at < CALM_S else self._at_once
        self._begun |= self._saved_s >= MIN_SAVED_S
        while line and most > 0 and (self._begun or not sends):
            most -= 1
            self._serve(line.popleft())
            before, at = at, self._cpu_s()
            self._saved_s -= at - before
            self._begun &= self._saved_s > 0
        self._saved_s = max(self._saved_s, -MAX_OWED_S)
        self._left_at = at
        return bool(line)

    def serve_all(self) -> None:
        """Serve all waiting requests, because the broker stops."""
        while self._line:
            self._serve(self._line.popleft())
