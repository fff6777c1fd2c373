"""Scenarios for clients with a namespace, run against any broker like those in scenarios.py."""

from __future__ import annotations

import asyncio

from tests.client.scenarios import PATIENT, Ledger, names, reading
from tests.kit.waiting import until

from cometmq import (
    ClientInstance,
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    PullConsumer,
    PushConsumer,
    PushOptions,
    TransactionProducer,
    TransactionState,
    reply_to,
)


class Committing:
    """A transaction listener that commits."""

    async def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        return TransactionState.COMMIT

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


class Tenant:
    """A consumer of a topic: bodies that begin with `retry` fail once, and `ask` gets a reply."""

    def __init__(self, namesrv: str, topic: str, group: str, namespace: str, *, orderly: bool) -> None:
        self.topic, self.ledger = topic, Ledger()
        self.client = ClientInstance(namesrv, ClientOptions(namespace=namespace, api_timeout_s=30.0))
        self.producer = TransactionProducer(f"p-{group}", Committing(), client=self.client, options=PATIENT)
        options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, orderly=orderly)
        listener = self.ordered if orderly else self.unordered
        self.consumer = PushConsumer(group, listener, topic, client=self.client, options=options)

    async def ordered(self, messages: list[MessageExt]) -> None:
        await self.handle(messages)

    async def unordered(self, messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus | None:
        await self.handle(messages)
        context.delay_level = 1
        failed = messages[0].body.startswith(b"retry") and not messages[0].reconsume_times
        return ConsumeStatus.RECONSUME_LATER if failed else None

    async def handle(self, messages: list[MessageExt]) -> None:
        self.ledger.add(messages)
        for message in messages:
            assert message.topic == self.topic
            if message.body.startswith(b"ask"):
                await self.producer.send(reply_to(message, b"re: " + message.body))


async def namespaces_keep_clients_apart(namesrv: str) -> None:
    name = names("spaces")
    await asyncio.gather(
        use_all(namesrv, name.topic, name.group, "left", orderly=False),
        use_all(namesrv, name.topic, name.group, "right", orderly=True),
    )
    for namespace in ("left", "right"):  # brokers see the names with the namespace
        async with reading(namesrv, "g-look") as reader:
            assert await reader.fetch_queues(f"{namespace}%{name.topic}")


async def use_all(namesrv: str, topic: str, group: str, space: str, *, orderly: bool) -> None:
    tenant = Tenant(namesrv, topic, group, space, orderly=orderly)
    bodies = [f"{kind} in {space}".encode() for kind in ("plain", "retry", "half", "ask", "batch")]
    plain, retry, half, ask, batch = (Message(topic, body) for body in bodies)
    async with tenant.client, tenant.producer as producer:
        sent = await producer.send(plain)
        assert sent.queue.topic == topic
        async with tenant.consumer as consumer:
            assert (await producer.request(ask, timeout_s=30.0)).body == b"re: " + ask.body
            await producer.send(retry)
            await producer.send_batch([batch])
            await producer.send_in_transaction(half)
            await tenant.ledger.has_all(bodies)
            if not orderly:
                await tenant.ledger.wait_until(
                    lambda ledger: any(message.reconsume_times for message in ledger.messages), "the retry"
                )
            assert {queue.topic for queue in consumer.assignment} <= {topic, f"%RETRY%{group}"}
        async with PullConsumer(group, client=tenant.client) as puller:

            async def committed() -> bool:
                return (await puller.committed(sent.queue) or 0) > sent.queue_offset

            await until(committed, "the offset")
            found = await puller.pull(sent.queue, sent.queue_offset)
            assert (found.messages[0].topic, found.messages[0].body) == (topic, plain.body)
    assert set(tenant.ledger.bodies) == set(bodies)


NAMESPACE_SCENARIOS = [namespaces_keep_clients_apart]
