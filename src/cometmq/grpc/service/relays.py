"""Requests of tools that a consumer answers on its telemetry stream: a stack trace, and a trial consumption.

The broker forwards such a request to the client's link. The client's answer repeats the nonce of the command.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from cometmq.errors import CommandError
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.service.clients import Client
from cometmq.grpc.service.delivered import unleased_message
from cometmq.protocol.bodies import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from cometmq.protocol.codes import ResponseCode, version_name
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import GetConsumerRunningInfoRequestHeader
from cometmq.protocol.record.one import decode_record
from cometmq.remoting import Connection

RELAY_S = 9.0
"""The time, in seconds, within which a client must answer. The broker waits for 10 s."""
MAX_RELAYS = 64
"""The maximum number of requests that wait for answers."""
RESULTS = {
    Code.OK: "CR_SUCCESS",
    Code.FAILED_TO_CONSUME_MESSAGE: "CR_LATER",
    Code.MESSAGE_CORRUPTED: "CR_RETURN_NULL",
}
"""The result of a trial consumption for each status of a client's answer. Any other status is an error."""


class Relays:
    """Sends requests of tools to clients, and receives the answers."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Client, asyncio.Future[Any]]] = {}

    async def running_info(self, client: Client, _connection: Connection, frame: Frame) -> Frame:
        """Return what is known about a consumer and, if the request asks for it, its stack trace."""
        header = frame.header(GetConsumerRunningInfoRequestHeader)
        properties = {
            "PROP_CONSUME_TYPE": "CONSUME_ACTIVELY",  # Tools of 4.x know no type for pops
            "PROP_CLIENT_VERSION": version_name(client.version),
            "consumerGroup": header.consumer_group,
        }
        info = ConsumerRunningInfo(properties=properties, subscription_set=client.subscriptions())
        if header.jstack_enable:
            command = messages().TelemetryCommand()
            command.print_thread_stack_trace_command.nonce = nonce = secrets.token_hex(16)
            answer = await self._ask(client, nonce, command)
            if answer.status.code != Code.OK:
                raise _failed(answer)
            info.jstack = answer.thread_stack_trace.thread_stack_trace
        return frame.response(body=info.encode())

    async def consume_directly(self, client: Client, _connection: Connection, frame: Frame) -> Frame:
        """Let a consumer consume the message in a request, and return its result."""
        command = messages().TelemetryCommand()
        command.verify_message_command.nonce = nonce = secrets.token_hex(16)
        command.verify_message_command.message.CopyFrom(unleased_message(decode_record(frame.body)))
        begun = asyncio.get_running_loop().time()
        answer = await self._ask(client, nonce, command)
        result = RESULTS.get(answer.status.code)
        if result is None:
            raise _failed(answer)
        spent_ms = round((asyncio.get_running_loop().time() - begun) * 1000)
        remark = answer.status.message or "from a 5.x client"
        body = ConsumeMessageDirectlyResult(consume_result=result, remark=remark, spent_time_mills=spent_ms)
        return frame.response(body=body.encode())

    async def _ask(self, client: Client, nonce: str, command: Any) -> Any:
        """Send a command to a client and return its answer. Raises CommandError."""
        if len(self._waiting) >= MAX_RELAYS:
            problem = f"{MAX_RELAYS} requests already wait for the answers of 5.x clients"
            raise CommandError(ResponseCode.SYSTEM_BUSY, problem)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[nonce] = client, future
        try:
            if not client.command(command):
                problem = f"client {client.client_id} has no telemetry stream, or does not read it"
                raise CommandError(ResponseCode.SYSTEM_ERROR, problem)
            return await asyncio.wait_for(future, RELAY_S)
        except TimeoutError:
            problem = f"client {client.client_id} has not answered within {RELAY_S:g} s"
            raise CommandError(ResponseCode.CONSUME_MSG_TIMEOUT, problem) from None
        finally:
            del self._waiting[nonce]

    def answered(self, client: Client, nonce: str, command: Any) -> None:
        """Pass a client's answer to the request that waits for it. An unexpected answer is ignored."""
        waiting = self._waiting.get(nonce)
        if waiting is not None and waiting[0] is client and not waiting[1].done():
            waiting[1].set_result(command)


def _failed(answer: Any) -> CommandError:
    text = answer.status.message or f"status {answer.status.code}"
    return CommandError(ResponseCode.SYSTEM_ERROR, f"the client has refused the request: {text}")
