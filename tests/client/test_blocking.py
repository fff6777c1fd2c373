"""The blocking clients: the same calls without an event loop, from many threads, and calls they refuse."""

from __future__ import annotations

import asyncio
import gc
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from cometmq import (
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageQueue,
    MessageStream,
    NoRouteError,
    OrderlyContext,
    OrderlyStatus,
    Producer,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    SyncMessageStream,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
    SyncTransactionProducer,
    TransactionProducer,
    reply_to,
    select_by_hash,
)
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import ClientStateError, CometError
from cometmq.testing import LocalBroker


def test_messages_sent_from_many_threads_are_consumed_in_threads(local: LocalBroker) -> None:
    sent = [b"%d" % number for number in range(300)]
    received: list[bytes] = []
    complete = threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        received.extend(message.body for message in messages)
        if len(received) >= len(sent):
            complete.set()

    with SyncProducer("p", namesrv=local.namesrv) as producer, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda body: producer.send(Message("Threads", body)), sent))
        assert {result.queue for result in results} <= set(producer.queues("Threads"))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPushConsumer("g", listener, "Threads", namesrv=local.namesrv, options=options) as consumer:
        assert complete.wait(30)
        assert consumer.health().ok
        assert {queue.topic for queue in consumer.assignment} == {"Threads", "%RETRY%g"}
        consumer.persist_offsets()
    assert Counter(received) == Counter(sent)


def test_an_error_is_gone_with_its_handler(local: LocalBroker) -> None:
    """An error refers to the call's data, such as a body, and must be freed without the garbage collector."""
    nobody = MessageQueue("Errors", "nobody", 0)
    with (
        SyncProducer("p", namesrv=local.namesrv) as producer,
        SyncPullConsumer("g", namesrv=local.namesrv) as consumer,
    ):
        producer.send(Message("Errors", b"x"))
        calls: list[Callable[[], object]] = [
            lambda: producer.send(Message("Errors", b"")),
            lambda: producer.send(Message("Errors", b"x"), queue=nobody),
            lambda: producer.request(Message("Errors", b"x"), timeout_s=0.1),
            lambda: consumer.fetch_queues("Nowhere"),
            lambda: producer.recall("no handle"),
        ]
        gc.collect()
        gc.disable()
        try:
            for number, call in enumerate(calls):
                with pytest.raises(CometError) as caught:
                    call()
                error = weakref.ref(caught.value)
                del caught
                until = time.monotonic() + 10  # the loop's thread may still be leaving the call
                while error() is not None and time.monotonic() < until:
                    time.sleep(0.002)
                assert error() is None, number
        finally:
            gc.enable()


