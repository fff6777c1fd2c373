"""Pops that wait for messages: their table, and the server that parks and wakes them.

A pop that found nothing is parked under its group, topic and queue id (-1 for all queues). A new message in
the topic, or in the group's retry topic, wakes the pop of each group that has waited longest. After a pop has
been served, and if there is more to read, its server wakes the next one. So no more pops wake than needed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from cometmq import logs
from cometmq.broker.base.deadlines import DeadlineTimer
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms
from cometmq.broker.pop.expiry import LeaseExpiry
from cometmq.broker.pop.leases import Leases, QueueKey
from cometmq.broker.pop.retries import Retries
from cometmq.broker.pull.checks import Wanted
from cometmq.broker.pull.long_poll import ParkedTable, remove
from cometmq.broker.rates.rate_limits import Amount, RateLimit, RateLimits, count_one
from cometmq.periodic import Tasks
from cometmq.protocol.codes import ResponseCode
from cometmq.remoting import Connection, Tick
from cometmq.store import Arrivals, Buffer, Clock, MessageStore, tag_matches

FOUND = int(ResponseCode.SUCCESS)
POLLING_FULL = int(ResponseCode.POLLING_FULL)
POLLING_TIMEOUT = int(ResponseCode.POLLING_TIMEOUT)
WOKEN_PER_TICK = 64
MAX_PER_KEY = 1_024
"""The maximum number of pops that are parked under one group, topic and queue id."""
MAX_PARKED = 100_000
"""The maximum number of parked pops of a broker."""
MAX_HOLD_MS = 60_000
"""The maximum time, in ms, for which a pop is parked."""
TAGS_PER_POP = 16
"""A pop counts as one more pop towards MAX_PARKED for each TAGS_PER_POP tags of its filter."""
THROTTLED = -2
"""The queue id in the key of a pop that waits because of a rate limit: only its deadline wakes it."""
_MAX_FILTERS_TRIED = 4  # Number of parked pops of one group whose filters are compared with a new message


class PollKey(NamedTuple):
    """What a parked pop waits for: messages for a group in a topic's queue, or in any queue (-1)."""

    group: str
    topic: str
    queue_id: int


_NOTHING = PollKey("", "", -1)


