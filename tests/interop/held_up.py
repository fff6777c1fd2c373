"""Run one of our commands on an event loop that is blocked for 0.3 s of every 0.31 s.

Usage as of attached.py.
"""

from __future__ import annotations

import asyncio
import time

from tests.interop import attached

from cometmq.remoting import loop

HELD_S, FREE_S = 0.3, 0.01
_new_event_loop = loop.new_event_loop


def _held_up() -> asyncio.AbstractEventLoop:
    made = _new_event_loop()

    def hold() -> None:
        time.sleep(HELD_S)
        made.call_later(FREE_S, hold)

    made.call_soon(hold)
    return made


if __name__ == "__main__":
    loop.new_event_loop = _held_up
    attached.main()
