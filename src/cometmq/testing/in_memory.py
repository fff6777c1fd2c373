"""A real name server and broker for unit tests, with connections in memory instead of sockets.

Each test broker has a host address of 127.54.0.0/16 for which no socket is opened. While the broker runs,
servers and clients of this process that listen on or connect to its host are connected in memory
(`remoting/memory.py`). Code under test therefore needs only the address of the name server, as with any
other broker.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Self

from cometmq.client.cluster.decoding import decode_messages
from cometmq.errors import ClientStateError
from cometmq.message import MessageExt
from cometmq.protocol.codes import DEFAULT_BROKER_PORT, DEFAULT_NAMESRV_PORT
from cometmq.remoting import MemoryNetwork, Run, loop_in_thread, serving
from cometmq.standalone import Standalone
from cometmq.store import WAITING, MessageStore

_numbers = itertools.count()

# A test may block the event loop that it shares with the broker. The broker must not reject the sends that
# waited during that time.
PATIENT = {"waitTimeMillsInSendQueue": "60000"}


class TestBroker:
    """A name server and a broker in this process, without sockets, in a temporary directory.

    `async with` runs both in the test's event loop. `with` runs them in a thread, for the blocking classes of
    the client. The first message sent to a topic creates the topic.

    Args:
        settings: Broker settings by RocketMQ's keys, such as `{"autoCreateTopicEnable": "false"}`.

    Attributes:
        namesrv: Address ("host:port") of the name server, for clients in this process. It is valid before the
            start, too.
    """

    __test__ = False  # Without this attribute, pytest would collect the class as a test

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        number = next(_numbers)
        self._host = f"127.54.{number >> 8 & 0xFF}.{number & 0xFF}"
        self.namesrv = f"{self._host}:{DEFAULT_NAMESRV_PORT}"
        self._settings = {**PATIENT, **(settings or {})}
        self._cluster: Standalone | None = None
        self._run: Run | None = None  # Runs coroutines in the broker's thread; None without such a thread
        self._exits = AsyncExitStack()
        self._thread = ExitStack()

    def _enter(self, stack: ExitStack | AsyncExitStack) -> Standalone:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="cometmq-"))
        stack.enter_context(serving(self._host, MemoryNetwork(self._host)))
        self._cluster = Standalone(
            directory, DEFAULT_NAMESRV_PORT, DEFAULT_BROKER_PORT, settings=self._settings, host=self._host
        )
        return self._cluster

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._enter(stack))
            self._exits = stack.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._exits.aclose()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            cluster = self._enter(stack)
            self._run = stack.enter_context(loop_in_thread("cometmq-test-broker"))
            self._run(cluster.start())
            stack.callback(lambda run: run(cluster.stop()), self._run)
            self._thread = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.close()
        self._run = None

    def messages(self, topic: str) -> list[MessageExt]:
        """Return all messages that a topic stores now, ordered by queue and offset.

        Delayed messages and half messages are not included before their delivery or commit.

        Args:
            topic: Name of the topic. A topic that does not exist has no messages.

        Raises:
            ClientStateError: The broker is not running.
        """
        if self._cluster is None or self._cluster.broker is None:
            raise ClientStateError("the test broker is not running: use it in `async with` or `with`")
        broker = self._cluster.broker

        async def stored() -> list[MessageExt]:
            return _stored(broker.parts.store, topic, broker.config.broker_name)

        if self._run is not None:
            return self._run(stored())
        return _stored(broker.parts.store, topic, broker.config.broker_name)


def _stored(store: MessageStore, topic: str, broker_name: str) -> list[MessageExt]:
    found: list[MessageExt] = []
    for queue in sorted(store.queues.of_topic(topic), key=lambda queue: queue.queue_id):
        offset = queue.min_offset
        while offset < queue.max_offset:
            got = store.get_messages(topic, queue.queue_id, offset, 1024, bulk=True, reads=WAITING)
            for buffer in got.buffers:
                found += decode_messages(buffer, broker_name)
            offset = got.next_begin_offset
    return found
