"""`cometmq standalone`, a complete cluster on this machine, and `cometmq console`, the web console."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq import logs
from cometmq.cli import STARTED_S
from cometmq.cli.options import HELP, PORT, namesrv_option
from cometmq.cli.servers import log_format_option, serve
from cometmq.command_options import opt
from cometmq.errors import ConfigError

if TYPE_CHECKING:
    from cometmq.console.app import Console
    from cometmq.standalone import Standalone as StandaloneServer

CONSOLE_DATA = Path("~/.cometmq/console")
DEFAULT_PORT = 8082
NEEDED = ("nicegui", "argon2")


@click.command(context_settings=HELP)
@namesrv_option
@opt("--port", type=PORT, default=DEFAULT_PORT, help="Port; 0 is any free port.")
@opt(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; 0.0.0.0 also accepts connections from other machines.",
)
@opt(
    "--name names",
    multiple=True,
    metavar="HOST",
    help="Host name in browser addresses, in addition to --host and localhost; may be repeated.",
)
@opt(
    "--proxy proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Address of a trusted proxy, whose X-Forwarded-For names the client; may be repeated.",
)
@opt("--cert", type=click.Path(dir_okay=False, path_type=Path), help="Certificate for HTTPS, as PEM.")
@opt(
    "--key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Private key, if it is not in the certificate's file.",
)
@opt(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=CONSOLE_DATA,
    help="Directory of the accounts and the audit log.",
)
@opt(
    "--reports",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with results of pipeline jobs to show.",
)
@opt(
    "--add-user",
    metavar="NAME",
    help="Create an account, or set a new password; print the password and exit.",
)
@opt("--role", type=click.Choice(["admin", "reader"]), default="reader", help="Of --add-user.")
@opt("--remove-user", metavar="NAME", help="Remove an account and exit.")
@log_format_option
@opt("--with-parent", is_flag=True, hidden=True)
def console(
    namesrv: str,
    port: int,
    host: str,
    names: tuple[str, ...],
    proxies: tuple[str, ...],
    cert: Path | None,
    key: Path | None,
    data: Path,
    reports: Path | None,
    add_user: str | None,
    role: str,
    remove_user: str | None,
    with_parent: bool,
) -> None:
    """Show a cluster in a browser until Ctrl-C or SIGTERM.

    The first start creates the account `admin` and prints its password once.
    """
    check_installed()
    data = data.expanduser()
    if add_user is not None or remove_user is not None:
        _change_accounts(data, add_user, role, remove_user)
        return
    # Without this setting, NiceGUI would create its storage directory in the working directory.
    os.environ["NICEGUI_STORAGE_PATH"] = str(data / "framework")
    from cometmq.console.app import Console, ConsoleOptions

    options = ConsoleOptions(
        namesrv=namesrv, data=data, host=host, port=port, names=names, cert=cert, key=key, reports=reports,
        proxies=proxies,
    )  # fmt: skip
    serve("console", lambda: _made(Console(options), with_parent), announcement)


def check_installed() -> None:
    """Raise ClickException if the console's packages are not installed."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise click.ClickException(f"{' and '.join(missing)} missing: pip install 'cometmq[console]'")


def _made(console: Console, with_parent: bool) -> Console:
    if with_parent:
        _end_with_parent()
    return console


def _end_with_parent() -> None:
    """Stop the process as a signal would, when standard input ends because the parent process has ended."""
    import signal

    from cometmq.remoting import end_of_input

    async def wait() -> None:
        parent_ended = asyncio.Event()
        await end_of_input(parent_ended)
        await parent_ended.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    _waiting.append(asyncio.ensure_future(wait()))


_waiting: list[asyncio.Future[None]] = []


def announcement(console: Console) -> str:
    """Return the text that is printed when the console is ready."""
    lines = [f"The console of {console.namesrv} is ready: {console.url}"]
    if console.password is not None:
        lines.append(f"  first account  admin  password  {console.password}")
        lines.append(
            "  The password is shown only once. --add-user creates further accounts or a new password."
        )
    if console.exposed:
        lines.append(
            f"  WARNING: other machines can reach the console, because it listens on {console.options.host}."
        )
        if console.options.cert is None:
            lines.append("  WARNING: passwords are sent over the network as plain text: use --cert.")
    return "\n".join(lines)


