"""Taskiq with CometMQ as its broker: receivers in this process, and worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from taskiq import (
    AckableMessage,
    BrokerMessage,
    InMemoryBroker,
    TaskiqMessage,
    TaskiqMiddleware,
    TaskiqResult,
)
from taskiq.api import run_receiver_task
from tests.kit.waiting import PATIENCE_S, until, wait_until
from tests.ports import free_port

from cometmq import SyncProducer
from cometmq.errors import ClientStateError, ConfigError, NoRouteError, RemotingError
from cometmq.integrations.session import Session
from cometmq.integrations.taskiq import CometMQBroker
from cometmq.message import Message
from cometmq.standalone import Standalone
from cometmq.testing import LocalBroker, ServerProcess, local_broker

PAGE = Path(__file__).parents[2] / "docs" / "taskiq.md"
WORKER = [sys.executable, "-m", "taskiq", "worker", "-w", "1"]
READY = "Listening started"

Make = Callable[..., CometMQBroker]


@pytest.fixture
async def make(broker: LocalBroker) -> AsyncIterator[Make]:
    """A function that returns a broker of Taskiq with the test's own queue and result store."""
    queue, made = f"tasks-{uuid4().hex[:8]}", []
    results: Any = InMemoryBroker().result_backend

    def making(**options: Any) -> CometMQBroker:
        made.append(CometMQBroker(broker.namesrv, **{"queue": queue, "lease_s": 5.0} | options))
        return made[-1].with_result_backend(results)

    yield making
    for each in made:
        await each.shutdown()


@contextlib.asynccontextmanager
async def working(worker: CometMQBroker) -> AsyncIterator[None]:
    """Let a receiver run the tasks of a broker."""
    receiver = asyncio.create_task(run_receiver_task(worker))
    try:
        yield
    finally:
        receiver.cancel()
        await asyncio.gather(receiver, return_exceptions=True)


async def value(task: Any) -> Any:
    result: TaskiqResult[Any] = await task.wait_result(timeout=PATIENCE_S, check_interval=0.01)
    result.raise_for_error()
    return result.return_value


class TestTasks:
    async def test_results_return(self, make: Make) -> None:
        broker = make()

        @broker.task
        async def add(a: int, b: int) -> int:
            return a + b

        await broker.startup()
        async with working(broker):
            tasks = [await add.kiq(number, 1) for number in range(50)]
            assert [await value(task) for task in tasks] == list(range(1, 51))

    async def test_a_delay_is_kept_by_the_broker(self, make: Make) -> None:
        broker = make()

        @broker.task
        async def now() -> float:
            return time.time()

        await broker.startup()
        due = time.time() + 1.5
        task = await now.kicker().with_labels(delay=1.5).kiq()
        async with working(broker):
            assert await value(task) >= due

    async def test_the_highest_priority_runs_first(self, make: Make) -> None:
        sender, order = make(priorities=3), []

        @sender.task
        async def note(name: str) -> None:
            order.append(name)

        await sender.startup()
        tasks = [await note.kicker().with_labels(priority=number).kiq(str(number)) for number in (0, 2, 1)]
        async with working(sender):
            for each in tasks:
                await value(each)
        assert order == ["2", "1", "0"]

    async def test_a_failed_task_is_not_repeated(self, make: Make) -> None:
        broker, runs = make(), []

        @broker.task
        async def fail() -> None:
            runs.append(1)
            raise ValueError("as asked")

        await broker.startup()
        async with working(broker):
            with pytest.raises(ValueError, match="as asked"):
                await value(await fail.kiq())
        assert runs == [1]

    async def test_a_message_that_is_no_task_is_left_behind(self, make: Make, broker: LocalBroker) -> None:
        worker = make()

        @worker.task
        async def one() -> int:
            return 1

        await worker.startup()
        with SyncProducer("stranger", namesrv=broker.namesrv) as stranger:
            stranger.send(Message(worker.topic, b"\xff no task"))
        async with working(worker):
            assert await value(await one.kiq()) == 1


