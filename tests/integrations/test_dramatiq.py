"""Dramatiq with CometMQ as its broker: tests like Dramatiq's own tests of brokers, and tests with workers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from dramatiq import Message, MessageProxy, Worker
from dramatiq.common import current_millis
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout, QueueNotFound
from dramatiq.middleware import Retries
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.ports import closed_port, free_port

from cometmq import SyncProducer
from cometmq.admin import Admin
from cometmq.errors import ConfigError
from cometmq.integrations.dramatiq import CometMQBroker
from cometmq.message import Message as Sent
from cometmq.standalone import Standalone
from cometmq.testing import LocalBroker

PAGE = Path(__file__).parents[2] / "docs" / "dramatiq.md"
JOIN_MS = int(PATIENCE_S * 1000)

Make = Callable[..., CometMQBroker]


@pytest.fixture
def queue() -> str:
    return f"tasks-{uuid4().hex[:8]}"


@pytest.fixture
def make(broker: LocalBroker) -> Iterator[Make]:
    """A function that returns a broker of Dramatiq."""
    made = []

    def making(**options: Any) -> CometMQBroker:
        made.append(CometMQBroker(broker.namesrv, **{"lease_s": 5.0} | options))
        return made[-1]

    yield making
    for each in made:
        each.close()


@contextmanager
def working(broker: CometMQBroker, **options: Any) -> Iterator[Worker]:
    worker = Worker(broker, **{"worker_timeout": 100, "worker_threads": 4} | options)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


class TestActors:
    def test_messages_are_processed(self, make: Make, queue: str) -> None:
        broker, found = make(), {}

        @dramatiq.actor(broker=broker, queue_name=queue)
        def put(key: str, value: int) -> None:
            found[key] = value

        with working(broker) as worker:
            for number in range(100):
                put.send(f"key-{number}", number)
            broker.join(queue, timeout=JOIN_MS)
            worker.join()
        assert found == {f"key-{number}": number for number in range(100)}

    def test_a_failed_one_is_retried_and_acknowledged(self, make: Make, queue: str) -> None:
        broker, runs = make(), []

        @dramatiq.actor(broker=broker, queue_name=queue, min_backoff=100, max_backoff=500)
        def fail_twice() -> None:
            runs.append(time.time())
            if len(runs) < 3:
                raise RuntimeError("as asked")

        with working(broker) as worker:
            fail_twice.send()
            wait_until("the third run", lambda: len(runs) == 3)
            broker.join(queue, timeout=JOIN_MS)
            worker.join()
        assert len(runs) == 3

    def test_a_failed_one_without_retries_is_a_dead_letter(
        self, make: Make, queue: str, broker: LocalBroker
    ) -> None:
        sender = make(middleware=[Retries(max_retries=0)])

        @dramatiq.actor(broker=sender, queue_name=queue)
        def fail() -> None:
            raise RuntimeError("as asked")

        async def dead() -> int:
            async with Admin(broker.namesrv) as admin:
                counts = await admin.dead_letter_counts()
                return sum(each.count for each in counts if each.group == queue)

        with working(sender):
            fail.send()
            sender.join(queue, timeout=JOIN_MS)
            wait_until("a dead letter", lambda: asyncio.run(dead()) == 1)

    def test_a_delay_is_kept_by_the_broker(self, make: Make, queue: str) -> None:
        broker, runs = make(), []

        @dramatiq.actor(broker=broker, queue_name=queue)
        def note() -> None:
            runs.append(current_millis())

        due = current_millis() + 1500
        sent = note.send_with_options(delay=1500)
        assert sent.options["eta"] >= due
        assert broker.get_declared_delay_queues() == set()
        with working(broker):
            broker.join(queue, timeout=JOIN_MS)
        assert len(runs) == 1
        assert runs[0] >= due - 1000  # a broker's timer has a precision of a second

    @pytest.mark.slow("waits for a delay of several seconds")
    def test_a_longer_delay_than_a_broker_allows_is_sent_again(
        self, make: Make, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cometmq.integrations.session.MAX_DELAY_MS", 1200)
        broker, runs = make(), []

        @dramatiq.actor(broker=broker, queue_name=queue)
        def note() -> None:
            runs.append(current_millis())

        due = current_millis() + 3500
        note.send_with_options(delay=3500)
        with working(broker):
            broker.join(queue, timeout=JOIN_MS)
        assert len(runs) == 1
        assert runs[0] >= due - 1000

    def test_the_highest_priority_is_first(self, make: Make, queue: str) -> None:
        broker, order = make(priorities=3), []

        @dramatiq.actor(broker=broker, queue_name=queue)
        def note(name: str) -> None:
            order.append(name)

        for priority in (0, 2, 1):
            note.send_with_options(args=(str(priority),), broker_priority=priority)
        with working(broker, worker_threads=1):
            broker.join(queue, timeout=JOIN_MS)
        assert order == ["2", "1", "0"]
        with pytest.raises(ConfigError, match="0 to 2"):
            note.send_with_options(args=("x",), broker_priority=3)

    def test_what_a_stopped_worker_has_not_begun_is_given_back(self, make: Make, queue: str) -> None:
        broker, runs = make(lease_s=60.0), []

        @dramatiq.actor(broker=broker, queue_name=queue)
        def slow(number: int) -> None:
            runs.append(number)
            time.sleep(0.2)

        for number in range(8):
            slow.send(number)
        with working(broker, worker_threads=1):
            wait_until("the first one", lambda: runs)
        assert 1 <= len(runs) < 8
        with working(broker):
            broker.join(queue, timeout=JOIN_MS)  # without waiting for the lease of a minute
        assert sorted(runs) == list(range(8))


class TestQueues:
    def test_a_queue_that_was_not_declared(self, make: Make) -> None:
        broker = make()
        message: Message[Any] = Message(queue_name="unknown", actor_name="a", args=(), kwargs={}, options={})
        for use in (
            lambda: broker.enqueue(message),
            lambda: broker.consume("unknown"),
            lambda: broker.join("unknown"),
            lambda: broker.flush("unknown"),
        ):
            with pytest.raises(QueueNotFound):
                use()

    def test_they_are_flushed(self, make: Make, queue: str) -> None:
        broker = make()

        @dramatiq.actor(broker=broker, queue_name=queue)
        def nothing() -> None:
            raise AssertionError

        nothing.send()
        with pytest.raises(QueueJoinTimeout):
            broker.join(queue, timeout=200)
        broker.flush_all()
        broker.join(queue, timeout=JOIN_MS)

    def test_a_consumer_has_at_most_its_prefetch(self, make: Make, queue: str) -> None:
        broker = make()

        @dramatiq.actor(broker=broker, queue_name=queue)
        def nothing() -> None: ...

        for _ in range(3):
            nothing.send()
        consumer = broker.consume(queue, prefetch=2, timeout=1000)
        try:
            first, second, third = next(consumer), next(consumer), next(consumer)
            assert first is not None
            assert second is not None
            assert third is None
            consumer.ack(first)
            wait_until("the third message", lambda: next(consumer) is not None)
        finally:
            consumer.close()

    @pytest.mark.parametrize(
        "changes",
        [
            None,
            {"options": None},
            {"options": {"eta": 1 << 60}, "message_id": 7},
            {"options": {"eta": 1 << 60}, "message_id": "\ud800"},
            {"kwargs": [1]},
            {"actor_name": ["note"]},
            {"queue_name": "other"},
            {"kwargs": {"no": "such"}, "options": {"throws": "text"}},
        ],
    )
    def test_a_message_that_is_not_dramatiqs_becomes_a_dead_letter(
        self, make: Make, queue: str, broker: LocalBroker, changes: dict[str, Any] | None
    ) -> None:
        receiver, runs = make(), []

        @dramatiq.actor(broker=receiver, queue_name=queue)
        def note() -> None:
            runs.append(1)

        fields = note.send().asdict()
        body = b"\xff not a message" if changes is None else json.dumps(fields | changes).encode()
        with SyncProducer("others", namesrv=broker.namesrv) as producer:
            producer.send(Sent(queue, body))
        note.send()
        with working(receiver, worker_threads=1):
            receiver.join(queue, timeout=JOIN_MS)
        assert runs == [1, 1]


class TestErrors:
    def test_nothing_is_connected_at_first(self) -> None:
        with closed_port() as port:
            broker = CometMQBroker(f"127.0.0.1:{port}")

            @dramatiq.actor(broker=broker)
            def nothing() -> None: ...

            with pytest.raises(ConnectionClosed):
                nothing.send()
            with pytest.raises(ConnectionClosed):
                broker.consume("default")
            broker.close()

    def test_a_forked_process_connects_itself(self, make: Make, queue: str) -> None:
        broker = make()

        @dramatiq.actor(broker=broker, queue_name=queue)
        def nothing() -> None: ...

        nothing.send()
        child = os.fork()
        if child == 0:
            try:
                nothing.send()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        consumer = broker.consume(queue, prefetch=8, timeout=1000)
        found: list[MessageProxy] = []

        def both() -> bool:
            if message := next(consumer):
                found.append(message)
            return len(found) == 2

        wait_until("both messages", both)
        consumer.close()

    @pytest.mark.parametrize(("name", "value"), [("lease_s", 0.0), ("priorities", 17)])
    def test_arguments_out_of_range(self, name: str, value: float) -> None:
        with pytest.raises(ConfigError, match=name):
            CometMQBroker(**{name: value})  # type: ignore[arg-type]


@contextmanager
def worker(env: dict[str, str], application: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Dramatiq's program with one process."""
    words = [sys.executable, "-m", "dramatiq", "-p", "1", "-t", "4", application]
    with subprocess.Popen(words, env=env, cwd=cwd, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 15)
                process.wait(60)


