"""kombu's own integration tests with CometMQ, as kombu's `t/integration/test_redis.py` runs them with Redis.

`test_own_suites.py` copies this module into kombu's source distribution.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress

import kombu
import pytest

import cometmq.integrations.kombu  # noqa: F401 - registers the URL scheme

from .common import BaseExchangeTypes, BaseMessage, BasePriority, BasicFunctionality


@pytest.fixture
def invalid_connection():
    return kombu.Connection("cometmq://127.0.0.1:1")


class Draining(kombu.Connection):
    """Delivers all messages in one call, like RabbitMQ's transport. CometMQ's transport delivers one."""

    def drain_events(self, **kwargs):
        super().drain_events(**kwargs)
        with suppress(TimeoutError):
            while True:
                super().drain_events(timeout=0.3)


@pytest.fixture
def connection():
    with kombu.Connection(os.environ["TEST_BROKER"]) as opened:
        yield opened


class TestBasicFunctionality(BasicFunctionality):
    pass


class TestExchangeTypes(BaseExchangeTypes):
    pass


class TestPriority(BasePriority):
    test_simple_buffer_publish_consume = None  # auto_delete queues have no priorities

    @pytest.fixture
    def connection(self):
        with Draining(os.environ["TEST_BROKER"]) as opened:
            yield opened


class TestMessage(BaseMessage):
    """A message that is requeued is delivered again within a second, not at once."""

    @pytest.mark.parametrize("requeue", ["requeue", "reject"])
    def test_requeue(self, connection, requeue):
        with closing(connection.SimpleQueue("test_requeue")) as queue:
            queue.put({"Hello": "World"})
            message = queue.get(timeout=10)
            message.requeue() if requeue == "requeue" else message.reject(requeue=True)
            again = queue.get(timeout=10)
            assert again.body == message.body
            again.ack()

    test_reject_requeue = None
