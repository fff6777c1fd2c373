"""Idempotency keys in Redis.

While a handler runs, a lease reserves the key of its message. Afterwards a script runs the Redis
commands of the handler and then stores the key.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from cometmq import logs
from cometmq.client.idempotency.memory import EXPIRY_S
from cometmq.errors import BeingHandled, ConfigError

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logs.logger("cometmq.client.idempotency")

_DONE = "done"
_IF_OURS = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
# This is a script and not a MULTI, because EXEC would set the key even if an earlier command had failed.
# ARGV: the token, the value, its lifetime in ms, then for each command the number of its words and the words.
_DO_ALL = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
local at = 4
while ARGV[at] do
  local last = at + tonumber(ARGV[at])
  local answer = redis.pcall(unpack(ARGV, at + 1, last))
  if type(answer) == 'table' and answer.err then return answer end
  at = last + 1
end
redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3])
return 1
"""


class RedisMarks:
    """Idempotency keys in Redis for async handlers, which receive a pipeline.

    One script runs the commands of the pipeline and stores the key, so that no command of another client runs
    between them. If a command fails, for example because a Redis key has another type, the script ends
    without storing the key, and the message is delivered again. Redis does not roll back the commands before
    the failed command, so these commands run twice. Scripts cannot contain commands that block, subscribe or
    run scripts (EVAL, EVALSHA), nor commands of 8,000 or more words. The handler must not call `execute`.

    If the process is killed, no effect of the pipeline is repeated. An effect outside Redis is repeated,
    after the lease has expired, if the process was killed between the effect and the storing of the key.

    Args:
        client: A client of redis.asyncio. Needs `cometmq[redis]` and Redis 6.2.
        prefix: The prefix of the keys in Redis.
        lease_s: The time in seconds for which a message in progress is reserved. It must exceed the duration
            of every handler call: a longer call fails if it has added commands to the pipeline, and succeeds
            otherwise.
        expiry_s: The lifetime of a key in seconds. Default: seven days.
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
        """Call and await `act(pipeline)` unless the key is stored, as described in `Marks.once`.

        Raises:
            BeingHandled: Another consumer is processing a message with this key.
            redis.RedisError: Redis failed.
        """
        # The length of the scope distinguishes scope "a" with key "b:c" from scope "a:b" with key "c".
        name = f"{self._prefix}{len(scope)}:{scope}:{key}"
        token = f"doing:{secrets.token_hex(8)}"
        if not await self._take(name, token, key):
            return False
        async with self._redis.pipeline(transaction=True) as effects:
            try:
                effects.multi()  # type: ignore[no-untyped-call]
                await act(effects)
                if not effects.command_stack:
                    await self._redis.set(name, _DONE, px=self._expiry_ms)
                elif not await self._do_all(name, token, effects.command_stack):
                    raise BeingHandled(key)
            except BaseException:
                await self._release_lease(name, token)
                raise
        return True

    async def _do_all(self, name: str, token: str, commands: Iterable[tuple[Any, Any]]) -> bool:
        """Run the commands and store the key. Return False if the lease has expired or was taken.

        Raises the error of the first command that fails.
        """
        words: list[Any] = []
        for (command, *arguments), _ in commands:
            parts = [*command.split(), *arguments]  # a command name may have two words, as "XGROUP CREATE"
            words += len(parts), *parts
        done = await self._redis.eval(_DO_ALL, 1, name, token, _DONE, self._expiry_ms, *words)
        return bool(done)

    async def _take(self, name: str, token: str, key: str) -> bool:
        """Reserve the key for this call. Return False if the key is already stored."""
        for _ in range(2):
            if await self._redis.set(name, token, nx=True, px=self._lease_ms):
                return True
            held = _text(await self._redis.get(name))
            if held == _DONE:
                return False
            if held is not None:
                break
            # The lease of another consumer expired between the two commands above, so try once more. If this
            # happens again, raise BeingHandled, so that the message is delivered again.
        raise BeingHandled(key)

    async def _release_lease(self, name: str, token: str) -> None:
        try:
            await self._redis.eval(_IF_OURS, 1, name, token)
        except Exception as error:
            # Only log this error: the lease expires by itself, and the caller raises the handler's exception.
            log.debug("the lease of %s was not released: %r", name, error)


def _text(value: Any) -> str | None:
    """Return a value of Redis as text. The value is bytes unless the client has set decode_responses."""
    return value.decode() if isinstance(value, bytes) else value
