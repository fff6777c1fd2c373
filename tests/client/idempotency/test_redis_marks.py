"""Marks in Redis, a real one: in one MULTI with the effect, or with a lease beside an effect elsewhere."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from cometmq import BeingHandled, ConfigError, RedisMarks

_scopes = map(str, itertools.count())


@pytest.fixture(params=[False, True], ids=["bytes", "text"])
async def redis(request: pytest.FixtureRequest, redis_port: int) -> AsyncIterator[Redis]:
    async with Redis(port=redis_port, decode_responses=request.param) as client:
        yield client


async def test_effect_and_mark_are_done_together_and_once(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def effect(pipeline: Any) -> None:
        pipeline.incr(f"paid-{scope}")

    assert [await marks.once_async(scope, "a", effect) for _ in range(3)] == [True, False, False]
    assert int(await redis.get(f"paid-{scope}") or 0) == 1
    assert 6 * 86400 < await redis.ttl(f"cometmq:once:{len(scope)}:{scope}:a") <= 7 * 86400


async def test_scopes_do_not_meet_in_their_keys(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def nothing(_: object) -> None: ...

    assert await marks.once_async(f"s{scope}", "eu:7", nothing)
    assert await marks.once_async(f"s{scope}:eu", "7", nothing)


async def test_a_failure_leaves_neither_effect_nor_mark(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def fail(pipeline: Any) -> None:
        pipeline.incr(f"paid-{scope}")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await marks.once_async(scope, "a", fail)
    assert await redis.exists(f"paid-{scope}", f"cometmq:once:{len(scope)}:{scope}:a") == 0


async def test_a_command_that_fails_marks_nothing(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)
    await redis.set(f"paid-{scope}", "no list")

    async def fail(pipeline: Any) -> None:
        pipeline.rpush(f"paid-{scope}", "x")

    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await marks.once_async(scope, "a", fail)
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == 0


async def test_a_key_that_is_being_handled_is_refused(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)
    begun, end = asyncio.Event(), asyncio.Event()

    async def slow(_: object) -> None:
        begun.set()
        await end.wait()

    async with asyncio.timeout(20):
        task = asyncio.create_task(marks.once_async(scope, "a", slow))
        await begun.wait()
        with pytest.raises(BeingHandled):
            await marks.once_async(scope, "a", slow)
        end.set()
        assert await task
    assert await marks.once_async(scope, "a", slow) is False


@pytest.mark.parametrize("in_redis", [True, False])
async def test_a_call_that_outlasts_its_lease(redis: Redis, in_redis: bool) -> None:
    """What it has put into the pipeline is not done, since somebody else may have done it; an effect
    elsewhere has happened, so it is marked."""
    marks, scope = RedisMarks(redis, lease_s=0.02), next(_scopes)

    async def slow(pipeline: Any) -> None:
        if in_redis:
            pipeline.incr(f"paid-{scope}")
        while await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a"):
            await asyncio.sleep(0.005)

    if in_redis:
        with pytest.raises(BeingHandled):
            await marks.once_async(scope, "a", slow)
    else:
        assert await marks.once_async(scope, "a", slow)
    assert await redis.exists(f"paid-{scope}") == 0
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == (0 if in_redis else 1)


async def test_a_lease_that_ran_out_is_not_taken_from_its_new_holder(redis: Redis) -> None:
    marks, scope = RedisMarks(redis), next(_scopes)

    async def overtaken(_: object) -> None:
        await redis.set(f"cometmq:once:{len(scope)}:{scope}:a", "doing:other")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await marks.once_async(scope, "a", overtaken)
    assert await redis.exists(f"cometmq:once:{len(scope)}:{scope}:a") == 1


async def test_without_redis_the_message_is_not_handled() -> None:
    handled = []

    async def handler(_: object) -> None:
        handled.append(1)

    async with Redis(port=1, retry=Retry(NoBackoff(), 0)) as nowhere:
        with pytest.raises(RedisConnectionError):
            await RedisMarks(nowhere).once_async("g", "a", handler)
    assert handled == []


@pytest.mark.parametrize("setting", ["lease_s", "expiry_s"])
def test_times_below_a_millisecond_are_refused(setting: str) -> None:
    wrong: Any = {setting: 0.0001}
    with pytest.raises(ConfigError, match=setting):
        RedisMarks(Redis(), **wrong)
