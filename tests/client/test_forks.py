"""Objects created before a fork are detected in the child, which can create new ones; the parent works on."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest

from cometmq import (
    ClientInstance,
    ClientStateError,
    Message,
    MessageExt,
    MessageStream,
    Producer,
    PullConsumer,
    PushConsumer,
    SyncMessageStream,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
)
from cometmq.testing import LocalBroker

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def answer_of(work: Callable[[], object], answers: Any) -> None:
    try:
        answers.put(work() or "it worked")
    except ClientStateError as error:
        answers.put(str(error))
    except BaseException as error:
        answers.put(repr(error))


def in_child(work: Callable[[], object]) -> str:
    """Run `work` in a forked child and return the text that the child reports."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=answer_of, args=(work, answers))
    child.start()
    answer: str = answers.get(timeout=30)
    child.join(30)
    assert not child.is_alive()
    return answer


ASYNC: list[tuple[str, Callable[[str], Any], Callable[[Any], Any]]] = [
    ("producer", lambda at: Producer("p", namesrv=at), lambda one: one.send(Message("Forked", b"x"))),
    (
        "push consumer",
        lambda at: PushConsumer("g-push", lambda messages: None, "Forked", namesrv=at),
        lambda one: one.rebalance(),
    ),
    ("push consumer", lambda at: PushConsumer("g-lag", print, "Forked", namesrv=at), lambda one: one.lag()),
    ("pull consumer", lambda at: PullConsumer("g-pull", namesrv=at), lambda one: one.fetch_queues("Forked")),
    ("message stream", lambda at: MessageStream("g-s", "Forked", namesrv=at), lambda one: anext(one)),
    ("producer", lambda at: Producer("p", namesrv=at), lambda one: one.stop()),
    ("client", lambda at: ClientInstance(at), lambda one: one.start()),
]


@pytest.mark.parametrize(("kind", "make", "use"), ASYNC)
async def test_an_asyncio_client_refuses_to_work_in_a_forked_child(
    kind: str, make: Callable[[str], Any], use: Callable[[Any], Any], local: LocalBroker
) -> None:
    async def used(one: Any) -> None:
        await use(one)

    async with make(local.namesrv) as one:
        said = in_child(lambda: asyncio.run(used(one)))
        assert said.startswith(kind)
        assert "was started before a fork; create a new one in the child process" in said
        assert one.state == "running"


def consume(messages: list[MessageExt]) -> None: ...


SYNC: list[tuple[Callable[[str], Any], Callable[[Any], object]]] = [
    (lambda at: SyncProducer("p", namesrv=at), lambda one: one.send(Message("Forked", b"x"))),
    (lambda at: SyncPushConsumer("g-f1", consume, "Forked", namesrv=at), lambda one: one.health()),
    (lambda at: SyncPullConsumer("g-f2", namesrv=at), lambda one: one.poll(0)),
    (lambda at: SyncMessageStream("g-f3", "Forked", namesrv=at), lambda one: next(iter(one))),
]


@pytest.mark.parametrize(("make", "use"), SYNC)
def test_a_blocking_client_refuses_to_work_in_a_forked_child(
    make: Callable[[str], Any], use: Callable[[Any], object], local: LocalBroker
) -> None:
    with make(local.namesrv) as one:
        assert "before a fork" in in_child(lambda: use(one))
        assert one.state == "running"


def test_a_forked_child_makes_clients_of_its_own(local: LocalBroker) -> None:
    def send(text: bytes) -> str:
        with SyncProducer("p", namesrv=local.namesrv) as producer:
            return producer.send(Message("Forked", text)).status.name

    with SyncProducer("p", namesrv=local.namesrv) as parents:
        assert parents.send(Message("Forked", b"1")).status.name == "SEND_OK"
        assert in_child(lambda: send(b"2")) == "SEND_OK"
        assert parents.send(Message("Forked", b"3")).status.name == "SEND_OK"
