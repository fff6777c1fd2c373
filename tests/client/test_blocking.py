"""The blocking faces: the same calls without a loop, from many threads, and what they refuse."""

from __future__ import annotations

import inspect
import multiprocessing
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cometmq import (
    ConsumeFromWhere,
    Message,
    MessageExt,
    NoRouteError,
    Producer,
    PullConsumer,
    PullOptions,
    PushConsumer,
    PushOptions,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
    select_by_hash,
)
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import ClientStateError
from cometmq.testing import LocalBroker, local_broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with local_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


def test_messages_sent_from_many_threads_are_consumed_in_threads(broker: LocalBroker) -> None:
    sent = [b"%d" % number for number in range(300)]
    received: list[bytes] = []
    complete = threading.Event()

    def listener(messages: list[MessageExt]) -> None:
        received.extend(message.body for message in messages)
        if len(received) >= len(sent):
            complete.set()

    with SyncProducer("p", namesrv=broker.namesrv) as producer, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda body: producer.send(Message("Threads", body)), sent))
        assert {result.queue for result in results} <= set(producer.queues("Threads"))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPushConsumer("g", listener, "Threads", namesrv=broker.namesrv, options=options) as consumer:
        assert complete.wait(30)
        assert consumer.health().ok
        assert {queue.topic for queue in consumer.assignment} == {"Threads", "%RETRY%g"}
        consumer.persist_offsets()
    assert Counter(received) == Counter(sent)


def test_every_way_of_sending_and_pulling(broker: LocalBroker) -> None:
    with SyncProducer("p", namesrv=broker.namesrv) as producer:
        first = producer.send(Message("Ways", b"0"), selector=select_by_hash, argument="one queue")
        producer.send_batch([Message("Ways", b"1"), Message("Ways", b"2")], queue=first.queue)
        producer.send_oneway(Message("Ways", b"3"), queue=first.queue)
        assert len(producer.send_many([Message("Ways", b"x")] * 10)) == 10
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    with SyncPullConsumer("g-pull", namesrv=broker.namesrv, options=options) as consumer:
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


def test_errors_are_those_of_the_asyncio_classes(broker: LocalBroker) -> None:
    with SyncPullConsumer("g", namesrv=broker.namesrv) as consumer, pytest.raises(NoRouteError):
        consumer.fetch_queues("Nowhere")


def test_the_loop_ends_with_its_last_user(broker: LocalBroker) -> None:
    with SyncProducer("p1", namesrv=broker.namesrv), SyncProducer("p2", namesrv=broker.namesrv):
        assert [thread.name for thread in threading.enumerate()].count("cometmq-loop") == 1
    assert "cometmq-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_face_that_is_not_started_says_so(broker: LocalBroker) -> None:
    producer = SyncProducer("p", namesrv=broker.namesrv)
    with pytest.raises(ClientStateError, match=r"is new: start\(\) it"):
        producer.send(Message("T", b"x"))
    with producer, pytest.raises(ClientStateError, match="started already"):
        producer.start()
    producer.stop()


def test_a_failed_start_leaves_no_thread(broker: LocalBroker) -> None:
    with pytest.raises(ClientStateError):
        SyncPushConsumer("g", print, (), namesrv=broker.namesrv).start()
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
def test_a_client_used_after_a_fork_says_so(broker: LocalBroker) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = context.Queue()
    with SyncProducer("p", namesrv=broker.namesrv) as producer:
        child = context.Process(target=_in_child, args=(producer, answers))
        child.start()
        assert "before a fork" in answers.get(timeout=20)
        child.join(20)
        assert producer.send(Message("Fork", b"y"))


PAIRS = [(Producer, SyncProducer), (PushConsumer, SyncPushConsumer), (PullConsumer, SyncPullConsumer)]
LOOP_ONLY = {
    "client",  # an asyncio object
    "send_raw",
    "started",
    "message_model",
    "options",
}


@pytest.mark.parametrize(("twin", "face"), PAIRS)
def test_each_face_has_what_its_twin_has(twin: type, face: type) -> None:
    missing = [
        name
        for name in vars(twin)
        if not name.startswith("_") and not hasattr(face, name) and name not in LOOP_ONLY
    ]
    assert missing == []
    for name, method in vars(face).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        ours, theirs = inspect.signature(method), inspect.signature(getattr(twin, name))
        assert ours == theirs, name
