"""What pages show of a cluster, asked once for all who look at it, and never when nobody does.

A feed asks one question again and again: all pages that show its answer share it. It asks from the moment the
first page looks until the last has gone, and never twice at a time. Its answer says how old it is; a failure
leaves the last answer, with the reason why there is none newer: that is "unavailable", and not "none".
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

FEEDS_MAX = 256
"""Feeds that are kept though nobody looks: their answers and histories."""
FRESH = 0.5
"""The share of its interval for which an answer is not asked again when a page comes back."""

PAUSE_S, PAUSE = 0.5, 0.1
"""After an answer nothing is asked again for so long, and for no more than this share of the interval."""

TOPS, TOPS_KEPT = 5, 20
"""Lines of a chart of the largest, and names whose past is kept."""


@dataclass(frozen=True)
class Reading(Generic[T]):
    """An answer. value: None before the first; at_s: when it came, by the wall clock, 0.0 before the first;
    problem: why there is none newer."""

    value: T | None = None
    at_s: float = 0.0
    problem: Exception | None = None

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.at_s)


class Feed(Generic[T]):
    """One question. `ask` is awaited every `interval_s` seconds while somebody looks."""

    def __init__(self, ask: Callable[[], Awaitable[T]], interval_s: float) -> None:
        self._ask = ask
        self.interval_s = interval_s
        self.latest: Reading[T] = Reading()
        self._watchers: dict[object, Callable[[Reading[T]], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()
        self._asking = asyncio.Lock()

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def watch(self, told: Callable[[Reading[T]], None]) -> Callable[[], None]:
        """Have `told` called with each new reading; returns what ends that. The latest one is not told."""
        mark = object()
        self._watchers[mark] = told
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll())

        def end() -> None:
            self._watchers.pop(mark, None)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

        return end

    async def first(self, within_s: float) -> Reading[T]:
        """The latest reading; before the first one it is waited for, but not longer than this. For pages that
        are just drawn."""
        if self.latest.at_s or self.latest.problem:
            return self.latest
        came = asyncio.Event()
        end = self.watch(lambda _reading: came.set())
        try:
            await asyncio.wait_for(came.wait(), within_s)
        except TimeoutError:
            pass
        finally:
            # The page that waited looks on: without this the question would be asked anew for it.
            asyncio.get_running_loop().call_later(1.0, end)
        return self.latest

    def refresh(self) -> None:
        """Ask now, if somebody looks: something has been changed."""
        self._now.set()

    async def fresh(self) -> Reading[T]:
        """The answer of now, for what is to be changed. All who look are told, too."""
        async with self._asking:
            await self._ask_once()
        return self.latest

    async def _poll(self) -> None:
        known = self.latest
        if known.at_s and not known.problem and known.age_s < self.interval_s * FRESH:
            await self._wait(self.interval_s - known.age_s)
        while True:
            await self.fresh()
            # Whoever asks for it again and again does not have brokers asked without a pause.
            pause_s = min(PAUSE_S, self.interval_s * PAUSE)
            await asyncio.sleep(pause_s)
            await self._wait(self.interval_s - pause_s)

    async def _wait(self, span_s: float) -> None:
        try:
            await asyncio.wait_for(self._now.wait(), span_s)
        except TimeoutError:
            pass
        self._now.clear()

    async def _ask_once(self) -> None:
        try:
            self.latest = Reading(await self._ask(), time.time())
        except CometError as error:
            self.latest = Reading(self.latest.value, self.latest.at_s, error)
        except Exception as error:
            log.exception("a page's question failed")
            self.latest = Reading(self.latest.value, self.latest.at_s, error)
        for told in list(self._watchers.values()):
            try:
                told(self.latest)
            except Exception:
                log.exception("a page could not be drawn anew")


class Live:
    """All feeds, by key: `live.feed(("topic", name), ask, 5.0)` is the same feed for all pages of a topic."""

    def __init__(self) -> None:
        self._feeds: dict[Hashable, Feed[Any]] = {}

    def feed(self, key: Hashable, ask: Callable[[], Awaitable[T]], interval_s: float) -> Feed[T]:
        """The feed of a key, made with `ask` if there is none."""
        found: Feed[T] | None = self._feeds.pop(key, None)
        if found is None:
            found = Feed(ask, interval_s)
        self._feeds[key] = found  # the one last asked for is the last to go
        if len(self._feeds) > FEEDS_MAX:
            unwatched = (each for each, feed in self._feeds.items() if not feed.watched and feed is not found)
            if (oldest := next(unwatched, None)) is not None:
                del self._feeds[oldest]
        return found

    def __len__(self) -> int:
        return len(self._feeds)

    def refresh(self, *keys: Hashable) -> None:
        """Ask again what has been changed; keys that nobody looks at may be named."""
        for key in keys:
            if (feed := self._feeds.get(key)) is not None:
                feed.refresh()

    @property
    def watched(self) -> int:
        """How many feeds somebody looks at."""
        return sum(feed.watched for feed in self._feeds.values())


class Ring:
    """The last values of a number with their times, at most `size` of them, one each `step_s` at most."""

    def __init__(self, size: int, step_s: float) -> None:
        self._size = size
        self._step_s = step_s
        self._times = array("d")
        self._values = array("d")

    def add(self, at_s: float, value: float) -> None:
        """Note a value; one that comes too soon after the last takes its place."""
        if self._times and at_s - self._times[-1] < 0:
            return  # the clock was set back
        if len(self._times) > 1 and self._times[-1] - self._times[-2] < self._step_s:
            del self._times[-1], self._values[-1]
        self._times.append(at_s)
        self._values.append(value)
        if len(self._times) > self._size:
            del self._times[0], self._values[0]

    def points(self, gap_s: float) -> list[tuple[float, float | None]]:
        """All values with their times; None where nothing came for longer than `gap_s`: nobody looked
        then."""
        found: list[tuple[float, float | None]] = []
        for at_s, value in zip(self._times, self._values, strict=True):
            if found and at_s - found[-1][0] > gap_s:
                found.append((found[-1][0] + gap_s / 2, None))
            found.append((at_s, value))
        return found

    def __len__(self) -> int:
        return len(self._times)


class Tops:
    """The last values of the largest of many numbers, by name: of those that are among the TOPS largest, and
    of TOPS_KEPT names at most. size and step_s: as of Ring."""

    def __init__(self, size: int, step_s: float) -> None:
        self._size, self._step_s = size, step_s
        self._rings: dict[str, Ring] = {}

    def add(self, at_s: float, values: Mapping[str, float]) -> None:
        """Note the values of all names at a time; a name without one has 0."""
        largest = nlargest(
            TOPS, (name for name, value in values.items() if value > 0), key=values.__getitem__
        )
        for name in reversed(largest):  # the one that was among them last is the last to go
            self._rings[name] = self._rings.pop(name, Ring(self._size, self._step_s))
        for name in list(self._rings)[:-TOPS_KEPT]:
            del self._rings[name]
        for name, ring in self._rings.items():
            ring.add(at_s, values.get(name, 0.0))

    @property
    def largest(self) -> dict[str, Ring]:
        """The TOPS names that were among the largest last, the largest of now first."""
        return dict(list(reversed(self._rings.items()))[:TOPS])


class Rate:
    """How fast counters grow: the difference of two looks by the time between them."""

    def __init__(self) -> None:
        self._before: dict[Hashable, int] = {}
        self._at_s = 0.0

    def of(self, at_s: float, counters: dict[Hashable, int]) -> dict[Hashable, float]:
        """Key -> growth a second since the last look; nothing at the first look, and for new keys. A counter
        that has become smaller has begun anew."""
        span = at_s - self._at_s
        before, self._before, self._at_s = self._before, counters, at_s
        if not before or span <= 0:
            return {}
        return {key: max(0, count - before[key]) / span for key, count in counters.items() if key in before}
