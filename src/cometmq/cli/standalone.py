"""`cometmq standalone`: a complete cluster on this machine in one command."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli import STARTED_S
from cometmq.cli.console import DEFAULT_PORT, check_installed
from cometmq.cli.options import HELP
from cometmq.cli.serving import log_format_option, serve

if TYPE_CHECKING:
    from cometmq.standalone import Standalone as StandaloneServer

DEFAULT_DATA = Path("~/.cometmq/data")
NAMESRV_LINE = "name server"
CONSOLE_STOP_TIMEOUT_S = 10.0


@click.command(context_settings=HELP)
@click.option(
    "--data",
    "data_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DATA,
    help="Directory of the stores, with a subdirectory per broker.",
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
    help="Port of the first broker; the next brokers have ports 10, 20, … higher. 0 is any free port.",
)
@click.option(
    "--brokers",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of brokers; each one after the first is a separate process and uses a CPU core.",
)
@click.option(
    "--console", "with_console", is_flag=True, help="Also run the web console, in a separate process."
)
@click.option(
    "--console-port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    help="Port of the console; 0 is any free port.",
)
@log_format_option
def standalone(
    data_dir: Path, namesrv_port: int, broker_port: int, brokers: int, with_console: bool, console_port: int
) -> None:
    """Run a name server and its brokers on 127.0.0.1 until Ctrl-C or SIGTERM."""
    from cometmq.standalone import Standalone

    data_dir = data_dir.expanduser()
    if with_console:
        check_installed()

    def make() -> Cluster:
        server = Standalone(data_dir, namesrv_port=namesrv_port, broker_port=broker_port, brokers=brokers)
        return Cluster(server, data_dir / "console", console_port if with_console else None)

    def announce(cluster: Cluster) -> str:
        server = cluster.server
        lines = [f"CometMQ is ready after {time.monotonic() - STARTED_S:.2f} s. Ctrl-C stops it."]
        lines.append(f"  {NAMESRV_LINE}  {server.namesrv_addr}")
        lines += [f"  {name:<11}  {addr}  {data_dir / name}" for name, addr in server.broker_addrs.items()]
        return "\n".join(lines)

    serve("standalone", make, announce)


@dataclass(eq=False)
class Cluster:
    """The servers of `cometmq standalone` and, if enabled, the web console.

    The console is a separate process, which prints its own ready line and errors.
    """

    server: StandaloneServer
    console_data: Path
    console_port: int | None
    console: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the servers, and the console if it is enabled.

        Raises the error of a server that cannot start.
        """
        await self.server.start()
        if self.console_port is not None:
            command = [sys.executable, "-m", "cometmq", "console", "-n", self.server.namesrv_addr]
            command += ["--port", str(self.console_port), "--data", str(self.console_data), "--with-parent"]
            # The console runs in a session of its own, so that Ctrl-C stops only this process, which then
            # ends the console by closing its input.
            self.console = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )

    async def stop(self) -> None:
        """Stop all servers, the console first."""
        if self.console is not None and self.console.returncode is None:
            assert self.console.stdin is not None
            self.console.stdin.close()
            try:
                await asyncio.wait_for(self.console.wait(), CONSOLE_STOP_TIMEOUT_S)
            except TimeoutError:
                self.console.kill()
                await self.console.wait()
        await self.server.stop()