def test_a_plain_listener_gets_a_queue_in_order(local: LocalBroker) -> None:
    received: list[bytes] = []
    complete = threading.Event()

    def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
        (message,) = messages
        context.suspend_current_queue_s = 0.01
        if message.body == b"7" and message.reconsume_times < 2:
            return OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
        received.append(message.body)
        if len(received) == 50:
            complete.set()
        return OrderlyStatus.SUCCESS

    with SyncProducer("p", namesrv=local.namesrv) as producer:
        for number in range(50):
            producer.send(Message("InOrder", b"%d" % number), selector=select_by_hash, argument="k")
    options = PushOptions(orderly=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPushConsumer("g-order", listener, "InOrder", namesrv=local.namesrv, options=options):
        assert complete.wait(30)
    assert received == [b"%d" % number for number in range(50)]


def test_every_way_of_sending_and_pulling(local: LocalBroker) -> None:
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        first = producer.send(Message("Ways", b"0"), selector=select_by_hash, argument="one queue")
        producer.send_batch([Message("Ways", b"1"), Message("Ways", b"2")], queue=first.queue)
        producer.send_oneway(Message("Ways", b"3"), queue=first.queue)
        assert len(producer.send_many([Message("Ways", b"x")] * 10)) == 10
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPullConsumer("g-pull", namesrv=local.namesrv, options=options) as consumer:
        assert first.queue in consumer.fetch_queues("Ways")
        result = consumer.pull_blocking(first.queue, consumer.min_offset(first.queue))
        assert [message.body for message in result.messages][:4] == [b"0", b"1", b"2", b"3"]
        consumer.assign_topic("Ways")
        bodies = Counter(message.body for _, message in zip(range(14), consumer, strict=False))
        assert bodies == Counter({b"0": 1, b"1": 1, b"2": 1, b"3": 1, b"x": 10})
        consumer.seek_to_end(first.queue)
        consumer.seek_to_begin(first.queue)
        assert consumer.poll(10)[0].body == b"0"
        consumer.update_offset(first.queue, 2)
        consumer.commit()
        assert consumer.committed(first.queue) is not None


def test_requests_from_threads_get_their_replies(local: LocalBroker) -> None:
    with SyncProducer("p", namesrv=local.namesrv) as producer, ThreadPoolExecutor(4) as pool:
        producer.send(Message("Asked", b"makes the topic"))

        def listener(messages: list[MessageExt]) -> None:
            for message in messages:
                producer.send(reply_to(message, b"re: " + message.body))

        options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
        tags = {"Asked": "ask"}
        with SyncPushConsumer("g-asked", listener, tags, namesrv=local.namesrv, options=options):
            asked = [Message("Asked", b"%d" % number, tags="ask") for number in range(8)]
            replies = pool.map(lambda message: producer.request(message, timeout_s=20), asked)
            assert [reply.body for reply in replies] == [b"re: %d" % number for number in range(8)]


def test_errors_are_those_of_the_asyncio_classes(local: LocalBroker) -> None:
    with SyncPullConsumer("g", namesrv=local.namesrv) as consumer, pytest.raises(NoRouteError):
        consumer.fetch_queues("Nowhere")


def test_the_loop_ends_with_its_last_user(local: LocalBroker) -> None:
    with SyncProducer("p1", namesrv=local.namesrv), SyncProducer("p2", namesrv=local.namesrv):
        assert [thread.name for thread in threading.enumerate()].count("cometmq-loop") == 1
    assert "cometmq-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_face_that_is_not_started_says_so(local: LocalBroker) -> None:
    producer = SyncProducer("p", namesrv=local.namesrv)
    with pytest.raises(ClientStateError, match=r"is new: start\(\) it"):
        producer.send(Message("T", b"x"))
    with producer, pytest.raises(ClientStateError, match="is already started"):
        producer.start()
    producer.stop()


def test_a_probe_may_ask_before_the_start_and_after_the_stop(local: LocalBroker) -> None:
    faces = (
        SyncPushConsumer("probed", print, "T", namesrv=local.namesrv),
        SyncPullConsumer("probed", namesrv=local.namesrv),
        SyncMessageStream("probed", "T", namesrv=local.namesrv),
    )
    for face in faces:
        states = [face.health()]
        with face:
            states.append(face.health())
        states.append(face.health())
        assert [(each.state, each.group) for each in states] == [
            (state, "probed") for state in ("new", "running", "stopped")
        ]


def test_a_failed_start_leaves_no_thread(local: LocalBroker) -> None:
    with pytest.raises(ClientStateError):
        SyncPushConsumer("g", print, (), namesrv=local.namesrv).start()
    assert "cometmq-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_call_from_the_loop_itself_is_refused_instead_of_hanging() -> None:
    thread = LoopThread.acquire()

    async def inside() -> None:
        async def work() -> None: ...

        thread.run(work())

    try:
        with pytest.raises(ClientStateError, match="asyncio class"):
            thread.run(inside())
    finally:
        thread.release()


def _in_child(producer: SyncProducer, answers: multiprocessing.Queue[str]) -> None:
    try:
        producer.send(Message("Fork", b"x"))
    except ClientStateError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_client_used_after_a_fork_says_so(local: LocalBroker) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        child = context.Process(target=_in_child, args=(producer, answers))
        child.start()
        assert "before a fork" in answers.get(timeout=20)
        child.join(20)
        assert producer.send(Message("Fork", b"y"))


def numbered(local: LocalBroker, topic: str, count: int) -> MessageQueue:
    """Create a queue with the bodies 0, 1, ..."""
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        queue = producer.queues(topic)[0]
        for number in range(count):
            producer.send(Message(topic, b"%d" % number), queue=queue)
    return queue


def bodies_of(messages: Iterable[MessageExt]) -> list[int]:
    return [int(message.body) for message in messages]


def test_an_iteration_that_is_left_goes_on_where_it_was(local: LocalBroker) -> None:
    queue = numbered(local, "Left", 10)
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, pull_batch_size=4)
    with SyncPullConsumer("g-left", namesrv=local.namesrv, options=options) as consumer:
        consumer.assign([queue])
        got = bodies_of(islice(consumer, 2))
        # The message that was returned last may not have been processed yet, so it is not committed.
        assert consumer.committed(queue) == 1
        got += bodies_of(islice(consumer, 6))
        got += bodies_of(consumer.poll())
        assert got == list(range(10))
        abandoned = iter(consumer)
        consumer.seek(queue, 0)
        assert next(abandoned).body == b"0"
    abandoned.close()  # has no effect on a stopped consumer