@pytest.mark.slow("clients reconnect after seconds")
def test_a_worker_goes_on_after_a_restart_of_the_server(tmp_path: Path, queue: str) -> None:
    """Tasks that run during the restart are acknowledged after it, so they are not delivered again."""
    ports = {"namesrv_port": free_port(), "broker_port": free_port()}
    runs, go = list[str](), threading.Event()

    def serve() -> AbstractContextManager[Standalone]:
        return Standalone(tmp_path / "broker", **ports).run_in_thread()

    broker = CometMQBroker(f"127.0.0.1:{ports['namesrv_port']}", lease_s=60.0)

    @dramatiq.actor(broker=broker, queue_name=queue)
    def run(name: str) -> None:
        runs.append(name)
        assert name != "first" or go.wait(PATIENCE_S)

    def sends() -> bool:
        with suppress(ConnectionClosed):
            run.send("second")
            return True
        return False

    with closing(broker), ExitStack() as stack:
        with serve():
            run.send("first")
            stack.enter_context(working(broker))
            wait_until("it runs", lambda: runs)
        with serve():
            go.set()
            wait_until("a message is sent after the restart", sends)
            broker.join(queue, timeout=JOIN_MS)  # without waiting for the lease of a minute
            assert (runs[0], set(runs[1:])) == ("first", {"second"})
            stack.close()


