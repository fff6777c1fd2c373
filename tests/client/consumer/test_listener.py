"""The four kinds of listener and the meaning of their results."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, get_args

import pytest

from cometmq import MemoryMarks, PushOptions, idempotent
from cometmq.client.cluster.workers import is_async
from cometmq.client.consumer.listener import (
    ConsumeContext,
    ConsumeStatus,
    NoneMeans,
    OrderlyStatus,
    bind_listener,
)
from cometmq.errors import ConfigError
from cometmq.message import MessageExt, MessageQueue

CONTEXT = ConsumeContext(MessageQueue("T", "a", 0))
Messages = list[MessageExt]


async def run(listener: object) -> ConsumeStatus:
    with ThreadPoolExecutor(1) as executor:
        return await bind_listener(listener, executor, ConsumeStatus)([], CONTEXT)  # type: ignore[arg-type]


async def test_an_async_listener_runs_on_the_loop() -> None:
    seen = []

    async def listener(messages: Messages) -> None:
        seen.append(threading.current_thread())

    assert await run(listener) is ConsumeStatus.SUCCESS
    assert seen == [threading.current_thread()]


async def test_a_plain_listener_runs_in_a_thread() -> None:
    seen = []

    def listener(messages: Messages, context: ConsumeContext) -> ConsumeStatus:
        seen.append((threading.current_thread(), context))
        return ConsumeStatus.RECONSUME_LATER

    assert await run(listener) is ConsumeStatus.RECONSUME_LATER
    assert seen[0][0] is not threading.current_thread()
    assert seen[0][1] is CONTEXT


class Asynchronous:
    async def __call__(self, messages: Messages) -> None: ...


class Method:
    async def on_messages(self, messages: Messages, context: ConsumeContext) -> None:
        assert context is CONTEXT


@pytest.mark.parametrize(
    "listener",
    [Asynchronous(), Method().on_messages, functools.partial(Method.on_messages, Method())],
    ids=["object", "method", "partial"],
)
async def test_what_counts_as_async(listener: object) -> None:
    assert is_async(listener)  # type: ignore[arg-type]
    assert await run(listener) is ConsumeStatus.SUCCESS


@pytest.mark.parametrize("listener", [[].extend, print, lambda messages: None, lambda *args: None])
async def test_plain_callables_of_every_kind(listener: object) -> None:
    assert not is_async(listener)  # type: ignore[arg-type]
    assert await run(listener) is ConsumeStatus.SUCCESS


async def test_a_result_that_means_nothing_is_an_error() -> None:
    with pytest.raises(TypeError, match="ConsumeStatus"):
        await run(lambda messages: True)
    with pytest.raises(TypeError, match="not <OrderlyStatus"):
        await run(lambda messages: OrderlyStatus.SUCCESS)


@pytest.mark.parametrize("listener", [lambda: None, lambda a, b, c: None])
def test_a_listener_of_the_wrong_shape_is_refused_at_once(listener: object) -> None:
    with pytest.raises(ConfigError, match=r"listener = .*expected a function of \(messages\)"):
        bind_listener(listener, None, ConsumeStatus)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statuses", "later"),
    [
        (ConsumeStatus, ConsumeStatus.RECONSUME_LATER),
        (OrderlyStatus, OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT),
    ],
)
async def test_what_none_means_can_be_chosen(statuses: Any, later: Enum) -> None:
    async def returned(listener: object, none_means: NoneMeans) -> Enum:
        with ThreadPoolExecutor(1) as executor:
            return await bind_listener(listener, executor, statuses, none_means)([], CONTEXT)  # type: ignore[arg-type]

    assert await returned(lambda messages: None, "success") is statuses.SUCCESS
    assert await returned(lambda messages: None, "retry") is later
    with pytest.raises(TypeError, match=f"must return one of {statuses.__name__}, not None"):
        await returned(lambda messages: None, "error")
    for means in get_args(NoneMeans):
        assert await returned(lambda messages: statuses.SUCCESS, means) is statuses.SUCCESS
        assert await returned(idempotent("g", lambda message: None, MemoryMarks()), means) is statuses.SUCCESS


@pytest.mark.parametrize(("none_means", "lines"), [("success", 1), ("retry", 0)])
async def test_a_listener_that_returns_none_now_and_then_is_named_once(
    caplog: pytest.LogCaptureFixture, none_means: NoneMeans, lines: int
) -> None:
    results = [None, ConsumeStatus.SUCCESS, None, ConsumeStatus.SUCCESS]

    async def ported(messages: Messages) -> ConsumeStatus | None:
        return results.pop()

    bound = bind_listener(ported, None, ConsumeStatus, none_means)
    await bound([], CONTEXT)
    assert "ported" not in caplog.text
    while results:
        await bound([], CONTEXT)
    assert caplog.text.count("ported returns None for some calls and a status for others") == lines


def test_a_meaning_of_none_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'none_means = .*expected "success", "retry" or "error"'):
        PushOptions(none_means="later")  # type: ignore[arg-type]
