"""Idempotency keys in the memory of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cometmq.errors import BeingHandled

EXPIRY_S = 7 * 24 * 3600.0
"""The default lifetime of a key in seconds, longer than the three days for which brokers keep a message."""


class MemoryMarks:
    """Idempotency keys in the memory of this process, for plain and async handlers.

    A key is dropped after `expiry_s`, or when it is the oldest of more than `max_keys` keys. All keys are
    lost at the end of the process, so messages whose offset was not stored before a crash are processed
    again.

    Args:
        expiry_s: The lifetime of a key in seconds. Default: seven days.
        max_keys: The maximum number of keys.
    """

    def __init__(self, *, max_keys: int = 100_000, expiry_s: float = EXPIRY_S) -> None:
        self._max_keys = max_keys
        self._expiry_s = expiry_s
        self._lock = threading.Lock()
        self._under_way: set[tuple[str, str]] = set()
        self._done: dict[tuple[str, str], float] = {}
        """The time (time.monotonic) at which each key was stored, oldest first."""

    def once(self, scope: str, key: str, act: Callable[[Any], object]) -> bool:
        """Call `act(None)` unless the key is stored, as described in `Marks.once`."""
        with self._turn(scope, key) as first:
            if first:
                act(None)
        return first

    async def once_async(self, scope: str, key: str, act: Callable[[Any], Awaitable[object]]) -> bool:
        """Call and await `act(None)` unless the key is stored, as described in `Marks.once`."""
        with self._turn(scope, key) as first:
            if first:
                await act(None)
        return first

    @contextmanager
    def _turn(self, scope: str, key: str) -> Iterator[bool]:
        mark = (scope, key)
        with self._lock:
            self._forget_old()
            if mark in self._done:
                first = False
            elif mark in self._under_way:
                raise BeingHandled(key)
            else:
                first = True
                self._under_way.add(mark)
        if not first:
            yield False
            return
        try:
            yield True
        except BaseException:
            with self._lock:
                self._under_way.discard(mark)
            raise
        with self._lock:
            self._under_way.discard(mark)
            self._done[mark] = time.monotonic()

    def _forget_old(self) -> None:
        done = self._done
        before = time.monotonic() - self._expiry_s
        while done and (len(done) >= self._max_keys or next(iter(done.values())) < before):
            del done[next(iter(done))]
