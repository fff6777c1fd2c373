"""Hooks around sends and listeners, including hooks that fail."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    BrokerError,
    ConfigError,
    ConsumeStatus,
    Consuming,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushOptions,
    Sending,
    SendStatus,
)
from cometmq.client.cluster.hooks import kept
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.testing import LocalBroker


class Noted:
    """A hook that records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Sending]] = []

    def before_send(self, sending: Sending) -> None:
        assert (sending.result, sending.error) == (None, None)
        self.told.append(("before", sending))

    def after_send(self, sending: Sending) -> None:
        self.told.append(("after", sending))


class Broken:
    def before_send(self, sending: Sending) -> None:
        raise ValueError("a bug")

    after_send = before_send


class Awaitable:
    async def before_send(self, sending: Sending) -> None:
        raise AssertionError

    after_send = before_send


async def forbids(sending: Sending) -> None:
    raise AssertionError


async def passes(message: MessageExt) -> bool:
    raise AssertionError


@pytest.mark.parametrize(
    ("key", "options", "hook"),
    [
        ("send_hooks", ProducerOptions, Awaitable()),
        ("send_hooks", ProducerOptions, forbids),
        ("check_forbidden", ProducerOptions, forbids),
        ("check_forbidden", ProducerOptions, 7),
        ("end_transaction_hooks", ProducerOptions, forbids),
        ("filter_hooks", PushOptions, passes),
        ("consume_hooks", PushOptions, Awaitable()),
    ],
)
def test_hooks_are_plain_functions(key: str, options: Any, hook: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*not async"):
        options(**{key: [hook]})


def hooked(namesrv: FakeNamesrv, *hooks: Noted | Broken) -> Producer:
    return Producer("p", namesrv=namesrv.addr, options=ProducerOptions(send_hooks=hooks))


async def test_a_send_hook_is_told_of_each_try(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    hook = Noted()
    broker.refuse(RequestCode.SEND_MESSAGE_V2, ResponseCode.SYSTEM_ERROR)
    message = Message("T", b"x")
    async with hooked(namesrv, hook) as producer:
        with pytest.raises(BrokerError) as caught:
            await producer.send(message)
        del broker.scripts[RequestCode.SEND_MESSAGE_V2]
        await producer.send_oneway(message)
        result = await producer.send_batch([message, message])
    assert [when for when, _ in hook.told] == ["before", "after"] * 5
    *tries, oneway, batch = [sending for when, sending in hook.told if when == "after"]
    assert len(tries) == 3
    assert tries[-1].error is caught.value
    told = [(each.group, list(each.messages), each.broker_addr) for each in tries]
    assert told == [("p", [message], broker.addr)] * 3
    assert (oneway.oneway, oneway.result, oneway.error) == (True, None, None)
    assert (len(batch.messages), batch.result, result.status) == (2, result, SendStatus.SEND_OK)
    assert batch.queue == MessageQueue("T", "broker-a", 0)


async def test_a_hook_that_fails_is_logged_and_changes_nothing(
    namesrv: FakeNamesrv, caplog: pytest.LogCaptureFixture
) -> None:
    last = Noted()
    async with hooked(namesrv, Broken(), last) as producer:
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    assert len(last.told) == 2
    failures = [record for record in caplog.records if "hook" in record.message]
    assert [record.exc_text is not None for record in failures] == [True, True]


async def test_a_check_may_forbid_a_send(namesrv: FakeNamesrv, broker: FakeBroker) -> None:
    def check(sending: Sending) -> None:
        if sending.messages[0].tags == "secret":
            raise PermissionError("not to be sent")

    options = ProducerOptions(check_forbidden=[check])
    async with Producer("p", namesrv=namesrv.addr, options=options) as producer:
        await producer.send(Message("T", b"x"))
        for send in (producer.send, producer.send_oneway):
            with pytest.raises(PermissionError, match="not to be sent"):
                await send(Message("T", b"x", tags="secret"))
    assert len(broker.sent) == 1


class Watch:
    def __init__(self) -> None:
        self.before: list[Consuming] = []
        self.after: list[Consuming] = []
        self.enough = asyncio.Event()

    def before_consume(self, consuming: Consuming) -> None:
        assert consuming.status is None
        self.before.append(consuming)

    def after_consume(self, consuming: Consuming) -> None:
        self.after.append(consuming)
        if len(self.after) == 3:
            self.enough.set()


async def test_hooks_of_a_consumer(local: LocalBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    watch, given = Watch(), []

    def odd(message: MessageExt) -> bool:
        return bool(int(message.body) % 2)

    async def listener(messages: list[MessageExt]) -> ConsumeStatus:
        given.extend(message.body for message in messages)
        if messages[0].body == b"3":
            raise ValueError("a bug")
        return ConsumeStatus.SUCCESS if messages[0].body == b"1" else ConsumeStatus.RECONSUME_LATER

    async with Producer("p", namesrv=local.namesrv) as producer:
        for number in range(6):
            await producer.send(Message("Hooked", b"%d" % number))
        options = PushOptions(consume_hooks=[watch], filter_hooks=[odd], pull_interval_s=0.01)
        async with (
            asyncio.timeout(60),
            PushConsumer("g-hooked", listener, "Hooked", namesrv=local.namesrv, options=options),
        ):
            await watch.enough.wait()
    assert sorted(given) == [b"1", b"3", b"5"]
    ended = {each.messages[0].body: each for each in watch.after}
    assert {id(each) for each in watch.before} == {id(each) for each in watch.after}
    assert {body: each.status for body, each in ended.items()} == {
        b"1": ConsumeStatus.SUCCESS, b"3": None, b"5": ConsumeStatus.RECONSUME_LATER,
    }  # fmt: skip
    assert isinstance(ended[b"3"].error, ValueError)
    assert {(each.group, each.queue.topic) for each in watch.after} == {("g-hooked", "Hooked")}


def test_a_filter_that_fails_lets_the_message_pass() -> None:
    messages = [MessageExt("T", b"1"), MessageExt("T", b"x")]
    assert kept([lambda message: int(message.body) > 1], messages) == messages[1:]
