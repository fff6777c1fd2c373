"""Clients never log message bodies or user properties, even at the most verbose level and after failures."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cometmq import (
    BeingHandled,
    ClientOptions,
    CometError,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageStream,
    OrderlyStatus,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushOptions,
    TraceOptions,
    TransactionProducer,
    TransactionState,
)
from cometmq.testing import LocalBroker

SECRET = "s3cret"
BODY = f"the body is {SECRET}".encode() * 20


def message(topic: str) -> Message:
    return Message(topic, BODY, properties={"password": f"{SECRET}-property"})


class Failing:
    async def execute_local_transaction(self, message: Message, argument: object) -> TransactionState:
        raise RuntimeError("the database is away")

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


async def test_no_line_of_the_log_has_a_body_or_a_property(
    local: LocalBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    quick = {"consume_from_where": ConsumeFromWhere.FIRST_OFFSET}
    traced = ClientOptions(trace=TraceOptions())
    failed = asyncio.Event()
    errors: list[str] = []

    async def fails(messages: list[MessageExt]) -> ConsumeStatus:
        failed.set()
        if len(errors) % 2:
            raise BeingHandled("order-7")
        return ConsumeStatus.RECONSUME_LATER

    async def in_order(messages: list[MessageExt]) -> OrderlyStatus:
        raise LookupError("not yet")

    async with (
        asyncio.timeout(60),
        Producer("p", namesrv=local.namesrv, client_options=traced) as producer,
        TransactionProducer("p-tx", Failing(), namesrv=local.namesrv) as transactions,
    ):
        await producer.send(message("Logged"))
        await producer.send_batch([message("Logged"), message("Logged")])
        await producer.send_oneway(message("Logged"))
        await transactions.send_in_transaction(message("Logged"))
        options = PushOptions(**quick)
        orderly = PushOptions(orderly=True, **quick)
        async with (
            PushConsumer("g-fails", fails, "Logged", namesrv=local.namesrv, options=options),
            PushConsumer("g-order", in_order, "Logged", namesrv=local.namesrv, options=orderly),
            MessageStream("g-left", "Logged", namesrv=local.namesrv, options=options) as stream,
        ):
            left, refused = await anext(stream), await anext(stream)
            await stream.nack(refused)
            assert left.properties["password"] == f"{SECRET}-property"
            await failed.wait()
        for topic, at in (("Logged", "127.0.0.1:1"), ("no such topic", local.namesrv)):
            try:
                async with Producer("p", namesrv=at, options=ProducerOptions(send_timeout_s=1)) as lost:
                    await lost.send(message(topic))
            except CometError as error:
                errors.append(str(error))
    assert len(errors) == 2
    assert [text for text in errors if SECRET in text] == []
    lines = [logging.Formatter().format(record) for record in caplog.records]
    assert any("cometmq" in record.name for record in caplog.records)
    assert len(lines) > 5
    assert [line for line in lines if SECRET in line] == []
