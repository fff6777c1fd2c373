"""FastStream with CometMQ as its broker: handlers in this process, and a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faststream import AckPolicy
from faststream.exceptions import NackMessage, RejectMessage, StopConsume
from tests.kit.waiting import PATIENCE_S, soon, until

from cometmq import MessageModel, Producer, PushOptions, sql92
from cometmq.client import ConsumeFromWhere
from cometmq.errors import ClientStateError, RemotingError, ReplyTimeout
from cometmq.integrations.faststream import CometMQBroker, CometMQMessage, CometMQResponse, TestCometMQBroker
from cometmq.integrations.faststream.subscriber import CometMQSubscriber
from cometmq.message import Message, MessageQueue
from cometmq.testing import LocalBroker, local_broker

FIRST = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)

Make = Callable[..., CometMQBroker]
Found = asyncio.Queue[Any]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A real broker, which delivers each retry after a second. Each test has its own topics."""
    settings = {"messageDelayLevel": " ".join(["1s"] * 18)}
    with local_broker(tmp_path_factory.mktemp("broker"), settings) as running:
        yield running


@pytest.fixture
async def make(broker: LocalBroker) -> AsyncIterator[Make]:
    """A function that returns a broker of FastStream, which is stopped after the test."""
    made: list[CometMQBroker] = []

    def making(namesrv: str = broker.namesrv, **options: Any) -> CometMQBroker:
        made.append(CometMQBroker(namesrv, **{"logger": None} | options))
        return made[-1]

    yield making
    for each in made:
        await each.stop()


@pytest.fixture
def topic() -> str:
    return f"t-{uuid4().hex[:8]}"


@pytest.fixture
async def found() -> Found:
    """The messages that handlers have received."""
    return asyncio.Queue()


async def taken(found: Found, count: int) -> list[Any]:
    return [await soon(found.get()) for _ in range(count)]


async def nothing_is_left(stopping: CometMQBroker, subscriber: CometMQSubscriber, dead: int = 0) -> None:
    """Stop a broker, and wait until a group has consumed all messages. `dead` of them are dead letters."""
    await stopping.stop()
    async with CometMQBroker(str(stopping.specification.url[0]), logger=None) as asking:
        client = (await asking.connect()).producer.client
        queues = await client.read_queues(subscriber.topic)
        letters = MessageQueue(f"%DLQ%{subscriber.group}", queues[0].broker_name, 0)
        addr = client.master_addr(letters.broker_name)

        async def done() -> bool:
            for queue in queues:
                end = await client.brokers.max_offset(addr, queue)
                if end and await client.brokers.consumer_offset(addr, subscriber.group, queue) != end:
                    return False
            return not dead or await client.brokers.max_offset(addr, letters) == dead

        await until(done, f"all messages are consumed, {dead} of them dead")


async def dead_letters(stopped: CometMQBroker, subscriber: CometMQSubscriber) -> int:
    """Return the number of dead letters of a group."""
    async with CometMQBroker(str(stopped.specification.url[0]), logger=None) as asking:
        client = (await asking.connect()).producer.client
        (name,) = {each.broker_name for each in await client.read_queues(subscriber.topic)}
        queue = MessageQueue(f"%DLQ%{subscriber.group}", name, 0)
        return await client.brokers.max_offset(client.master_addr(name), queue)


