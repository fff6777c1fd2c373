"""The example programs, run as a user runs them."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from tests.kit.waiting import until

from cometmq import Message, SyncProducer
from cometmq.testing import LocalBroker, TestBroker, local_broker

EXAMPLES = Path(__file__).parents[2] / "examples"
SENT = 1 + 1000 + 3 + 10 + 1 + 1


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=60
    )


def consumed(name: str, local: LocalBroker) -> tuple[list[str], str]:
    """Return the first SENT lines that a consumer program prints, and the rest of its output."""
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), local.namesrv], stdout=subprocess.PIPE, text=True
    ) as consumer:
        watchdog = threading.Timer(60, consumer.kill)
        watchdog.start()
        assert consumer.stdout is not None
        lines = [consumer.stdout.readline() for _ in range(SENT)]
        consumer.send_signal(signal.SIGINT)
        rest = consumer.stdout.read()
        assert consumer.wait(30) == 0
        watchdog.cancel()
    return lines, rest


def steps_of(lines: list[str]) -> list[str]:
    """Return the steps of the single order that examples/send.py sends in order."""
    return [line.split(": ")[1].strip() for line in lines if re.search(r": (created|paid|shipped)$", line)]


def test_orders_are_sent_consumed_and_read_again(local: LocalBroker) -> None:
    sent = run("send.py", local.namesrv)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout.startswith("SEND_OK: ")
    assert "1000 sent side by side" in sent.stdout

    lines, rest = consumed("consume.py", local)
    assert rest == f"{SENT} consumed, 0 failed\n"
    assert sorted(steps_of(lines)) == ["created", "paid", "shipped"]
    assert any("remind me" in line for line in lines)

    lines, _ = consumed("consume_in_order.py", local)
    assert steps_of(lines) == ["created", "paid", "shipped"]

    read = run("pull.py", local.namesrv, "Orders")
    assert read.returncode == 0, read.stderr
    assert sum(int(count) for count in re.findall(r": (\d+) messages", read.stdout)) == SENT


def test_orders_are_announced_if_they_are_in_the_database(local: LocalBroker) -> None:
    done = run("transactions.py", local.namesrv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "order for 30: COMMIT", "order for -1: ROLLBACK", "order for 12: COMMIT",
    ]  # fmt: skip
    read = run("pull.py", local.namesrv, "Announced")
    assert sum(int(count) for count in re.findall(r": (\d+) messages", read.stdout)) == 2


@pytest.mark.parametrize("name", ["send.py", "pull.py", "transactions.py"])
def test_without_a_cluster_an_example_says_what_is_missing(name: str) -> None:
    failed = run(name, "127.0.0.1:1")
    assert failed.returncode == 1
    assert ": cannot connect to 127.0.0.1:1: Connection refused. No name server" in failed.stderr
    assert "cometmq standalone" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_plain_script_sends_and_receives(local: LocalBroker) -> None:
    done = run("plain_script.py", local.namesrv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-10:] == [f"order {number}" for number in range(10)]


@contextlib.asynccontextmanager
async def web(monkeypatch: pytest.MonkeyPatch, broker: TestBroker) -> AsyncIterator[AsyncClient]:
    """Run the FastAPI example as a user would test a service: with a broker without sockets."""
    monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    app = importlib.import_module("fastapi_orders").app
    client = AsyncClient(transport=ASGITransport(app), base_url="http://shop")
    async with app.router.lifespan_context(app), client:
        yield client


async def test_a_fastapi_service_sends_and_consumes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBroker() as broker, web(monkeypatch, broker) as client:
        taken = await client.post("/orders/7", content=b"two books")
        assert taken.status_code == 202

        async def shipped() -> bool:
            return (await client.get("/shipped/7")).status_code == 200

        await until(shipped, "the order shipped")
        assert (await client.get("/shipped/7")).json() == {"shipped": "two books"}
        assert (await client.get("/health")).json() == {"consuming": True}
        assert [message.msg_id for message in broker.messages("Orders")] == [taken.json()["msg_id"]]


async def test_a_fastapi_service_that_cannot_send_answers_503(monkeypatch: pytest.MonkeyPatch) -> None:
    readable_only = {"brokerPermission": "4"}
    async with TestBroker(readable_only) as broker, web(monkeypatch, broker) as client:
        assert (await client.post("/orders/7", content=b"two books")).status_code == 503


def test_a_django_command_puts_each_order_into_the_database_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("django")
    with (
        local_broker(directory / "broker") as broker,
        SyncProducer("shop", namesrv=broker.namesrv) as producer,
    ):
        results = producer.send_many([Message("Orders", b"order %d" % number) for number in range(20)])
        environment = {
            **os.environ, "NAMESRV_ADDR": broker.namesrv, "SHOP_DATABASE": str(directory / "shop.sqlite3"),
        }  # fmt: skip

        def manage(*arguments: str) -> str:
            command = [sys.executable, "-W", "error", "manage.py", *arguments]
            done = subprocess.run(
                command,
                cwd=EXAMPLES / "django_shop",
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        manage("migrate", "--run-syncdb")
        assert manage("consume_orders", "--count", "20") == "consuming; Ctrl-C ends it\n20 orders\n"
        # The group continues where it stopped: no order is repeated, and one new order ends the program.
        producer.send(Message("Orders", b"one more"))
        assert manage("consume_orders", "--count", "21") == "consuming; Ctrl-C ends it\n21 orders\n"
    with sqlite3.connect(directory / "shop.sqlite3") as database:
        stored = {row[0] for row in database.execute("SELECT msg_id FROM shop_order")}
    database.close()
    assert len(stored) == 21
    assert stored >= {result.msg_id for result in results}
