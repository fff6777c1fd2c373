"""A pytest plugin for Celery's own integration tests: it registers the URL scheme and adapts redis-py."""

from __future__ import annotations

import redis
from kombu.transport import TRANSPORT_ALIASES

import cometmq.integrations.kombu  # noqa: F401 - registers the URL scheme

assert "cometmq" in TRANSPORT_ALIASES


class _Patient(redis.StrictRedis):
    """redis-py 8 has a response timeout of 5 s, but the tests wait for 10 s or more in one call."""

    def __init__(self, *args: object, socket_timeout: float | None = None, **kwargs: object) -> None:
        super().__init__(*args, socket_timeout=socket_timeout, **kwargs)  # type: ignore[arg-type]


redis.StrictRedis = _Patient  # type: ignore[misc]
