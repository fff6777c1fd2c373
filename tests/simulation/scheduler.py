"""A seeded event loop with simulated time, which determines the order of all events of a run.

It is a heap of (time, number, event). asyncio's tasks and futures run on it, so the same loop drives whole
brokers and clients, and cores without I/O. A run uses no thread, no socket and no clock of the machine: work
for threads is done in one step a little later, `network.py` makes the connections, and `patched_time`
replaces the clocks with the loop's time. So two runs of one seed are identical.

An event belongs to the process in whose context it was created (`OWNER`). Events of a killed process never
happen; events of a paused process happen when it resumes.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import socket
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
START_S = 1_700_000_000.0
"""Wall time at the beginning of a run."""
_EVENTS_MOST = 400_000
_EVENTS_A_LOOK = 16
"""Number of events between two checks of whether a run is done."""


class Stuck(AssertionError):
    """A run that did not end: no event is left, or there are far too many."""


class Process:
    """A process of the simulated cluster, on a host of its own. A restart creates a new object."""

    def __init__(self, scheduler: Scheduler, name: str, host: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.host = host
        self.alive = True
        self.wall_offset_s = 0.0
        """Offset of the host's wall clock, in seconds."""
        self._held: list[_Event] | None = None  # events kept while the process is paused
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)

    def pause(self) -> None:
        """Pause the process, as SIGSTOP does."""
        if self._held is None:
            self._held = []

    def resume(self) -> None:
        """Resume the process: events that were due in the meantime happen now."""
        held, self._held = self._held or [], None
        for event in held:
            self.scheduler.push(event)

    @property
    def paused(self) -> bool:
        return self._held is not None

    def kill(self) -> None:
        """Drop all events of the process from now on."""
        self.alive = False
        self._held = None

    def may_happen(self, event: _Event) -> bool:
        """Return whether an event of the process may happen now; a paused process keeps it."""
        if self._held is not None:
            self._held.append(event)
            return False
        return self.alive

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Create a task of this process."""
        return self.scheduler.create_task(work, context=self.context.copy())


OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


class _Event:
    """A callback at a point in time, in place of asyncio's handles."""

    __slots__ = ("args", "at", "callback", "dropped", "owner", "within")

    def __init__(self, at: float, callback: Any, args: Any, within: contextvars.Context) -> None:
        self.at = at
        self.callback = callback
        self.args = args
        self.within = within
        self.owner: Process | None = within.get(OWNER)
        self.dropped = False

    def cancel(self) -> None:
        self.dropped = True

    def cancelled(self) -> bool:
        return self.dropped

    def when(self) -> float:
        return self.at


