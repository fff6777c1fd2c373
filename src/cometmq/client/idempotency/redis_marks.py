"""Marks in Redis: with the effects in one MULTI, or beside effects that are elsewhere, with a lease."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from cometmq import logs
from cometmq.client.idempotency.memory import EXPIRY_S
from cometmq.errors import BeingHandled, ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["RedisMarks"]

log = logs.logger("cometmq.client.idempotency")

_DONE = "done"
_IF_OURS = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


class RedisMarks:
    """For async handlers, which get a pipeline: what they put into it and the mark are one MULTI/EXEC.

    Redis does that whole or not at all, and a handler leaves `execute` to the marks. A command that does not
    fit the type of its key fails alone, as always in Redis; then the message comes again.

    client: of redis.asyncio; needs `cometmq[redis]` and Redis 6.2. While a message is handled, its key says
    so for `lease_s`, which has to be longer than any call of the handler: a call that outlasts it fails if it
    has put commands into the pipeline, and counts if it has not.

    A process that is killed repeats nothing that was in the pipeline. An effect that is elsewhere is repeated
    if the kill came between effect and mark, after the lease has run out.
    """

    def __init__(
        self,
        client: Redis,
        *,
        prefix: str = "cometmq:once:",
        lease_s: float = 60.0,
        expiry_s: float = EXPIRY_S,
    ) -> None:
        for name, value in (("lease_s", lease_s), ("expiry_s", expiry_s)):
            if value < 0.001:
                raise ConfigError(name, str(value), "a millisecond or more")
        self._redis = client
        self._prefix = prefix
        self._lease_ms = int(lease_s * 1000)
        self._expiry_ms = int(expiry_s * 1000)

    async def once_async(self, scope: str, key: str, act: Callable[[Any], Awaitable[object]]) -> bool:
        """Call act(pipeline) unless the key is marked. Raises what Redis raises, and BeingHandled for a key
        that somebody else works on or has taken meanwhile."""
        from redis.exceptions import WatchError

        # With its length, since "a" and "b:c" are not "a:b" and "c".
        name = f"{self._prefix}{len(scope)}:{scope}:{key}"
        token = f"doing:{secrets.token_hex(8)}"
        if not await self._take(name, token, key):
            return False
        elsewhere = False
        async with self._redis.pipeline(transaction=True) as effects:
            try:
                # From here on EXEC does nothing if the lease has run out or the key is somebody else's.
                await effects.watch(name)
                if _text(await effects.get(name)) != token:
                    raise BeingHandled(key)
                effects.multi()  # type: ignore[no-untyped-call]
                await act(effects)
                elsewhere = len(effects) == 0
                effects.set(name, _DONE, px=self._expiry_ms)
                for answer in await effects.execute(raise_on_error=False):
                    if isinstance(answer, Exception):
                        await self._redis.delete(name)
                        raise answer
            except WatchError:
                if not elsewhere:
                    raise BeingHandled(key) from None
                await self._redis.set(name, _DONE, px=self._expiry_ms)
            except BaseException:
                await self._let_go(name, token)
                raise
        return True

    async def _take(self, name: str, token: str, key: str) -> bool:
        """Whether the key is ours to handle; False if it is marked."""
        for _ in range(2):
            if await self._redis.set(name, token, nx=True, px=self._lease_ms):
                return True
            held = _text(await self._redis.get(name))
            if held == _DONE:
                return False
            if held is not None:
                break
            # It ran out between the two.
        raise BeingHandled(key)

    async def _let_go(self, name: str, token: str) -> None:
        try:
            await self._redis.eval(_IF_OURS, 1, name, token)
        except Exception as error:
            # The lease runs out by itself; what the handler raised counts.
            log.debug("the lease of %s stays: %r", name, error)


def _text(value: Any) -> str | None:
    """As a client answers that decodes, and one that does not."""
    return value.decode() if isinstance(value, bytes) else value
