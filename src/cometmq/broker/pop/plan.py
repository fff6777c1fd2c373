"""The queues from which a pop reads, in the order in which it reads them.

A pop begins with a random queue of its topic. The group's retry topic comes first in a share of the pops and
last in the others. In a topic of type PRIORITY, the queue id is the priority of its messages: pops read the
highest queue first. The retry topic of such a topic has as many queues, so that a retry keeps its priority.
Each of its queues is read directly before or after the queue with the same id.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from cometmq.broker.base.attributes import has_priorities
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.pop import TopicKind

RETRY_FIRST = 0.2
"""The share of pops that read from the retry topic first, as in Apache's broker."""
PRIORITY_FACTOR = "priority.factor"
"""The attribute of a group with the percentage of its pops that read the highest priority first."""


class Place(NamedTuple):
    """A queue from which a pop reads."""

    kind: TopicKind
    topic: str
    queue_id: int


def plan(
    topics: Mapping[str, TopicConfig],
    settings: SubscriptionGroupConfig | None,
    group: str,
    topic: str,
    queue_id: int,
    ordered: bool,
) -> deque[Place]:
    """Return the queues of a pop.

    Args:
        topics: All topics.
        settings: The settings of the group.
        group: The group.
        topic: The topic.
        queue_id: The queue, or -1 for all queues of the topic.
        ordered: Whether the pop is ordered. Ordered pops read no retry topics.
    """
    places: list[Place] = []
    known = topics.get(topic)
    if queue_id >= 0:
        places.append(Place(TopicKind.NORMAL, topic, queue_id))
    elif known is not None and (count := known.read_queue_nums) > 0:
        first = random.randrange(count)
        places += [Place(TopicKind.NORMAL, topic, (first + each) % count) for each in range(count)]
    if ordered:
        return deque(places)
    retries = [
        (kind, name, retry.read_queue_nums)
        for kind in (TopicKind.RETRY_V1, TopicKind.RETRY_V2)
        if (retry := topics.get(name := kind.topic(topic, group))) is not None
    ]
    if retries:
        kind, name, count = retries[0] if len(retries) == 1 else random.choice(retries)
        several = [Place(kind, name, each) for each in range(count)]
        places = several + places if random.random() < RETRY_FIRST else places + several
    if known is not None and has_priorities(known) and random.randrange(100) < _factor(settings):
        places.sort(key=lambda place: place.queue_id, reverse=True)  # Keeps the order of equal queue ids
    return deque(places)


def _factor(settings: SubscriptionGroupConfig | None) -> int:
    """Return the percentage of a group's pops that read the highest priority first."""
    text = ((settings and settings.attributes) or {}).get(PRIORITY_FACTOR, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 100