class TestLeases:
    async def test_a_long_task_is_not_delivered_twice(self, make: Make) -> None:
        broker, runs = make(lease_s=1.0), []

        @broker.task
        async def long() -> None:
            runs.append(1)
            await asyncio.sleep(3)

        await broker.startup()
        async with working(broker):
            await value(await long.kiq())
        assert runs == [1]

    @pytest.mark.slow("leases end after a second")
    async def test_tasks_that_a_middleware_fails_for_take_no_places_and_are_delivered_again(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker, runs = make(lease_s=1.0, prefetch=2), []
        # asyncio logs that the error was never retrieved. pytest would keep the error and its message alive.
        monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", True)

        class Failing(TaskiqMiddleware):
            def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
                assert message.args != ["bad"] or runs.count("bad") > 3

        @broker.task
        async def note(name: str) -> str:
            runs.append(name)
            return name

        broker.add_middlewares(Failing())
        await broker.startup()
        async with working(broker):
            tasks = [await note.kiq(name) for name in ("bad", "bad", "bad", "good")]
            assert [await value(task) for task in tasks] == ["bad", "bad", "bad", "good"]
        assert runs.index("good") < 4

    async def test_prefetched_tasks_return_when_a_worker_stops(self, make: Make) -> None:
        first, second = make(lease_s=60.0), make()
        await first.startup()
        for number in range(5):
            await first.kick(message(str(number)))
        listening = first.listen()
        taken = await asyncio.wait_for(anext(listening), PATIENCE_S)
        await taken.ack()  # type: ignore[misc]
        await listening.aclose()
        await second.startup()
        others = second.listen()
        left = {(await asyncio.wait_for(anext(others), PATIENCE_S)).data for _ in range(4)}
        assert left | {taken.data} == {str(number).encode() for number in range(5)}

    async def test_a_task_that_runs_when_listening_ends_can_be_acknowledged(self, make: Make) -> None:
        first, second = make(lease_s=1.0), make()
        await first.startup()
        await first.kick(message("a"))
        listening = first.listen()
        taken = await asyncio.wait_for(anext(listening), PATIENCE_S)
        await listening.aclose()
        await taken.ack()  # type: ignore[misc]
        await first.kick(message("b"))
        await second.startup()
        assert (await asyncio.wait_for(anext(second.listen()), PATIENCE_S)).data == b"b"

    async def test_a_broker_can_listen_again(self, make: Make) -> None:
        """Taskiq's receivers call it after an error."""
        broker = make(lease_s=60.0)
        await broker.startup()
        for text in ("a", "b"):
            await broker.kick(message(text))
            listening = broker.listen()
            taken = await asyncio.wait_for(anext(listening), PATIENCE_S)
            assert taken.data == text.encode()
            await taken.ack()  # type: ignore[misc]
            await listening.aclose()

    async def test_a_broker_that_listens_twice_does_so_until_both_end(self, make: Make) -> None:
        broker = make(lease_s=60.0)
        await broker.startup()
        first, second = broker.listen(), broker.listen()
        both = [asyncio.create_task(_taken(each)) for each in (first, second)]
        for text in ("a", "b"):
            await broker.kick(message(text))
        assert set(await asyncio.wait_for(asyncio.gather(*both), PATIENCE_S)) == {b"a", b"b"}
        await first.aclose()
        await broker.kick(message("c"))
        assert await asyncio.wait_for(_taken(second), PATIENCE_S) == b"c"


@pytest.mark.slow("clients reconnect after seconds")
async def test_a_worker_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    ports = {"namesrv_port": free_port(), "broker_port": free_port()}
    with contextlib.ExitStack() as servers:

        def serve() -> Standalone:
            return servers.enter_context(Standalone(tmp_path / "broker", **ports).run_in_thread())

        served = serve()
        broker = CometMQBroker(served.namesrv_addr, lease_s=60.0)
        await broker.startup()
        await broker.kick(message("a"))
        listening = broker.listen()
        taken = await asyncio.wait_for(anext(listening), PATIENCE_S)
        await asyncio.to_thread(servers.close)
        await asyncio.to_thread(serve)
        await taken.ack()  # type: ignore[misc]

        async def sent() -> bool:
            with contextlib.suppress(RemotingError):
                await broker.kick(message("b"))
                return True
            return False

        await until(sent, "a task is sent after the restart")
        assert await asyncio.wait_for(_taken(listening), PATIENCE_S) == b"b"
        await listening.aclose()
        await broker.shutdown()  # releases unacknowledged tasks
        other = CometMQBroker(served.namesrv_addr)
        await other.startup()
        await other.kick(message("c", delay=2))
        assert await asyncio.wait_for(_taken(other.listen()), PATIENCE_S) == b"c"
        await other.shutdown()


async def _taken(listening: AsyncGenerator[AckableMessage, None]) -> bytes:
    taken = await anext(listening)
    await taken.ack()  # type: ignore[misc]
    return taken.data


def message(text: str, **labels: Any) -> BrokerMessage:
    return BrokerMessage(task_id=f"id of {text}", task_name="task", message=text.encode(), labels=labels)


class TestRefusals:
    @pytest.mark.parametrize(
        ("labels", "problem"),
        [
            ({"delay": "soon"}, "label delay of task task.*'soon'"),
            ({"delay": -1}, "delay"),
            ({"delay": float("nan")}, "delay"),
            ({"delay": 200_000}, "0 to 172800"),
            ({"priority": 3}, "0 to 2"),
            ({"priority": None}, "priority"),
        ],
    )
    async def test_a_label_out_of_range(self, make: Make, labels: dict[str, Any], problem: str) -> None:
        broker = make(priorities=3)
        await broker.startup()
        with pytest.raises(ConfigError, match=problem):
            await broker.kick(message("x", **labels))

    @pytest.mark.parametrize("options", [{"lease_s": 0.0}, {"prefetch": 0}, {"priorities": 17}], ids=str)
    def test_an_option_out_of_range(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            CometMQBroker(**options)

    async def test_a_broker_that_is_not_started(self) -> None:
        with pytest.raises(ClientStateError, match="startup"):
            await CometMQBroker("127.0.0.1:1").kick(message("x"))

    async def test_a_cluster_that_does_not_exist(self, make: Make) -> None:
        with pytest.raises(NoRouteError, match="no cluster typo with a master"):
            await make(cluster="typo").startup()

    async def test_a_topic_that_is_not_registered_in_time(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def never(_self: Session, _topic: str) -> bool:
            return False

        monkeypatch.setattr("cometmq.integrations.session._ROUTE_S", 0.01)
        monkeypatch.setattr(Session, "exists", never)
        with pytest.raises(NoRouteError, match=r"not registered within 0\.01 s"):
            await make().startup()

    async def test_no_cluster(self) -> None:
        with pytest.raises(RemotingError):
            await CometMQBroker("127.0.0.1:1").startup()


def kill(worker: ServerProcess) -> None:
    """Kill a worker and its child process, which runs the tasks."""
    children = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    for each in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@pytest.mark.slow("three worker processes start, and leases end after seconds")
def test_no_task_is_lost_when_workers_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    runs.touch()

    def noted() -> list[str]:
        return runs.read_text().splitlines()

    async def send(count: int) -> None:
        from tests.integrations.taskiq_app import run

        broker = CometMQBroker(os.environ["TEST_NAMESRV"], queue="runs")
        await broker.startup()
        for number in range(count):
            await run.kicker().with_broker(broker).kiq(str(number))
        await broker.shutdown()

    with local_broker(tmp_path / "broker") as server:
        monkeypatch.setenv("TEST_NAMESRV", server.namesrv)
        monkeypatch.setenv("TEST_RUNS", str(runs))
        asyncio.run(send(300))
        command = [*WORKER, "--max-async-tasks", "4", "tests.integrations.taskiq_app:broker"]
        for runs_until_kill in (20, 60):
            with ServerProcess(command, READY) as worker:
                wait_until("some runs", lambda least=runs_until_kill: len(noted()) >= least)
                kill(worker)
        with ServerProcess(command, READY):
            wait_until("all runs", lambda: len(set(noted())) == 300)


@pytest.mark.slow("a worker process starts and stops")
def test_the_program_of_the_guide(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with local_broker(tmp_path / "broker") as server:
        program = blocks[0].replace("127.0.0.1:9876", server.namesrv)
        (tmp_path / "shop.py").write_text(program)
        with ServerProcess([*WORKER, "--app-dir", str(tmp_path), "shop:broker"], READY):
            done = subprocess.run(
                [sys.executable, "shop.py"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
    assert done.stdout == "sent\n"
