"""Scenarios for delivery times, run like those in scenarios.py against brokers that have them (5.x, ours)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from tests.client.scenarios import Ledger, consuming, fill, names, sending

from cometmq import Message
from cometmq.errors import BrokerError


async def messages_come_at_their_time_unless_taken_back(namesrv: str) -> None:
    name, ledger = names("timed"), Ledger()
    await fill(namesrv, name.topic, [b"first"])
    async with sending(namesrv, "p-timed") as producer:
        begun = time.time_ns() // 1_000_000
        at = await producer.send(Message(name.topic, b"at", deliver_at_ms=begun + 2_000))
        after = await producer.send(
            Message(name.topic, b"after", tags="T", keys=["k"], delay_ms=1_500, properties={"x": "1"})
        )
        back = await producer.send(Message(name.topic, b"back", delay_ms=3_000))
        assert at.recall_handle
        assert after.recall_handle
        assert back.recall_handle
        assert await producer.recall(back.recall_handle) == back.msg_id
        with pytest.raises(BrokerError, match="max delay"):
            await producer.send(Message(name.topic, b"too far", delay_ms=41 * 86_400_000))
        async with consuming(namesrv, name, ledger.listener):
            await ledger.has_all([b"first", b"at", b"after"])
            # The recalled message would have been delivered by then, even if it were a second late.
            await asyncio.sleep(max(0.0, begun / 1000 + 5 - time.time()))
    assert ledger.bodies == Counter([b"first", b"at", b"after"])
    came = {message.body: message for message in ledger.messages}
    assert came[b"at"].store_timestamp_ms >= begun + 2_000
    timed = came[b"after"]
    assert timed.store_timestamp_ms >= begun + 1_500
    assert (timed.topic, timed.tags, timed.keys) == (name.topic, "T", ("k",))
    assert (timed.msg_id, timed.user_properties) == (after.msg_id, {"x": "1"})
