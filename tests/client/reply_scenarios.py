"""Scenarios for requests and replies, run against any broker like those in scenarios.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.client.scenarios import Ledger, Names, consuming, fill, names, sending

from cometmq import Message, MessageExt, ReplyTimeout, reply_to
from cometmq.errors import MessageIllegal


@asynccontextmanager
async def replying(namesrv: str, name: Names, ledger: Ledger) -> AsyncIterator[None]:
    """Run a consumer that replies "re: " and the body to each request without the tag `silent`."""
    async with sending(namesrv, "p-replier") as producer:

        async def listener(messages: list[MessageExt]) -> None:
            ledger.add(messages)
            for message in messages:
                if "CORRELATION_ID" in message.properties and message.tags != "silent":
                    reply = reply_to(message, b"re: " + message.body, tags="answer", properties={"x": "1"})
                    await producer.send(reply)

        async with consuming(namesrv, name, listener):
            yield


async def each_request_gets_its_own_reply(namesrv: str) -> None:
    name, ledger = names("request"), Ledger()
    await fill(namesrv, name.topic, [b"makes the topic"])
    async with sending(namesrv, "p-asker") as producer, replying(namesrv, name, ledger):
        small = [b"%d" % number for number in range(40)]
        wanted = [*small, b"compressed " * 2000]
        replies = await asyncio.gather(
            *(producer.request(Message(name.topic, body), timeout_s=30.0) for body in wanted)
        )
        assert [reply.body for reply in replies] == [b"re: " + body for body in wanted]
        assert {(reply.tags, reply.user_properties["x"]) for reply in replies} == {("answer", "1")}
        assert len({reply.msg_id for reply in replies}) == len(wanted)
        assert len(producer.client.replies) == 0


async def a_request_without_a_reply_ends_in_time(namesrv: str) -> None:
    name, ledger = names("silent"), Ledger()
    await fill(namesrv, name.topic, [b"makes the topic"])
    async with sending(namesrv, "p-asker") as producer, replying(namesrv, name, ledger):
        assert (await producer.request(Message(name.topic, b"first"), timeout_s=30.0)).body == b"re: first"
        with pytest.raises(ReplyTimeout, match=f"topic {name.topic} within 1.5 s") as caught:
            await producer.request(Message(name.topic, b"second", tags="silent"), timeout_s=1.5)
        await ledger.has_all([b"first", b"second"])
        (asked,) = [message for message in ledger.messages if message.body == b"second"]
        assert caught.value.correlation_id == asked.properties["CORRELATION_ID"]
        assert (caught.value.msg_id, asked.properties["TTL"]) == (asked.msg_id, "1500")
        await producer.send(reply_to(asked, b"too late"))  # the client discards it: the request has timed out
        assert len(producer.client.replies) == 0
        await producer.send(Message(name.topic, b"plain", tags="silent"))
        await ledger.has_all([b"plain"])
        (plain,) = [message for message in ledger.messages if message.body == b"plain"]
        with pytest.raises(MessageIllegal, match="no property CORRELATION_ID"):
            reply_to(plain, b"nobody asked")


REPLY_SCENARIOS = [each_request_gets_its_own_reply, a_request_without_a_reply_ends_in_time]
