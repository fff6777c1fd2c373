"""A filter server as a process: `python -m cometmq.filtersrv.process`, started by a broker only.

Its settings (server.Settings, JSON) are the first line of its standard input, and it stops when that ends,
however the broker went. Signals are meant for the broker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import msgspec

from cometmq import logs
from cometmq.filtersrv.confine import CannotConfine
from cometmq.filtersrv.filters import check
from cometmq.filtersrv.server import FilterServer, Settings
from cometmq.remoting import end_of_input, run

log = logs.logger(__name__)


async def serve(settings: Settings) -> None:
    """Run a filter server until the standard input ends."""
    ended = asyncio.Event()
    await end_of_input(ended)
    server = FilterServer(settings)
    try:
        await server.start()
        await ended.wait()
    finally:
        await server.stop()


def main() -> int:
    """Exit code 0 after an orderly stop, 1 if it cannot start, EX_UNAVAILABLE if none can on this machine."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.set_up()
    try:
        check()
        run(serve(msgspec.json.decode(sys.stdin.readline(), type=Settings)))
    except CannotConfine as error:
        log.critical("filter classes cannot be confined on this machine, so none is run: %s", error)
        return os.EX_UNAVAILABLE
    except (OSError, msgspec.MsgspecError) as error:
        log.critical("the filter server cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
