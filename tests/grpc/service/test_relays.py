"""Requests of tools that a 5.x consumer answers on its telemetry stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.grpc.service.caller import consumer_settings, message
from tests.grpc.serving import M
from tests.kit.brokers import create, refused
from tests.kit.waiting import until

from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.service import relays
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import ConsumeMessageDirectlyRequestHeader, GetConsumerRunningInfoRequestHeader
from cometmq.protocol.ids import encode_offset_id


class Consumer:
    """A consumer with a telemetry stream."""

    def __init__(self, cluster: Any, caller: Any, stream: Any) -> None:
        self.cluster = cluster
        self.caller = caller
        self.stream = stream

    async def running_info(self, stack: bool) -> Any:
        """Ask for the running info, as tools do."""
        header = GetConsumerRunningInfoRequestHeader(
            consumer_group="G", client_id="client-1", jstack_enable=stack
        )
        return await self.cluster.peer().call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)

    async def consume(self) -> Any:
        """Ask for the consumption of the first message of the log."""
        host = self.cluster.broker.parts.store.appender.store_host
        header = ConsumeMessageDirectlyRequestHeader(
            consumer_group="G", client_id="client-1", msg_id=encode_offset_id(host, 0)
        )
        return await self.cluster.peer().call(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)

    async def answer(self, code: int, text: str = "", **answer: Any) -> None:
        status = M.Status(code=code, message=text)
        await self.stream.write(M.TelemetryCommand(status=status, **answer))


@pytest.fixture
async def consumer(cluster, connect):
    caller = await connect(cluster, x_mq_client_version="5.1.2")
    await create(cluster.peer(), "Orders", 1, 1)
    await caller.send(message())
    stream = caller.telemetry()
    await stream.write(consumer_settings())
    await stream.read()
    await until(lambda: "G" in cluster.broker.parts.consumers.groups)
    yield Consumer(cluster, caller, stream)
    stream.cancel()


async def test_running_info_without_a_stack_trace_asks_no_client(consumer):
    info = ConsumerRunningInfo.decode((await consumer.running_info(stack=False)).body)
    assert [each.topic for each in info.subscription_set] == ["Orders"]
    assert info.properties["consumerGroup"] == "G"
    assert info.properties["PROP_CLIENT_VERSION"] == "V5_1_2"
    assert info.jstack is None


async def test_a_stack_trace(consumer):
    asking = asyncio.create_task(consumer.running_info(stack=True))
    nonce = (await consumer.stream.read()).print_thread_stack_trace_command.nonce
    await consumer.answer(Code.OK, thread_stack_trace=M.ThreadStackTrace(nonce="another"))
    trace = M.ThreadStackTrace(nonce=nonce, thread_stack_trace="main: waiting")
    await consumer.answer(Code.OK, thread_stack_trace=trace)
    assert ConsumerRunningInfo.decode((await asking).body).jstack == "main: waiting"


@pytest.mark.parametrize(
    ("code", "result"),
    [(Code.OK, "CR_SUCCESS"), (Code.FAILED_TO_CONSUME_MESSAGE, "CR_LATER"), (Code.NOT_IMPLEMENTED, None)],
)
async def test_a_message_is_consumed_on_request(consumer, code, result):
    asking = asyncio.create_task(consumer.consume())
    command = (await consumer.stream.read()).verify_message_command
    assert (command.message.body, command.message.topic.name) == (b"body", "Orders")
    assert not command.message.system_properties.HasField("receipt_handle")
    await consumer.answer(code, "text", verify_message_result=M.VerifyMessageResult(nonce=command.nonce))
    response = await asking
    if result is None:
        refused(response, ResponseCode.SYSTEM_ERROR, "the client has refused the request: text")
    else:
        assert ConsumeMessageDirectlyResult.decode(response.body).consume_result == result


async def test_a_client_that_does_not_answer(consumer, monkeypatch):
    monkeypatch.setattr(relays, "RELAY_S", 0.1)
    refused(await consumer.running_info(stack=True), ResponseCode.CONSUME_MSG_TIMEOUT, "not answered within")


async def test_the_number_of_waiting_requests_is_limited(consumer, monkeypatch):
    monkeypatch.setattr(relays, "MAX_RELAYS", 0)
    refused(await consumer.running_info(stack=True), ResponseCode.SYSTEM_BUSY, "already wait")


async def test_a_client_without_a_telemetry_stream(cluster, caller):
    await caller.heartbeat("G")
    refused(
        await Consumer(cluster, caller, None).running_info(stack=True),
        ResponseCode.SYSTEM_ERROR,
        "has no telemetry stream",
    )
