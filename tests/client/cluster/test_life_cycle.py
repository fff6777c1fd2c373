"""A call that does not fit the client's state raises an error that names a valid next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.client.fakes import ignore
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import (
    Admin,
    ClientInstance,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    PushConsumer,
    SyncProducer,
    SyncPullConsumer,
    SyncPushConsumer,
)
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.errors import ClientStateError

QUEUE = MessageQueue("T", "broker-a", 0)


def producer(**more: Any) -> Producer:
    return Producer("g", **more)


def push(**more: Any) -> PushConsumer:
    return PushConsumer("g", ignore, "T", **more)


def pull(**more: Any) -> PullConsumer:
    return PullConsumer("g", **more)


CALLS: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
    (producer, lambda it: it.send(Message("T", b"x"))),
    (producer, lambda it: it.send_oneway(Message("T", b"x"))),
    (producer, lambda it: it.send_batch([Message("T", b"x")])),
    (producer, lambda it: it.send_many([Message("T", b"x")])),
    (producer, lambda it: it.queues("T")),
    (push, lambda it: it.rebalance()),
    (push, lambda it: it.persist_offsets()),
    (pull, lambda it: it.pull(QUEUE, 0)),
    (pull, lambda it: it.poll(0.01)),
    (pull, lambda it: anext(aiter(it))),
    (pull, lambda it: it.fetch_queues("T")),
    (pull, lambda it: it.assign([QUEUE])),
]


@pytest.mark.parametrize(("make", "call"), CALLS)
async def test_before_the_start_and_after_the_stop(
    make: Callable[..., Any], call: Callable[[Any], Any], namesrv: FakeNamesrv
) -> None:
    client = make(namesrv=namesrv.addr)
    with pytest.raises(ClientStateError, match=r"of group g is new: start\(\) it"):
        await call(client)
    await client.start()
    await client.stop()
    with pytest.raises(ClientStateError, match="of group g is stopped: this is final, create a new one"):
        await call(client)
    with pytest.raises(ClientStateError, match="is stopped and cannot be started again; create a new one"):
        await client.start()
    assert client.state == "stopped"


async def started(make: Callable[..., Any]) -> Any:
    async with FakeNamesrv() as namesrv, FakeBroker("broker-a") as broker:
        namesrv.serve("T", broker)
        client = make(namesrv=namesrv.addr)
        await client.start()
        return client


@pytest.mark.parametrize(
    ("make", "call"), [*CALLS, *((make, lambda it: it.stop()) for make in (producer, push, pull))]
)
def test_used_in_another_event_loop(make: Callable[..., Any], call: Callable[[Any], Any]) -> None:
    async def use(client: Any) -> None:
        with pytest.raises(ClientStateError, match="was started in another event loop, which is closed"):
            await call(client)

    client = asyncio.run(started(make))
    asyncio.run(use(client))


@pytest.mark.parametrize("call", [lambda it: it.suspend(), lambda it: it.resume()], ids=["suspend", "resume"])
def test_used_where_no_event_loop_runs(call: Callable[[Any], Any]) -> None:
    client = asyncio.run(started(push))
    with pytest.raises(ClientStateError, match="was started in another event loop, which is closed"):
        call(client)


def test_a_shared_instance_in_another_event_loop() -> None:
    async def made() -> ClientInstance:
        return ClientInstance("127.0.0.1:1")

    async def use(client: ClientInstance) -> None:
        with pytest.raises(ClientStateError, match="another event loop"):
            await Producer("g", client=client).start()

    asyncio.run(use(asyncio.run(made())))


class Slow(LifeCycle):
    """A client whose start and stop set an event and then wait for `gate`."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__("slow thing")
        self.gate = asyncio.Semaphore(0)
        self.seen: list[str] = []
        self.failure = failure

    async def _begin(self) -> None:
        self.seen.append("begin")
        await self.gate.acquire()
        if self.failure is not None:
            raise self.failure

    async def _end(self, *, drain: bool) -> None:
        self.seen.append("drain" if drain else "clear away")
        await self.gate.acquire()


