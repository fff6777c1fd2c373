"""A broker with the endpoint for 5.x clients, and the main program of a broker process.

`python -m cometmq.broker_process -c broker.conf` starts a broker with a settings file. When it is ready, it
prints one line of JSON, {"name", "addr", "port", "pid"}. It stops on SIGTERM or SIGINT. With --with-parent it
also stops when its standard input ends, so that no broker outlives its parent process.
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
from cometmq.store import Clock, Disk

log = logs.logger(__name__)


def read_config(path: str, settings: Sequence[str] = ()) -> BrokerConfig:
    """Read a settings file, and apply `settings` ("key=value" texts). Raises OSError or ConfigError."""
    more = {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in settings)}
    with settings_of(path, more):
        return BrokerConfig.from_properties({**read_properties_file(path), **more})


def make_broker(config: BrokerConfig, *, disk: Disk | None = None, clock: Clock | None = None) -> Broker:
    """Return a broker, with an endpoint for 5.x clients if the setting `grpcPort` asks for it."""
    if config.grpc_port < 0:
        return Broker(config, disk=disk, clock=clock)
    # Imported here, because the start of a broker without the endpoint is faster without it.
    from cometmq.grpc.endpoint import GrpcEndpoint

    return Broker(config, disk=disk, clock=clock, endpoint=GrpcEndpoint())


async def serve(config: BrokerConfig, ready: Callable[[Broker], None], with_parent: bool = False) -> None:
    """Run a broker until SIGINT or SIGTERM, or if `with_parent` is set the end of the standard input."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    broker = make_broker(config)
    await broker.start()
    try:
        ready(broker)
        if with_parent:
            await end_of_input(stopping)
        await stopping.wait()
    finally:
        await broker.stop()


def say_ready(broker: Broker) -> None:
    """Print a line of JSON that notifies a waiting parent process that the broker is ready."""
    line = {"name": broker.config.broker_name, "addr": broker.addr, "port": broker.port, "pid": os.getpid()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a broker. Return the exit code: 0 after an orderly stop, 1 if the broker could not run."""
    parser = argparse.ArgumentParser(prog="cometmq.broker_process", description="Run one broker.")
    parser.add_argument("-c", "--config", required=True, help="settings file (properties)")
    parser.add_argument(
        "-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of the file"
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
