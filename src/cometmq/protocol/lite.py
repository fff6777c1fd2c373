"""Lite topics of 5.5: their names, and the attributes of their parent topics and consumer groups.

A lite topic belongs to a parent topic, in whose queues its messages are stored. It also is a queue of its
own, a light message queue (LMQ), with the name `%LMQ%$<parent>$<lite topic>`. Each of its records names this
queue and the message's offset in it, in the properties INNER_MULTI_DISPATCH and INNER_MULTI_QUEUE_OFFSET.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MESSAGE_TYPE = "message.type"
LITE = "LITE"
"""The message type of parent topics."""
EXPIRATION = "lite.topic.expiration"
"""Attribute of a parent: the minutes without a message after which a lite topic is removed; -1 for never."""
MAX_EXPIRATION_MINUTES = 43_200
BIND_TOPIC = "lite.bind.topic"
"""Attribute of a group: the parent topic whose lite topics the group consumes."""
SUB_MODEL = "lite.sub.model"
SUB_MODELS = ("Shared", "Exclusive")
CLIENT_QUOTA = "lite.sub.client.quota"
WILDCARD = "lite.sub.wildcard"
"""Attribute of a group: if it is present, each client receives from all lite topics of the parent."""
RESET_OFFSET_EXCLUSIVE = "lite.sub.reset.offset.exclusive"
RESET_OFFSET_UNSUBSCRIBE = "lite.sub.reset.offset.unsubscribe"
DEFAULT_CLIENT_QUOTA = 2_000
"""The maximum number of lite topics to which one client may subscribe, unless the group sets another."""
MAX_LITE_TOPIC_LENGTH = 64

LITE_TOPIC = b"__LITE_TOPIC"
DISPATCH = b"INNER_MULTI_DISPATCH"
QUEUE_OFFSET = b"INNER_MULTI_QUEUE_OFFSET"

_PREFIX = "%LMQ%$"
_LEGAL = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_lite_topic(name: str) -> bool:
    """Return whether a lite topic can have this name: 1 to 64 letters, digits, "-" and "_"."""
    return _LEGAL.fullmatch(name) is not None


def lmq_name(parent: str, lite_topic: str) -> str:
    """Return the name of a lite topic's queue."""
    return f"{_PREFIX}{parent}${lite_topic}"


def all_of(parent: str) -> str:
    """Return the name that stands for the queues of all lite topics of a parent, which begin with it."""
    return lmq_name(parent, "")


def all_with(lmq: str) -> str:
    """Return the name that stands for all lite topics of the same parent."""
    return lmq[: lmq.rindex("$") + 1]


def lmq_range(parent: str) -> tuple[str, str]:
    """Return two texts between which the queue names of all lite topics of a parent lie."""
    return f"{_PREFIX}{parent}$", f"{_PREFIX}{parent}%"


def lite_topic_of(lmq: str) -> str:
    """Return the lite topic of a queue name."""
    return lmq.rpartition("$")[2]


def parent_of(lmq: str) -> str:
    """Return the parent topic of a queue name."""
    return lmq.removeprefix(_PREFIX).rpartition("$")[0]


def expiration_minutes(attributes: Mapping[str, str] | None) -> int:
    """Return after how many minutes without a message a lite topic of a parent expires, or -1 for never."""
    text = (attributes or {}).get(EXPIRATION, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else -1


def is_lite_parent(attributes: Mapping[str, str] | None) -> bool:
    """Return whether a topic with these attributes has lite topics."""
    return (attributes or {}).get(MESSAGE_TYPE) == LITE


def bound_topic(attributes: Mapping[str, str] | None) -> str:
    """Return the parent topic whose lite topics a group consumes, or "" for an ordinary group."""
    return (attributes or {}).get(BIND_TOPIC, "")


def client_quota(attributes: Mapping[str, str] | None) -> int:
    """Return the maximum number of lite topics to which one client of a group may subscribe."""
    text = (attributes or {}).get(CLIENT_QUOTA, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else DEFAULT_CLIENT_QUOTA
