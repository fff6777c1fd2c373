"""Values that pages show. A value is requested once for all open pages, and only while a page shows it.

A feed requests one value periodically, and all pages that show the value share the feed. Requests begin when
the first page watches the feed and end when the last page is closed; only one request is in progress at a
time. After a failed request, the feed keeps its last value and adds the error, so that a page can distinguish
"unavailable" from "none".
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, Generic, TypeVar

from cometmq import logs
from cometmq.errors import CometError

log = logs.logger(__name__)

T = TypeVar("T")

MAX_FEEDS = 256
"""Maximum number of feeds that are kept in memory although no page watches them."""
FRESH_SHARE = 0.5
"""The age, as a share of the feed's interval, at which a value is too old for a page that becomes visible.

Such a page requests a new value. If the latest value is not as old, the page shows that value.
"""
PAUSE_S, PAUSE_SHARE = 0.5, 0.1
"""Minimum pause between two requests: PAUSE_S, or PAUSE_SHARE of the interval if that is shorter."""
TOPS, MAX_TOPS_KEPT = 5, 20
"""The limits for the topics or groups with the largest values (Tops).

TOPS is the number of lines in their chart, and MAX_TOPS_KEPT is the maximum number of names whose past values
are kept.
"""


@dataclass(frozen=True)
class Reading(Generic[T]):
    """The state of a feed.

    Attributes:
        value: The latest value; None before the first one.
        at_s: Wall-clock time of the latest value; 0.0 before the first one.
        problem: The error of the last request, if that request failed.
    """

    value: T | None = None
    at_s: float = 0.0
    problem: Exception | None = None

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.at_s)


class Feed(Generic[T]):
    """A value that the function `ask` requests every `interval_s` seconds while a page watches the feed."""

    def __init__(self, ask: Callable[[], Awaitable[T]], interval_s: float) -> None:
        self._ask = ask
        self.interval_s = interval_s
        self.latest: Reading[T] = Reading()
        self._watchers: dict[object, Callable[[Reading[T]], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._refresh_now = asyncio.Event()
        self._asking = asyncio.Lock()

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def watch(self, on_reading: Callable[[Reading[T]], None]) -> Callable[[], None]:
        """Call `on_reading` with the feed's state after each request.

        Return a function that ends these calls.
        """
        key = object()
        self._watchers[key] = on_reading
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll())

        def end() -> None:
            self._watchers.pop(key, None)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

        return end

    async def first(self, timeout_s: float) -> Reading[T]:
        """Return the state of the feed.

        If no request has ended yet, wait for the first one, at most `timeout_s` seconds.
        """
        if self.latest.at_s or self.latest.problem:
            return self.latest
        received = asyncio.Event()
        end = self.watch(lambda _reading: received.set())
        try:
            await asyncio.wait_for(received.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            # The caller's page begins to watch the feed shortly after this call. The watch above continues
            # until then, because a feed without a watch stops, and would request the value a second time.
            asyncio.get_running_loop().call_later(1.0, end)
        return self.latest

    def refresh(self) -> None:
        """Request the value now, if a page watches it. Called after an action has changed the cluster."""
        self._refresh_now.set()

    async def fresh(self) -> Reading[T]:
        """Request the value now and return the feed's new state.

        All watching pages receive the state, too.
        """
        async with self._asking:
            await self._ask_once()
        return self.latest

    async def _poll(self) -> None:
        known = self.latest
        if known.at_s and not known.problem and known.age_s < self.interval_s * FRESH_SHARE:
            await self._wait(self.interval_s - known.age_s)
        while True:
            await self.fresh()
            # The pause limits the requests of a user who refreshes repeatedly.
            pause_s = min(PAUSE_S, self.interval_s * PAUSE_SHARE)
            await asyncio.sleep(pause_s)
            await self._wait(self.interval_s - pause_s)

    async def _wait(self, span_s: float) -> None:
        try:
            await asyncio.wait_for(self._refresh_now.wait(), span_s)
        except TimeoutError:
            pass
        self._refresh_now.clear()

    async def _ask_once(self) -> None:
        try:
            self.latest = Reading(await self._ask(), time.time())
        except Exception as error:
            if not isinstance(error, CometError):
                log.exception("reading data for a page failed")
            self.latest = Reading(self.latest.value, self.latest.at_s, error)
        for on_reading in list(self._watchers.values()):
            try:
                on_reading(self.latest)
            except Exception:
                log.exception("a page could not be redrawn")


class Feeds:
    """All feeds by key: `feeds.feed(("topic", name), ask, 5.0)` is the same feed for all pages of a topic."""

    def __init__(self) -> None:
        self._feeds: dict[Hashable, Feed[Any]] = {}

    def feed(self, key: Hashable, ask: Callable[[], Awaitable[T]], interval_s: float) -> Feed[T]:
        """Return the feed with a key. If it does not exist, create it with `ask`."""
        found: Feed[T] | None = self._feeds.pop(key, None)
        if found is None:
            found = Feed(ask, interval_s)
        self._feeds[key] = found  # the least recently used feeds are first and are removed first
        if len(self._feeds) > MAX_FEEDS:
            unwatched = (each for each, feed in self._feeds.items() if not feed.watched and feed is not found)
            if (oldest := next(unwatched, None)) is not None:
                del self._feeds[oldest]
        return found

    def __len__(self) -> int:
        return len(self._feeds)

    def refresh(self, *keys: Hashable) -> None:
        """Request the values of the feeds with these keys now. Keys without a feed are ignored."""
        for key in keys:
            if (feed := self._feeds.get(key)) is not None:
                feed.refresh()

    @property
    def watched(self) -> int:
        """The number of feeds that are watched by a page."""
        return sum(feed.watched for feed in self._feeds.values())


class Ring:
    """The last `size` values of one number with their times, at most one value per `step_s` seconds."""

    def __init__(self, size: int, step_s: float) -> None:
        self._size = size
        self._step_s = step_s
        self._times = array("d")
        self._values = array("d")

    def add(self, at_s: float, value: float) -> None:
        """Add a value.

        If the latest stored value is less than `step_s` younger than the value before it, the new value
        replaces the latest one.
        """
        if self._times and at_s - self._times[-1] < 0:
            return  # The clock was set back, so the value is dropped.
        if len(self._times) > 1 and self._times[-1] - self._times[-2] < self._step_s:
            del self._times[-1], self._values[-1]
        self._times.append(at_s)
        self._values.append(value)
        if len(self._times) > self._size:
            del self._times[0], self._values[0]

    def points(self, gap_s: float) -> list[tuple[float, float | None]]:
        """Return all values with their times.

        Between two values that are more than `gap_s` apart, the result contains a None.
        """
        points: list[tuple[float, float | None]] = []
        for at_s, value in zip(self._times, self._values, strict=True):
            if points and at_s - points[-1][0] > gap_s:
                points.append((points[-1][0] + gap_s / 2, None))
            points.append((at_s, value))
        return points

    def __len__(self) -> int:
        return len(self._times)


class Tops:
    """The past values of the topics or groups that have, or recently had, the largest values.

    The past values of a name are kept from the moment at which its value is among the TOPS largest. At most
    MAX_TOPS_KEPT names are kept. Each name has a `Ring` with the given `size` and `step_s`.
    """

    def __init__(self, size: int, step_s: float) -> None:
        self._size, self._step_s = size, step_s
        self._rings: dict[str, Ring] = {}

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        """Add the values of all names at one time. A name with a history but without a value gets 0."""
        largest = nlargest(
            TOPS, (name for name, value in values.items() if value > 0), key=values.__getitem__
        )
        # Move these names to the end of the dict, because surplus names are removed from its start.
        for name in reversed(largest):
            self._rings[name] = self._rings.pop(name, Ring(self._size, self._step_s))
        for name in list(self._rings)[:-MAX_TOPS_KEPT]:
            del self._rings[name]
        for name, ring in self._rings.items():
            ring.add(at_s, values.get(name, 0.0))

    @property
    def largest(self) -> dict[str, Ring]:
        """Return the past values of up to `TOPS` names, the name with the largest latest value first."""
        return dict(list(reversed(self._rings.items()))[:TOPS])
