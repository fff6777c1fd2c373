"""Readers that drain what is not in memory, and how much of the loop they get while messages are sent.

Such a reader asks again as soon as it is answered, and a pull of 32 costs the loop as much as six sends: left
alone, draining a few queues halves the rate of sends. So its pulls wait until the answers of the tick have
left. After a tick with sends they get a part of the CPU time that the loop spends on everything else, and
several are served at once, because every answer wakes the loop with the next request. After a tick without
sends the loop has nothing better to do. CPU time is what counts, because a busy machine takes the processor
away from both.

A reader counts as draining from its first miss until it has nearly caught up, however rarely it misses in
between: the system reads ahead of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")
Reader = tuple[str, str, int]  # group, topic, queue id

PART = 0.08  # of the CPU time of everything else; requests read and answers written cost as much again
LEAST_SAVED_S = 0.0003  # CPU time that is worth a beginning beside sends
NEAR = 64 << 20  # bytes of log before the reader at which it has nearly caught up
MISS_S = 0.0003  # CPU time that a miss costs beside the pull itself: a task, a thread, the second look
MOST_SAVED_S = 0.001
MOST_OWED_S = 0.002
CALM_S = 0.005  # without a send for so long, several are served in one tick
AT_ONCE = 16
MOST_READERS = MOST_WAITING = 1 << 14


class Backlog(Generic[Request]):
    """The readers and their waiting requests. Loop thread only.

    serve: answers a request, raises nothing. log_end: grows with every message that is sent. now_s: any
    clock. cpu_s: CPU seconds of this thread. part: of the CPU time of everything else, beside sends. at_once:
    served in one tick when there are none.
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
        self._left_at = cpu_s()  # when requests were served last
        self._saved_s = 0.0  # CPU time that they may use beside sends; below 0 they have used too much
        self._begun = False  # they may use what is saved

    def missed(self, reader: Reader) -> None:
        """What this reader asked for is not in memory: from now on its requests should wait."""
        self._saved_s -= MISS_S
        if len(self.readers) >= MOST_READERS:  # those who still miss will be here again
            self.readers.clear()
        self.readers.add(reader)

    def wait(self, request: Request) -> bool:
        """Serve this request when it is its turn; the caller sees to it that there is a tick. False: too many
        wait already, whoever sends so many should be kept busy with answers."""
        if len(self._line) >= MOST_WAITING:
            return False
        self._line.append(request)
        return True

    def __len__(self) -> int:
        return len(self._line)

    def serve_some(self) -> bool:
        """After a tick: serve those whose turn it is. True if others are left, for another tick."""
        line = self._line
        if not line:
            return False
        at, now, end = self._cpu_s(), self._now_s(), self._log_end()
        self._saved_s = min(self._saved_s + self._part * (at - self._left_at), MOST_SAVED_S)
        sends = end != self._end
        if sends:
            self._end, self._sent_at = end, now
            most = len(line)
        else:
            most = 1 if now - self._sent_at < CALM_S else self._at_once
        self._begun |= self._saved_s >= LEAST_SAVED_S
        while line and most > 0 and (self._begun or not sends):
            most -= 1
            self._serve(line.popleft())
            before, at = at, self._cpu_s()
            self._saved_s -= at - before
            self._begun &= self._saved_s > 0
        self._saved_s = max(self._saved_s, -MOST_OWED_S)
        self._left_at = at
        return bool(line)

    def serve_all(self) -> None:
        """Serve everything that waits: the broker stops."""
        while self._line:
            self._serve(self._line.popleft())