LEAVES_AN_ITERATION = """
import sys
from cometmq import ConsumeFromWhere, PullOptions, SyncPullConsumer

options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
consumer = SyncPullConsumer("g-exit", namesrv=sys.argv[1], options=options)
consumer.start()
consumer.assign_topic("Exit")
messages = iter(consumer)
print(next(messages).body.decode())
"""


def test_a_program_ends_although_it_stops_neither_iteration_nor_consumer(local: LocalBroker) -> None:
    numbered(local, "Exit", 3)
    command = [sys.executable, "-c", LEAVES_AN_ITERATION, local.namesrv]
    ended = subprocess.run(command, timeout=30, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


def test_a_seek_within_an_iteration_holds_from_the_next_message_on(local: LocalBroker) -> None:
    queue = numbered(local, "Sought", 10)
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPullConsumer("g-seek", namesrv=local.namesrv, options=options) as consumer:
        consumer.assign([queue])
        got = []
        for message in consumer:
            got.append(int(message.body))
            if got == [0, 1]:
                consumer.seek(queue, 7)
            if len(got) == 5:
                break
    assert got == [0, 1, 7, 8, 9]


PAIRS = [
    (Producer, SyncProducer),
    (TransactionProducer, SyncTransactionProducer),
    (PushConsumer, SyncPushConsumer),
    (MessageStream, SyncMessageStream),
    (MessageStream, SyncMessageStream),
    (PullConsumer, SyncPullConsumer),
]
LOOP_ONLY = {
    "client",  # is an asyncio object
    "send_raw",
    "started",
    "message_model",
    "check",  # called for a broker's transaction check
    "topics",
}


def public(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class and its base classes."""
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("twin", "face"), PAIRS)
def test_each_face_has_what_its_twin_has(twin: type, face: type) -> None:
    ours, theirs = public(face), public(twin)
    futures = (
        {"send_async", "send_batch_async", "send_oneway_async"} if issubclass(face, SyncProducer) else set()
    )
    assert theirs.keys() - LOOP_ONLY == ours.keys() - futures
    for name, source in ((name, theirs[name]) for name in ours.keys() - futures):
        member = ours[name]
        if isinstance(source, property):
            assert isinstance(member, property), name
            declared = get_type_hints(face).get(name)
            kind = get_type_hints(member.fget)["return"] if declared is None else get_args(declared)[0]
            assert kind == get_type_hints(source.fget)["return"], name
        else:
            assert inspect.signature(member) == inspect.signature(source), name
            assert get_type_hints(member) == get_type_hints(source), name
            assert not inspect.iscoroutinefunction(member), name
        if name not in ("start", "stop"):
            assert inspect.getdoc(member) == inspect.getdoc(source), name
    made, expected = (inspect.signature(kind.__init__) for kind in (face, twin))  # type: ignore[misc]
    assert made.parameters.items() == expected.parameters.items() - {
        ("client", expected.parameters["client"])
    }
    assert hasattr(face, "__iter__") == hasattr(twin, "__aiter__")


def test_a_call_under_way_at_the_stop_ends_with_a_client_error(local: LocalBroker) -> None:
    """The call ends even if another client keeps the loop running and no response will ever arrive."""
    for keeper in (SyncProducer("keeper", namesrv=local.namesrv), None):
        if keeper is not None:
            keeper.start()
        consumer = SyncPullConsumer("g-under-way", namesrv=local.namesrv)
        consumer.start()
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(consumer.poll, None)
            time.sleep(0.2)
            consumer.stop()
            with pytest.raises(ClientStateError, match="stopp"):
                call.result(10)
        if keeper is not None:
            keeper.stop()


def test_a_call_on_a_thread_that_has_ended_is_refused() -> None:
    thread = LoopThread.acquire()
    thread.release()

    async def work() -> None: ...

    with pytest.raises(ClientStateError, match="is stopped"):
        thread.run(work())


def test_calls_beside_the_stop_say_that_it_stops(local: LocalBroker) -> None:
    said: list[str] = []

    def ask(consumer: SyncPullConsumer) -> None:
        try:
            while True:
                assert consumer.assignment == ()
        except ClientStateError as error:
            said.append(str(error))

    for _ in range(10):
        with ThreadPoolExecutor(3) as threads:
            with SyncPullConsumer("g-beside", namesrv=local.namesrv) as consumer:
                calls = [threads.submit(ask, consumer) for _ in range(3)]
                time.sleep(0.01)
            for call in calls:
                call.result(10)
    assert len(said) == 30
    assert not [text for text in said if "is running" in text]


class Interrupted:
    """A loop thread in which one call is interrupted just before the loop receives it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.armed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_soon_threadsafe(self, *args: Any) -> object:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return self._loop.call_soon_threadsafe(*args)


def test_an_interrupt_harms_one_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread.acquire()
    begun = []

    async def work() -> None:
        begun.append(1)

    try:
        monkeypatch.setattr(thread, "loop", Interrupted(thread.loop))
        with pytest.raises(KeyboardInterrupt):
            thread.run(work())
        thread.run(work(), timeout_s=10)
        assert begun == [1]
    finally:
        thread.release()


def test_a_stream_whose_end_is_interrupted_stops_all_the_same(
    local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = LoopThread.acquire()
    stream = SyncMessageStream("g-interrupted", "Interrupted", namesrv=local.namesrv)

    def leave() -> None:
        with stream:
            monkeypatch.setattr(thread, "loop", Interrupted(thread.loop))

    try:
        with pytest.raises(KeyboardInterrupt):
            leave()
        assert stream.state == "stopped"
    finally:
        thread.release()
    assert "cometmq-loop" not in [each.name for each in threading.enumerate()]


def test_a_stop_of_another_thread_is_waited_for(local: LocalBroker) -> None:
    called, end = threading.Event(), threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        called.set()
        end.wait(20)

    with SyncProducer("p", namesrv=local.namesrv) as producer:
        producer.send(Message("Waited", b"x"))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    consumer = SyncPushConsumer("g-waited", listener, "Waited", namesrv=local.namesrv, options=options)
    consumer.start()
    assert called.wait(20)
    with ThreadPoolExecutor(2) as threads:
        stop = threads.submit(consumer.stop)
        while consumer.state == "running":
            time.sleep(0.01)
        waiting = threads.submit(consumer.wait_stopped)
        end.set()
        stop.result(20)
        waiting.result(20)
    assert consumer.state == "stopped"


@pytest.mark.parametrize("early", [True, False], ids=["while it starts", "while it runs"])
def test_a_plain_listener_may_stop_its_consumer(local: LocalBroker, early: bool) -> None:
    """Messages handled before the stop are not delivered again, and the consumer leaves its group."""
    topic, group, alone = f"StopsItself{early}", f"g-stops-itself-{early}", threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        assert consumer.health().group == group
        assert early or alone.wait(60)
        consumer.stop()  # the last client that uses the loop

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    consumer = SyncPushConsumer(group, listener, topic, namesrv=local.namesrv, options=options)
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        sent = [producer.send(Message(topic, b"last"))] if early else []
        consumer.start()
        sent += [] if early else [producer.send(Message(topic, b"last"))]
    alone.set()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(consumer.wait_stopped).result(10)
    assert consumer.state == "stopped"
    with SyncPullConsumer(group, namesrv=local.namesrv) as after:
        assert after.committed(sent[0].queue) == 1


@pytest.mark.parametrize("plain", [True, False])
def test_an_exit_in_a_listener_ends_its_call_only(local: LocalBroker, plain: bool) -> None:
    topic, calls, handled = f"Exit{plain}", Counter[bytes](), threading.Event()

    def handle(messages: list[MessageExt]) -> None:
        calls[messages[0].body] += 1
        if calls[messages[0].body] == 1:
            sys.exit("cannot go on")
        handled.set()

    async def on_loop(messages: list[MessageExt]) -> None:
        handle(messages)

    options = PushOptions(
        orderly=True, suspend_current_queue_s=0.01, consume_from_where=ConsumeFromWhere.FIRST_OFFSET
    )
    listener: Any = handle if plain else on_loop
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        producer.send(Message(topic, b"1"))
        with SyncPushConsumer(
            f"g-{topic}", listener, topic, namesrv=local.namesrv, options=options
        ) as member:
            assert handled.wait(60)
            assert "cannot go on" in str(member.health().last_error)
            producer.send(Message(topic, b"2"))
    assert calls[b"1"] == 2


def test_an_exit_on_the_loop_harms_nobody_else(local: LocalBroker) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with SyncProducer("p", namesrv=local.namesrv) as producer:
        thread = LoopThread.acquire()
        with pytest.raises(SystemExit):
            thread.run(leave())
        thread.release()
        producer.send(Message("Exit", b"goes on"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.filterwarnings("ignore:.*was dropped without stop:ResourceWarning")
def test_producers_that_are_dropped_are_stopped_and_named(local: LocalBroker) -> None:
    def sockets() -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum(os.path.realpath(link).rpartition("/")[2].startswith("socket:") for link in links)

    def drop() -> None:
        for _ in range(10):
            producer = SyncProducer("dropped", namesrv=local.namesrv)
            producer.start()
            producer.send(Message("Dropped", b"x"))
        del producer
        gc.collect()

    gc.collect()
    before = sockets()
    with pytest.warns(ResourceWarning, match="SyncProducer of group dropped was dropped without stop"):
        drop()
    deadline = time.monotonic() + 20
    while "cometmq-loop" in [thread.name for thread in threading.enumerate()] or sockets() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_consumer_with_a_listener_goes_on_when_it_is_dropped(local: LocalBroker) -> None:
    """A consumer with a listener keeps running although no reference to it is left."""
    received: list[bytes] = []
    arrived = threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        received.extend(message.body for message in messages)
        arrived.set()

    held: list[Any] = [SyncPushConsumer("g-dropped", listener, "KeptOn", namesrv=local.namesrv)]
    held[0].start()
    twin, thread = held[0]._twin, held[0]._thread  # noqa: SLF001 - to end it behind the test
    with pytest.warns(ResourceWarning, match="keeps calling its listener"):
        held.clear()  # without a reference cycle, so no garbage collection is needed
    with SyncProducer("p", namesrv=local.namesrv) as producer:
        while not arrived.wait(0.05):
            producer.send(Message("KeptOn", b"later"))
    assert b"later" in received
    thread.run(twin.stop())
    thread.release()
