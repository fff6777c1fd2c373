"""The table of outstanding calls."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from tests.kit.waiting import until

from cometmq.errors import RequestTimeout, SendFailed
from cometmq.protocol.frame import Frame
from cometmq.remoting.calls import CallTable


def table() -> CallTable:
    return CallTable(asyncio.get_running_loop(), "127.0.0.1:1")


def add(calls: CallTable, opaque: int, code: int, timeout_s: float = 30) -> asyncio.Future[Frame]:
    future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    calls.add(opaque, code, timeout_s, future)
    return future


def answer_to(opaque: int, body: bytes | memoryview = b"") -> Frame:
    request = Frame.request(1)
    request.opaque = opaque
    response = request.response(0)
    response.body = body
    return response


async def test_numbers_wrap_and_skip_outstanding_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.remoting.calls.OPAQUE_MASK", 3)
    calls = table()
    add(calls, 0, 1, 30)
    add(calls, 2, 1, 30)

    assert [calls.next_opaque() for _ in range(3)] == [1, 3, 1]
    calls.fail_all(lambda code: SendFailed("a", code))


async def test_an_answer_is_given_once_and_owns_its_body() -> None:
    calls = table()
    buffer = bytearray(b"body")
    future = add(calls, 5, 1, 30)

    assert calls.resolve(answer_to(5, memoryview(buffer)))
    buffer[:] = b"XXXX"
    assert not calls.resolve(answer_to(5))
    assert not calls.resolve(answer_to(6))
    assert (await future).body == b"body"


async def test_failing_all_names_each_code() -> None:
    calls = table()
    futures = [add(calls, n, 100 + n, 30) for n in range(3)]
    calls.fail_all(lambda code: SendFailed("127.0.0.1:1", code))
    errors = await asyncio.gather(*futures, return_exceptions=True)

    assert [error.code for error in errors] == [100, 101, 102]
    assert len(calls) == 0


async def test_one_timer_serves_many_calls() -> None:
    loop = Mock(wraps=asyncio.get_running_loop())
    calls = CallTable(loop, "127.0.0.1:1")
    futures = [add(calls, n, 1, 0.05 + n / 10_000) for n in range(500)]
    add(calls, 1000, 1, 30)

    assert loop.call_at.call_count == 1
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert {type(error) for error in errors} == {RequestTimeout}
    assert len(calls) == 1
    calls.fail_all(lambda code: SendFailed("a", code))


async def test_a_shorter_time_out_is_not_kept_waiting_by_a_longer_one() -> None:
    calls = table()
    long = add(calls, 1, 1, 30)
    with pytest.raises(RequestTimeout):
        await asyncio.wait_for(add(calls, 2, 1, 0.05), 5)
    assert not long.done()
    long.cancel()
    await until(lambda: long.cancelled())
    calls.fail_all(lambda code: SendFailed("a", code))
