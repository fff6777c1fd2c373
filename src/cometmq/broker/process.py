"""A broker as a process: it starts with a settings file, reports when it is ready, and stops on a signal.

`python -m cometmq.broker.process -c broker.conf` prints one JSON line {"name", "addr", "port", "pid"} when it
is ready. It stops on SIGTERM or SIGINT and, with --with-parent, when its standard input closes, so that a
parent that dies leaves no brokers behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.errors import CometError
from cometmq.remoting import end_of_input, run
from cometmq.settings import read_properties_file, settings_of

log = logs.logger(__name__)


def read_config(path: str, settings: Sequence[str] = ()) -> BrokerConfig:
    """Return the settings of a file with the `key=value` texts applied. Raises OSError, ConfigError."""
    more = {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in settings)}
    with settings_of(path, more):
        return BrokerConfig.from_properties({**read_properties_file(path), **more})


async def serve(config: BrokerConfig, ready: Callable[[Broker], None], with_parent: bool = False) -> None:
    """Run a broker until a signal arrives, or until the standard input ends."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    broker = Broker(config)
    await broker.start()
    try:
        ready(broker)
        if with_parent:
            await end_of_input(stopping)
        await stopping.wait()
    finally:
        await broker.stop()


def say_ready(broker: Broker) -> None:
    """Print the ready line, for which a parent process waits."""
    line = {"name": broker.config.broker_name, "addr": broker.addr, "port": broker.port, "pid": os.getpid()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 after an orderly stop, 1 if the broker could not start."""
    parser = argparse.ArgumentParser(prog="cometmq.broker.process", description="Run one broker.")
    parser.add_argument("-c", "--config", required=True, help="settings file (properties)")
    parser.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="an additional setting"
    )
    parser.add_argument("--with-parent", action="store_true", help="stop when standard input closes")
    options = parser.parse_args(arguments)
    logs.set_up()
    others = {text.partition("=")[0].strip() for text in options.set}
    try:
        with settings_of(options.config, others):
            run(serve(read_config(options.config, options.set), say_ready, options.with_parent))
    except (CometError, OSError, ValueError) as error:
        log.critical("the broker cannot run: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
