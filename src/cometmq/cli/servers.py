"""Servers in the foreground: `mqnamesrv` and `mqbroker` (also `cometmq namesrv` and `cometmq broker`).

Precedence of settings, lowest first, as in Apache's servers: defaults, properties file, command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from cometmq import __version__, logs, remoting
from cometmq.cli.options import HELP, PORT
from cometmq.cli.running import RunFile
from cometmq.command_options import F, opt
from cometmq.errors import ConfigError
from cometmq.settings import check_addresses, read_properties_file, settings_of

if TYPE_CHECKING:
    from cometmq.broker.base.config import BrokerConfig
    from cometmq.broker.server import Broker
    from cometmq.namesrv.config import NamesrvConfig
    from cometmq.namesrv.server import NameServer

# By default, numpy starts a thread per core for linear algebra (OpenBLAS), which no server uses.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

GC_THRESHOLD = 700  # the garbage-collection threshold of running servers, equal to Python's default
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Server(Protocol):
    """Interface of the servers that `serve` runs: NameServer, Broker, Standalone cluster."""

    async def start(self) -> Any: ...

    async def stop(self) -> None: ...


S = TypeVar("S", bound=Server)


def log_format_option(command: F) -> F:
    """Add `--log-format`, the log format of this process and its child processes, and set up logging."""

    def use(_context: click.Context, _parameter: click.Parameter, form: str | None) -> None:
        if form is not None:
            os.environ[logs.FORMAT] = form
        logs.set_up()

    return opt(
        "--log-format",
        type=click.Choice(logs.FORMATS),
        show_default=f"{logs.FORMAT}, else text",
        callback=use,
        expose_value=False,
        help="Format of log lines on standard error: text, or a JSON object per line.",
    )(command)


def serve(kind: str, make: Callable[[], S], announce: Callable[[S], str]) -> None:
    """Run a server until SIGINT, SIGTERM or SIGHUP. A second signal ends the process immediately.

    Args:
        kind: Kind under which the process is registered for `mqshutdown`.
        make: Creates the server, inside the loop.
        announce: Returns the ready line, which is printed once the ports listen.
    """
    remoting.run(_serve(kind, make, announce))


async def _serve(kind: str, make: Callable[[], S], announce: Callable[[S], str]) -> None:
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()

    def ask(signum: int) -> None:
        if stop_requested.is_set():
            os._exit(128 + signum)
        stop_requested.set()

    for signum in STOP_SIGNALS:
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # under nohup the server keeps running when its terminal is closed
        loop.add_signal_handler(signum, ask, signum)
    server = make()
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop_requested.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            # The signal arrived before the ready line, for example during a long recovery, so the start is
            # cancelled.
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return
        await starting
        # The objects of the start live as long as the server, so no later collection needs to traverse them.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        with RunFile(kind):
            click.echo(announce(server))
            sys.stdout.flush()
            await stopping
    finally:
        stopping.cancel()
        await server.stop()


VERSION = click.version_option(__version__, "-V", "--version")
PRINT_ALL = opt(
    "-p --printConfigItem print_all", is_flag=True, help="Print all configuration items and exit."
)

# Output of `mqbroker -m`: the settings that Apache's configuration classes mark as important.
IMPORTANT_BROKER_KEYS = (
    "namesrvAddr", "brokerIP1", "brokerName", "brokerClusterName", "brokerId",
    "autoCreateTopicEnable", "autoCreateSubscriptionGroup", "msgTraceTopicName", "traceTopicEnable",
    "rejectTransactionMessage", "fetchNamesrvAddrByAddressServer", "transactionTimeOut",
    "transactionCheckMax", "transactionCheckInterval", "aclEnable", "storePathRootDir",
    "storePathCommitLog", "flushIntervalCommitLog", "commitIntervalCommitLog",
    "flushCommitLogTimed", "deleteWhen", "fileReservedTime", "maxTransferBytesOnMessageInMemory",
    "maxTransferCountOnMessageInMemory", "maxTransferBytesOnMessageInDisk",
    "maxTransferCountOnMessageInDisk", "accessMessageInMemoryMaxRatio", "messageIndexEnable",
    "messageIndexSafe", "haMasterAddress", "brokerRole", "flushDiskType", "cleanFileForciblyEnable",
    "transientStorePoolEnable",
)  # fmt: skip


@click.command(context_settings=HELP)
@opt("-c --configFile config_file", metavar="FILE", help="Name server config properties file.")
@opt("-n --namesrvAddr namesrv_addr", metavar="LIST", help="Accepted for compatibility; has no effect.")
@PRINT_ALL
@opt("--port", type=PORT, help="Port to listen on instead of listenPort; 0 is any free port.")
@log_format_option
@VERSION
def mqnamesrv(config_file: str | None, namesrv_addr: str | None, print_all: bool, port: int | None) -> None:
    """Run a name server in the foreground until Ctrl-C or SIGTERM."""
    if namesrv_addr is not None:
        check_addresses("namesrvAddr", namesrv_addr)
    config = namesrv_config(config_file, port)
    if print_all:
        print_properties(config.to_properties())
        interface = config.bind_address or "0.0.0.0"
        warn_of_ports([("listenPort", interface, config.listen_port), *config.metrics_ports(interface)])
        return
    from cometmq.namesrv.server import NameServer

    def announce(server: NameServer) -> str:
        return f"The Name Server boot success. serializeType=JSON, listening on port {server.port}"

    with settings_of(config_file):
        serve("namesrv", lambda: NameServer(config), announce)


@click.command(context_settings=HELP)
@opt("-c --configFile config_file", metavar="FILE", help="Broker config properties file.")
@opt(
    "-n --namesrvAddr namesrv_addr",
    metavar="LIST",
    help="Name servers, '192.168.0.1:9876;192.168.0.2:9876'; overrides the file and the environment.",
)
@PRINT_ALL
@opt(
    "-m --printImportantConfig print_important",
    is_flag=True,
    help="Print the important configuration items and exit.",
)
@log_format_option
@VERSION
def mqbroker(
    config_file: str | None, namesrv_addr: str | None, print_all: bool, print_important: bool
) -> None:
    """Run a broker in the foreground until Ctrl-C or SIGTERM."""
    config = broker_config(config_file, namesrv_addr)
    if print_all or print_important:
        pairs = config.properties()
        print_properties(
            pairs if print_all else {key: pairs[key] for key in IMPORTANT_BROKER_KEYS if key in pairs}
        )
        if print_all:
            from cometmq.broker.base.address import ports_of

            warn_of_ports(ports_of(config))
        return
    from cometmq.broker_process import make_broker

    def announce(broker: Broker) -> str:
        addr = f"{config.broker_ip1}:{broker.port}"
        ready = f"The broker[{config.broker_name}, {addr}] boot success. serializeType=JSON"
        return f"{ready} and name server is {config.namesrv_addr}" if config.namesrv_addr else ready

    with settings_of(config_file):
        serve("broker", lambda: make_broker(config), announce)


def namesrv_config(config_file: str | None, port: int | None) -> NamesrvConfig:
    """Return the settings. Raises ConfigError for an invalid value, OSError for an unreadable file."""
    from cometmq.namesrv.config import NamesrvConfig

    properties = read_properties_file(config_file) if config_file else {}
    if config_file:
        properties.setdefault("configStorePath", config_file)
    if port is not None:
        properties["listenPort"] = str(port)
    with settings_of(config_file):
        return NamesrvConfig.from_properties(properties)


def broker_config(config_file: str | None, namesrv_addr: str | None) -> BrokerConfig:
    """Return the settings. Raises ConfigError for an invalid value, OSError for an unreadable file."""
    from cometmq.broker.base.config import BrokerConfig

    properties = read_properties_file(config_file) if config_file else {}
    if config_file:
        properties["brokerConfigPath"] = config_file
    options = {} if namesrv_addr is None else {"namesrvAddr": namesrv_addr}
    with settings_of(config_file, options):
        return BrokerConfig.from_properties({**properties, **options})


def warn_of_ports(ports: Iterable[tuple[str, str, int]]) -> None:
    """Print a line to standard error for each port that cannot be listened on now.

    Args:
        ports: Setting key, interface and number of each port.
    """
    from cometmq.remoting import check_port

    for key, interface, port in ports:
        try:
            check_port(key, interface, port)
        except ConfigError as error:
            click.echo(f"warning: {error}; the start fails unless this server itself uses the port", err=True)


def print_properties(pairs: dict[str, str]) -> None:
    """Print a `key=value` line per setting, unescaped, as Apache's servers do."""
    for key, value in sorted(pairs.items()):
        click.echo(f"{key}={value}")