@dataclass(slots=True, eq=False, kw_only=True)
class CheckedPop:
    """The part of a checked pop that all kinds of pops have.

    Attributes:
        owner: The connection.
        opaque: The number of the request on its connection, by which the owner can withdraw the pop.
        answer: Is called once, with the request and a response code.
        wanted: The filter. It is set before the request is served.
        key: What the pop waits for while it is parked.
        topics: The topics whose messages wake the pop.
        until_ms: The deadline of the wait, by the clock of the event loop; -1 before the pop is parked.
        pop_ms: The wall-clock time at which the pop was served last.
        account: The access key of the sender ("": none).
        limits: The rate limits that applied when the pop was last served. They may reduce `count`.
        asked: The `count` of the request, once a limit applies.
    """

    owner: Connection
    opaque: int
    group: str
    answer: Callable[[Any, int], None]
    count: int = 1
    invisible_ms: int = 0
    poll_ms: int = 0
    attempt_id: str = ""
    wanted: Wanted = None
    key: PollKey = _NOTHING
    topics: tuple[str, ...] = ()
    bucket: int = 0
    until_ms: int = -1
    pop_ms: int = 0
    account: str = ""
    limits: Sequence[RateLimit] = ()
    asked: int = 0

    @property
    def weight(self) -> int:
        """The number of pops as which this one counts towards MAX_PARKED."""
        return 1 + (len(self.wanted) // TAGS_PER_POP if isinstance(self.wanted, frozenset) else 0)


P = TypeVar("P", bound=CheckedPop)


class Polls(ParkedTable[P]):
    """All parked pops of a broker, or all of those from lite topics."""

    def __init__(self, watch: Callable[[str, str], None]) -> None:
        """Create an empty table.

        `watch` is called with each topic whose messages must be reported, and with the topic of the pop. The
        two differ if the first one is a retry topic.
        """
        super().__init__(MAX_HOLD_MS)
        self._watch = watch
        self._keys: dict[PollKey, dict[P, None]] = {}
        self._by_topic: dict[str, dict[PollKey, None]] = {}
        # All topics of a key's parked pops. Those of an ordered pop are the first ones of another pop.
        self._topics: dict[PollKey, tuple[str, ...]] = {}
        self._numbered: dict[tuple[object, int], P] = {}  # By owner and number of the request
        self._weight = 0

    def count(self, key: PollKey) -> int:
        """Return the number of pops that are parked under a key."""
        return len(self._keys.get(key, ()))

    def waits_for(self, topic: str) -> bool:
        """Return whether any parked pop waits for messages of a topic."""
        return topic in self._by_topic

    def has_room(self, key: PollKey) -> bool:
        """Return whether one more pop can be parked under a key."""
        return self._weight < MAX_PARKED and self.count(key) < MAX_PER_KEY

    def park(self, pop: P, now_ms: int, hold_ms: int) -> int:
        """Park a pop for `hold_ms`. Return the time in ms at which `expire` must be called for it."""
        for topic in pop.topics:
            self._by_topic.setdefault(topic, {})[pop.key] = None
            self._watch(topic, pop.key.topic)
        self._topics[pop.key] = max(self._topics.get(pop.key, ()), pop.topics, key=len)
        self._keys.setdefault(pop.key, {})[pop] = None
        self._numbered[pop.owner, pop.opaque] = pop
        self._weight += pop.weight
        return self._enter(pop, now_ms, hold_ms)

    def arrived(self, arrivals: Arrivals) -> list[P]:
        """Remove and return the pops that new messages wake: at most one of each key."""
        woken: dict[PollKey, P] = {}
        for topic, queue_id, _, tags_code, _ in arrivals:
            for key in self._by_topic.get(topic, ()):
                if key in woken or (key.queue_id not in (-1, queue_id) and topic == key.topic):
                    continue
                for tried, pop in enumerate(self._keys[key]):
                    wanted = pop.wanted
                    if not isinstance(wanted, frozenset) or tag_matches(wanted, tags_code):
                        woken[key] = pop
                        break
                    if tried == _MAX_FILTERS_TRIED:
                        break
        return self._unpark(list(woken.values()))

    def wake_group(self, group: str, topic: str, queue_id: int) -> list[P]:
        """Remove and return one pop of each key of a group that waits for a queue or, with -1, for any."""
        found = []
        for each in dict.fromkeys((-1, queue_id)):
            parked = self._keys.get(PollKey(group, topic, each))
            if parked:
                found.append(next(iter(parked)))
        return self._unpark(found)

    def withdraw(self, owner: object, opaque: int) -> list[P]:
        """Remove and return the pop with this owner and request number, if there is one."""
        pop = self._numbered.get((owner, opaque))
        return self._unpark([] if pop is None else [pop])

    def _unpark(self, found: list[P]) -> list[P]:
        for pop in found:
            self._weight -= pop.weight
            remove(self._keys, pop.key, pop)
            if self._numbered.get((pop.owner, pop.opaque)) is pop:
                del self._numbered[pop.owner, pop.opaque]
            if pop.key not in self._keys:
                for topic in self._topics.pop(pop.key):
                    remove(self._by_topic, topic, pop.key)
        return super()._unpark(found)


@dataclass(eq=False)
class PopServer(Generic[P]):
    """Parks pops that find nothing and serves them again: the common part of all kinds of pops.

    Its `end_tick` must run after that of the pulls.
    """

    clock: Clock
    store: MessageStore
    tick: Tick
    stats: Stats
    leases: Leases
    retries: Retries
    rates: RateLimits

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.polls = Polls[P](self._watch)
        self._ready: deque[P] = deque()
        self._tasks = Tasks()
        self._timer = DeadlineTimer(self._loop, self._expire_polls)
        self._stopping = False
        self._log_limit = logs.LogLimiter()
        self.expiry = LeaseExpiry(self.clock, self.leases, self.retries, self.freed)

    def serve(self, request: P) -> None:
        """Read messages for a pop, and answer or park it."""
        raise NotImplementedError

    def _watch(self, topic: str, origin: str) -> None:
        """Let the arrivals in a topic be reported (see `Polls`)."""

    def _throttled(self, request: P) -> bool:
        """Park a pop whose group or account has received enough for now. Return False if it may go on."""
        request.count = request.asked or request.count
        request.limits = limits = self.rates.of_receive(request.group, request.account)
        if not limits:
            return False
        request.asked = request.count
        most, limit, wait_ms = self.rates.allowance(limits, Amount(request.count, 1))
        request.count = most.messages
        if limit is None:
            return False
        count_one(self.rates.delayed_receives, request.group, limit)
        self._park(request, PollKey(request.group, "", THROTTLED), (), wait_ms)
        return True

    def _hold_tokens(self, request: P) -> Callable[[], None]:
        """Take the tokens of a pop that waits for the disk, as other pops must not receive the same ones.

        Return a function that gives them back. It must be called before the leased messages are counted.
        """
        held = Amount(request.count, 0)
        if not request.limits:
            return lambda: None
        self.rates.take(request.limits, held)
        return partial(self.rates.give_back, request.limits, held)

    def _count_leased(self, request: P, topic: str, count: int, records: Iterable[Buffer]) -> None:
        """Count messages that a pop has leased. `records` are theirs, in any division."""
        if request.limits:
            self.rates.take(request.limits, Amount(count, sum(map(len, records))))
        group = request.group
        self.stats.found += count
        self.stats.transferred += count
        self.stats.group_get[group, topic] = self.stats.group_get.get((group, topic), 0) + count
        self.expiry.arm()

    def _park(self, request: P, key: PollKey, topics: tuple[str, ...], longest_ms: int = MAX_HOLD_MS) -> None:
        now_ms = self._timer.now_ms()
        if request.until_ms < 0:
            request.until_ms = now_ms + request.poll_ms
        if request.until_ms <= now_ms or self._stopping:
            request.answer(request, POLLING_TIMEOUT)
        elif not self.polls.has_room(key):
            request.answer(request, POLLING_FULL)
        else:
            request.key, request.topics = key, topics
            hold_ms = min(request.until_ms - now_ms, longest_ms)
            self._timer.arm(self.polls.park(request, now_ms, hold_ms))

    def _expire_polls(self, now_ms: int) -> int | None:
        self.wake(self.polls.expire(now_ms))
        return self.polls.next_deadline()

    def wake(self, pops: Sequence[P]) -> None:
        """Serve parked pops at the end of this event-loop tick, or of later ones."""
        if pops:
            self._ready.extend(pops)
            self.tick.schedule()

    def withdraw(self, owner: Connection, opaque: int) -> None:
        """Answer the parked pop with this request number, because its client does not wait any more."""
        for pop in self.polls.withdraw(owner, opaque):
            pop.answer(pop, POLLING_TIMEOUT)

    # -- leases

    def freed(self, key: QueueKey) -> None:
        """Wake a pop that waits for a queue that was blocked by leases of an ordered pop."""
        raise NotImplementedError

    def ack(self, key: QueueKey, offset: int, pop_ms: int) -> bool:
        """Mark a message as consumed. Return False if it is not leased under this handle."""
        queue = self.leases.find(key)
        ordered = queue is not None and queue.ordered
        done = self.leases.ack(key, offset, pop_ms)
        if done and ordered and queue is not None and not queue.leases:
            self.freed(key)
        return done

    def renew(self, key: QueueKey, offset: int, pop_ms: int, invisible_ms: int, counts: bool = True) -> bool:
        """Let a lease expire `invisible_ms` from now (see `Leases.renew`)."""
        renewed = self.leases.renew(key, offset, pop_ms, mono_ms(self.clock), invisible_ms, counts)
        if renewed:
            self.expiry.arm()
        return renewed

    # -- start and stop

    def restart(self) -> None:
        """Forget all leases and accept pops, because this broker becomes the leader: others moved offsets."""
        self.leases.clear()
        self.leases.born_ms = self.clock.time_ms()
        self._stopping = False

    async def stop(self) -> None:
        """Answer all waiting pops and handle no further leases, because the broker stops to be a master."""
        self._stopping = True
        self.expiry.stop()
        self._timer.cancel()
        self.wake(self.polls.wake_all())
        while self._ready:
            self.serve(self._ready.popleft())
        await self._tasks.finish()

    def end_tick(self) -> None:
        """Serve woken pops, up to a limit per event-loop tick."""
        ready = self._ready
        for _ in range(min(len(ready), WOKEN_PER_TICK)):
            self.serve(ready.popleft())
        if ready:
            # Schedule the next tick via the event loop, because a running tick cannot schedule itself.
            self._loop.call_soon(self.tick.schedule)
