"""Consumers for the fake servers, and a listener that stores the messages it receives."""

from __future__ import annotations

import asyncio

from tests.kit.fakes import FakeNamesrv
from tests.kit.waiting import until

from cometmq import ConsumeFromWhere, ConsumeStatus, MessageExt, PushConsumer, PushOptions


async def ignore(messages: list[MessageExt]) -> None: ...


def push_consumer(namesrv: FakeNamesrv, listener: object, **options: object) -> PushConsumer:
    """Create a member of group g that reads topic T from its beginning, with short delays after failures."""
    first = {"consume_from_where": ConsumeFromWhere.FIRST_OFFSET, "pull_error_delay_s": 0.01}
    settings = PushOptions(**{**first, **options})  # type: ignore[arg-type]
    return PushConsumer("g", listener, "T", namesrv=namesrv.addr, options=settings)  # type: ignore[arg-type]


class Box:
    """A listener that stores the messages it receives, and creates consumers with itself as listener."""

    def __init__(self, namesrv: FakeNamesrv) -> None:
        self.namesrv = namesrv
        self.messages: list[MessageExt] = []
        self.status = ConsumeStatus.SUCCESS
        self.open = asyncio.Event()
        self.open.set()

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    async def __call__(self, messages: list[MessageExt]) -> ConsumeStatus:
        self.messages += messages
        await self.open.wait()
        return self.status

    def consumer(self, **options: object) -> PushConsumer:
        return push_consumer(self.namesrv, self, **options)

    async def has(self, count: int) -> None:
        await until(lambda: len(self.messages) >= count)