async def test_each_state_in_its_turn() -> None:
    slow = Slow()
    await slow.stop()
    assert (slow.state, slow.seen) == ("new", [])
    starting = asyncio.create_task(slow.start())
    await asyncio.sleep(0)
    assert slow.state == "starting"
    with pytest.raises(ClientStateError, match=r"slow thing is starting and cannot be started again$"):
        await slow.start()
    stops = [asyncio.create_task(slow.stop()) for _ in range(2)]  # both wait for the start and for each other
    await asyncio.sleep(0)
    slow.gate.release()
    await starting
    assert (slow.state, slow.seen, stops[1].done()) == ("stopping", ["begin", "drain"], False)
    slow.gate.release()
    await stops[1]
    assert (slow.state, slow.seen) == ("stopped", ["begin", "drain"])


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_start_that_does_not_succeed_clears_away_what_it_began(cancelled: bool) -> None:
    slow = Slow(None if cancelled else RuntimeError("no luck"))
    starting = asyncio.create_task(slow.start())
    await asyncio.sleep(0)
    if cancelled:
        starting.cancel()
    else:
        slow.gate.release()
    stopping = asyncio.create_task(slow.stop())
    await asyncio.sleep(0)
    slow.gate.release()
    with pytest.raises(asyncio.CancelledError if cancelled else RuntimeError):
        await starting
    await stopping
    assert (slow.state, slow.seen) == ("stopped", ["begin", "clear away"])


async def test_an_instance_may_be_started_and_closed_again() -> None:
    instance = ClientInstance("127.0.0.1:1")
    await instance.start()
    await instance.start()
    assert instance.state == "running"
    await instance.close()
    await instance.close()
    with pytest.raises(ClientStateError, match="is stopped and cannot be started again; create a new one"):
        await instance.start()
    unused = ClientInstance("127.0.0.1:1")
    await unused.close()
    assert unused.state == "stopped"


@pytest.mark.parametrize("shared", [True, False])
async def test_whoever_waits_for_a_route_hears_of_the_stop(namesrv: FakeNamesrv, shared: bool) -> None:
    """A caller that waits for a route gets an error from the stop and is not cancelled."""
    namesrv.hangs = True
    instance = ClientInstance(namesrv.addr)
    await instance.start()
    user: Any
    if shared:
        user = Producer("p", client=instance)
        await user.start()
        asking = asyncio.create_task(user.send(Message("T", b"x")))
    else:
        user = PullConsumer("g", namesrv=namesrv.addr)
        await user.start()
        asking = asyncio.create_task(user.fetch_queues("T"))
    await until(lambda: namesrv.asked)
    await (instance if shared else user).stop()
    with pytest.raises(ClientStateError, match="is stopp"):
        await asking
    await user.stop()
    await instance.stop()


async def test_admin_is_used_between_its_start_and_its_stop(namesrv: FakeNamesrv) -> None:
    admin = Admin(namesrv.addr)
    with pytest.raises(ClientStateError, match=r"admin is new: start\(\) it"):
        await admin.topics()
    await admin.start()
    assert admin.state == "running"
    assert (await admin.route("T")).queue_datas
    await admin.stop()
    await admin.stop()
    with pytest.raises(ClientStateError, match="cannot be started"):
        await admin.start()


async def test_a_second_consumer_of_a_group_leaves_the_first_one_alone(namesrv: FakeNamesrv) -> None:
    async with ClientInstance(namesrv.addr) as shared, push(client=shared):
        before = dict(shared.consumers)
        with pytest.raises(ClientStateError, match="already has a consumer of group g"):
            await push(client=shared).start()
        assert shared.consumers == before


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (SyncProducer, lambda it: it.send(Message("T", b"x"))),
        (SyncPullConsumer, lambda it: it.poll(0.01)),
        (lambda *a, **k: SyncPushConsumer(a[0], ignore, "T", **k), lambda it: it.rebalance()),
    ],
)
async def test_blocking_faces(
    make: Callable[..., Any], call: Callable[[Any], Any], namesrv: FakeNamesrv
) -> None:
    await asyncio.to_thread(use_face, make("g", namesrv=namesrv.addr), call)


def use_face(face: Any, call: Callable[[Any], Any]) -> None:
    with pytest.raises(ClientStateError, match=r"Sync\w+ of group g is new: start\(\) it"):
        call(face)
    face.start()
    face.stop()
    with pytest.raises(ClientStateError, match="is stopped: this is final, create a new one"):
        call(face)
    with pytest.raises(ClientStateError, match="create a new one"):
        face.start()
