"""Apache's Java producers above a topic's rate limit, which neither 4.9 nor 5.x knows."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.interop import store_input, wire
from tests.interop.conftest import instead_of_ours
from tests.interop.driver import JavaError, message
from tests.interop.space import Space, assert_exactly_once

pytestmark = pytest.mark.skipif(bool(instead_of_ours()), reason="Apache's brokers have no such attributes")
RATE = 20


def limit(space: Space, attribute: str) -> None:
    with wire.Connection(space.broker_port) as connection:
        store_input.Feeder(connection).update_topic(space.topic, 4, attributes=attribute)


@pytest.mark.parametrize("mode", ["sync", "async", "queue"])
def test_all_sends_succeed_and_the_rate_is_held(space: Space, mode: str) -> None:
    """Asynchronous sends, and those to a chosen queue, would not be tried again after a refusal."""
    limit(space, f"+rate.send.messages={RATE}")
    sent = [b"%d" % number for number in range(50)]
    where: dict[str, Any] = {"queue": space.queue(2)} if mode == "queue" else {}
    batch = [message(space.topic, body) for body in sent]
    results = space.java.send(space.producer(timeout=20_000), batch, mode, **where)
    assert [each["status"] for each in results] == ["SEND_OK"] * 50
    stored = space.pull_topic(space.pull())
    assert_exactly_once(stored, sent)
    times = sorted(each["storeTimestamp"] for each in stored)
    assert times[-1] - times[0] >= (50 - RATE) * 1000 / RATE - 10  # Two clocks of the broker are compared


def test_a_refused_send_succeeds_by_the_clients_own_retries(space: Space) -> None:
    """Another message has used the bytes of the next 4.8 s, so the first tries are refused."""
    limit(space, "+rate.send.bytes=1000")
    once = space.producer(timeout=20_000, retries=0, compressOver=100_000)
    patient = space.producer(timeout=20_000, retries=9)
    began = time.monotonic()
    space.java.send(once, [message(space.topic, bytes(5_800))])
    with pytest.raises(JavaError) as refused:
        space.java.send(once, [message(space.topic, bytes(10))])
    assert refused.value.code == 14
    (result,) = space.java.send(patient, [message(space.topic, bytes(10))])
    assert result["status"] == "SEND_OK"
    assert time.monotonic() - began >= 4.8


def test_a_send_that_would_wait_too_long_is_tried_three_times(space: Space) -> None:
    limit(space, "+rate.send.bytes=100")
    space.java.send(space.producer(compressOver=100_000), [message(space.topic, bytes(10_000))])
    with pytest.raises(JavaError, match=r"Send \[3\] times, still failed") as caught:
        space.java.send(space.producer(), [message(space.topic, bytes(10))])
    assert caught.value.code == 14
