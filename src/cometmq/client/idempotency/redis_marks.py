"""Marks in Redis: with the effects in one script, or beside effects that are elsewhere, with a lease."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable
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
# Not MULTI: EXEC would set the mark though a command before it has failed. ARGV: the token, the mark, its
# life in ms, then each command's number of words and its words.
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
    """For async handlers, which get a pipeline: Redis does what they put into it, and sets the mark, in one
    script.

    Nothing comes between these commands. The first that fails, as one does that does not fit the type of its
    key, ends the script: there is no mark, the message comes again, and the commands before the failed one,
    which Redis does not take back, are done again. A script knows no commands that block, subscribe, run
    scripts (EVAL, EVALSHA) or have 8,000 words, so they fail. The handler leaves `execute` to the marks.

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
        # With its length, since "a" and "b:c" are not "a:b" and "c".
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
                await self._let_go(name, token)
                raise
        return True

    async def _do_all(self, name: str, token: str, commands: Iterable[tuple[Any, Any]]) -> bool:
        """Whether they were done, and the mark is set; False if the lease has run out or the key is somebody
        else's. Raises what the first that fails raises."""
        words: list[Any] = []
        for (command, *arguments), _ in commands:
            parts = [*command.split(), *arguments]  # a command may be two words: "XGROUP CREATE"
            words += len(parts), *parts
        done = await self._redis.eval(_DO_ALL, 1, name, token, _DONE, self._expiry_ms, *words)
        return bool(done)

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
