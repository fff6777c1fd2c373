"""A limit on the CPU time of pulls that read old messages from the disk while producers send.

A consumer that reads from the disk pulls again as soon as it has its response, and a pull of 32 messages
costs as much CPU time as six sends. Without a limit, draining a few queues halves the rate of sends. So the
pulls of such a consumer wait until the responses of the event-loop tick have been sent. After a tick with
sends, the waiting pulls get a share of the CPU time that the event loop uses for all other work. Several
pulls are served together, because each response makes the client send the next request, which wakes the loop.
After a tick without sends, the CPU time of the waiting pulls has no limit. CPU time is measured rather than
elapsed time, because on a busy machine other programs delay sends and pulls alike.

A consumer is limited from its first read from the disk until it has nearly caught up, even if most of its
reads in between are served from memory because the system reads ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.protocol.codes import is_system_group

log = logs.logger(__name__)

Request = TypeVar("Request")
Reader = tuple[str, str, int]  # A reader: consumer group, topic and queue id

# The CPU time of pulls that read old messages, as a share of the CPU time of all other work. The share is
# small, because the I/O of these pulls costs as much CPU time again.
PART = 0.08
# While producers send, pulls of old messages are served in groups: they wait until their share of the CPU
# time has grown to this number of seconds.
MIN_SAVED_S = 0.0003
# A reader has nearly caught up if its last pull ended less than this many bytes before the end of the log.
NEAR = 64 << 20
MISS_S = 0.0003  # Extra CPU time, in s, of a pull that reads from the disk in a thread
MAX_SAVED_S = 0.001
MAX_OWED_S = 0.002
# An event-loop tick in which no message is stored usually serves several waiting pulls. It serves only one
# if a message was stored less than this many seconds ago.
CALM_S = 0.005
AT_ONCE = 16
MAX_READERS = MAX_WAITING_REQUESTS = 1 << 14
CHECK_S = 180.0
MAX_SLOW_READERS = 10_000  # Maximum number of readers whose lag is recorded


class Backlog(Generic[Request]):
    """The readers (group, topic and queue id) that read from the disk, and their waiting pull requests.

    All methods must be called in the event loop's thread.

    Args:
        serve: Answers a request. It must not raise.
        log_end: Returns a number that increases whenever a message is stored.
        now_s: Returns the time in seconds, on any clock.
        cpu_s: Returns the CPU time of this thread, in seconds.
        part: While producers send, these pulls may use this ratio of the CPU time of all other work.
        at_once: The maximum number of requests that an event-loop tick without sends serves.
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
        self._left_at = cpu_s()  # CPU time of this thread when `serve_some` last returned
        self._saved_s = 0.0  # CPU time, in s, that pulls may still use; negative if they have used too much
        # Whether pulls are served even while producers send: from the moment at which their allowed CPU time
        # has grown to MIN_SAVED_S until they have used it.
        self._begun = False

    def missed(self, reader: Reader) -> None:
        """Limit a reader's pulls from now on, because one of them has to read from the disk."""
        self._saved_s -= MISS_S
        if len(self.readers) >= MAX_READERS:  # Clear all readers; active ones are soon added again
            self.readers.clear()
        self.readers.add(reader)

    def wait(self, request: Request) -> bool:
        """Queue a request. If the request was queued, the caller must schedule an event-loop tick.

        Returns:
            False if too many requests are waiting, so the caller must serve the request itself.
        """
        if len(self._line) >= MAX_WAITING_REQUESTS:
            return False
        self._line.append(request)
        return True

    def __len__(self) -> int:
        return len(self._line)

    def serve_some(self) -> bool:
        """Serve waiting requests within the limit of CPU time. Return whether any are still waiting."""
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
        """Serve all waiting requests, because the broker is stopping."""
        while self._line:
            self._serve(self._line.popleft())


class SlowReaders(msgspec.Struct, eq=False):
    """Detects groups that are far behind the end of the log (docs/reference/storage.md, Slow readers).

    `consumerFallbehindThreshold` is a number of bytes between the end of a reader's last pull and the end of
    the log.
    """

    config: BrokerConfig
    groups: SubscriptionGroups
    _behind: dict[Reader, int] = msgspec.field(default_factory=dict)

    def record_lag(self, reader: Reader, behind: int) -> None:
        """Record a reader's lag: the number of bytes from the end of its last pull to the end of the log.

        A lag of at most `consumerFallbehindThreshold` is not recorded, and deletes an earlier record.
        """
        if behind <= self.config.consumer_fallbehind_threshold:
            self._behind.pop(reader, None)
        elif len(self._behind) < MAX_SLOW_READERS:
            self._behind[reader] = behind

    def check(self) -> None:
        """If `disableConsumeIfConsumerReadSlowly` is set, disable the groups that are too far behind.

        RocketMQ's own groups are exempt, because tools use them to read old messages.
        """
        behind, self._behind = self._behind, {}
        if not self.config.disable_consume_if_consumer_read_slowly:
            return
        for (group, topic, queue_id), size in behind.items():
            most = self.config.consumer_fallbehind_threshold
            if size > most and not is_system_group(group) and self.groups.disable_consume(group):
                log.warning(
                    "group %s disabled: its lag in topic %s queue %d is %d bytes, above "
                    "consumerFallbehindThreshold=%d. Set consumeEnable to enable it again",
                    group, topic, queue_id, size, most,
                )  # fmt: skip
