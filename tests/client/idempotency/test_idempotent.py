"""Idempotent listeners: valid handlers and stores, the choice of keys, and the state after a failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from cometmq import ConfigError, ConsumeStatus, MemoryMarks, MessageExt, OrderlyStatus, idempotent, unique_key

MESSAGE = MessageExt("orders", b"7", properties={"UNIQ_KEY": "A1", "KEYS": "order-7"})


class OnLoop:
    async def once_async(self, scope: str, key: str, act: Callable[[Any], Awaitable[object]]) -> bool:
        await act("pipeline")
        return True


class InThreads:
    def __init__(self) -> None:
        self.keys: list[tuple[str, str]] = []

    def once(self, scope: str, key: str, act: Callable[[Any], object]) -> bool:
        self.keys.append((scope, key))
        act("cursor")
        return True


def test_a_message_is_handled_once_by_each_scope() -> None:
    handled: list[bytes] = []
    marks = MemoryMarks()
    listeners = [
        idempotent(scope, lambda message: handled.append(message.body), marks)
        for scope in ("billing", "audit")
    ]
    for listener in listeners * 2:
        listener([MESSAGE])
    assert handled == [b"7", b"7"]


async def test_an_async_handler_handles_a_message_once() -> None:
    handled: list[bytes] = []

    async def handler(message: MessageExt) -> None:
        handled.append(message.body)

    listener = idempotent("billing", handler, MemoryMarks())
    for _ in range(2):
        await listener([MESSAGE, MESSAGE])
    assert handled == [b"7"]


async def test_a_handler_gets_the_transaction_if_it_takes_one() -> None:
    got: list[object] = []

    def plain(message: MessageExt, cursor: object) -> None:
        got.append(cursor)

    class Handler:
        async def __call__(self, message: MessageExt, pipeline: object) -> None:
            got.append(pipeline)

    idempotent("billing", plain, InThreads())([MESSAGE])
    await idempotent("billing", Handler(), OnLoop())([MESSAGE])
    assert got == ["cursor", "pipeline"]


def test_after_a_failure_the_message_is_handled_again_and_those_before_it_are_not() -> None:
    handled: list[bytes] = []
    first, second = MESSAGE, MessageExt("orders", b"8", properties={"UNIQ_KEY": "A2"})

    def handler(message: MessageExt) -> None:
        handled.append(message.body)
        if handled == [b"7", b"8"]:
            raise ValueError("not yet")

    listener = idempotent("billing", handler, MemoryMarks())
    with pytest.raises(ValueError, match="not yet"):
        listener([first, second])
    listener([first, second])
    assert handled == [b"7", b"8", b"8"]


@pytest.mark.parametrize("status", [ConsumeStatus.RECONSUME_LATER, OrderlyStatus.ROLLBACK])
def test_a_status_that_means_later_marks_nothing(status: object) -> None:
    statuses = [status, ConsumeStatus.SUCCESS, OrderlyStatus.COMMIT]
    listener = idempotent("billing", lambda message: statuses.pop(0), MemoryMarks())
    with pytest.raises(TypeError, match="raise an exception for a retry"):
        listener([MESSAGE])
    for _ in range(2):
        listener([MESSAGE])
    assert statuses == [OrderlyStatus.COMMIT]


async def never(message: MessageExt) -> None:
    raise AssertionError("nobody awaits this")


def yielding(message: MessageExt) -> Iterator[None]:
    yield


@pytest.mark.parametrize("handler", [lambda message: never(message), yielding])
def test_a_handler_that_was_not_even_begun_marks_nothing(handler: Any) -> None:
    listener = idempotent("billing", handler, MemoryMarks())
    for _ in range(2):
        with pytest.raises(TypeError, match="not awaited"):
            listener([MESSAGE])


@pytest.mark.parametrize(
    ("properties", "key"),
    [
        ({"UNIQ_KEY": "A1", "ORIGIN_MESSAGE_ID": "B2"}, "A1"),
        ({"ORIGIN_MESSAGE_ID": "B2"}, "B2"),
        ({}, "7F00000100002A9F0000000000000005"),
    ],
)
def test_the_unique_key_stays_the_same_through_retries(properties: dict[str, str], key: str) -> None:
    message = MessageExt("T", b"x", properties=properties, store_host="127.0.0.1:10911", physical_offset=5)
    assert unique_key(message) == key


@pytest.mark.parametrize(
    ("key", "marked"),
    [
        ("order-7", "order-7"),
        ("ä" * 255, "ä" * 255),
        ("k" * 256, "sha256:" + "6d8e4e2c"),
        ("a\0b", "sha256:"),
        ("\ud800", "sha256:"),
    ],
)
def test_a_key_that_no_database_takes_is_marked_by_its_hash(key: str, marked: str) -> None:
    marks = InThreads()
    idempotent("billing", lambda message: None, marks, key=lambda message: key)([MESSAGE])
    ((scope, found),) = marks.keys
    assert scope == "billing"
    assert found == marked or (marked.startswith("sha256:") and len(found) == 71 and found.isascii())


@pytest.mark.parametrize("key", ["", None, b"bytes", 7])
def test_what_is_no_key_fails_the_message(key: Any) -> None:
    listener = idempotent("billing", lambda message: None, InThreads(), key=lambda message: key)
    with pytest.raises(TypeError, match="the key of message A1 must be"):
        listener([MESSAGE])


@pytest.mark.parametrize("scope", ["", "s" * 256, "a\0b", None])
def test_a_scope_that_no_database_takes_is_refused(scope: Any) -> None:
    with pytest.raises(ConfigError, match="1 to 255 printable"):
        idempotent(scope, lambda message: None, InThreads())


async def an_async_one(message: MessageExt) -> None: ...


@pytest.mark.parametrize(
    ("handler", "marks", "words"),
    [
        (an_async_one, InThreads(), "a plain one: InThreads would block the loop"),
        (lambda message: None, OnLoop(), "an async one: OnLoop works on the loop"),
        ("no function", InThreads(), r"a function of \(message\) or \(message, transaction\)"),
        (lambda: None, InThreads(), r"a function of \(message\) or \(message, transaction\)"),
        (lambda a, b, c: None, InThreads(), r"a function of \(message\) or \(message, transaction\)"),
    ],
)
def test_a_handler_that_the_marks_cannot_serve_is_refused(handler: Any, marks: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        idempotent("billing", handler, marks)