class Scheduler(asyncio.AbstractEventLoop):
    """An event loop with simulated time in seconds from 0. `chance` supplies the run's random numbers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(f"run {seed}")
        self.now = 0.0
        self.events = 0
        self.digest = 0
        """Checksum of the times of all events so far; it is equal for two runs of one seed."""
        self.failures: list[BaseException] = []
        """Exceptions of callbacks and tasks that were never retrieved."""
        self.connections: Connections | None = None
        self._heap: list[tuple[float, int, _Event]] = []
        self._numbers = itertools.count()
        self._running = False
        # Tasks of killed processes are kept, since collecting them would run their `finally` blocks.
        self._tasks: list[asyncio.Task[Any]] = []

    # -- running

    def run_for(self, seconds: float) -> None:
        """Run all events that are due within the given seconds."""
        self.run_until(lambda: False, seconds)

    def run_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Run events until `done` returns true or the time is over; return whether `done` did."""
        end = self.now + seconds
        heap, pop = self._heap, heapq.heappop
        with self._current():
            while not done():
                for _ in range(_EVENTS_A_LOOK):
                    if not heap or heap[0][0] > end:
                        self.now = end
                        return done()
                    when, _, event = pop(heap)
                    if event.dropped:
                        continue
                    if when > self.now:
                        self.now = when
                    owner = event.owner
                    if owner is not None and not owner.may_happen(event):
                        continue
                    self.events += 1
                    self.digest = zlib.crc32(b"%d" % (when * 1e6), self.digest)
                    try:
                        event.within.run(event.callback, *event.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self.failures.append(error)
                if self.events > _EVENTS_MOST:
                    raise Stuck(f"seed {self.seed}: {self.events} events until {self.now:.3f} s")
        return True

    @contextmanager
    def _current(self) -> Iterator[None]:
        outside = asyncio.events._get_running_loop()  # noqa: SLF001 - what loops have for this
        asyncio.events._set_running_loop(self)  # noqa: SLF001
        self._running = True
        try:
            yield
        finally:
            self._running = False
            asyncio.events._set_running_loop(outside)  # noqa: SLF001

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 3600.0) -> T:
        """Run a coroutine and return its result. Raises Stuck if it takes longer than `seconds`."""
        with self._current():
            task = self.create_task(work)
        if not self.run_until(task.done, seconds):
            raise Stuck(f"seed {self.seed}: not done within {seconds:g} s")
        return task.result()

    def forget(self) -> None:
        """Release the objects of a finished run."""
        self.connections = None
        for each in (self._heap, self._tasks, self.failures):
            each.clear()

    def push(self, event: _Event) -> None:
        """Schedule an event for its time, or for now if that has passed."""
        heapq.heappush(self._heap, (max(event.at, self.now), next(self._numbers), event))

    # -- asyncio's loop

    def time(self) -> float:
        """Return the seconds since the beginning of the run."""
        return self.now

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        event = _Event(when, callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), event))
        return event

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        event = _Event(self.now, callback, args, contextvars.copy_context() if context is None else context)
        heapq.heappush(self._heap, (self.now, next(self._numbers), event))
        return event

    call_soon_threadsafe = call_soon

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: Any = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run the function of an executor in one step, a little later."""
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self.chance.uniform(0, 0.002), _work, future, func, args)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:  # type: ignore[override]
        """Return the host unchanged: all hosts are addresses."""
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port or 0))]

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        assert self.connections is not None
        return await self.connections.connect(factory, host, port)

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        assert self.connections is not None
        return self.connections.listen(factory, host, port)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if "exception" in context:
            self.failures.append(context["exception"])


class Connections(Protocol):
    """The interface that makes the connections of a run."""

    async def connect(self, factory: Any, host: str, port: int) -> tuple[Any, Any]: ...

    def listen(self, factory: Any, host: str, port: int) -> Any: ...


def _work(future: Any, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = func(*args)
    except Exception as error:  # the caller gets it, as from a thread
        future.set_exception(error)
    else:
        future.set_result(result)


class _Job(Future[Any]):
    """Work submitted to a pool. Waiting for the result executes it immediately."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._work: tuple[Callable[..., Any], tuple[Any, ...]] | None = (func, args)

    def do(self) -> None:
        """Execute the work unless it is done."""
        work, self._work = self._work, None
        if work is not None:
            _work(self, *work)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.do()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        self.do()
        return super().result(timeout)


class Pool:
    """A replacement for a ThreadPoolExecutor with one thread."""

    def __init__(self, scheduler: Scheduler, delay_s: Callable[[], float]) -> None:
        """`delay_s` returns the duration of a piece of work in seconds."""
        self._scheduler = scheduler
        self._delay_s = delay_s
        self._free_at = 0.0
        self._jobs: list[_Job] = []

    def submit(self, func: Callable[..., Any], *args: Any) -> Future[Any]:
        job = _Job(func, args)
        self._jobs = [each for each in self._jobs if not each.done()] + [job]
        self._free_at = max(self._free_at, self._scheduler.now) + self._delay_s()
        self._scheduler.call_at(self._free_at, job.do)
        return job

    def shutdown(self, wait: bool = True) -> None:
        """Execute all remaining work."""
        for job in self._jobs:
            job.do()


def wall_s(scheduler: Scheduler) -> float:
    """Return the wall time on the host of the running process."""
    owner = OWNER.get()
    return START_S + scheduler.now + (owner.wall_offset_s if owner is not None else 0.0)


@contextmanager
def patched_time(scheduler: Scheduler) -> Iterator[None]:
    """Replace the machine's clocks with the scheduler's time, and `random` with seeded numbers."""
    clocks: dict[str, Callable[..., float]] = {
        "time": lambda: wall_s(scheduler),
        "time_ns": lambda: int(wall_s(scheduler) * 1e9),
        "monotonic": lambda: 1000.0 + scheduler.now,
        "monotonic_ns": lambda: int((1000.0 + scheduler.now) * 1e9),
        "perf_counter": lambda: 1000.0 + scheduler.now,
        "clock_gettime": lambda _which: 1000.0 + scheduler.now,
    }
    before = {name: getattr(time, name) for name in clocks}
    state = random.getstate()
    random.seed(scheduler.seed)
    for name, clock in clocks.items():
        setattr(time, name, clock)
    try:
        yield
    finally:
        random.setstate(state)
        for name, was in before.items():
            setattr(time, name, was)