@pytest.mark.slow("Dramatiq's program is started twice")
def test_no_message_is_lost_when_a_worker_is_killed(
    broker: LocalBroker, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    runs = tmp_path / "runs"
    runs.touch()
    env = {**os.environ, "TEST_NAMESRV": broker.namesrv, "TEST_RUNS": str(runs), "TEST_QUEUE": queue}
    sender = make()
    sender.declare_queue(queue)
    names = {f"task-{number}" for number in range(300)}
    for name in names:
        sender.enqueue(Message(queue_name=queue, actor_name="run", args=(name,), kwargs={}, options={}))
    root = Path(__file__).parents[2]
    with worker(env, "tests.integrations.dramatiq_app", root) as first:
        wait_until("some have run", lambda: len(runs.read_text().splitlines()) > 20)
        os.killpg(first.pid, 9)
    with worker(env, "tests.integrations.dramatiq_app", root):
        wait_until("all have run", lambda: set(runs.read_text().split()) == names)


@pytest.mark.slow("Dramatiq's program is started")
def test_the_program_of_the_page(broker: LocalBroker, tmp_path: Path) -> None:
    """The page's program, with the port of this test's cluster."""
    (code,) = re.findall(r"```python\n# shop.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    out = tmp_path / "out"
    (tmp_path / "shop.py").write_text(code.replace("127.0.0.1:9876", broker.namesrv))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "shop.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "sent\n"
    with worker({**env, "SHOP_OUT": str(out)}, "shop", tmp_path):
        wait_until("both have run", lambda: out.exists() and sorted(out.read_text().split()) == ["3", "42"])
