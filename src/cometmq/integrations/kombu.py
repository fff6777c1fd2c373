"""The kombu transport, by which Celery and other users of kombu have CometMQ as their broker.

    import cometmq.integrations.kombu  # registers the URL scheme

    app = Celery("shop", broker="cometmq://127.0.0.1:9876")

The URL names a name server: `cometmq://ACCESS_KEY:SECRET_KEY@HOST:PORT/NAMESPACE`. Without the import, kombu
finds the transport by its path: `broker_transport = "cometmq.integrations.kombu:Transport"`. docs/celery.md
describes the transport options and the delivery guarantees.
"""

from __future__ import annotations

import os
import queue as queues
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.compat import _detect_environment as green_environment
from kombu.utils.json import dumps, loads

from cometmq import __version__, logs
from cometmq.client import ClientOptions
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import ClientStateError, CometError, ConfigError, NoRouteError, RemotingError
from cometmq.integrations.inbox import Inbox
from cometmq.integrations.session import Session, Settlement, topic_name
from cometmq.message import Message, MessageExt, MessageQueue
from cometmq.text import printable

log = logs.logger("cometmq.integrations.kombu")
T = TypeVar("T")

MAX_READY = 1000
"""The number of undelivered messages at which the reading of broadcast topics pauses."""
BROADCAST = "broadcast"
_CONNECT_S = 10.0
"""The timeout of a connection attempt, in seconds."""


_MAX_QUEUES = 5000
"""The maximum number of queues in `_offsets`. The queue that was declared longest ago is dropped."""

_Offsets = OrderedDict[str, dict[tuple[str, str], dict[MessageQueue, int]]]
_offsets: dict[tuple[str, str], _Offsets] = {}
"""The next offsets of broadcast topics, by name servers and namespace, then queue, then topic and tag.

All connections of the process share this table. Celery declares the queue of `rpc://` results on one
connection, and consumes it on another one, perhaps after the first result was published.
"""


class QoS(virtual.QoS):
    """Passes settlements to the channel, whose inbox holds the messages and the prefetch count."""

    restore_at_shutdown = False

    def append(self, message: virtual.Message, delivery_tag: str) -> None:
        """Do nothing, because the inbox already holds the message."""

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, Settlement.ACK)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.settle(delivery_tag, Settlement.REQUEUE if requeue else Settlement.DEAD)

    def restore_unacked(self) -> None:
        self.channel.connection.call_soon(self.channel.inbox.release)


