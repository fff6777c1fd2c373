"""Queues that hold messages but cannot be read: the topic has fewer read queues now, or no read permission.

A broker refuses pulls from a queue whose number is not below the topic's `readQueueNums`, and a route does
not list such a queue. The messages are not lost: they become readable when the topic has enough read queues
again. Until then a reader must report them, because the rest of the topic would look complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from cometmq import logs
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.errors import NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import UnreadableError
from cometmq.pipeline.base.offsets import MAX_QUEUE_ID
from cometmq.pipeline.base.options import Topics
from cometmq.pipeline.base.plan import Bounds
from cometmq.pipeline.live.cluster import Cluster
from cometmq.protocol.bodies import QueueData
from cometmq.protocol.codes import Perm

log = logs.logger(__name__)

_PROBED = 16
"""Number of queue numbers that are probed together, beginning after the topic's last queue.

While one of the probed queues has messages, the next numbers are probed, too. Probing is necessary because no
request lists the former queues of a topic that had more queues earlier.
"""
_MAX_PROBES = 64  # Maximum number of probes in a row, which limits the probed queue numbers to 1,024

_LISTED = 10  # Maximum number of queues that an error or a log line lists


class UnreadableQueue(msgspec.Struct, frozen=True, order=True):
    """A queue that cannot be read, and the number of its unread messages."""

    topic: str
    broker_name: str
    queue_id: int
    messages: int

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    def __str__(self) -> str:
        return f"{self.topic} {self.broker_name}/{self.queue_id} ({self.messages})"


def is_unreadable(cluster: Cluster, queue: MessageQueue) -> bool:
    """Return whether the last known route has the queue's broker but does not permit reading the queue."""
    route = cluster.known_route(queue.topic)
    own = [item for item in route.data.queue_datas if item.broker_name == queue.broker_name] if route else []
    return bool(own) and queue.queue_id >= _readable_count(own[0])


def _readable_count(item: QueueData) -> int:
    return item.read_queue_nums if item.perm & Perm.READ else 0


def listed(found: Sequence[UnreadableQueue]) -> str:
    """Return a text for users: the number of unreadable messages, their queues, and the remedy."""
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return (
        f"{sum(item.messages for item in found)} messages lie in {len(found)} queues that cannot be read: "
        f"{', '.join(map(str, found[:_LISTED]))}{more}. The topic has fewer read queues than before, or no "
        "read permission; `mqadmin updateTopic -r` or `updateTopicPerm` gives them back"
    )


def check_readable(cluster: Cluster, topics: Topics, *, fail: bool, group: str | None = None) -> None:
    """Raise UnreadableError (or warn) for unread messages, with `group` those after its offsets."""
    finder = UnreadableQueues(cluster, topics)
    found = finder.find({})
    if found and group is not None:
        found = finder.find(cluster.committed(group, [item.queue for item in found]))
    if found and fail:
        raise UnreadableError(listed(found))
    if found:
        log.warning("%s. The messages of these queues are skipped", listed(found))


class UnreadableQueues:
    """A search for the unreadable queues of topics, once or repeatedly for a continuous job.

    With `ask`, missing routes are requested from the name servers, else their topics are omitted. With
    `lenient`, servers that do not respond are omitted, else their errors are raised after the timeout.
    """

    def __init__(self, cluster: Cluster, topics: Topics, *, ask: bool = True, lenient: bool = False) -> None:
        self._cluster, self._topics, self._ask, self._lenient = cluster, topics, ask, lenient
        # Numbers of readable and writable queues, by (topic, broker), when `find` last searched the broker
        # for queues that the route does not list
        self._probed: dict[tuple[str, str], tuple[int, int]] = {}
        # Queues that the topic's route does not list, but for which a broker has reported stored messages
        self._known: set[MessageQueue] = set()
        self._reported: list[MessageQueue] = []

    def find(self, read: Mapping[MessageQueue, int]) -> list[UnreadableQueue]:
        """Return the unreadable queues that have unread messages, sorted.

        `read` holds the offset at which reading would continue in each queue. In a queue that `read` does not
        contain, all messages are unread. Topics without a route are omitted. A queue that the topic's route
        does not list is found by a probe: a request to the broker for the offsets of a queue number above the
        listed ones. Each broker is probed once for a topic, and again when the number of the topic's queues
        on the broker changes.
        """
        topics = {queue.topic for queue in read if self._topics.includes(queue)}
        with suppress(*((RemotingError,) if self._lenient else ())):
            topics.update(self._cluster.names(self._topics, wait=False))
        counts: dict[tuple[str, str], tuple[int, int]] = {}
        unprobed: dict[tuple[str, str], int] = {}  # The next queue number to probe, by (topic, broker)
        readable: dict[tuple[str, str], int] = {}  # Number of readable queues by (topic, broker)
        wanted = {*read, *self._known}
        for topic in topics:
            for item in self._queue_datas(topic):
                place = (topic, item.broker_name)
                readable[place] = _readable_count(item)
                counts[place] = (readable[place], item.write_queue_nums)
                wanted.update(MessageQueue(*place, number) for number in range(*counts[place]))
                if self._probed.get(place) != counts[place]:
                    unprobed[place] = max(counts[place])
        held = self._bounds(wanted, readable)
        for _ in range(_MAX_PROBES):
            if not unprobed:
                break
            asked = [
                MessageQueue(*place, number)
                for place, first in unprobed.items()
                for number in range(first, first + _PROBED)
            ]
            found = self._bounds(asked, readable)
            used = {queue for queue, bounds in found.items() if bounds.maximum > 0}
            self._known |= used
            held |= found
            answered = {(queue.topic, queue.broker_name) for queue in found}
            self._probed |= {place: counts[place] for place in answered}
            places = {(queue.topic, queue.broker_name) for queue in used}
            unprobed = {place: first + _PROBED for place, first in unprobed.items() if place in places}
        return [
            UnreadableQueue(queue.topic, queue.broker_name, queue.queue_id, bounds.maximum - first)
            for queue, bounds in sorted(held.items())
            if (first := max(bounds.minimum, read.get(queue, 0))) < bounds.maximum
        ]

    def report(self, read: Mapping[MessageQueue, int], consequence: str) -> list[UnreadableQueue]:
        """Return the result of `find`. If it has changed, log a warning that ends with `consequence`."""
        found = self.find(read)
        queues = [item.queue for item in found]
        if queues and queues != self._reported:
            log.warning("%s. %s", listed(found), consequence)
        self._reported = queues
        return found

    def _queue_datas(self, topic: str) -> Sequence[QueueData]:
        route = self._cluster.known_route(topic)
        if route is None and self._ask:
            try:
                route = self._cluster.route(topic)
            except NoRouteError as error:
                if not self._lenient and isinstance(error, NameServersUnreachable):
                    raise
        if route is None:
            return ()
        return [item for item in route.data.queue_datas if not self._cluster.is_away(item.broker_name)]

    def _bounds(
        self, queues: Iterable[MessageQueue], readable: Mapping[tuple[str, str], int]
    ) -> dict[MessageQueue, Bounds]:
        """Return the first and the end offsets of the unreadable `queues`, from the brokers that respond."""
        asked = {
            queue
            for queue in filter(self._topics.includes, queues)
            if queue.queue_id >= readable.get((queue.topic, queue.broker_name), MAX_QUEUE_ID + 1)
        }
        return self._cluster.bounds(sorted(asked), missing_ok=self._lenient)