class TestMessages:
    async def test_a_message_arrives_with_all_that_it_was_sent_with(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()

        @broker.subscriber(topic)
        async def handle(body: dict[str, int], message: CometMQMessage) -> None:
            await found.put((body, message))

        await broker.start()
        sent = await broker.publish(
            {"n": 1}, topic, headers={"h": 1}, correlation_id="c1", tag="A", keys=["k1", "k2"]
        )
        ((body, message),) = await taken(found, 1)
        assert body == {"n": 1}
        assert (message.headers["h"], message.correlation_id) == ("1", "c1")
        assert message.message_id == sent.msg_id
        raw = message.raw_message
        assert (raw.topic, raw.tags, raw.keys) == (topic, "A", ("k1", "k2"))
        await nothing_is_left(broker, broker.subscribers[0])

    async def test_results_are_published_with_headers_and_options(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()

        @broker.subscriber(topic)
        @broker.publisher(f"{topic}-out", headers={"by": "publisher"}, tag="A")
        async def double(number: int) -> CometMQResponse:
            return CometMQResponse(number * 2, keys=["k"])

        @broker.subscriber(f"{topic}-out", expression="A")
        async def read(number: int, message: CometMQMessage) -> None:
            await found.put((number, message.headers["by"], message.raw_message.keys, message.correlation_id))

        await broker.start()
        await broker.publish(21, topic, correlation_id="c1")
        assert await taken(found, 1) == [(42, "publisher", ("k",), "c1")]

    @pytest.mark.parametrize("expression", ["A || B", sql92("n > 5")], ids=str)
    async def test_the_server_filters(self, make: Make, topic: str, found: Found, expression: Any) -> None:
        broker = make(topic_queues=1)

        @broker.subscriber(topic, expression=expression)
        async def handle(body: str) -> None:
            await found.put(body)

        await broker.start()
        await broker.publish("other", topic, tag="C", headers={"n": 5})
        await broker.publish("wanted", topic, tag="B", headers={"n": 6})
        assert await taken(found, 1) == ["wanted"]

    async def test_the_server_delays(self, make: Make, topic: str, found: Found) -> None:
        broker = make()

        @broker.subscriber(topic, max_workers=2)
        async def handle(body: str) -> None:
            await found.put((body, time.time()))

        await broker.start()
        begun = time.time()
        await broker.publish("for 1 s", topic, delay_s=1)
        await broker.publish("until then", topic, deliver_at=datetime.now(UTC) + timedelta(seconds=1))
        await broker.publish("now", topic)
        came = dict(await taken(found, 3))
        assert min(came["for 1 s"], came["until then"]) >= begun + 1

    async def test_messages_of_a_sharding_key_stay_in_order(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker, running = make(), set()

        @broker.subscriber(topic, options=PushOptions(orderly=True), max_workers=8)
        async def handle(body: str, message: CometMQMessage) -> None:
            key, number = body.split()
            assert key not in running, "two messages of a key at once"
            running.add(key)
            await asyncio.sleep(0)
            running.discard(key)
            assert message.headers["__SHARDINGKEY"] == key
            await found.put((key, int(number)))

        await broker.start()
        for number in range(20):
            for key in ("a", "b", "c"):
                await broker.publish(f"{key} {number}", topic, sharding_key=key)
        came = await taken(found, 60)
        for wanted in ("a", "b", "c"):
            assert [number for key, number in came if key == wanted] == list(range(20))

    async def test_each_member_receives_a_broadcast(
        self, make: Make, topic: str, found: Found, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            options = PushOptions(
                message_model=MessageModel.BROADCASTING, offset_dir=str(tmp_path / name), start_strictly=True
            )
            broker = make()

            async def handle(body: str, name: str = name) -> None:
                await found.put((name, body))

            broker.subscriber(topic, options=options)(handle)
            await broker.start()
        await broker.publish("a", topic)
        assert {name for name, _ in await taken(found, 2)} == {"one", "two"}

    @pytest.mark.parametrize(
        ("where", "received"),
        [(ConsumeFromWhere.FIRST_OFFSET, ["old", "new"]), (ConsumeFromWhere.LAST_OFFSET, ["new"])],
    )
    async def test_a_new_group_starts_where_it_is_told_to(
        self, make: Make, topic: str, found: Found, where: ConsumeFromWhere, received: list[str]
    ) -> None:
        broker = make(topic_queues=1)
        await (await broker.connect()).ensure_topic(topic)
        await broker.publish("old", topic)

        @broker.subscriber(topic, options=PushOptions(consume_from_where=where, start_strictly=True))
        async def handle(body: str) -> None:
            await found.put(body)

        await broker.start()
        await broker.publish("new", topic)
        assert await taken(found, len(received)) == received

    async def test_handlers_run_concurrently(self, make: Make, topic: str, found: Found) -> None:
        broker, together = make(), asyncio.Barrier(3)

        @broker.subscriber(topic, max_workers=3)
        async def handle(body: str) -> None:
            await together.wait()
            await found.put(body)

        await broker.start()
        for body in "abc":
            await broker.publish(body, topic)
        assert sorted(await taken(found, 3)) == ["a", "b", "c"]

    async def test_single_messages_and_iteration(self, make: Make, topic: str) -> None:
        broker = make()
        subscriber = broker.subscriber(topic)
        await broker.start()
        assert await subscriber.get_one(timeout=0.01) is None
        for body in ("a", "b", "c"):
            await broker.publish(body, topic)
        first = await subscriber.get_one(timeout=PATIENCE_S)
        assert first is not None
        await first.ack()
        bodies = {await first.decode()}
        async for message in subscriber:
            bodies.add(await message.decode())
            await message.ack()
            if len(bodies) == 3:
                break
        assert bodies == {"a", "b", "c"}
        subscriber.ack_policy = AckPolicy.ACK_FIRST
        await broker.publish("d", topic)
        assert await subscriber.get_one(timeout=PATIENCE_S) is not None
        await nothing_is_left(broker, subscriber)

    async def test_the_test_broker_uses_the_server_if_asked_to(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()
        publisher = broker.publisher(f"{topic}-out")

        @broker.subscriber(topic)
        @publisher
        async def double(number: int) -> int:
            await found.put(number)
            return number * 2

        async with TestCometMQBroker(broker, with_real=True):
            await broker.publish(21, topic)
            await double.wait_call(timeout=PATIENCE_S)
            double.mock.assert_called_once_with(21)
            await until(lambda: publisher.mock.called, "the fake subscriber has received the result")
            publisher.mock.assert_called_once_with(42)
        assert await taken(found, 1) == [21]


class TestSettling:
    @pytest.mark.parametrize(
        ("policy", "again", "dead", "share"),
        [
            (AckPolicy.ACK, False, 0, "queues"),
            (AckPolicy.ACK_FIRST, False, 0, "queues"),
            (AckPolicy.REJECT_ON_ERROR, False, 1, "queues"),
            (AckPolicy.NACK_ON_ERROR, True, 0, "queues"),
            (AckPolicy.ACK, False, 0, "messages"),
            (AckPolicy.REJECT_ON_ERROR, False, 1, "messages"),
        ],
    )
    async def test_a_failed_message_goes_where_the_policy_says(
        self, make: Make, topic: str, found: Found, policy: AckPolicy, again: bool, dead: int, share: Any
    ) -> None:
        broker = make()

        @broker.subscriber(topic, ack_policy=policy, options=PushOptions(share=share))
        async def fail_once(message: CometMQMessage) -> None:
            await found.put(message.raw_message.reconsume_times)
            if not message.raw_message.reconsume_times:
                raise ValueError("as asked")

        await broker.start()
        await broker.publish("a", topic)
        assert await taken(found, 1 + again) == [0, 1][: 1 + again]
        await nothing_is_left(broker, broker.subscribers[0], dead)
        assert found.empty()

    @pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR])
    async def test_a_handler_that_awaits_a_cancelled_task_fails(
        self, make: Make, topic: str, found: Found, policy: AckPolicy
    ) -> None:
        broker = make(topic_queues=1)

        @broker.subscriber(topic, ack_policy=policy)
        async def handle(body: str, message: CometMQMessage) -> None:
            await found.put(body)
            if body == "cancelled" and not message.raw_message.reconsume_times:
                inner = asyncio.create_task(asyncio.Event().wait())
                inner.cancel()
                await inner

        await broker.start()
        for body in ("cancelled", "other"):
            await broker.publish(body, topic)
        assert sorted(await taken(found, 3)) == ["cancelled", "cancelled", "other"]
        await nothing_is_left(broker, broker.subscribers[0])

    @pytest.mark.parametrize("orderly", [False, True])
    async def test_a_handler_settles_its_message_itself(
        self, make: Make, topic: str, found: Found, orderly: bool
    ) -> None:
        broker = make()
        options = PushOptions(orderly=orderly, suspend_current_queue_s=0.01)

        @broker.subscriber(topic, ack_policy=AckPolicy.MANUAL, options=options)
        async def handle(body: str, message: CometMQMessage) -> None:
            await found.put(body)
            if body == "reject":
                await message.reject()
            elif body == "nack" and not message.raw_message.reconsume_times:
                await message.nack()
            else:
                await message.ack()
            await message.nack()  # a message is settled once

        await broker.start()
        for body in ("ack", "nack", "reject"):
            await broker.publish(body, topic)
        assert sorted(await taken(found, 4)) == ["ack", "nack", "nack", "reject"]
        await nothing_is_left(broker, broker.subscribers[0], dead=1)

    async def test_exceptions_settle(self, make: Make, topic: str, found: Found) -> None:
        broker = make()

        @broker.subscriber(topic)
        async def handle(body: str, message: CometMQMessage) -> None:
            await found.put(body)
            if body == "reject":
                raise RejectMessage
            if not message.raw_message.reconsume_times:
                raise NackMessage(delay_level=1)

        await broker.start()
        for body in ("nack", "reject"):
            await broker.publish(body, topic)
        assert sorted(await taken(found, 3)) == ["nack", "nack", "reject"]
        await nothing_is_left(broker, broker.subscribers[0], dead=1)

    async def test_after_too_many_retries_a_message_is_dead(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()

        @broker.subscriber(topic, options=PushOptions(max_reconsume_times=1))
        async def fail(message: CometMQMessage) -> None:
            await found.put(message.raw_message.reconsume_times)
            raise ValueError("as asked")

        await broker.start()
        await broker.publish("a", topic)
        assert await taken(found, 2) == [0, 1]
        await nothing_is_left(broker, broker.subscribers[0], dead=1)

    async def test_a_message_that_no_decoder_reads_is_settled_too(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()

        @broker.subscriber(topic, ack_policy=AckPolicy.REJECT_ON_ERROR)
        async def handle(number: int) -> None:
            await found.put(number)

        await broker.start()
        producer = (await broker.connect()).producer
        bad = Message(topic, b"\xff{", properties={"content-type": "application/json"})
        await producer.send(bad)
        await broker.publish(1, topic)
        assert await taken(found, 1) == [1]
        await nothing_is_left(broker, broker.subscribers[0], dead=1)


class TestRequests:
    async def test_a_request_returns_the_result_of_the_handler(self, make: Make, topic: str) -> None:
        broker = make()

        @broker.subscriber(topic)
        async def upper(body: str) -> CometMQResponse:
            return CometMQResponse(body.upper(), headers={"h": "1"})

        publisher = broker.publisher(topic)
        await broker.start()
        for asking in (broker.request("a", topic, timeout=PATIENCE_S, correlation_id="c1"),
                       publisher.request("a", timeout=PATIENCE_S, correlation_id="c1")):  # fmt: skip
            reply = await asking
            assert (await reply.decode(), reply.headers["h"], reply.correlation_id) == ("A", "1", "c1")
            await reply.ack()  # without effect

    async def test_results_go_to_the_topic_that_a_message_names(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()

        @broker.subscriber(topic)
        async def upper(body: str) -> str:
            return body.upper()

        @broker.subscriber(f"{topic}-replies")
        async def read(body: str, message: CometMQMessage) -> None:
            await found.put((body, message.correlation_id))

        await broker.start()
        await broker.publish("a", topic, reply_to=f"{topic}-replies", correlation_id="c1")
        assert await taken(found, 1) == [("A", "c1")]

    async def test_no_reply_in_time(self, make: Make, topic: str) -> None:
        broker = make()

        @broker.subscriber(topic, no_reply=True)
        async def upper(body: str) -> str:
            return body.upper()

        await broker.start()
        with pytest.raises(ReplyTimeout):
            await broker.request("a", topic, timeout=1.0)

    async def test_a_handler_does_not_run_again_because_the_requester_has_gone(
        self, make: Make, broker: LocalBroker, topic: str, found: Found
    ) -> None:
        server, gone = make(), asyncio.Event()

        @server.subscriber(topic)
        async def upper(body: str) -> str:
            await found.put(body)
            await gone.wait()
            return body.upper()

        await server.start()
        async with Producer("requester", namesrv=broker.namesrv) as requester:
            with pytest.raises(ReplyTimeout):
                await requester.request(Message(topic, b"a"), timeout_s=1.0)
        gone.set()
        assert await taken(found, 1) == ["a"]
        await nothing_is_left(server, server.subscribers[0])
        assert found.empty()

    @pytest.mark.parametrize("reply_to", ["no such/topic", "SCHEDULE_TOPIC_XXXX", "t-missing"])
    async def test_a_handler_does_not_run_again_because_its_reply_has_no_topic(
        self, make: Make, topic: str, found: Found, reply_to: str
    ) -> None:
        broker = make()

        @broker.subscriber(topic, ack_policy=AckPolicy.REJECT_ON_ERROR)
        async def upper(body: str) -> str:
            await found.put(body)
            return body.upper()

        await broker.start()
        await broker.publish("a", topic, reply_to=reply_to)
        assert await taken(found, 1) == ["a"]
        await nothing_is_left(broker, broker.subscribers[0])
        assert await dead_letters(broker, broker.subscribers[0]) == 0

    async def test_a_handler_without_a_result_replies_nothing(
        self, make: Make, topic: str, found: Found
    ) -> None:
        broker = make()

        @broker.subscriber(topic, ack_policy=AckPolicy.REJECT_ON_ERROR)
        async def handle(body: str) -> None:
            await found.put(body)

        await broker.start()
        await broker.publish("a", topic, reply_to=f"{topic}-replies")
        assert await taken(found, 1) == ["a"]
        await nothing_is_left(broker, broker.subscribers[0])
        assert await dead_letters(broker, broker.subscribers[0]) == 0


class TestLifeCycle:
    async def test_a_stop_waits_for_running_handlers(self, make: Make, topic: str, found: Found) -> None:
        broker, go, done = make(), asyncio.Event(), []

        @broker.subscriber(topic)
        async def handle(body: str) -> None:
            await found.put(body)
            await go.wait()
            done.append(body)

        await broker.start()
        await broker.publish("a", topic)
        await taken(found, 1)
        stopping = asyncio.create_task(broker.stop())
        await asyncio.sleep(0)
        go.set()
        await soon(stopping)
        assert done == ["a"]
        await nothing_is_left(broker, broker.subscribers[0])

    async def test_what_is_not_settled_at_the_stop_is_delivered_to_the_next_member(
        self, make: Make, topic: str, found: Found
    ) -> None:
        first, second = make(graceful_timeout=0.2), make()

        @first.subscriber(topic)
        async def hang(body: str) -> None:
            await found.put(body)
            await asyncio.Event().wait()

        @second.subscriber(topic, options=FIRST)
        async def handle(body: str) -> None:
            await found.put(body)

        await first.start()
        for body in "ab":
            await first.publish(body, topic)
        await taken(found, 1)
        await first.stop()
        await second.start()
        assert sorted(await taken(found, 2)) == ["a", "b"]

    async def test_a_broker_starts_again(self, make: Make, topic: str, found: Found) -> None:
        broker = make()

        @broker.subscriber(topic)
        async def handle(body: str) -> None:
            await found.put(body)

        for body in ("a", "b"):
            await broker.start()
            assert await broker.ping()
            await broker.publish(body, topic)
            assert await taken(found, 1) == [body]
            await broker.stop()
            assert not await broker.ping()

    async def test_stop_consume_stops_one_subscriber(self, make: Make, topic: str, found: Found) -> None:
        broker = make()

        @broker.subscriber(topic)
        async def stop(body: str) -> None:
            await found.put(body)
            raise StopConsume

        @broker.subscriber(f"{topic}-other")
        async def other(body: str) -> None:
            await found.put(body)

        await broker.start()
        stopped = next(each for each in broker.subscribers if each.topic == topic)
        await broker.publish("a", topic)
        assert await taken(found, 1) == ["a"]
        await until(lambda: not stopped.running, "the subscriber has stopped")
        await broker.publish("b", f"{topic}-other")
        assert await taken(found, 1) == ["b"]

    async def test_two_subscribers_of_a_group_are_refused(self, make: Make, topic: str) -> None:
        broker = make()
        for _ in range(2):
            broker.subscriber(topic)
        with pytest.raises(ClientStateError, match=f"already has a consumer of group {topic}"):
            await broker.start()

    async def test_no_cluster(self, make: Make) -> None:
        with pytest.raises(RemotingError):
            await make("127.0.0.1:1").start()
