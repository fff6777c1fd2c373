"""The leased messages of a channel when requests to brokers fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.waiting import PATIENCE_S

import cometmq.integrations.inbox as module
from cometmq.errors import BrokerError, RemotingError
from cometmq.integrations.inbox import Inbox
from cometmq.integrations.session import QueueConsumer, Settlement
from cometmq.message import MessageExt
from cometmq.protocol.codes import ResponseCode


class Scripted(QueueConsumer):
    """A consumer whose requests fail as listed for each message. Repeated requests are refused."""

    def __init__(self, **failures: list[Exception]) -> None:
        self.failures = failures
        self.done: list[str] = []

    async def ack(self, *messages: MessageExt) -> None:
        for each in messages:
            if each.topic in self.done and len(messages) == 1:
                raise BrokerError(ResponseCode.NO_MESSAGE)
            if self.failures.get(each.topic):
                raise self.failures[each.topic].pop()
            self.done.append(each.topic)

    async def dead_letter(self, message: MessageExt) -> None:
        await self.ack(message)

    async def change_invisibility(self, message: MessageExt, seconds: float) -> None:
        await self.ack(message)

    async def wait(self) -> bool:
        return True

    async def receive(self, *_: Any, **__: Any) -> list[MessageExt]:
        if self.failures["receive"]:
            raise self.failures["receive"].pop()
        await asyncio.sleep(0)
        return [MessageExt("received", b"")]


@pytest.fixture
async def inbox(monkeypatch: pytest.MonkeyPatch) -> Inbox:
    """An inbox without brokers, which retries immediately."""
    monkeypatch.setattr(module, "RETRY_S", 0)
    session: Any = SimpleNamespace(visibility_s=60.0)
    return Inbox(session, lambda *_: None)


class TestFailures:
    @pytest.mark.parametrize("how", [Settlement.ACK, Settlement.DEAD, Settlement.REQUEUE])
    @pytest.mark.parametrize(
        "error", [RemotingError("b:1"), ValueError("unexpected")], ids=["timeout", "other"]
    )
    async def test_each_broker_is_judged_alone(self, inbox: Inbox, how: Settlement, error: Exception) -> None:
        consumer = Scripted(m0=[error])
        consumer.failures["m1"] = [BrokerError(ResponseCode.NO_MESSAGE)]
        for number in range(40):
            message = MessageExt(f"m{number}", b"", broker_name=f"broker {number}")
            inbox.settle(inbox._hold("q", consumer, message), how)  # noqa: SLF001

        assert not await inbox.flush()
        assert await inbox.flush()
        assert sorted(consumer.done) == sorted(f"m{number}" for number in range(40) if number != 1)
        assert inbox._sending == 0  # noqa: SLF001
        await inbox.close()

    async def test_an_interrupted_request_is_repeated(self, inbox: Inbox) -> None:
        consumer = Scripted(m=[asyncio.CancelledError()])  # type: ignore[list-item]
        inbox.settle(inbox._hold("q", consumer, MessageExt("m", b"")), Settlement.ACK)  # noqa: SLF001

        with pytest.raises(asyncio.CancelledError):
            await inbox.flush()
        assert await inbox.flush()
        assert consumer.done == ["m"]
        await inbox.close()

    async def test_concurrent_acknowledgements_share_a_request(self, inbox: Inbox) -> None:
        """Requests to an unreachable broker must not delay renewals at other brokers."""
        consumer = Scripted(m=[RemotingError("b:1")] * 100)
        for _ in range(20):
            inbox.settle(inbox._hold("q", consumer, MessageExt("m", b"")), Settlement.ACK)  # noqa: SLF001
        assert not any(await asyncio.gather(*(inbox.flush() for _ in range(20))))
        assert len(consumer.failures["m"]) >= 90  # the inbox itself also tries again
        consumer.failures.clear()
        await inbox.close()
        assert consumer.done == ["m"] * 20

    async def test_receiving_goes_on_after_any_error(self, inbox: Inbox) -> None:
        consumer = Scripted(receive=[ValueError("unexpected")])
        inbox.set_limit(1)
        fetch = asyncio.create_task(inbox._fetch({"q": consumer}))  # noqa: SLF001
        async with asyncio.timeout(PATIENCE_S):
            while not inbox._held:  # noqa: SLF001
                assert not fetch.done()
                await asyncio.sleep(0)
        fetch.cancel()
        inbox._held.clear()  # noqa: SLF001
        await inbox.close()

    async def test_one_task_receives_when_another_listener_begins_as_one_ends(self, inbox: Inbox) -> None:
        async def consumer(_queue: str) -> QueueConsumer:
            return Scripted(receive=[RemotingError("b:1")] * 100)

        inbox._session.consumer = consumer  # type: ignore[method-assign]  # noqa: SLF001
        await inbox.consume("q")
        await asyncio.sleep(0)
        await asyncio.gather(inbox.cancel("q"), inbox.consume("q"))
        assert len(inbox._fetching) == 1  # noqa: SLF001
        await inbox.close()

    async def test_a_large_prefetch_count_is_kept(self, inbox: Inbox) -> None:
        inbox.set_limit(5000)
        assert inbox.limit == 5000
        inbox.set_limit(0)
        assert inbox.limit == module.MAX_UNSETTLED
        await inbox.close()