def _change_accounts(data: Path, add: str | None, role: str, remove: str | None) -> None:
    from cometmq.console.auth.accounts import Accounts, Role

    accounts = Accounts(data / "users.json")
    if add is not None:
        password = accounts.put(add, Role(role))
        click.echo(f"{add}  {role}  password  {password}")
    if remove is not None:
        accounts.remove(remove)
        click.echo(f"{remove} is removed")


log = logs.logger(__name__)

DEFAULT_DATA = Path("~/.cometmq/data")
DEFAULT_GRPC_PORT = 8081
NAMESRV_LINE = "name server"
CONSOLE_STOP_TIMEOUT_S = 10.0


@click.command(context_settings=HELP)
@opt(
    "--data data_dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DATA,
    help="Directory of the stores, with a subdirectory per broker.",
)
@opt("--namesrv-port", type=PORT, default=9876, help="Port of the name server; 0 is any free port.")
@opt(
    "--broker-port",
    type=PORT,
    default=10911,
    help="Port of the first broker; the next brokers have ports 10, 20, … higher. 0 is any free port.",
)
@opt(
    "--brokers",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of brokers; each one after the first is a separate process and uses a CPU core.",
)
@opt(
    "--grpc-port",
    type=click.IntRange(-1, 65535),
    help="Port of the first broker for RocketMQ 5.x clients; the next brokers have ports 10, 20, … higher. 0 "
    "is any free port, -1 is none. Default: 8081 with a single broker, if the port is free and the extra "
    "cometmq[grpc] is installed.",
)
@opt("--console with_console", is_flag=True, help="Also run the web console, in a separate process.")
@opt("--console-port", type=PORT, default=DEFAULT_PORT, help="Port of the console; 0 is any free port.")
@log_format_option
def standalone(
    data_dir: Path,
    namesrv_port: int,
    broker_port: int,
    brokers: int,
    grpc_port: int | None,
    with_console: bool,
    console_port: int,
) -> None:
    """Run a name server and its brokers on 127.0.0.1 until Ctrl-C or SIGTERM."""
    from cometmq.standalone import Standalone

    data_dir = data_dir.expanduser()
    if with_console:
        check_installed()

    def server_with(port: int) -> StandaloneServer:
        return Standalone(data_dir, namesrv_port, broker_port, brokers, grpc_port=port)

    def make() -> Cluster:
        default = DEFAULT_GRPC_PORT if brokers == 1 and has_protobuf() else -1
        server = server_with(default if grpc_port is None else grpc_port)
        fallback = server_with(-1) if grpc_port is None else None
        return Cluster(server, fallback, data_dir / "console", console_port if with_console else None)

    def announce(cluster: Cluster) -> str:
        server = cluster.server
        lines = [f"CometMQ is ready after {time.monotonic() - STARTED_S:.2f} s. Ctrl-C stops it."]
        lines.append(f"  {NAMESRV_LINE}  {server.namesrv_addr}")
        lines += [f"  {name:<11}  {addr}  {data_dir / name}" for name, addr in server.broker_addrs.items()]
        if server.broker is not None and server.broker.endpoint is not None:
            lines.append(f"  5.x clients  {server.broker.config.broker_ip1}:{server.broker.endpoint.port}")
        return "\n".join(lines)

    serve("standalone", make, announce)


def has_protobuf() -> bool:
    """Return whether the package protobuf, of the extra `grpc`, is installed."""
    try:
        return find_spec("google.protobuf") is not None
    except ModuleNotFoundError:  # There is no package `google` at all
        return False


@dataclass(eq=False)
class Cluster:
    """The servers of `cometmq standalone` and, if enabled, the web console.

    The console is a separate process, which prints its own ready line and errors.

    Attributes:
        server: The servers.
        fallback: The same without a port for 5.x clients, in case the default port is in use.
    """

    server: StandaloneServer
    fallback: StandaloneServer | None
    console_data: Path
    console_port: int | None
    console: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the servers, and the console if it is enabled.

        Raises the error of a server that cannot start.
        """
        try:
            await self.server.start()
        except ConfigError as error:
            if error.key == "listenPort":
                hint = "is CometMQ already running? --namesrv-port and --broker-port choose other ports"
                raise click.ClickException(f"{error}: {hint}") from error
            if error.key != "grpcPort" or self.fallback is None:
                raise
            log.warning("5.x clients are not served: %s", error)
            self.server = self.fallback
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
