"""FastStream with servers that restart, that are offline, or that require accounts; stops during starts."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from faststream.security import SASLPlaintext
from tests.broker.access.test_files import write
from tests.integrations.test_faststream import nothing_is_left, taken
from tests.kit.waiting import soon, until
from tests.ports import free_port

from cometmq.errors import BrokerError, RemotingError
from cometmq.integrations.faststream import CometMQBroker
from cometmq.integrations.faststream.config import Connection
from cometmq.standalone import Standalone
from cometmq.testing import LocalBroker, local_broker


async def test_a_name_server_that_has_gone_does_not_answer_a_ping(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with local_broker(tmp_path / "broker") as server:
            broker = await stack.enter_async_context(CometMQBroker(server.namesrv, logger=None))
            assert await broker.ping()
        assert not await broker.ping(timeout=1.0)


async def test_subscribers_and_publishers_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    ports = {"namesrv_port": free_port(), "broker_port": free_port()}
    found: asyncio.Queue[Any] = asyncio.Queue()
    go = asyncio.Event()
    with contextlib.ExitStack() as servers:

        def serve() -> Standalone:
            return servers.enter_context(Standalone(tmp_path / "broker", **ports).run_in_thread())

        async with CometMQBroker(serve().namesrv_addr, logger=None) as broker:

            @broker.subscriber("runs", max_workers=2)
            async def handle(body: str) -> None:
                await found.put(body)
                if body == "long":
                    await go.wait()

            await broker.start()
            await broker.publish("long", "runs")
            assert await taken(found, 1) == ["long"]
            await asyncio.to_thread(servers.close)
            await asyncio.to_thread(serve)

            async def sent() -> bool:
                with contextlib.suppress(RemotingError, BrokerError):
                    await broker.publish("after", "runs")
                    return True
                return False

            await until(sent, "a message is sent after the restart")
            assert await taken(found, 1) == ["after"]
            go.set()
            await nothing_is_left(broker, broker.subscribers[0])


async def test_an_account_signs(tmp_path: Path) -> None:
    allowed = "accounts: [{accessKey: program, secretKey: secret-of-program, admin: true}]\n"
    write(tmp_path / "conf" / "plain_acl.yml", allowed)
    settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path)}
    found: asyncio.Queue[Any] = asyncio.Queue()
    account = SASLPlaintext("program", "secret-of-program")
    with local_broker(tmp_path / "broker", settings) as server:
        async with (
            CometMQBroker(server.namesrv, logger=None, security=account) as broker,
            CometMQBroker(server.namesrv, logger=None) as nobody,
        ):

            @broker.subscriber("orders")
            async def handle(body: str) -> None:
                await found.put(body)

            await broker.start()
            await broker.publish("a", "orders")
            assert await taken(found, 1) == ["a"]
            with pytest.raises(BrokerError):
                await nobody.publish("b", "orders")


@pytest.mark.parametrize("step", ["open", "join"])
async def test_a_stop_during_a_start_leaves_nothing_open(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stopped, begun = CometMQBroker(broker.namesrv, logger=None), asyncio.Event()
    for topic in ("stopped-a", "stopped-b"):
        stopped.subscriber(topic)(lambda _body: None)
    real = getattr(Connection, step)

    async def beginning(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        return await real(*args, **kwargs)

    monkeypatch.setattr(Connection, step, beginning)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(stopped.start())
    await soon(begun.wait())
    await soon(stopped.stop())
    await soon(starting)

    assert not stopped.running
    assert not any(each.running for each in stopped.subscribers)
    assert not await stopped.ping()
    assert asyncio.all_tasks() == before


async def test_publishing_avoids_a_broker_that_does_not_answer(broker: LocalBroker) -> None:
    async with CometMQBroker(broker.namesrv, logger=None) as connected:
        assert (await connected.connect()).producer.options.send_latency_fault_enable
