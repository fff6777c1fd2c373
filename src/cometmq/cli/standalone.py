"""`cometmq standalone`: a whole cluster on this machine in one command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli import STARTED_S
from cometmq.cli.options import HELP
from cometmq.cli.serving import log_format_option, serve

if TYPE_CHECKING:
    from cometmq.standalone import Standalone as StandaloneServer

DEFAULT_DATA = Path("~/.cometmq/data")
NAMESRV_LINE = "name server"


@click.command(context_settings=HELP)
@click.option(
    "--data",
    "data_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DATA,
    help="Where the stores lie, one directory per broker.",
)
@click.option(
    "--namesrv-port",
    type=click.IntRange(0, 65535),
    default=9876,
    help="Port of the name server; 0 is any free port.",
)
@click.option(
    "--broker-port",
    type=click.IntRange(0, 65535),
    default=10911,
    help="Port of the first broker, the next 10 above; 0 is any free port.",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, 64),
    default=1,
    help="Brokers of the cluster; each beyond the first is a process, and uses a core, of its own.",
)
@log_format_option
def standalone(data_dir: Path, namesrv_port: int, broker_port: int, brokers: int) -> None:
    """Run a name server and its brokers on 127.0.0.1 until Ctrl-C or SIGTERM."""
    from cometmq.standalone import Standalone

    data_dir = data_dir.expanduser()

    def make() -> StandaloneServer:
        return Standalone(data_dir, namesrv_port=namesrv_port, broker_port=broker_port, brokers=brokers)

    def announce(server: StandaloneServer) -> str:
        lines = [f"CometMQ is ready after {time.monotonic() - STARTED_S:.2f} s. Ctrl-C stops it."]
        lines.append(f"  {NAMESRV_LINE}  {server.namesrv_addr}")
        lines += [f"  {name:<11}  {addr}  {data_dir / name}" for name, addr in server.broker_addrs.items()]
        return "\n".join(lines)

    serve("standalone", make, announce)
