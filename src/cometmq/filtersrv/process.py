"""The main program of a filter server process (`python -m cometmq.filtersrv.process`), started by a broker.

The first line of its standard input holds its settings (server.Settings as JSON). The process stops at the
end of its input, so it stops in every case in which the broker ends. It ignores SIGINT, SIGTERM and SIGHUP,
because these signals are meant for the broker.
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
    """Run the filter server. Return the exit code, EX_UNAVAILABLE if this machine cannot confine classes."""
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
