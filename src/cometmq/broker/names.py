"""Topic names as the broker checks them, in Apache's words (storage.md 12.2)."""

from __future__ import annotations

import re

from cometmq.broker import compat
from cometmq.remoting import CommandError

TOPIC_MAX_LENGTH = 127
_allowed = re.compile(r"[%|a-zA-Z0-9_-]+").fullmatch


def check_topic(topic: str | None, version: int) -> str:
    """The name, if it may be a topic's. Raises CommandError with 1, or 29 for requests of 5.x."""
    if topic is None or not topic.strip():
        problem = "The specified topic is blank."
    elif _allowed(topic) is None:
        problem = "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    elif len(topic) > TOPIC_MAX_LENGTH:
        problem = "The specified topic is longer than topic max length."
    else:
        return topic
    raise CommandError(compat.invalid_parameter(version), problem)
