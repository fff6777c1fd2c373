"""What is wrong with a call that does not fit the state of a producer or consumer, and the way out."""

from __future__ import annotations

import asyncio

from cometmq.errors import ClientStateError

__all__ = ["check_loop", "not_running", "starts_once"]


def not_running(who: str, state: str) -> ClientStateError:
    """`who` is "producer of group g". A stop is final, so nobody is told to start again what was stopped."""
    way = {
        "new": "start() it, or use it in `async with` (the blocking classes in `with`)",
        "starting": "wait for its start()",
    }.get(state, "that is final, make a new one")
    return ClientStateError(f"{who} is {state}: {way}")


def starts_once(who: str, state: str) -> ClientStateError:
    way = "" if state in ("starting", "running") else "; make a new one"
    return ClientStateError(f"{who} is {state}: it starts once{way}")


def check_loop(who: str, loop: asyncio.AbstractEventLoop) -> None:
    """Raise ClientStateError when `who` is used in another event loop than the one it was started in."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None  # a thread without a loop, or code behind asyncio.run()
    if running is not loop:
        over = ", which is closed" if loop.is_closed() else ""
        raise ClientStateError(
            f"{who} was started in another event loop{over}: start and use it within one asyncio.run(), "
            "or use the blocking classes"
        )