class LeasingChannel(virtual.Channel):
    """A channel of kombu, with an inbox for the queues that it consumes."""

    QoS = QoS
    supports_fanout = True
    do_restore = False
    prepare_queue_arguments = staticmethod(to_rabbitmq_queue_arguments)
    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.no_ack: set[str] = set()
        self.inbox = connection.run(connection.inbox(self))

    def close(self) -> None:
        if not self.closed:
            self.connection.run_if_open(self.inbox.close)
        super().close()

    # -- declarations

    def _new_queue(
        self,
        queue: str,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        transport = self.connection
        if exclusive or auto_delete:
            transport.live.add(queue)
            self._watch(queue, "", topic_name(queue))
            return
        highest = min(int((arguments or {}).get("x-max-priority") or 0), self.max_priority)
        if highest > 0:
            transport.priorities[queue] = highest
        count = highest + 1 if highest > 0 else 0
        name = topic_name(queue)
        transport.run(transport.session.ensure_topic(name, queues=count, priorities=highest > 0))

    def _has_queue(self, queue: str, **_: Any) -> bool:
        session, topic = self.connection.session, topic_name(queue)
        known = queue in self.connection.live or topic in session.known
        return known or self.connection.run(session.exists(topic))

    def _queue_bind(self, exchange: str, routing_key: str, _pattern: str | None, queue: str) -> None:
        kind = self.typeof(exchange).type
        if queue in self.connection.live or kind == "fanout":
            self._watch(queue, exchange, topic_name(routing_key) if kind == "direct" else "*")

    def _watch(self, queue: str, exchange: str, tag: str) -> None:
        """Store the end offsets of an exchange's broadcast topic, at which a queue begins to read it."""
        transport = self.connection
        topic = topic_name(exchange, BROADCAST)
        known = transport.offsets.setdefault(queue, {})
        with suppress(KeyError):  # another thread has deleted the queue
            transport.offsets.move_to_end(queue)
            if len(transport.offsets) > _MAX_QUEUES:
                transport.offsets.popitem(last=False)
        if (topic, tag) not in known:
            known[topic, tag] = transport.run(transport.session.ends(topic))

    def _size(self, queue: str) -> int:
        transport = self.connection
        return 0 if queue in transport.live else transport.run(transport.session.size(topic_name(queue)))

    def _purge(self, queue: str) -> int:
        transport = self.connection
        return 0 if queue in transport.live else transport.run(transport.session.purge(queue))

    def _delete(self, queue: str, *_args: Any, **_kwargs: Any) -> None:
        """Delete the messages of a queue. Its topic remains."""
        if queue not in self.connection.live:
            self._purge(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        transport = self.connection
        if if_empty and self._size(queue):
            return
        super().queue_delete(queue, if_unused, **kwargs)
        transport.offsets.pop(queue, None)
        transport.priorities.pop(queue, None)
        transport.live.discard(queue)
        for exchange in self.state.exchanges.values():
            exchange["table"] = [each for each in exchange["table"] if each[2] != queue]

    # -- publishing

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Return text unchanged. Bytes are encoded in base64, because messages are JSON."""
        return (body, "utf-8") if isinstance(body, str) else super().encode_body(body, encoding)

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **_: Any) -> None:
        """Send a message to the queues of its exchange. If there are none, send it to the broadcast topic."""
        self._inplace_augment_message(message, exchange, routing_key)
        found = self._queues_of(exchange, routing_key)
        for queue in found:
            self._send(topic_name(queue), message, queue)
        if not found:
            topic = topic_name(exchange, BROADCAST)
            if topic not in self.connection.session.known:
                self.connection.run(self.connection.session.ensure_topic(topic, queues=1))
            self._send(topic, message, tag=topic_name(routing_key))

    def _queues_of(self, exchange: str, routing_key: str) -> list[str]:
        if not exchange:
            is_topic = routing_key not in self.connection.live and self._has_queue(routing_key)
            return [routing_key] if is_topic else []
        if exchange not in self.state.exchanges or self.typeof(exchange).type == "fanout":
            return []
        found = self.typeof(exchange).lookup(self.get_table(exchange), exchange, routing_key, None)
        return sorted(found - self.connection.live)

    def _send(self, topic: str, payload: dict[str, Any], queue: str = "", tag: str | None = None) -> None:
        headers = payload.get("headers") or {}
        task_id = headers.get("id")
        keys = (task_id,) if isinstance(task_id, str) and topic_name(task_id) == task_id else ()
        highest = self.connection.priorities.get(queue)
        priority = None if highest is None else min(self._get_message_priority(payload), highest)
        message = Message(topic, dumps(payload).encode(), tags=tag, keys=keys)
        due_ms = 0
        if queue and self.connection.client.transport_options.get("native_delayed_delivery", True):
            due_ms = _due_ms(headers.get("eta"))
        self.connection.run(self.connection.session.send(message, due_ms=due_ms, priority=priority))

    # -- consuming

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.connection.call_soon(self.inbox.set_limit, prefetch_count)

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        transport = self.connection
        transport.set_callback(queue, callback)
        if no_ack:
            self.no_ack.add(queue)
        if queue not in transport.live:
            transport.run(self.inbox.consume(queue))
        for tag, offsets in self._watched(queue):
            transport.call_soon(self.inbox.read, queue, offsets, tag, transport.has_room)

    def _watched(self, queue: str) -> Iterator[tuple[str, dict[MessageQueue, int]]]:
        """Yield the tag and the offsets of each broadcast topic from which a queue receives messages."""
        watched = self.connection.offsets.get(queue, {})
        for (topic, tag), offsets in list(watched.items()):
            if topic != topic_name("", BROADCAST) or len(watched) == 1:
                yield tag, offsets  # a queue with bindings does not also receive messages by its own name

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None:
            self.no_ack.discard(queue)
            self.connection.run_if_open(lambda: self.inbox.cancel(queue))

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> virtual.Message | None:
        if queue in self.connection.live:
            return self._get_broadcast(queue)
        found = self.connection.run(self.inbox.get(queue))
        if found is None:
            return None
        message = self.decode(queue, *found)
        if no_ack:
            self.settle(found[0], Settlement.ACK)
        return message

    def _get_broadcast(self, queue: str) -> virtual.Message | None:
        """Return the next broadcast message of a live queue, or None without waiting."""
        transport = self.connection
        for tag, offsets in self._watched(queue):
            while message := transport.run(transport.session.next_message(offsets, tag)):
                decoded = self.decode(queue, "", message)
                if decoded is not None:
                    return decoded
        return None

    def decode(self, queue: str, tag: str, message: MessageExt) -> virtual.Message | None:
        """Return the decoded message, or None. An invalid message becomes a dead letter."""
        try:
            payload = loads(message.body)
            properties = payload["properties"]
            info = properties["delivery_info"]
            exchange, routing_key = info["exchange"], info["routing_key"]
            if not (isinstance(exchange, str) and isinstance(routing_key, str)):
                raise TypeError("exchange and routing_key must be strings")
            properties["delivery_tag"] = tag
            info["redelivered"] = message.reconsume_times > 0
            decoded = self.Message(payload, channel=self)
        except Exception as error:  # any client can send any body to the topic
            text = "message %s of queue %s is not from kombu: %s"
            log.error(text, printable(message.msg_id), queue, printable(repr(error)))
            self.settle(tag, Settlement.DEAD)
            return None
        if tag or not exchange or exchange not in self.state.exchanges:
            return decoded
        bound = self.typeof(exchange).lookup(self.get_table(exchange), exchange, routing_key, None)
        return decoded if queue in bound else None

    def settle(self, tag: str, how: Settlement) -> None:
        if tag and not self.closed:
            self.connection.call_soon(self.inbox.settle, tag, how)


class Transport(virtual.Transport):
    """A connection of kombu: a session on the background event loop, and a queue of received messages."""

    Channel = LeasingChannel
    default_port = 9876
    driver_type = driver_name = "cometmq"
    connection_errors = recoverable_connection_errors = (
        *virtual.Transport.connection_errors,
        *(RemotingError, NoRouteError, ClientStateError, OSError),
    )
    channel_errors = (*virtual.Transport.channel_errors, CometError)
    recoverable_channel_errors = ()
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.live: set[str] = set()
        """The exclusive and auto_delete queues, which only this process uses. They have no topics."""
        self.offsets = _offsets.setdefault((str(self._namesrv()), client.virtual_host), OrderedDict())
        self.priorities: dict[str, int] = {}
        """The highest priority of each queue that has priorities."""
        self._thread: LoopThread | None = None
        self._ready: queues.SimpleQueue[tuple[LeasingChannel, str, str, MessageExt]] = queues.SimpleQueue()
        self._bell: tuple[socket.socket, socket.socket] | None = None
        """A socket pair for kombu's event loop. Its first end is readable while messages are ready."""
        self._hub: Any = None

    def driver_version(self) -> str:
        return __version__

    # -- life

    def establish_connection(self) -> Transport:
        if green_environment() != "default":
            expected = "prefork, threads or solo, because CometMQ's client uses threads"
            raise ConfigError("pool", green_environment(), expected)
        thread = LoopThread.acquire()
        try:
            self.session = thread.run(self._open(), _CONNECT_S)
        except BaseException:
            thread.release()
            raise
        self._thread = thread
        super().establish_connection()
        return self

    async def _open(self) -> Session:
        client, options = self.client, self.client.transport_options
        settings: dict[str, Any] = {"access_key": client.userid, "secret_key": client.password}
        if client.virtual_host and client.virtual_host != "/":
            settings["namespace"] = client.virtual_host.strip("/")
        if client.ssl:
            settings["tls"] = True
        settings |= options.get("client_options") or {}
        session = await Session.open(
            self._namesrv(),
            ClientOptions(**settings),
            visibility_s=float(options.get("visibility_timeout", 60.0)),
            cluster=options.get("cluster"),
            topic_queues=int(options.get("topic_queues", 4)),
        )
        try:
            # kombu pauses between attempts to connect, but not before it uses a connection again.
            await session.reach_master()
        except BaseException:
            await session.close()
            raise
        return session

    def _namesrv(self) -> Any:
        """Return the name servers: the option `namesrv`, else the URL's host, else None (the default)."""
        client = self.client
        host = f"[{client.hostname}]" if ":" in (client.hostname or "") else client.hostname
        of_url = f"{host}:{client.port or self.default_port}" if host else None
        return client.transport_options.get("namesrv") or of_url

    def close_connection(self, connection: Transport) -> None:
        try:
            super().close_connection(connection)
            self.run_if_open(lambda: self.session.close())
        finally:
            self._release()

    def _release(self) -> None:
        """Release the background thread and the socket pair."""
        thread, self._thread = self._thread, None
        if self._bell is not None:
            if self._hub is not None and thread is not None and thread.pid == os.getpid():
                self._hub.remove_reader(self._bell[0])
            for each in self._bell:
                each.close()
            self._bell = None
        if thread is not None:
            thread.release()

    def verify_connection(self, _connection: Transport) -> bool:
        return self._is_open()

    def _is_open(self) -> bool:
        """Return whether this process has the background thread. A forked child does not."""
        return self._thread is not None and self._thread.pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the session's event loop. Raises ClientStateError if it is closed."""
        if self._thread is None:
            work.close()
            raise ClientStateError("the connection to CometMQ is closed")
        return self._thread.run(work)

    def run_if_open(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._is_open():
            self.run(work())

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a call of a function on the session's event loop."""
        if self._is_open() and self._thread is not None:
            self._thread.loop.call_soon_threadsafe(function, *args)

    # -- messages

    async def inbox(self, channel: LeasingChannel) -> Inbox:
        def deliver(queue: str, tag: str, message: MessageExt) -> None:
            self._ready.put((channel, queue, tag, message))
            self._ring()

        return Inbox(self.session, deliver)

    def set_callback(self, queue: str, callback: Callable[[virtual.Message], object]) -> None:
        """Set the callback for a queue's messages. The callbacks of kombu's base class get raw payloads."""
        self._callbacks[queue] = callback

    def has_room(self) -> bool:
        return self._ready.qsize() < MAX_READY

    def drain_events(self, _connection: Transport, timeout: float | None = None) -> None:
        """Deliver one message. Raises TimeoutError if there is none within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                item = self._ready.get(timeout=left) if left is None or left > 0 else self._ready.get_nowait()
            except queues.Empty:
                raise TimeoutError("no message") from None
            if self._hand_over(*item):
                return

    def _hand_over(self, channel: LeasingChannel, queue: str, tag: str, message: MessageExt) -> bool:
        """Deliver a message, unless its queue is no longer consumed."""
        callback = self._callbacks.get(queue)
        if channel.closed or callback is None:
            channel.settle(tag, Settlement.RELEASE)
            return False
        if tag and not channel.inbox.take(tag):
            return False
        decoded = channel.decode(queue, tag, message)
        if decoded is None:
            return False
        if queue in channel.no_ack:
            channel.settle(tag, Settlement.ACK)
        try:
            callback(decoded)
        except Exception:
            channel.inbox.fail(tag)
            raise
        return True

    def register_with_event_loop(self, _connection: Transport, loop: Any) -> None:
        if self._bell is None:
            self._bell = socket.socketpair()
            for each in self._bell:
                each.setblocking(False)
        self._hub = loop
        loop.add_reader(self._bell[0], self._on_readable)
        self._ring()

    def unregister_from_event_loop(self, _connection: Transport, loop: Any) -> None:
        if self._bell is not None:
            loop.remove_reader(self._bell[0])

    def _ring(self) -> None:
        """Wake the event loop of kombu."""
        bell = self._bell
        if bell is not None:
            try:
                bell[1].send(b"\0")
            except OSError:
                pass  # its buffer is full of unread bytes, or the connection is being closed

    def _on_readable(self) -> None:
        assert self._bell is not None
        try:
            self._bell[0].recv(MAX_READY)
        except BlockingIOError:
            pass
        try:
            for _ in range(self._ready.qsize()):
                self.drain_events(self, timeout=0)
        except TimeoutError:
            pass  # the queues of the remaining messages are no longer consumed
        finally:
            if not self._ready.empty():
                self._ring()


def _due_ms(eta: object) -> int:
    """Return an ETA in ms since 1970, or 0 if it is missing, invalid or without a time zone."""
    try:
        due = datetime.fromisoformat(eta) if isinstance(eta, str) else None
    except ValueError:
        return 0
    return int(due.timestamp() * 1000) if due is not None and due.tzinfo is not None else 0


TRANSPORT_ALIASES.setdefault("cometmq", "cometmq.integrations.kombu:Transport")
