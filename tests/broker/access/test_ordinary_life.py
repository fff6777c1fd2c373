"""No request of an account without admin rights is refused during the normal life of a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.broker.access.test_files import write

from cometmq import Message, Producer, PullConsumer, PushConsumer
from cometmq.client import (
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    OrderlyContext,
    OrderlyStatus,
    PushOptions,
    TraceOptions,
    TransactionProducer,
    reply_to,
    sql92,
)
from cometmq.message import MessageExt, TransactionState
from cometmq.standalone import Standalone

ACL = """
accounts:
- {accessKey: adminer, secretKey: secret-of-adminer, admin: true}
- accessKey: program
  secretKey: secret-of-program
  topicPerms: [Orders=PUB|SUB, DefaultCluster_REPLY_TOPIC=PUB]
  groupPerms: [billing=SUB, repliers=SUB, readers=SUB]
"""
OPTIONS = ClientOptions(access_key="program", secret_key="secret-of-program", trace=TraceOptions())
FIRST = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
Life = Callable[[str], Coroutine[Any, Any, None]]


@asynccontextmanager
async def sending(namesrv: str) -> AsyncIterator[Producer]:
    async with Producer("PG", namesrv=namesrv, client_options=OPTIONS) as producer:
        yield producer


async def a_producer(namesrv: str) -> None:
    async with sending(namesrv) as producer:
        sent = await producer.send(Message("Orders", b"1", keys=("K",)))
        await producer.send_batch([Message("Orders", b"2"), Message("Orders", b"3")])
        await producer.send_oneway(Message("Orders", b"4"))
        await producer.send(Message("Orders", b"5", delay_level=1))
        assert [each.body for each in await producer.query_messages("Orders", "K")] == [b"1"]
        for msg_id in (sent.msg_id, sent.offset_msg_id):
            assert msg_id is not None
            assert (await producer.view_message(msg_id, "Orders")).body == b"1"


class Local:
    def execute_local_transaction(self, message: MessageExt, _argument: object) -> TransactionState:
        return TransactionState.UNKNOWN if message.body == b"asked" else TransactionState.COMMIT

    def check_local_transaction(self, _message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


async def transactions(namesrv: str) -> None:
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def listener(messages: list[MessageExt]) -> None:
        got.put_nowait(messages[0].body)

    async with (
        TransactionProducer("TG", Local(), namesrv=namesrv, client_options=OPTIONS) as producer,
        PushConsumer("billing", listener, "Orders", namesrv=namesrv, options=FIRST, client_options=OPTIONS),
    ):
        for body in (b"told", b"asked"):
            await producer.send_in_transaction(Message("Orders", body))
        assert {await got.get(), await got.get()} == {b"told", b"asked"}


async def a_question_and_a_reply(namesrv: str) -> None:
    async with sending(namesrv) as producer:

        async def listener(messages: list[MessageExt]) -> None:
            await producer.send(reply_to(messages[0], b"re: " + messages[0].body))

        consumer = PushConsumer(
            "repliers", listener, "Orders", namesrv=namesrv, options=FIRST, client_options=OPTIONS
        )
        async with consumer:
            assert (await producer.request(Message("Orders", b"hm"), timeout_s=20)).body == b"re: hm"


async def a_consumer_that_fails_once(namesrv: str) -> None:
    tries: asyncio.Queue[int] = asyncio.Queue()

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        tries.put_nowait(messages[0].reconsume_times)
        context.delay_level = 1
        return ConsumeStatus.SUCCESS if messages[0].reconsume_times else ConsumeStatus.RECONSUME_LATER

    async with sending(namesrv) as producer:
        await producer.send(Message("Orders", b"x"))
    wanted = {"Orders": sql92("a IS NULL")}
    consumer = PushConsumer(
        "billing", listener, wanted, namesrv=namesrv, options=FIRST, client_options=OPTIONS
    )
    async with consumer:
        assert [await tries.get(), await tries.get()] == [0, 1]
        await consumer.lag()
        await consumer.persist_offsets()


async def an_orderly_consumer(namesrv: str) -> None:
    came = asyncio.Event()

    async def listener(_messages: list[MessageExt], _context: OrderlyContext) -> OrderlyStatus:
        came.set()
        return OrderlyStatus.SUCCESS

    async with sending(namesrv) as producer:
        await producer.send(Message("Orders", b"x"))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, orderly=True)
    async with PushConsumer(
        "billing", listener, "Orders", namesrv=namesrv, options=options, client_options=OPTIONS
    ):
        await came.wait()


async def one_that_pulls(namesrv: str) -> None:
    async with sending(namesrv) as producer:
        queue = (await producer.send(Message("Orders", b"x"))).queue
    async with PullConsumer("readers", namesrv=namesrv, client_options=OPTIONS) as consumer:
        assert queue in await consumer.fetch_queues("Orders")
        assert [each.body for each in (await consumer.pull(queue, 0)).messages] == [b"x"]
        assert (await consumer.min_offset(queue), await consumer.max_offset(queue)) == (0, 1)
        assert await consumer.offset_by_time(queue, 0) == 0
        assert await consumer.earliest_store_time(queue) > 0
        await consumer.subscribe("Orders")
        await consumer.seek_to_begin(queue)
        polled = await consumer.poll(10)
        assert [each.body for each in polled] == [b"x"]
        await consumer.commit()
        assert await consumer.committed(queue) == 1
        await consumer.send_message_back(polled[0])


@pytest.mark.parametrize(
    "life",
    [
        a_producer,
        transactions,
        a_question_and_a_reply,
        a_consumer_that_fails_once,
        an_orderly_consumer,
        one_that_pulls,
    ],
)
async def test_nothing_that_clients_ask_in_their_life_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, life: Life
) -> None:
    write(tmp_path / "conf" / "plain_acl.yml", ACL)
    settings = {"aclEnable": "true", "rocketmqHome": str(tmp_path), "enablePropertyFilter": "true"}
    soon = {"transactionTimeOut": "200", "transactionCheckInterval": "200", "messageDelayLevel": "1s 2s"}
    async with (
        asyncio.timeout(50),
        Standalone(tmp_path / "data", 0, 0, settings={**settings, **soon}) as cluster,
    ):
        await life(cluster.namesrv_addr)
    assert [each.message for each in caplog.records if " refused: " in each.message] == []
